"""The stored tiles: what is written is read, and damaged or stale entries and those of other GPUs are not used."""

import json
import warnings
from dataclasses import replace

import pytest
from grids import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_directory

from moeflux_mlx import load_model
from moeflux_mlx.errors import RequestError
from moeflux_mlx.kept import measured
from moeflux_mlx.kept.measured import read_rows
from moeflux_mlx.ops.tiles import CODE, TILES, TRIED, Tiles, merged, planned

FOUND = {"qmv": {"halves": 1, "rows": 8}}
OTHER = {"prompt_experts": {"dense": 64}}
USABLE = st.lists(st.sampled_from(TRIED["metal"]), max_size=4).map(merged)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-4, 2**40) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def gpu_is(monkeypatch):
    """Returns a function that names the GPU."""
    return lambda name: monkeypatch.setattr(measured, "gpu_name", lambda: name)


@pytest.fixture
def gpu(monkeypatch, backend_is, gpu_is):
    monkeypatch.setenv("MOEFLUX_TILES", "auto")
    backend_is("metal")
    gpu_is("a made-up GPU")


@pytest.fixture
def file(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return measured.tiles_file()


def chosen(option="auto"):
    """Returns the tiles, and the warnings while they are chosen."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        return measured.choose_tiles(option).found, [str(one.message) for one in said]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))
@given(USABLE)
def test_stored_tiles_are_found(file, kept):
    file.unlink(missing_ok=True)
    measured.keep_tiles(kept)
    assert chosen() == (kept, [])
    assert [one.name for one in file.parent.iterdir()] == [file.name]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60))
@given(st.data())
def test_a_damaged_file_is_one_line_and_the_codes_tiles(file, data):
    """Bytes are changed or missing, or the JSON has another shape."""
    file.unlink(missing_ok=True)
    measured.keep_tiles(FOUND)
    whole = file.read_bytes()
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(whole) - 1))
        file.write_bytes(whole[:at] + data.draw(st.binary(max_size=2)) + whole[at + data.draw(st.integers(1, 40)) :])
    else:
        held = json.loads(whole)
        place = data.draw(st.sampled_from(["version", "found", "row", "tiles", "tile"]))
        row, value = held["found"][0], data.draw(JSON)
        match place:
            case "row":
                held["found"][0] = value
            case "tiles":
                row["tiles"] = value
            case "tile":
                row["tiles"]["qmv"][data.draw(st.sampled_from(["rows", "lanes", "new", "halves"]))] = value
            case _:
                held[place] = value
        file.write_text(json.dumps(held))
    chosen_tiles, said = chosen()
    assert all(measured.is_tried(kernel, *one) for kernel, values in chosen_tiles.items() for one in values.items())
    assert len(said) <= 1 and not (said and chosen_tiles)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "found": [1]}', "\0", '{"version": 1, "found": []}'])
def test_files_that_hold_no_tiles(file, text):
    file.parent.mkdir()
    file.write_text(text)
    chosen_tiles, said = chosen()
    assert chosen_tiles == {} and len(said) == 1 and "moeflux tune finds them anew" in said[0] and "\n" not in said[0]
    assert not read_rows(file)
    measured.keep_tiles(FOUND)
    assert chosen() == (FOUND, [])


@pytest.mark.parametrize("field", ["mlx", "kernels"])
def test_stale_tiles_are_one_line(file, monkeypatch, field):
    measured.keep_tiles(FOUND)
    monkeypatch.setattr(measured, {"mlx": "mlx_version", "kernels": "kernels_digest"}[field], lambda: "another")
    chosen_tiles, said = chosen()
    assert chosen_tiles == {} and len(said) == 1 and "another MLX or other kernels" in said[0]
    measured.keep_tiles({})
    assert chosen() == ({}, []) and len(read_rows(file)) == 1


def test_another_gpus_tiles_are_kept_and_not_used(file, gpu_is):
    measured.keep_tiles(FOUND)
    gpu_is("another GPU")
    assert chosen() == ({}, [])
    measured.keep_tiles({})
    gpu_is("a made-up GPU")
    assert chosen() == (FOUND, [])


def test_a_new_search_replaces_what_was_found(file):
    measured.keep_tiles(FOUND)
    measured.keep_tiles(OTHER)
    assert chosen()[0] == OTHER and len(read_rows(file)) == 1


def test_the_digest_follows_kernels_and_tiles(monkeypatch):
    measured.kernels_digest.cache_clear()
    before = measured.kernels_digest()
    monkeypatch.setitem(TILES["metal"], "qmv", replace(TILES["metal"]["qmv"], rows=8))
    measured.kernels_digest.cache_clear()
    assert measured.kernels_digest() != before
    measured.kernels_digest.cache_clear()


def test_the_built_in_tiles_can_be_asked_for(file, monkeypatch):
    measured.keep_tiles(FOUND)
    assert chosen() == (FOUND, []) and measured.choose_tiles("code") is CODE
    monkeypatch.setenv("MOEFLUX_TILES", "code")
    assert measured.choose_tiles("auto") is CODE
    with pytest.raises(RequestError, match="tiles 'mine' is not one of auto, code"):
        load_model(tiny_directory("qwen3_moe"), set={"tiles": "mine"})


def test_a_cpu_reads_no_file(file, ops):
    file.parent.mkdir()
    file.write_text("damaged")
    assert measured.choose_tiles("auto") is CODE


def test_a_model_computes_with_its_own_tiles(monkeypatch):
    """The tiles of another model in the process change nothing."""
    from moeflux_mlx.model import decoder
    from moeflux_mlx.opening import engine

    own = Tiles(FOUND)
    monkeypatch.setattr(engine, "choose_tiles", lambda option: own if option == "auto" else CODE)
    models = [load_model(tiny_directory("qwen3_moe"), set={"tiles": name}) for name in ("auto", "code")]
    assert [model.tiles for model in models] == [own, CODE]
    used, real = [], decoder.using
    monkeypatch.setattr(decoder, "using", lambda choice: used.append(choice) or real(choice))
    for model in models:
        model(decoder.mx.array([[1, 2, 3]]))
        model.experts.close()
    assert used == [own, CODE]


@pytest.mark.parametrize("wrong", [{"no": {"rows": 8}}, {"qmv": {"rows": 3}}, {"qmv": {"rows": True}}, {"qmv": 1}, []])
def test_tiles_that_are_never_tried_are_not_used(file, wrong):
    measured.keep_tiles(wrong)
    assert chosen()[0] == {}


def test_a_plan_takes_no_argument_by_name():
    """A result is kept by its positional arguments, so a keyword would be lost."""
    plan = planned("sums")(lambda first, second=0: first + second)
    assert plan(1, 2) == plan(1, 2) == 3
    with pytest.raises(TypeError, match="by position, not second"):
        plan(1, second=2)

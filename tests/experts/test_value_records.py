"""Value experts as records: read, kept, counted and evicted like routed experts, with the bits of those in memory."""

import json
import shutil

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from minmax import convert
from test_streaming import run, streamed
from tiny_models import tiny_directory, tiny_model, use_plain_operations

from moeflux_mlx.calibration.layers import LayerRun
from moeflux_mlx.calibration.weights import open_layers
from moeflux_mlx.errors import ConfigError, ModelFileError, RequestError
from moeflux_mlx.experts.memory import staging_memory
from moeflux_mlx.experts.stats import Asked, AskedByRow
from moeflux_mlx.experts.values import ValuesOf
from moeflux_mlx.experts.whole import HeldExperts
from moeflux_mlx.formats.layout_file import from_json, to_json
from moeflux_mlx.formats.packed import FOLDER, LAYOUT
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.model.tensors import needed
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.ops.tiles import LEASED_TOKENS
from moeflux_mlx.packing.located import Located
from moeflux_mlx.planning.memory_plan import least_slots
from moeflux_mlx.server.live import ExpertMap
from moeflux_mlx.spec import ModelArgs

FAMILY, LAYERS, ROUTED, VALUES, TOP_K = "k2_horizon", 3, 9, 7, 3
SPARSE, SETS = (1, 2), (1, 2, LAYERS + 1, LAYERS + 2)
RECORD = 16384  # bytes of any record in memory, at most
TOKENS = mx.array(goldens.golden(FAMILY)[0])[None]
KINDS = {
    "read in place": None,
    "on MLX's side": {"copied": False},
    "copied": {"copied": True},
    "copied, and kept on the host": {"copied": True, "host_bytes": 1 << 30},
    "adopted": {"adopt": staging_memory},
}


def has_the_bits_of_experts_in_memory(monkeypatch, family, kind, records):
    """Steps of one token and of several, and prompts in one piece and in two, with a pool of so many records."""
    options, tokens = KINDS[kind], mx.array(goldens.golden(family)[0])[None]
    if options is not None:
        use_plain_operations(monkeypatch)
    model = streamed(tiny_directory(family), least_slots=ROUTED, cache_bytes=records * RECORD, **(options or {}))
    whole = load_model(tiny_directory(family), dtype=mx.float32)
    for text, chunk in ((tokens[:, :9], 1), (tokens[:, :20], 10), (tokens, 20), (tokens, 64)):
        assert np.array_equal(run(model, text, chunk), run(whole, text, chunk)), chunk
    assert model.experts.stats.misses > 0
    model.experts.close()
    whole.experts.close()


@pytest.mark.parametrize("kind, records", drawn(KINDS, [ROUTED, 30]))
def test_the_bits_of_experts_in_memory(monkeypatch, kind, records):
    has_the_bits_of_experts_in_memory(monkeypatch, FAMILY, kind, records)


def test_a_wrong_byte_of_a_value_expert_changes_the_logits(tmp_path):
    """This shows that the comparison of bits can fail."""
    path = shutil.copytree(tiny_directory(FAMILY), tmp_path / "model")
    file = path / FOLDER / "values_02.bin"
    data = bytearray(file.read_bytes())
    data[:2048] = bytes(byte ^ 0xFF for byte in data[:2048])
    file.write_bytes(data)
    model = load_model(path, dtype=mx.float32, expert_io="pread", expert_cache_bytes=1)
    assert not np.array_equal(run(model, TOKENS, 20), run(tiny_model(FAMILY, mx.float32), TOKENS, 20))


def test_both_kinds_are_counted_kept_and_shown():
    model = load_model(tiny_directory(FAMILY), dtype=mx.float32, expert_io="pread", expert_cache_bytes=1 << 30)
    source, cache = model.experts, model.make_cache()
    shown = ExpertMap(source)
    model(TOKENS[:, :1], cache)
    assert source.stats.hits + source.stats.misses == len(SETS) * TOP_K
    source.counts_rows = True
    model(TOKENS[:, 1:2], cache)
    (asked,) = source.asked_by_row()
    assert asked.hits + asked.misses == len(SETS) * TOP_K
    assert {layer for (layer, _), _ in source.places()} == set(SETS)
    assert source.usage.counts.shape == (len(SETS), ROUTED) and source.usage.counts.sum() == 2 * len(SETS) * TOP_K
    assert shown.states().shape == (len(SPARSE), ROUTED)
    before = run(model, TOKENS[:, :9], 1)
    source.invalidate()
    source.warm(source.usage.counts / source.usage.steps)
    while source.warm_between_calls():
        pass
    assert source.stats.warmed > 0 and np.array_equal(run(model, TOKENS[:, :9], 1), before)
    source.close()


def test_rows_may_ask_for_another_number_of_each_kind():
    """There are more value experts than routed ones, and both rows ask for one of them in each layer."""
    config = {**goldens.config(FAMILY), "mova_num_experts": 12, "mova_num_experts_per_tok": 2}
    layout = ExpertLayout.from_args(ModelArgs.from_dict(config))
    asked, (routed, own) = AskedByRow(layout, 1.0), (layout.records[layer].size for layer in (1, LAYERS + 1))
    asked.note(1, np.array([[0, 1, 2], [3, 4, 5]]), np.array([[True] * 3, [False, True, True]]))
    asked.note(LAYERS + 1, np.array([[9, 0], [9, 1]]), np.array([[False, True], [False, False]]))
    asked.note(LAYERS + 2, np.array([[0, 1], [0, 2]]), np.array([[False, True]] * 2))
    assert asked.counts() == [Asked(5, 2, own), Asked(3, 4, routed + own * 2)]


def test_rows_of_a_step_that_are_asked_for_in_two_parts():
    """Each sequence has the bits that it has alone."""
    model, count = streamed(tiny_directory(FAMILY), least_slots=ROUTED, cache_bytes=1), LEASED_TOKENS + 2
    texts = [model.make_cache() for _ in range(count)]
    together = model.step([SequenceRows(cache, [i]) for i, cache in enumerate(texts)]).logits
    alone = [np.array(model(mx.array([[i]]), model.make_cache()))[0, -1] for i in range(count)]
    assert np.array_equal(np.stack([np.array(rows).reshape(-1) for rows in together]), np.stack(alone))
    model.experts.close()


def test_a_prompt_reads_each_once_also_in_several_blocks():
    """There is room for 5 of the 7 value experts of a layer."""
    options = {"expert_io": "pread", "expert_cache_bytes": 300_000, "prefetch": "off", "warm_start": "off"}
    model = load_model(tiny_directory(FAMILY), dtype=mx.float32, prefill_step_size=32, **options)
    model(mx.concatenate([TOKENS, TOKENS], axis=1)[:, :64], model.make_cache())
    assert model.experts.stats.misses == len(SPARSE) * (ROUTED + VALUES)
    assert model.experts.slots_per_layer(layer=LAYERS + 1) == 5
    model.experts.close()


class Noting(HeldExperts):
    """Experts in memory that behave as if there were room for two of a layer; notes which give way."""

    noted = ()

    def slots_per_layer(self, spare=0, layer=None):
        return 2

    def give_way(self, layer, ids):
        self.noted = layer, ids


def test_a_prompt_leaves_those_that_most_tokens_use():
    layout = ExpertLayout.from_args(ModelArgs.from_file(tiny_directory(FAMILY)))
    record, number = layout.records[LAYERS + 1], LAYERS + 1
    source = Noting(layout, {number: np.zeros((VALUES, record.stride // 4), np.uint32)})
    ids = np.array([[0, 1, 2]] * 3 + [[2, 1, 4]] * 20 + [[6, 4, 2]] * 4, np.int32)
    x, weights = np.zeros((len(ids), record.down.columns), np.float32), np.ones(ids.shape, np.float32)
    ValuesOf(source, number)(mx.array(x), mx.array(ids), mx.array(weights))
    assert source.noted == (number, [0, 6, 1])


def test_the_plan_counts_value_experts_as_experts():
    weights = open_weights(Located(tiny_directory(FAMILY)))
    layout = weights.experts.layout
    assert tuple(layout.records) == SETS and layout.total_experts == 2 * (ROUTED + VALUES)
    assert layout.total_bytes == sum(path.stat().st_size for path in (weights.path / FOLDER).glob("*.bin"))
    assert not any("value_experts" in name and "gate" not in name for name in needed(weights.args).matrices)
    assert layout.token_bytes(weights.args) == TOP_K * sum(record.held_bytes for record in layout.records.values())
    wide = ModelArgs.from_dict({**goldens.config(FAMILY), "mova_num_experts": 70, "mova_num_experts_per_tok": 6})
    assert least_slots(weights.args) == ROUTED and least_slots(wide) == 48


def layout_of(change=lambda content: None):
    """Returns what a changed layout.json states."""
    args, content = ModelArgs.from_file(tiny_directory(FAMILY)), stored_layout()
    change(content)
    return from_json(content, args, "layout.json")


def stored_layout():
    return json.loads((tiny_directory(FAMILY) / FOLDER / LAYOUT).read_text())


def test_the_geometry_of_value_experts_is_stated_in_version_4():
    content = stored_layout()
    assert content["format_version"] == 4 and to_json(layout_of()) == content
    (values,) = [one for one in content["geometries"] if "values" in one]
    assert (values["layers"], values["values"]) == ([1, 2], VALUES)
    assert [field["name"] for field in values["fields"]] == ["v_proj.weight", "v_proj.scales", "v_proj.biases"]


LIES = {
    "values is 8": lambda values: values.update(values=8),
    "layer 1, of value experts, has no geometry": lambda values: values.update(layers=[2]),
    "layer 2, of value experts, has two geometries": lambda values: values.update(layers=[1, 2, 2]),
    "not some of the model's layers with value experts": lambda values: values.update(layers=[0, 1]),
    "offset of v_proj.scales in layer 1, of value experts,": lambda values: values["fields"][1].update(offset=16),
    "layer 1 has two geometries": lambda values: values.pop("values"),
    "differ within a layer": lambda values: values.update(experts=list(range(VALUES))),
}


@pytest.mark.parametrize("said", LIES)
def test_a_layout_that_contradicts_the_model_is_refused(said):
    with pytest.raises(ModelFileError, match=said):
        layout_of(lambda content: LIES[said](next(one for one in content["geometries"] if "values" in one)))


def test_a_model_without_the_files_of_its_value_experts_is_refused(tmp_path):
    path = shutil.copytree(tiny_directory(FAMILY), tmp_path / "model")
    (path / FOLDER / "values_01.bin").unlink()
    with pytest.raises(ModelFileError, match=r"values_01\.bin does not exist"):
        load_model(path)


def test_several_directories_hold_all_value_experts(tmp_path):
    source, wanted = goldens.checkpoint_dir(FAMILY), run(tiny_model(FAMILY, mx.float32, "hub"), TOKENS, 20)
    convert(source, tmp_path / "striped", also=[tmp_path / "other"])
    model = load_model(tmp_path / "striped", dtype=mx.float32, expert_io="pread", expert_cache_bytes=1)
    assert np.array_equal(run(model, TOKENS, 20), wanted)


def test_what_does_not_run_is_refused(tmp_path):
    weights = open_layers(Located(tiny_directory(FAMILY)))
    with pytest.raises(RequestError, match="value experts, which do not run layer by layer"):
        LayerRun(weights, [np.array([1])], tmp_path, mx.float32)
    with pytest.raises(ConfigError, match="head_dim 96 is not a multiple of 64"):
        ModelArgs.from_dict({**goldens.config(FAMILY), "head_dim": 48, "rope_head_dim": None})
    with pytest.raises(ConfigError, match="value_experts.v_proj cannot be float"):
        convert(goldens.checkpoint_dir(FAMILY), tmp_path / "out", recipe=floats(tmp_path / "recipe.json"))


def floats(path):
    """Writes a recipe that leaves attention in floats."""
    path.write_text(json.dumps({"name": "x", "default": 4, "attention": "float"}))
    return path


def test_a_known_model_s_values_are_experts():
    args = ModelArgs.from_variant("k2-horizon-mova-36b-a4b")
    layout = ExpertLayout.from_args(args)
    values = [record for number, record in layout.records.items() if number >= args.num_hidden_layers]
    assert len(values) == 45 and layout.total_experts == 45 * (100 + 64)
    assert sum(64 * record.stride for record in values) == pytest.approx(4.25e9, rel=0.01)

"""The search for tiles: its path with an invented clock, what it refuses, and how it records a model's launches."""

from argparse import Namespace
from collections import Counter
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import goldens
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_directory

from metal import msl
from moeflux_mlx import tune as command
from moeflux_mlx.cli.opening import shapes_of
from moeflux_mlx.engine import random_weights
from moeflux_mlx.engine import tiles as file_of
from moeflux_mlx.errors import RequestError
from moeflux_mlx.formats.record import Record
from moeflux_mlx.model.tensors import stored_as
from moeflux_mlx.ops import backend, expert_rows, experts, grouped, linear
from moeflux_mlx.ops.experts import Records, expert_ffn
from moeflux_mlx.ops.forms import form_of, unpacked
from moeflux_mlx.ops.tiles import TILES, TUNED, Tile, Tiles, is_usable, neighbours, spot_of, using
from moeflux_mlx.quant import Quant
from moeflux_mlx.spec import ModelArgs, variants
from moeflux_mlx.tools import trial as trials
from moeflux_mlx.tools import tuning

pytestmark = pytest.mark.usefixtures("cpu_device")
KERNELS = [(target, kernel) for target in TILES for kernel in TILES[target]]
TINY = {
    "model_type": "qwen3_next",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 192,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.25,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 1,
}


@pytest.fixture
def host(monkeypatch):
    """Runs the kernels' source on this machine, for products of any size."""
    monkeypatch.setattr(linear, "PAYS_FROM", 1)
    monkeypatch.setattr(tuning, "TOKENS", (1, 20, 2))
    with msl.launching():
        yield


def tiny_shapes():
    return random_weights.Shapes.of_args(ModelArgs.from_dict(TINY), mx.bfloat16)


def tiny_samples():
    return tuning.samples(tiny_shapes()).items()


# ---- the search


@given(st.sampled_from(KERNELS), st.integers(0, 2**32))
def test_the_search_ends_at_the_best_of_a_made_up_machine(where, seed):
    """Each field of a tile costs time in proportion to its distance from a wanted value.

    Then every path of faster tiles leads to that value.
    """
    target, kernel = where
    code = TILES[target][kernel]
    ways, random = list(neighbours(target, kernel, code)), seed
    goal = code
    for _ in range(4):
        random, pick = divmod(random, len(ways))
        goal = ways[pick]
        ways = list(neighbours(target, kernel, goal))

    def seconds(tile):
        away = [abs(getattr(tile, name).bit_length() - getattr(goal, name).bit_length()) for name in TUNED[kernel]]
        return 1.05 ** sum(away)

    best, gain = tuning.search(code, lambda tile: neighbours(target, kernel, tile), lambda tile: True, seconds)
    assert best == goal and gain == pytest.approx(seconds(code) / seconds(goal))
    assert is_usable(kernel, best)


def test_a_gain_below_two_percent_is_not_kept():
    code, other = Tile(1, 32), Tile(2, 32)
    for factor, best in ((1.015, code), (1.03, other)):
        chosen, gain = tuning.search(
            code, lambda tile: [other], lambda tile: True, lambda tile, f=factor: 1.0 if tile is other else f
        )
        assert (chosen, gain) == (best, pytest.approx(factor if best is other else 1.0))


def test_wrong_values_are_never_measured():
    code, wrong = Tile(1, 32), Tile(2, 32)
    measured = Counter()

    def seconds(tile):
        measured[tile] += 1
        return 1.0 if tile is code else 1e-3

    assert tuning.search(code, lambda tile: [wrong, code], lambda tile: tile is code, seconds) == (code, 1.0)
    assert measured[wrong] == 0


def test_measurements_alternate():
    """If a machine slows down during a measurement, no tile has an advantage."""
    code, other, turns = Tile(1, 32), Tile(2, 32), []

    def seconds(tile):
        turns.append(tile)
        return 1.1 ** len(turns)

    tuning.ratio(code, other, seconds, 3)
    assert turns == [code, other] * 3


def test_halves_are_tried_on_metal_for_integers_of_four_bits(monkeypatch):
    """On CUDA shifts are fast; with other codes the launch is the same."""
    code = TILES["metal"]["expert_gate_up"]
    assert replace(code, halves=1) in neighbours("metal", "expert_gate_up", code)
    assert not any(tile.halves for tile in neighbours("cuda", "expert_gate_up", TILES["cuda"]["expert_gate_up"]))
    monkeypatch.setattr(backend, "name", lambda: "metal")
    tried = {}
    for bits in (4, 8):
        record = Record.make(128, 64, (Quant(bits, 64),) * 3)
        shapes = (1, 128), mx.bfloat16, (4, record.stride // 4), (1, 2), record
        launch = experts.plan_gate_up("metal", *shapes)
        spot = spot_of("expert_gate_up", f"64x128 {form_of(record.gate)}")
        around = trials.others(lambda: experts.plan_gate_up("metal", *shapes), launch, spot, "expert_gate_up", code)  # noqa: B023
        tried[bits] = any(tile.halves for tile in around)
    assert tried == {4: True, 8: False}


def test_a_choice_among_all_experts_is_tried_with_the_few_that_are_there(host):
    """Its logits are such that it chooses these."""
    found = dict(tiny_samples())
    if backend.name() == "cuda":
        pytest.skip("its kernel is for Apple GPUs")
    sample = next(sample for spot, sample in found.items() if spot.startswith("expert_choice"))
    act, chosen = sample.make()(*sample.inputs)
    assert chosen[:2].tolist() == [0, 1] and mx.isfinite(act).all()
    assert sample.inputs[1].shape[0] == 2 < sample.make().template["E"] == 4


@pytest.mark.parametrize("target, kernel", KERNELS)
def test_neighbours_are_usable_and_differ(target, kernel):
    code = TILES[target][kernel]
    around = list(neighbours(target, kernel, code))
    assert around and code not in around and len(set(around)) == len(around)
    assert all(is_usable(kernel, tile) for tile in [code, *around])


# ---- what a model launches


def test_every_kernel_with_a_tile_is_met_and_gives_the_same_with_another(host, monkeypatch):
    """The launches of a tiny model are recorded once each, repeated with another tile, and compared."""
    monkeypatch.setattr(trials, "BOUND", 4e-2)  # MLX's products of a prompt's experts sum in bfloat16 on a CPU
    mx.random.seed(1)
    met = set()
    for spot, sample in tiny_samples():
        if sample.kernel in met:
            continue
        met.add(sample.kernel)
        trial = trials.TileTrial(spot, sample)
        other = next(trial.around(TILES[backend.name()][sample.kernel]), None)
        assert other is None or trial.is_right(other), (spot, other)
        trial.wanted = [out * 1.05 for out in trial.wanted]
        assert other is None or not trial.is_right(other), "a planted fault"
    of_prompts = {"expert_dequantize", "prompt_experts"}
    wanted = set(TILES["metal"]) - {"qmv_large"}
    on_cuda = wanted - of_prompts - {"expert_choice"} | {"expert_rows"}
    assert met == (wanted if backend.name() == "metal" else on_cuda)


def test_products_on_matrix_units_are_tried_in_place_of_dequantising(host, monkeypatch):
    monkeypatch.setattr(expert_rows, "refusal_on", lambda *_: None)
    found = dict(tiny_samples())
    assert not {"expert_dequantize", "prompt_experts"} & {sample.kernel for sample in found.values()}
    spots = [spot for spot, sample in found.items() if sample.kernel == "expert_rows"]
    assert [spot.split()[1] for spot in spots] == ["2x64x128", "1x128x64"]
    for spot in spots:
        trial = trials.TileTrial(spot, found[spot])
        assert trial.is_right(next(trial.around(TILES["metal"]["expert_rows"])))


def test_our_kernel_for_prompts_is_used_once_the_search_has_chosen_it(host, monkeypatch):
    if backend.name() != "metal":
        pytest.skip("on CUDA it is the default")
    launches, record = dict(tiny_samples()), next(iter(tiny_shapes().layout.records.values()))
    (spot,) = (spot for spot, sample in launches.items() if sample.kernel == "prompt_experts")
    make, inputs, calls = launches[spot].make, launches[spot].inputs, []

    def zeros(x, starts, source, *_):
        calls.append(len(source))
        return mx.zeros((len(source), x.shape[1]), x.dtype)

    monkeypatch.setattr(grouped, "expert_rows", zeros)

    class Bench:
        def __init__(self, spot, sample):
            self.around = lambda tile: neighbours("metal", sample.kernel, tile)
            self.is_right = lambda tile: True
            self.seconds = lambda tile: 1.0 if tile.kernel else 2.0 + (tile.dense != 256)

    (result,) = tuning.tune([spot], launches, Bench)
    assert result.best.kernel and result.gain == 2
    assert expert_rows.refusal(mx.bfloat16, record)
    assert make()(*inputs) and not calls
    with using(Tiles(tuning.kept([result]))):
        assert not expert_rows.refusal(mx.bfloat16, record)
        assert make()(*inputs) and calls == [sum(tuning.ROWS)]
        assert expert_rows.refusal(mx.bfloat16, Record.make(64, 64))


@pytest.mark.parametrize("family", goldens.families())
def test_every_family_has_layers_to_try(host, monkeypatch, family):
    """Its files give the shapes. Only the launch of a product matters here."""
    monkeypatch.setattr(
        msl.HostKernel,
        "__call__",
        lambda self, *, inputs, output_shapes, output_dtypes, **call: [
            mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ],
    )
    shapes = shapes_of(Namespace(variant=None, model=tiny_directory(family)))
    assert "qmv" in {sample.kernel for sample in tuning.samples(shapes).values()}


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])  # limits of registers, and of threads on Metal
def test_a_tile_that_does_not_build_is_not_right(host, kind):
    spot, sample = next(iter(tiny_samples()))
    trial = trials.TileTrial(spot, sample)

    def refused(*inputs):
        raise kind("too many")

    sample.make = lambda: refused
    assert not trial.is_right(TILES["metal"][sample.kernel])


def test_a_value_that_is_missing_is_infinitely_wrong():
    want = mx.array([1.0, 2.0])
    assert trials.difference(mx.array([1.0, float("nan")]), want) == float("inf")
    assert trials.difference(mx.array([1.0, 2.1]), want) == pytest.approx(0.05)


def test_the_clock_runs_a_chain(host, monkeypatch):
    """On the host this measures nothing of a GPU, but it runs all of the code."""
    monkeypatch.setattr(trials, "SPREAD_BYTES", 1)
    monkeypatch.setattr(trials, "LAUNCHES", 8)
    for spot, sample in tiny_samples():
        if sample.kernel in ("qmv", "expert_dequantize"):
            bench = trials.Bench(spot, sample, nullcontext())
            assert bench.seconds(TILES["metal"][sample.kernel]) > 0


def test_a_spot_says_nothing_of_slots_and_tokens(host):
    """Otherwise two ways to one result could have two tiles."""
    names = [spot for spot, _ in tiny_samples()]
    assert len(set(names)) == len(names)
    assert "expert_gate_up 64x128 4 bits, group_size 64, mode affine, bfloat16" in names


def test_a_choice_reaches_launches_and_ends_with_its_block(host):
    w, s, b = mx.zeros((64, 16), mx.uint32), mx.zeros((64, 2), mx.bfloat16), mx.zeros((64, 2), mx.bfloat16)
    quant, x = stored_as(ModelArgs.from_dict(TINY), "lm_head", 128), mx.zeros((1, 128), mx.bfloat16)
    form = linear.Form(quant, s.dtype)

    def rows():
        return linear.plan("metal", x.shape, x.dtype, w.shape, s.shape, form).template["R"]

    before = rows()
    with using(Tiles({f"qmv 64x128 {form}": Tile(rows=8, lanes=8, simdgroups=2)})):
        assert rows() == 8
    assert rows() == before != 8
    assert b.shape == s.shape


def test_bits_under_one_choice_do_not_depend_on_where_records_lie(host):
    """A resident layer is read by id, a streamed layer by slot."""
    record = Record.make(128, 64)
    whole = random_weights.random_records(record, 4)
    pool = Records(mx.take(whole.blob, mx.array([2, 0]), axis=0), record)
    x, residual = (mx.random.normal((1, 128)).astype(mx.bfloat16) for _ in range(2))
    weights, form = mx.array([[0.7, 0.2]]), form_of(record.gate)
    others = {
        f"expert_gate_up 64x128 {form}": Tile(rows=1, lanes=2, simdgroups=1),
        f"expert_down_combine 128x64 {form}": Tile(rows=2, lanes=2),
    }

    def outputs():
        both = (whole, [[2, 0]]), (pool, [[0, 1]])
        return [expert_ffn(x, mx.array(slots, mx.uint32), at, weights, residual, None) for at, slots in both]

    code = outputs()[0]
    with using(Tiles(others)):
        by_id, by_slot = outputs()
        launch = experts.plan_gate_up("metal", x.shape, x.dtype, whole.blob.shape, (1, 2), record)
    assert (launch.template["R"], launch.template["L"]) == (1, 2), "the other tiles are used"
    assert mx.array_equal(by_id, by_slot) and trials.difference(by_id, code) < 1e-2


# ---- the processes


def test_a_process_of_the_crew_searches_its_spots(host, monkeypatch):
    monkeypatch.setattr(tuning.signal, "signal", lambda *given: None)
    monkeypatch.setattr(tuning, "Bench", lambda spot, sample, turn: Bench(spot, sample))
    shapes = tiny_shapes()
    tuning.begin_work(shapes.args, shapes.layout, shapes.quants, "bfloat16", nullcontext())
    spot = "expert_gate_up 64x128 4 bits, group_size 64, mode affine, bfloat16"
    assert tuning.search_spot(spot).gain == pytest.approx(2)
    tuning.work.clear()


@pytest.mark.parametrize("quant", [Quant(3, 32), Quant(8, 128), Quant(4, 32, "mxfp4"), Quant(4, 16, "nvfp4")])
def test_random_weights_are_of_a_trained_models_size(quant):
    parts = random_weights.random_parts(quant, (64, 512), mx.float32)
    values = np.array(unpacked(quant, *parts).astype(mx.float32))
    assert 0.3 < np.sqrt((values**2).sum(axis=1)).mean() < 3


def test_what_fails_in_a_process_of_the_crew_is_heard_here(monkeypatch):
    """Without a GPU the process does not know the name, and raises an error."""
    monkeypatch.setattr(tuning, "PROCESSES", 1)
    with pytest.raises(KeyError, match="nothing of that name"):
        list(tuning.crew(tiny_shapes(), ["nothing of that name"], 60))


class Pool:
    """Every task takes a second, and is done when it is checked."""

    now = 0.0

    def __init__(self, *given, **named):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, call, spot):
        Pool.now += 1
        future = Future()
        future.set_result(spot)
        return future


@pytest.mark.parametrize("seconds, done", [(2, ["a", "b"]), (60, ["a", "b", "c", "d"]), (0, [])])
def test_nothing_is_begun_when_the_time_is_over(monkeypatch, seconds, done):
    monkeypatch.setattr(Pool, "now", 0.0)
    monkeypatch.setattr(tuning, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: Pool.now))
    assert sorted(tuning.crew(tiny_shapes(), ["a", "b", "c", "d"], seconds)) == done


# ---- the command


@pytest.fixture
def cached(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(file_of, "gpu_name", lambda: "a made-up GPU")
    monkeypatch.setattr(command, "gpu_name", lambda: "a made-up GPU")
    return tmp_path / "moeflux" / "tiles.json"


class Bench:
    """A machine on which twice the rows are twice as fast, and four times as many give wrong results."""

    def __init__(self, spot, sample):
        self.start = TILES[backend.name()][sample.kernel]
        self.around = lambda tile: neighbours(backend.name(), sample.kernel, tile)

    def is_right(self, tile):
        return tile.rows <= 2 * self.start.rows

    def seconds(self, tile):
        return 1 / tile.rows


def alone(shapes, spots, seconds):
    """Runs the search in this process instead of several."""
    return tuning.tune(spots, tuning.samples(shapes), Bench)


def test_tiles_are_found_stored_shown_used_and_forgotten(host, cached, monkeypatch, capsys):
    monkeypatch.setattr(command, "shapes_of", lambda options: tiny_shapes())
    monkeypatch.setattr(command, "crew", alone)
    assert command.main(["--variant", variants()[0]]) == 0
    out = capsys.readouterr().out
    assert "2.00 times as fast as rows" in out and "a made-up GPU" in out
    monkeypatch.setenv("MOEFLUX_TILES", "auto")
    tiles = file_of.choose("auto").found
    code = TILES[backend.name()]
    assert tiles and all(tile.rows == 2 * code[spot.split()[0]].rows for spot, tile in tiles.items())
    assert file_of.choose("code").found == {}
    assert file_of.choose(str(cached)).found == tiles
    assert command.main(["--show"]) == 0
    out = capsys.readouterr().out
    assert all(spot in out for spot in tiles)
    assert command.main(["--reset"]) == 0 and not cached.exists()
    assert file_of.choose("auto").found == {}
    with pytest.raises(RequestError, match="does not exist"):
        file_of.choose(str(cached))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--minutes", "nan"], "--minutes is nan; it must be positive"),
        (["--show", "--model", "x"], "--show and --reset are for the tiles of all models; leave --model"),
        (["--reset", "--variant", "x"], "--show and --reset are for the tiles of all models; leave --model"),
        (["--variant", "no-such"], "no variant 'no-such'; there are: "),
    ],
)
def test_mistakes_are_one_line(arguments, message, host, cached, capsys):
    assert command.main(arguments) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_cpu_has_no_tiles_to_tune(monkeypatch, cached, capsys):
    monkeypatch.setattr(backend, "name", lambda: "ops")
    assert command.main([]) == 0
    assert capsys.readouterr().out.count("\n") == 1 and not cached.exists()
    for option, message in (("--variant", "no variant 'nonsense'"), ("--model", "nonsense does not exist")):
        assert command.main([option, "nonsense"]) == 1
        out, err = capsys.readouterr()
        assert message in err and err.count("\n") == 1 and not out

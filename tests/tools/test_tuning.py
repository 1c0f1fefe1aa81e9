"""The search for tiles: that what it runs has each tile that it tries, what it keeps, and its command."""

from argparse import Namespace
from types import SimpleNamespace

import goldens
import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_directory

from metal import msl
from moeflux_mlx import tune as command
from moeflux_mlx.cli.opening import shapes_of
from moeflux_mlx.formats.record import Record
from moeflux_mlx.kept import measured
from moeflux_mlx.opening import random_weights
from moeflux_mlx.ops import backend, experts, linear
from moeflux_mlx.ops.experts import Records, expert_ffn
from moeflux_mlx.ops.forms import unpacked
from moeflux_mlx.ops.tiles import CODE, TILES, TRIED, Tiles, merged, using
from moeflux_mlx.quant import Quant
from moeflux_mlx.spec import ModelArgs, variants
from moeflux_mlx.tools import tuning

pytestmark = pytest.mark.usefixtures("cpu_device")
METAL = TRIED["metal"]
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
def host(monkeypatch, small_products):
    """Runs the kernels' source on this machine, for products of any size."""
    monkeypatch.setattr(tuning, "MOST_LAYERS", 4)
    monkeypatch.setattr(tuning, "LEAST_BYTES", 1)
    monkeypatch.setattr(tuning, "ROWS", (1, 2, 40))
    with msl.launching():
        yield


def tiny_shapes():
    return random_weights.Shapes.of_args(ModelArgs.from_dict(TINY), mx.bfloat16)


@pytest.mark.parametrize("changes", METAL, ids=str)
def test_tiles_that_are_tried_differ_from_the_built_in_ones(changes):
    for kernel, values in changes.items():
        tile = Tiles(changes).tile("metal", kernel)
        assert tile != TILES["metal"][kernel] and all(getattr(tile, name) == value for name, value in values.items())


# ---- what is run


class Asked(Tiles):
    """The built-in tiles with changes; records which kernels ask."""

    def __init__(self, found):
        super().__init__(found)
        self.kernels = set()

    def tile(self, target, kernel):
        self.kernels.add(kernel)
        return super().tile(target, kernel)


@pytest.mark.parametrize("kind", [tuning.token_work, tuning.prompt_work])
def test_work_has_every_kernel_that_is_tried_and_gives_the_same_with_other_tiles(host, monkeypatch, kind):
    if backend.name() == "cuda":
        pytest.skip("nothing is tried there")
    monkeypatch.setattr(linear, "LARGE", 192 * 128)  # so that the head is large
    monkeypatch.setattr(tuning, "BOUND", 4e-2)  # MLX's products of a prompt's experts sum in bfloat16 on a CPU
    mx.random.seed(1)
    work, ours = (
        kind(tiny_shapes()),
        [one for one in METAL if ("prompt_experts" in one) == (kind is tuning.prompt_work)],
    )
    other = Asked(merged(ours))
    assert tuning.is_right(work, CODE, other)
    assert {kernel for one in ours for kernel in one} <= other.kernels
    for factor in (1.05, float("nan")):
        calls = iter([1.0] * len(work.parts) + [factor] * len(work.parts))
        wrong = [lambda x, part=part, calls=calls: next(calls) * part(x) for part in work.parts]
        assert not tuning.is_right(tuning.Work(work.x, wrong), CODE, other), "a planted fault"
    assert tuning.timed(work, other) > 0


@pytest.mark.parametrize("family", goldens.families())
def test_every_family_has_layers_to_try(host, monkeypatch, family):
    """Its files give the shapes. Only the launches matter here."""
    monkeypatch.setattr(
        msl.HostKernel,
        "__call__",
        lambda self, *, inputs, output_shapes, output_dtypes, **call: [
            mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ],
    )
    shapes, asked = shapes_of(Namespace(variant=None, model=tiny_directory(family))), Asked({})
    monkeypatch.setattr(tuning, "MOST_LAYERS", len(tuning.kinds_of(shapes)))
    with using(asked):
        out = tuning.token_work(shapes).run()
    assert out.shape == (1, 1, shapes.args.vocab_size) and "qmv" in asked.kernels


def test_a_choice_among_all_experts_is_run_with_the_few_that_are_there(host, monkeypatch):
    """Its logits are such that it chooses these."""
    chosen, right = [], tuning.chosen_ffn
    monkeypatch.setattr(tuning, "chosen_ffn", lambda x, choice, *more: chosen.append(choice) or right(x, choice, *more))
    mx.eval(tuning.token_work(tiny_shapes()).run())
    assert chosen and all(mx.argmax(one.logits, axis=1).item() == 0 for one in chosen)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])  # limits of registers, and of threads on Metal
def test_tiles_that_do_not_build_are_not_right(kind):
    class Refused:
        calls = 0

        def outputs(self):
            Refused.calls += 1
            if Refused.calls == 2:
                raise kind("too many")
            return [mx.zeros(1)]

    assert not tuning.is_right(Refused(), CODE, Tiles())


@pytest.fixture
def judge_by(monkeypatch):
    """Returns a function that says whether all values are right, and what takes times."""

    def judge(is_right, timed):
        monkeypatch.setattr(tuning, "is_right", lambda *_: is_right)
        monkeypatch.setattr(tuning, "timed", timed)

    return judge


def test_a_value_that_is_missing_is_infinitely_wrong():
    want = mx.array([1.0, 2.0])
    assert tuning.difference(mx.array([1.0, float("nan")]), want) == float("inf")
    assert tuning.difference(mx.array([1.0, 2.1]), want) == pytest.approx(0.05)


def test_measurements_alternate(judge_by):
    """If a machine slows down during a measurement, no tile has an advantage."""
    one, other, turns = Tiles(), Tiles(), []
    judge_by(True, lambda work, tiles: turns.append(tiles) or 1.1 ** len(turns))
    assert tuning.measured(None, one, other) == pytest.approx(1 / 1.1)
    assert turns == [one, other] * (tuning.ROUNDS + 1)


def test_wrong_values_are_never_measured(judge_by):
    judge_by(False, None)
    assert tuning.measured(None, CODE, Tiles()) == 0


# ---- what is kept


def gains(changes):
    """A machine on which halves are faster, and dense products from 64 rows on, and more so from 128."""
    dense = changes.get("prompt_experts", {}).get("dense", 256)
    return (1.2 if "qmv_large" in changes else 1.0) * {64: 1.1, 128: 1.3}.get(dense, 1.0)


@pytest.fixture
def metal(monkeypatch, backend_is):
    """The function that measures, for work of the right kind."""
    backend_is("metal")
    for name in ("token_work", "prompt_work"):
        monkeypatch.setattr(tuning, name, lambda shapes, name=name: name)

    def measured(work, one, other):
        is_prompt = one.found.get("prompt_experts") != other.found.get("prompt_experts")
        assert work == ("prompt_work" if is_prompt else "token_work")
        return gains(other.found) / gains(one.found)

    monkeypatch.setattr(tuning, "measured", measured)


def test_each_change_is_tried_with_those_that_were_faster(metal):
    results = list(tuning.tune(tiny_shapes(), 60))
    assert [changes for changes, _ in results] == list(METAL)
    assert [next(iter(one)) for one, gain in results if gain > 1.02] == ["expert_gate_up", *["prompt_experts"] * 2]


def test_nothing_is_begun_when_the_time_is_over(metal, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert len(list(tuning.tune(tiny_shapes(), 3))) == 2


# ---- what a choice reaches


def test_a_choice_reaches_launches_and_ends_with_its_block(host):
    w, s = mx.zeros((64, 16), mx.uint32), mx.zeros((64, 2), mx.bfloat16)
    x, form = mx.zeros((1, 128), mx.bfloat16), linear.Form(Quant(4, 64), s.dtype)

    def rows():
        return linear.plan("metal", x.shape, x.dtype, w.shape, s.shape, form).template["R"]

    before = rows()
    with using(Tiles({"qmv": {"rows": 8}})):
        assert rows() == 8
    assert rows() == before != 8


def test_bits_under_one_choice_do_not_depend_on_where_records_lie(host):
    """A resident layer is read by id, a streamed layer by slot."""
    record = Record.make(128, 64)
    whole = random_weights.random_records(record, 4)
    pool = Records(mx.take(whole.blob, mx.array([2, 0]), axis=0), record)
    x, residual = (mx.random.normal((1, 128)).astype(mx.bfloat16) for _ in range(2))
    weights = mx.array([[0.7, 0.2]])
    others = {
        "expert_gate_up": {"rows": 1, "lanes": 2, "simdgroups": 1},
        "expert_down_combine": {"rows": 2, "lanes": 2},
    }

    def outputs():
        both = (whole, [[2, 0]]), (pool, [[0, 1]])
        return [expert_ffn(x, mx.array(slots, mx.uint32), at, weights, residual, None) for at, slots in both]

    code = outputs()[0]
    with using(Tiles(others)):
        by_id, by_slot = outputs()
        launch = experts.plan_gate_up("metal", x.shape, x.dtype, whole.blob.shape, (1, 2), record)
    assert (launch.template["R"], launch.template["L"]) == (1, 2), "the other tiles are used"
    assert mx.array_equal(by_id, by_slot) and tuning.difference(by_id, code) < 1e-2


@pytest.mark.parametrize("quant", [Quant(3, 32), Quant(8, 128), Quant(4, 32, "mxfp4"), Quant(4, 16, "nvfp4")])
def test_random_weights_are_of_a_trained_models_size(quant):
    parts = random_weights.random_parts(quant, (64, 512), mx.float32)
    values = np.array(unpacked(quant, *parts).astype(mx.float32))
    assert 0.3 < np.sqrt((values**2).sum(axis=1)).mean() < 3


# ---- the command


@pytest.fixture
def tiny_work(monkeypatch):
    """The command's model is tiny."""
    monkeypatch.setattr(command, "shapes_of", lambda options: tiny_shapes())


@pytest.fixture
def cached(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module in (measured, command):
        monkeypatch.setattr(module, "gpu_name", lambda: "a made-up GPU")
    return tmp_path / "moeflux" / "tiles.json"


def test_tiles_are_found_stored_shown_used_and_forgotten(metal, cached, monkeypatch, capsys, tiny_work):
    assert command.main(["--variant", variants()[0]]) == 0
    out = capsys.readouterr().out
    assert "expert_gate_up halves 1, qmv halves 1" in out and "1.20 times as fast, kept" in out
    assert "5 kernels have faster tiles on a made-up GPU" in out
    monkeypatch.setenv("MOEFLUX_TILES", "auto")
    assert measured.choose_tiles("auto").found == {**METAL[0], "prompt_experts": {"dense": 128}}
    assert command.main(["--show"]) == 0
    assert "prompt_experts dense 128, qmv halves 1" in capsys.readouterr().out
    assert command.main(["--reset"]) == 0 and not cached.exists()
    assert measured.choose_tiles("auto").found == {}


def test_a_gain_below_two_percent_is_not_kept(metal, cached, monkeypatch, tiny_work):
    monkeypatch.setenv("MOEFLUX_TILES", "auto")
    for gain, found in ((1.015, {}), (1.03, merged(METAL))):
        monkeypatch.setattr(tuning, "measured", lambda *_, gain=gain: gain)
        assert command.main([]) == 0
        assert measured.choose_tiles("auto").found == found


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--show", "--model", "x"], "--show and --reset are for the results of all models; leave --model"),
        (["--reset", "--variant", "x"], "--show and --reset are for the results of all models; leave --model"),
        (["--variant", "no-such"], "no variant 'no-such'; there are: "),
    ],
)
def test_mistakes_are_one_line(arguments, message, host, cached, capsys):
    assert command.main(arguments) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["ops", "cuda"])
def test_only_apple_gpus_have_tiles_to_try(cached, capsys, name, backend_is, tiny_work):
    backend_is(name)
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert "only on Apple GPUs" in out and out.count("\n") == 1 and not cached.exists()


@pytest.mark.parametrize("option, message", [("--variant", "no variant 'x y'"), ("--model", "x y does not exist")])
def test_a_wrong_model_is_refused_on_a_cpu_too(cached, capsys, option, message):
    assert command.main([option, "x y"]) == 1
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out

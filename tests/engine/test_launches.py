"""The list of launches, compared with the launches that run."""

import gc
import itertools
import re
import weakref
from argparse import Namespace
from collections import Counter

import goldens
import mlx.core as mx
import pytest
from tiny_models import tiny_directory, use_plain_operations

from moeflux_mlx.cli.opening import shapes_of
from moeflux_mlx.mixers.latent.spec import heads_at_once
from moeflux_mlx.model.weights import arrange
from moeflux_mlx.opening import launches
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.kernel_cache import programs_of
from moeflux_mlx.opening.random_weights import Shapes
from moeflux_mlx.ops import backend, gpu_time, launch, native
from moeflux_mlx.ops.attend_span import attend_span, takes_span
from moeflux_mlx.ops.launch import LEAST_ELEMENTS, NO_KERNELS, Reason
from moeflux_mlx.ops.stand_ins import StandIns, stand_ins, standing_in
from moeflux_mlx.ops.tiles import CODE, planned
from moeflux_mlx.quant import Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
TOTALS = ("native linear", "native expert_gate_up", "native attend_step", "native gated_delta", "native choose")


class Counting:
    """The extension, with its calls counted by name."""

    def __init__(self, extension, calls):
        self.extension, self.calls = extension, calls

    def __getattr__(self, name):
        def call(*given):
            self.calls[f"native {name}"] += 1
            return getattr(self.extension, name)(*given)

        return call


def said(family, target, tokens):
    """Returns the list for a whole model, and the steps."""
    with standing_in(backend=target):
        shapes = shapes_of(Namespace(variant=None, model=tiny_directory(family)))
    every = (step for step in launches.launches_of(shapes, target) if step.tokens == tokens)
    steps = [step for step in every if "resident" not in step.part and "queued" not in step.part]
    total = Counter()
    for step in steps:
        for name, count in step.runs.items():
            total[name] += count * max(len(step.layers), 1)
    return total, steps


@pytest.mark.parametrize("family", ["glm_moe_dsa", "mistral_large4", "deepseek_v41"])
@pytest.mark.parametrize("target", ["cuda", "ops"])
def test_layers_that_take_what_another_handed_on_are_listed(family, target):
    """Lists the launches of a prompt that is longer than the budget, of several sequences and of several rows."""
    with standing_in(backend=target):
        shapes = shapes_of(Namespace(variant=None, model=tiny_directory(family)))
    steps = list(launches.launches_of(shapes, target, tokens=(1, 512), sequences=(3,), rows=(2,)))
    assert {512, 1, 3, 2} <= {step.tokens for step in steps if step.part.endswith("attention")}


@pytest.mark.skipif(not native.available(), reason="the extension is not built")
@pytest.mark.parametrize("family", goldens.families())
@pytest.mark.parametrize("tokens", [1, 4])
def test_native_forms_are_those_that_a_model_calls(family, tokens):
    model, calls = load_model(tiny_directory(family), dtype=mx.float32, expert_io="mmap"), Counter()
    model(mx.ones((1, tokens), mx.int32), model.make_cache())
    with standing_in(extension=Counting(native.extension(), calls)):
        model(mx.ones((1, tokens), mx.int32), model.make_cache())
    assert {name: said(family, "ops", tokens)[0][name] for name in TOTALS} == {name: calls[name] for name in TOTALS}
    assert calls["native linear"]


@pytest.mark.parametrize("family", goldens.families())
@pytest.mark.parametrize("tokens", [1, 4])
def test_kernels_are_those_that_a_model_launches(family, tokens, small_products):
    calls = Counter()

    def build(kernel, *_):
        def call(*, output_shapes, output_dtypes, **_):
            calls[f"{kernel.name}[{kernel.form}]" if kernel.form else kernel.name] += 1
            return [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]

        return call

    total, _ = said(family, "metal", tokens)
    model = load_model(tiny_directory(family), dtype=mx.bfloat16, expert_io="pread", prefetch="off")
    with standing_in(backend="metal", build=build):
        arrange(model)
        mx.eval(model(mx.ones((1, tokens), mx.int32), model.make_cache()))
    assert total == calls and len(calls) > 3


LISTED = (
    "deepseek_v4",
    "glm5_next",
    "nemotron_h",
    "qwen4_exp",
    "kimi_k3",
    "axk2",
    "k2_horizon",
    "muse_spark",
    "inkling",
    "inkling2",
    "inkling2_loop",
)


@pytest.mark.parametrize("family", LISTED)
def test_every_text_of_a_token_is_listed(family, small_products):
    """So that it is compiled before the first token. MLX's text for Metal also depends on whether an input has few
    elements. Routers and experts are left out, because their stored forms here are not those that a plan assumes."""
    listed = {(one.kernel.name, *one.few) for step in said(family, "metal", 1)[1] for one in step.programs}
    built = set()

    def build(*of):
        def call(*, inputs, output_shapes, output_dtypes, **_):
            built.add((name_of(*of), *(array.size < LEAST_ELEMENTS for array in inputs)))
            return list(map(mx.zeros, output_shapes, output_dtypes))

        return call

    model = load_model(tiny_directory(family), dtype=mx.bfloat16, expert_io="pread", prefetch="off")
    with standing_in(backend="metal", build=build):
        arrange(model)
        cache = model.make_cache()
        mx.eval(model(mx.ones((1, 40), mx.int32), cache))
        built.clear()
        for _ in range(4):  # one of which ends an entry
            mx.eval(model(mx.ones((1, 1), mx.int32), cache))
    assert built and {one for one in built - listed if not re.match("moeflux_(router|expert)_", one[0])} == set()


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3.6-35b-a3b", "kimi-linear-48b-a3b", "glm-4.7-flash"])
def test_short_turns_behind_short_and_long_texts_are_listed_for_cuda(name):
    shapes = Shapes.of_variant(name, mx.bfloat16)
    mixer = next(mixer for mixer in shapes.args.mixer_counts if mixer.span_heads)
    (heads, D, V), is_latent = mixer.span_heads, mixer.title == "latent attention"
    noted, scale = launches.Noted(CODE, NO_KERNELS), D**-0.5
    with standing_in(backend="cuda"), noted.listening():
        for start, tokens in itertools.product((0, launches.LONG), (9, 60, 127)):
            count = start + tokens
            some = heads_at_once(heads, count * (D + V)) if is_latent else heads
            rows = 1, some if is_latent else mixer.kv_heads, count
            given = (mx.zeros(shape, mx.bfloat16) for shape in ((1, some, tokens, D), (*rows, D), (*rows, V)))
            assert takes_span((D, V), mx.bfloat16, tokens, False)
            attend_span(*given, count, scale)
    listed = {program.key for program in programs_of(shapes, CODE)}
    assert len(noted.programs) >= 6 and {program.key for program in noted.programs} <= listed


@pytest.mark.parametrize("target, dtype", [("metal", mx.bfloat16), ("cuda", mx.float32), ("ops", mx.float32)])
def test_no_short_turn_is_listed_where_no_kernel_takes_it(target, dtype):
    steps = launches.launches_of(Shapes.of_variant("qwen3-30b-a3b", dtype), target, tokens=(1,))
    assert not any("short turn" in step.part for step in steps)


def name_of(kernel, target, constants, threads, places):
    return kernel.text(target, constants, threads, places).name


def test_a_list_keeps_nothing():
    """Every load on a GPU makes one; what a launch of it would call has the texts of all its kernels."""
    kept = launch.built.cache_info().currsize
    for _ in range(2):
        assert any(step.programs for step in said("qwen3_moe", "cuda", 1)[1])
    assert launch.built.cache_info().currsize == kept
    made = [weakref.ref(step.programs[0]) for step in said("qwen3_moe", "cuda", 1)[1] if step.programs]
    gc.collect()
    assert made and not any(one() for one in made)


def test_another_backend_is_only_viewed():
    before = backend.name()
    _, steps = said("qwen3_moe", "cuda", 512)
    assert backend.name() == before and stand_ins() == StandIns()
    attention = next(step for step in steps if step.part == "attention")
    assert "qmv" not in attention.runs and "several tokens" in attention.refused["attend"]
    assert attention.refused["linear"]


@pytest.mark.skipif(not native.available(), reason="the extension is not built")
def test_a_cpu_says_why_another_native_form_does_not_run(monkeypatch):
    _, steps = said("deepseek_v3", "ops", 512)
    refused = {step.part: step.refused for step in steps}
    assert "knows softmax, not sigmoid" in refused["experts"]["route"]
    assert "more than 8 tokens" in refused["latent attention"]["latent"]
    use_plain_operations(monkeypatch)
    _, steps = said("deepseek_v3", "ops", 1)
    reasons = {reason for step in steps for reason in step.refused.values()}
    assert reasons == {"the native extension is not built"} and not any(step.runs for step in steps)


def test_a_reason_stands_under_the_name_of_its_operation():
    @planned("attend")
    def plan(width):
        return Reason(f"width {width}")

    noted = launches.Noted(CODE, NO_KERNELS)
    with noted.listening():
        plan(7)
    assert noted.refused == {"attend": "width 7"}


def test_nothing_is_computed_for_a_list(monkeypatch):
    with standing_in(backend="metal"):
        x = mx.ones((4,)) + 1
        monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("evaluated"))
        monkeypatch.setattr(mx, "async_eval", lambda *_: pytest.fail("evaluated"))
        gpu_time.in_turn(2, [x, x + 1])


def test_layers_in_other_forms_are_listed_separately(cpu_device):
    with standing_in(backend="metal"):
        shapes = shapes_of(Namespace(variant="qwen3-30b-a3b", model=None))
    path = next(path for path in shapes.quants if path.startswith("model.layers.5.self_attn."))
    shapes.quants[path] = Quant(8, 64)
    steps = [step for step in launches.launches_of(shapes, "metal") if step.part == "attention" and step.tokens == 1]
    assert [len(step.layers) for step in steps] == [47, 1] and steps[1].layers == [5]
    assert any("[affine]" in name for name in steps[1].runs)

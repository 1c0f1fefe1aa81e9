"""The compiled decode step against the plain one, on MLX's CPU backend and without native kernels."""

import gc
import re
from concurrent.futures import ThreadPoolExecutor

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import marks
from tiny_models import tiny_directory, tiny_model, use_plain_operations

from metal import fast, msl
from moeflux_mlx.caches import entries, growing, ring
from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts import whole
from moeflux_mlx.kinds import streams_before
from moeflux_mlx.mixers.delta.spec import Delta
from moeflux_mlx.mixers.grouped import op as attend
from moeflux_mlx.mixers.registry import cache_numbers
from moeflux_mlx.model.compiled import DecodeStep
from moeflux_mlx.model.tokens import Tokens
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import launch
from moeflux_mlx.ops.experts import Shared
from moeflux_mlx.ops.seen import Chosen

FAMILIES = (*goldens.families(), "gpt_oss")
CHOOSING = ("deepseek_v4", "deepseek_v41", "glm5_next", "glm_moe_dsa", "hy_v4", "minimax_m3_vl", "qwen4_exp")
CHOOSING += ("axk2", "dots3_note")
SLOW = ("deepseek_v4", "deepseek_v41", "glm5_next")  # MLX takes 25 s to compile hyper-connections for the CPU
SLOW += ("axk2", "dots3_note")
SOME_CHOOSING = [pytest.param(one, marks=marks(one not in SLOW)) for one in CHOOSING]


ON_KERNELS = ["qwen3_5_moe", "deepseek_v3", "gpt_oss", "glm_moe_dsa"]  # every kind of mixer with a kernel of its own
ON_KERNELS += ["inkling2_loop"]  # and every kind of convolution, sum and message
ALSO = ("step3p5", "g9v3", "deepseek_v4", "qwen3_moe", "qwen3_next", "nemotron_h", "qwen4_exp", "glm5_next", "beam")
ALSO += ("ernie4_5_moe", "afmoe", "flint", "kolibri1", "qwen2_moe", "olmoe", "mixtral", "bailing_hybrid", "kimi_linear")
ALSO += ("minimax_m3_vl", "hy_v4", "kimi_k3", "granitemoehybrid", "llama4", "cohere2_moe", "longcat_flash", "inkling")
ALSO += ("mistral_large4", "inkling2", "k2_horizon", "axk2", "muse_spark", "lfm2_moe")
ON_KERNELS += [pytest.param(one, marks=pytest.mark.full) for one in ALSO]


def use_compiled_steps(patch):
    """Models compute tokens by a compiled step of MLX's operations, as on a GPU."""
    use_plain_operations(patch)
    for caches in (entries, growing, ring):
        patch.setattr(caches, "sees_capacity", lambda length: length == 1)


def make_resident(monkeypatch, family, dtype=mx.float32, variant="mlx4"):
    """Returns a model as on a GPU: MLX operations, each layer's experts in one array, tokens by the compiled step."""
    use_compiled_steps(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(whole, "map_file", copied)
        return load_model(tiny_directory(family, variant), dtype=dtype, expert_io="mmap")


def copied(path, experts, size):
    return mx.array(np.fromfile(path, np.uint32).reshape(experts, -1)), None


@pytest.fixture
def resident_model(monkeypatch, request):
    return make_resident(monkeypatch, request.param)


@pytest.mark.parametrize(
    "resident_model",
    [
        *FAMILIES,
        "mistral4",
        "beam",
        "kimi_k3",
        "llama4",
        "cohere2_moe",
        "inkling",
        "inkling2",
        "inkling2_loop",
        "longcat_flash",
        "mistral_large4",
        *SOME_CHOOSING,
    ],
    indirect=True,
)
def test_compiled_step_equals_the_plain_one(resident_model):
    model = resident_model
    prompt, rest = list(range(5, 25)), [7, 3, 9, 30]
    plain, fixed = model.make_cache(), model.make_cache()
    for cache in (plain, fixed):
        mx.eval(model(mx.array([prompt]), cache))
    step = model.decode_step
    for token in rest:
        tokens = mx.array([[token]])
        assert step.takes(tokens, [fixed])
        got, model.decode_step = model(tokens, fixed), None
        want, model.decode_step = model(tokens, plain), step
        np.testing.assert_allclose(np.array(got), np.array(want), atol=5e-5)
    assert [c.offset for c in fixed] == [c.offset for c in plain]


@pytest.mark.parametrize("resident_model", ["deepseek_v32", *SOME_CHOOSING], indirect=True)
def test_a_step_that_attends_to_all_and_one_that_chooses(resident_model):
    """The compiled step changes with the token that no longer sees all positions.

    It also changes with a token that ends an entry or a block. All steps match the golden.
    """
    tokens, wanted = goldens.golden(resident_model.model_type)
    cache, first = resident_model.make_cache(), 14
    last = next(i for i in range(first, 64) if any(not mixer.seeing_all(i, 1) for mixer in attending(resident_model)))
    mx.eval(resident_model(mx.array([tokens[:first].tolist()]), cache))
    for i in range(first, last + 6):
        assert resident_model.decode_step.takes(mx.array([[1]]), [cache])
        got = resident_model(mx.array([[int(tokens[i])]]), cache)[0, 0]
        np.testing.assert_allclose(np.array(got), wanted[i], atol=2e-4)


def attending(model):
    return [mixer for mixer in model.args.mixers if not isinstance(mixer, Delta)]


@pytest.mark.usefixtures("plain_operations")
@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("family", ON_KERNELS)
def test_tokens_on_kernels_equal_those_on_plain_operations(monkeypatch, family, small_products):
    """Single tokens of a whole model run through every kernel: Metal's source, executed by the harness."""
    monkeypatch.setattr(mx.fast, "rope", fast.rope)
    model = tiny_model(family, mx.float32)
    caches = [model.make_cache() for _ in range(2)]
    for cache in caches:
        mx.eval(model(mx.array([list(range(5, 25))]), cache))
    for token in ([[7]], [[3]]):
        want = np.array(model(mx.array(token), caches[0]))
        with msl.launching():
            got = np.array(model(mx.array(token), caches[1]))
        np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize("resident_model", ["qwen3_5_moe", "deepseek_v3"], indirect=True)
def test_capacity_grows_in_the_middle(resident_model):
    """The step after which the arrays grow sees all earlier positions."""
    model = resident_model
    prompt = (np.arange(255) % 200).tolist()
    plain, fixed = model.make_cache(), model.make_cache()
    for cache in (plain, fixed):
        mx.eval(model(mx.array([prompt]), cache))
    step, model.decode_step = model.decode_step, None
    for token in (1, 2, 3):
        want, got = model(mx.array([[token]]), plain), step(mx.array([[token]]), [fixed])[0]
        np.testing.assert_allclose(np.array(got), np.array(want), atol=5e-5)


@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v3"])
def test_kernels_give_resident_and_streamed_experts_the_same_bits(monkeypatch, family):
    """Resident experts are chosen in the launch that multiplies them, streamed experts before it."""
    joined, joins = [], Shared.joins
    monkeypatch.setattr(Shared, "joins", lambda *args: joined.append(joins(*args)) or joined[-1])
    models = [make_resident(monkeypatch, family, mx.bfloat16), load_model(tiny_directory(family), dtype=mx.bfloat16)]
    models[0].decode_step = None  # the harness of the kernels cannot trace these
    logits = []
    with msl.launching():
        for model in models:
            cache = model.make_cache()
            parts = [model(mx.array([chunk]), cache) for chunk in ([5, 6, 7], [9])]
            logits.append(mx.concatenate(parts, axis=1))
        assert mx.array_equal(*logits)
    assert joined and all(joined), "the shared expert goes with the routed ones"


def pretended(inputs, output_shapes, output_dtypes, **_):
    """Returns the outputs of a kernel, which are not computed."""
    outputs = [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]
    mx.eval(outputs)
    return mx.depends(outputs, inputs)


def pretended_norm(x, weight, eps):
    inputs = [x] if weight is None else [x, weight]
    return pretended(inputs, [x.shape], [x.dtype])[0]


def pretended_layer_norm(x, weight, bias, eps):
    return pretended([one for one in (x, weight, bias) if one is not None], [x.shape], [x.dtype])[0]


def pretended_turn(x, dims, *, freqs, **_):
    return pretended([x, freqs], [x.shape], [x.dtype])[0]


def pretended_attention(q, k, v, *, scale, mask=None, sinks=None):
    inputs = [one for one in (q, k, v, mask, sinks) if isinstance(one, mx.array)]
    return pretended(inputs, [(*q.shape[:-1], v.shape[-1])], [q.dtype])[0]


PRETENDED = {"rms_norm": pretended_norm, "layer_norm": pretended_layer_norm, "rope": pretended_turn}
PRETENDED["scaled_dot_product_attention"] = pretended_attention
# Operations that only view other arrays, and launch nothing.
VIEWS = ("Reshape", "Slice", "Split", "Broadcast", "ExpandDims", "Squeeze", "Unflatten", "Transpose")
# Shared experts of Moonlight and Qwen2-MoE are wider than routed ones, and a bias is a launch of its own. One of Step's
# layers has a limit for routed experts only.
MOST = {"moonlight": 10, "qwen2_moe": 11, "step3p5": 8, ("step3p5", 3): 10, "laguna": 9}
# A token that attends to chosen positions or entries; and several streams.
MOST |= {"deepseek_v4": 27, ("deepseek_v4", 0): 18, ("deepseek_v4", 2): 20}
MOST |= {"glm5_next": 12, ("glm5_next", 2): 21, ("glm5_next", 4): 21}
MOST |= {"qwen4_exp": 19, ("qwen4_exp", 0): 11, ("qwen4_exp", 1): 14, ("qwen4_exp", 3): 14}
MOST |= {"gemma4": 12, "deepseek_v32": 12, "glm_moe_dsa": 8, ("glm_moe_dsa", 2): 12, "minimax_m3_vl": 9}
# Its layers 1 and 3 make entries and choose among them by MLX's operations.
MOST |= {"deepseek_v41": 35, ("deepseek_v41", 1): 88, ("deepseek_v41", 3): 83}
MOST |= {"kimi_k3": 16, "hy_v4": 20, "hy_v4_vl": 20, ("beam", 1): 11, ("beam", 3): 11}  # the factor of queries
MOST |= {"mistral_large4": 18}  # queries grow, and an indexer makes its own of the input behind a norm
MOST |= {"k2_horizon": 18}  # MLX's operations gate heads, and repeat the input of value experts
MOST |= {"axk2": 21}  # gates of values by MLX's operations
MOST |= {"muse_spark": 23}  # MLX's operations norm heads and gate them
MOST |= {"dots3_note": 32, ("dots3_note", 1): 20}  # MLX's operations attend to latents of a window
MOST |= {"inkling": 22, "inkling2": 20, "inkling2_loop": 20}  # MLX's operations weigh Inkling's shared experts
MOST |= {"bailing_hybrid": 12}  # four gates would put rows where kernels cannot read them
MOST |= {"llama4": 11}  # the input of its experts is scaled
MOST |= {"longcat_flash": 24}  # the experts that return their input are taken out by MLX's operations
MOST |= {"cohere2_moe": 12}  # both parts take a norm of their own launch, and its shared expert is as wide as two
MOST |= {"nemotron_h": 10, "nemotron_h_latent": 12, "lfm2_moe": 7, ("lfm2_moe", 4): 8}
MOST |= dict.fromkeys((*goldens.families(), "glm4_moe", "hy_v3", "kimi_k2", "solar_open", "g9v3", "mixtral"), 8)


NAMED = {name if isinstance(name, str) else name[0] for name in MOST}  # 10 launches are enough for each other family


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=marks(name in NAMED)) for name in (*goldens.families(), *goldens.KIN)]
)
def test_a_layer_is_at_most_so_many_launches(monkeypatch, tmp_path, family, small_products, backend_is):
    """Counts the operations of a compiled step's graph that are not views. Compiling joins small operations."""
    model = make_resident(monkeypatch, family, mx.bfloat16, "hub")
    cache, token, numbers = model.make_cache(), mx.array([[7]]), cache_numbers(model.args.mixers)
    widths = [model.args.hidden_size * streams_before(model.args.connections, i) for i in range(len(model.layers))]
    inputs = {width: mx.zeros((1, 1, width), mx.bfloat16) for width in widths}
    mx.eval(model(mx.array([list(range(5, 36))]), cache), inputs, token)  # the next token ends entries and blocks
    backend_is("metal")
    monkeypatch.setattr(launch, "built", lambda *kernel: pretended)
    for name, pretends in PRETENDED.items():
        monkeypatch.setattr(mx.fast, name, pretends)
    monkeypatch.setattr(attend, "refusal", lambda *_: None)  # for heads that are narrower than a real model's
    for layer in model.layers:
        for part in (*map(layer.get, ("attn_hc", "ffn_hc")), layer.mixer):
            if hasattr(part, "arrange"):
                part.arrange()  # sizes that the kernels accept
    chosen, first = mx.arange(4)[None, None], {model.args.layers[i]: i for i in reversed(model.args.moe_layers)}
    for layer in {*first.values(), *(i for i in model.args.moe_layers if (family, i) in MOST)}:
        own, module = [cache[i] for i in numbers[layer]], model.layers[layer]
        for one in own:
            one.reserve(1)
            mx.eval([array for array in one.state[:-1] if array is not None], chosen)
        lent = model.args.layers[layer].mixer.borrowed
        step = DecodeStep(lambda x, caches, *more, m=module, n=lent: [m(x, caches, *given(*more, n))])
        mx.export_to_dot(str(tmp_path / "graph"), step(inputs[widths[layer]], [own], chosen, token)[0])
        names = re.findall(r'label ?= ?"(\w+)", shape=rectangle', (tmp_path / "graph").read_text())
        launched = [name for name in names if name not in VIEWS]
        assert 5 < len(launched) <= MOST.get((family, layer), MOST.get(family, 10)), launched


def given(positions, ids, lent):
    """Gives a layer the choice of the last layer with an indexer, latents of `lent` values, and the tokens."""
    latents = mx.zeros((1, 1, lent), mx.bfloat16)
    return Chosen(positions, latents=latents, unrotated=latents), Tokens(ids)


def test_an_empty_cache_is_not_taken():
    model = load_model(tiny_directory("qwen3_moe"), dtype=mx.float32)
    assert not DecodeStep.takes(mx.array([[1]]), [model.make_cache()])
    assert not DecodeStep.takes(mx.array([[1, 2]]), [])


def test_nothing_computes_or_is_held_after_close(monkeypatch):
    """The traces of several threads keep every expert as a constant."""
    model = make_resident(monkeypatch, "qwen3_moe")
    cache, token = model.make_cache(), mx.array([[1]])
    mx.eval(model(mx.array([[1, 2, 3]]), cache))
    with ThreadPoolExecutor(1) as pool:
        for call in (lambda: mx.eval(model(token, cache)), lambda: pool.submit(call_in_thread, model).result()):
            call()
        gc.collect()
        before, experts = mx.get_active_memory(), model.experts.layout.total_bytes
        model.experts.close()
        assert before - mx.get_active_memory() >= experts
    with pytest.raises(ExpertIOError, match="closed"):
        model(token, cache)


def call_in_thread(model):
    cache = model.make_cache()
    mx.eval(model(mx.array([[1, 2, 3]]), cache))
    mx.eval(model(mx.array([[1]]), cache))

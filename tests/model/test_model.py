"""Logits of every family against Hugging Face's, from every checkpoint form, in every chunking."""

import shutil
from dataclasses import replace

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from grids import drawn
from tiny_models import on_cpu, tiny_directory, tiny_model

import moeflux_mlx.mixers.latent.module as mla
import moeflux_mlx.ops.rope as rope
import moeflux_mlx.ops.route as router
from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.experts.routed import RoutedExperts
from moeflux_mlx.kinds import Yarn
from moeflux_mlx.layers import Weight
from moeflux_mlx.mixers.latent import op as latent
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.span import PromptSizes
from moeflux_mlx.model.weights import fill, read_resident
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import backend, native
from moeflux_mlx.ops.linear import multiply
from moeflux_mlx.quant import DEFAULT, PARTS

TOLERANCE = 2e-4  # maximal absolute error of logits with standard deviation 1, float32
SAME_GOLDEN = ("hub", "hub_sharded", "transformers5", "mlx4", "moeflux")
CASES = [(family, variant) for family in goldens.families() for variant in goldens.variants(family)]


def expected(family, variant):
    tokens, logits = goldens.golden(family, "hub" if variant in SAME_GOLDEN else variant)
    return mx.array(tokens).reshape(1, -1), logits


def run(model, tokens, chunk):
    """Returns the logits [T, V] of `tokens` [1, T], computed `chunk` at a time."""
    cache = model.make_cache()
    parts = [model(tokens[:, i : i + chunk], cache) for i in range(0, tokens.shape[1], chunk)]
    return np.array(mx.concatenate(parts, axis=1)[0].astype(mx.float32))


def error(family, variant="mlx4", chunk=None):
    tokens, want = expected(family, variant)
    got = run(tiny_model(family, mx.float32, variant), tokens, chunk or tokens.shape[1])
    return np.abs(got - want).max()


@pytest.mark.parametrize("family, variant", CASES)
def test_whole_prefill_matches_hugging_face(family, variant):
    assert error(family, variant) < TOLERANCE


@pytest.mark.parametrize("chunk", [7, 1])
@pytest.mark.parametrize("family", goldens.families())
def test_chunks_and_single_tokens_match_hugging_face(family, chunk):
    assert error(family, chunk=chunk) < TOLERANCE


@pytest.mark.parametrize("variant", ["negbias", "mlx4_embed_q"])
@pytest.mark.parametrize("chunk", [7, 1])
def test_deepseek_variants_in_chunks(variant, chunk):
    assert error("deepseek_v3", variant, chunk) < TOLERANCE


@pytest.mark.parametrize("family", goldens.families())
def test_any_chunking_gives_the_same_logits(family):
    tokens, _ = expected(family, "mlx4")
    model = tiny_model(family, mx.float32)
    whole = run(model, tokens, tokens.shape[1])
    for chunk in (2, 8, 9, 16, 39):
        assert np.abs(run(model, tokens, chunk) - whole).max() < (TOLERANCE if backend.has_kernels() else 1e-4)


@pytest.mark.parametrize("family", goldens.families())
def test_bfloat16_stays_close(family):
    """Random tiny models may choose other experts in bfloat16, but most positions agree."""
    tokens, want = expected(family, "mlx4")
    got = run(tiny_model(family, mx.bfloat16), tokens, tokens.shape[1])
    assert (got.argmax(-1) == want.argmax(-1)).mean() > 0.6
    assert np.isfinite(got).all()


@pytest.mark.parametrize("family", goldens.families())
def test_routing_is_float32_whatever_the_activations_are(family, tmp_path):
    """Compares with float64 results from the stored router and the layer's own input, which is bfloat16 here."""
    path = with_float32_routers(tiny_directory(family), tmp_path / "model")
    model, seen = load_model(path, dtype=mx.bfloat16), []
    call = RoutedExperts.in_pieces

    class Looking(RoutedExperts):
        def in_pieces(self, routing, *rest):
            seen.append((routing, rest[0]))
            return call(self, routing, *rest)

    for layer in model.args.moe_layers:
        model.layers[layer].mlp.experts = Looking(model.experts)
    tokens, _ = expected(family, "mlx4")
    mx.eval(model(tokens))
    stored = read_resident(path)
    assert len(seen) == len(model.args.moe_layers)
    for routing, x in seen:
        assert x.dtype == mx.bfloat16
        want_ids, want = route64(model.args, stored, f"model.layers.{routing.layer}.mlp", x)
        ids, weights = np.array(routing.ids), np.array(routing.weights)
        order, want_order = ids.argsort(axis=-1), want_ids.argsort(axis=-1)
        assert np.array_equal(np.take_along_axis(ids, order, -1), np.take_along_axis(want_ids, want_order, -1))
        got, wanted = np.take_along_axis(weights, order, -1), np.take_along_axis(want, want_order, -1)
        np.testing.assert_allclose(got, wanted, rtol=2e-5)


def with_float32_routers(source, path):
    """Returns the model with routers whose values bfloat16 cannot hold."""
    shutil.copytree(source, path)
    (file,) = path.glob("resident*.safetensors")
    tensors = mx.load(str(file))
    for name, tensor in tensors.items():
        if (".mlp.gate." in name or ".e_score_" in name) and tensor.dtype != mx.uint32:
            tensors[name] = tensor.astype(mx.float32) * 1.0011
    mx.eval(tensors)
    mx.save_safetensors(str(file), tensors)
    return path


def route64(args, stored, stem, x):
    """Returns (ids, weights) computed by the oracle."""
    gate = [stored[f"{stem}.gate.{part}"] for part in PARTS if f"{stem}.gate.{part}" in stored]
    if len(gate) == 3:
        gate = [mx.dequantize(gate[0], *(part.astype(mx.float32) for part in gate[1:]), group_size=64, bits=8)]
    logits = np.array(x.astype(mx.float32), np.float64) @ np.array(gate[0].astype(mx.float32), np.float64).T
    rule = args.experts.router
    if args.model_type != "deepseek_v3":
        return oracle.softmax_topk(logits, args.num_experts_per_tok, rule.normalise)
    bias = np.array(stored[f"{stem}.e_score_correction_bias"].astype(mx.float32), np.float64)
    groups = rule.groups, rule.kept_groups
    return oracle.noaux_tc_topk(logits, bias, args.num_experts_per_tok, *groups, rule.scale)


def test_the_correction_bias_keeps_its_precision(tmp_path):
    """The bias decides only near ties, so the tensor itself is compared."""
    path = with_float32_routers(tiny_directory("deepseek_v3"), tmp_path / "model")
    model, stored = load_model(path, dtype=mx.bfloat16), read_resident(path)
    for layer in model.args.moe_layers:
        kept = model.layers[layer].mlp.e_score_correction_bias
        want = stored[f"model.layers.{layer}.mlp.e_score_correction_bias"]
        assert kept.dtype == mx.float32 and mx.array_equal(kept, want)
        assert not mx.array_equal(want, want.astype(mx.bfloat16)), "rounding would go unseen"


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.scales", "lm_head.biases", "lm_head.weight"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_resident_tensor_that_is_not_finite_is_refused(name, value):
    model, tensors = tiny_model("qwen3_moe", mx.float32), read_resident(tiny_directory("qwen3_moe"))
    if name == "lm_head.weight":
        parts = [tensors.pop(f"lm_head.{part}") for part in PARTS]
        tensors[name] = mx.dequantize(*parts, 64, 4)
    tensors[name][-1] = value
    with pytest.raises(ModelFileError, match=f"tensor {name} holds NaN or infinite values"):
        fill(Model(model.args, None), tensors, model.args.quantization, mx.float32)


WAYS = [("mmap", 1), ("pread", 1), ("pread", 1 << 30)]  # how experts are read, and how many stay in memory


@pytest.mark.parametrize("family, way", drawn(goldens.families(), WAYS, turns=2))
def test_same_bits_in_every_io_mode(family, way):
    """On a GPU the reference computes single tokens with a compiled graph."""
    tokens = expected(family, "mlx4")[0][:, :20]
    reference = tiny_model(family, mx.float32)
    model = load_model(tiny_directory(family), dtype=mx.float32, expert_io=way[0], expert_cache_bytes=way[1])
    for chunk in (1, 16):
        assert np.array_equal(run(model, tokens, chunk), run(reference, tokens, chunk))
    model.experts.close()


@pytest.mark.usefixtures("plain_operations")
def test_blocks_of_a_prompt_are_waited_for(monkeypatch):
    """Otherwise the temporaries of all blocks, and of all layers up to the first with experts, would exist together."""
    model, evaluated, evaluate = tiny_model("deepseek_v3", mx.float32), [], mx.eval
    monkeypatch.setattr(model, "sizes", PromptSizes(32, 7))
    tokens = mx.array([[1] * 20])
    monkeypatch.setattr(
        mx, "eval", lambda *a: evaluated.extend(x.shape for x in a if isinstance(x, mx.array)) or evaluate(*a)
    )
    model(tokens)
    blocks = [(1, n, model.args.hidden_size) for n in (7, 6)]
    assert [evaluated.count(block) for block in blocks] == [2 * model.args.num_hidden_layers, 0]
    evaluated.clear()
    model(tokens[:, :8])
    assert (1, 8, model.args.hidden_size) not in evaluated


def breaks(monkeypatch, family, target, name, fault, variant="mlx4", chunk=None):
    """Returns the error with `fault` planted, on a newly loaded model."""
    monkeypatch.setattr(target, name, fault)
    tokens, want = expected(family, variant)
    model = load_model(tiny_directory(family, variant), dtype=mx.float32)
    return np.abs(run(model, tokens, chunk or tokens.shape[1]) - want).max()


a_kernel_chooses = pytest.mark.skipif(backend.has_kernels(), reason="a kernel chooses the experts there")


class TestPlantedFaults:
    """Each fault must exceed the tolerance; otherwise the tolerance proves nothing."""

    def test_yarn_factor_inside_the_power(self, monkeypatch):
        def wrong(dims, theta, yarn: Yarn):
            return (theta * yarn.factor) ** -(np.arange(0, dims, 2) / dims)

        assert breaks(monkeypatch, "deepseek_v3", rope, "yarn_inv_freq", wrong) > 10 * TOLERANCE

    def test_softmax_scale_without_mscale(self, monkeypatch):
        def wrong(mixer):
            return mixer.head_dim**-0.5

        assert breaks(monkeypatch, "deepseek_v3", mla, "softmax_scale", wrong) > 10 * TOLERANCE

    def test_half_split_rotation_in_mla(self, monkeypatch):
        class Wrong(rope.Rope):
            def __init__(self, rotation):
                super().__init__(replace(rotation, interleaved=False))

        assert breaks(monkeypatch, "deepseek_v3", mla, "Rope", Wrong) > 10 * TOLERANCE

    @a_kernel_chooses
    def test_dropped_groups_masked_with_zero(self, monkeypatch):
        class Zeros:
            def __getattr__(self, name):
                return 0.0 if name == "inf" else getattr(mx, name)

        assert breaks(monkeypatch, "deepseek_v3", router, "mx", Zeros(), "negbias") > 10 * TOLERANCE

    @a_kernel_chooses
    def test_smallest_experts_instead_of_largest(self, monkeypatch):
        right, natively = router.top_k, native.choose  # one of these two runs on this machine

        def wrong(scores, k):
            return right(-scores, k)

        monkeypatch.setattr(native, "choose", lambda logits, *rest: natively(-logits, *rest))

        assert breaks(monkeypatch, "qwen3_moe", router, "top_k", wrong) > 10 * TOLERANCE

    def test_absorbed_attention_without_the_rotated_part(self, monkeypatch):
        for name in ("absorbed_ops", "absorbed_native"):  # one of these two runs on this machine
            right = getattr(latent, name)

            def wrong(q_nope, q_pe, *rest, right=right):
                return right(q_nope, 0 * q_pe, *rest)

            monkeypatch.setattr(latent, name, wrong)
        # On a GPU a kernel computes the attention of a single token.
        assert breaks(monkeypatch, "deepseek_v3", latent, "absorbed_ops", latent.absorbed_ops, chunk=2) > 10 * TOLERANCE


def quantised(layer, rows, columns):
    """Fills `layer` with random 4-bit codes. Returns its dense matrix [rows, columns]."""
    layer.quant = DEFAULT
    dense = mx.array(np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32))
    layer.weight, layer.scales, layer.biases = mx.quantize(dense, group_size=64, bits=4)
    return mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=64, bits=4)


@pytest.mark.parametrize("columns, calls", [(64, 0), (128, 1)])
def test_cuda_multiplies_matrices_of_one_group_dense(monkeypatch, columns, calls, backend_is):
    """MLX's product of such matrices writes nothing on CUDA. A product in float32 rounds no weight, for scales of any
    dtype."""
    layer, product, seen = Weight(96, columns), mx.quantized_matmul, []
    quantised(layer, 96, columns)
    layer.scales, layer.biases = (part.astype(mx.bfloat16) for part in (layer.scales, layer.biases))
    exact = (part.astype(mx.float32) for part in (layer.scales, layer.biases))
    dense = mx.dequantize(layer.weight, *exact, group_size=64, bits=4)
    x = mx.array(np.random.default_rng(2).standard_normal((5, columns)).astype(np.float32))
    backend_is("cuda")
    monkeypatch.setattr(mx, "quantized_matmul", lambda *args, **more: seen.append(1) or product(*args, **more))
    assert mx.allclose(multiply(x, layer, transpose=True), x @ dense.T, atol=1e-4)
    assert len(seen) == calls


def products(layer, x):
    return [matrices.multiply(x, transpose=True) for matrices in (layer.key, layer.value)]


@on_cpu()  # on CUDA the halves are always used
def test_on_a_gpu_the_halves_of_the_latent_projection_replace_it(kernels_are):
    heads, nope, v_dim, latent = 3, 64, 32, 128
    layer = mla.LatentProjection(heads, nope, v_dim, latent)
    quantised(layer, heads * (nope + v_dim), latent)
    x = mx.array(np.random.default_rng(3).standard_normal((1, heads, 5, latent)).astype(np.float32))
    before, bytes_before = products(layer, x), layer.weight.nbytes
    kernels_are(True)
    layer.arrange()
    assert "weight" not in layer
    assert sum(half.weight.nbytes for half in layer.halves) == bytes_before
    assert all(map(mx.array_equal, products(layer, x), before))

"""The mathematics of the four model families in float64 numpy, written to be read.

Promises: every function is the textbook form of one formula, independent of the package under test (numpy
is the only import), and `forward` reproduces transformers' float32 eager logits (`test_oracle.py`).
Does not know: speed, caches, batches, files. One sequence at a time, everything materialised.

Where each formula comes from (class names are those of Hugging Face transformers):
  affine quantisation     mlx.core.quantize / dequantize documentation
  rms_norm                Zhang & Sennrich 2019; Qwen3NextRMSNorm stores w - 1
  rope                    Su et al. 2021; half-split: Qwen3MoeAttention, interleaved: DeepseekV3Attention
  yarn                    Peng et al. 2023; DeepseekV3Attention scales the softmax by mscale squared
  gqa_attention           Ainslie et al. 2023; output gate: Qwen3NextAttention
  gated_delta             Yang et al. 2024 (Gated Delta Networks), eq. 10; Qwen3NextGatedDeltaNet
  mla                     DeepSeek-V2 report, section 2.1; DeepseekV3Attention
  softmax_topk            Qwen3MoeTopKRouter
  noaux_tc_topk           DeepSeek-V3 report, section 2.1.2; DeepseekV3TopkRouter

Shapes: T tokens, D hidden, H heads, E experts, I expert width. A linear weight is [out, in].
"""

import numpy as np

BLOCK_PARTS = tuple(f"{p}_proj.{c}" for p in ("gate", "up", "down") for c in ("weight", "scales", "biases"))


# ---- bfloat16, float8 and affine quantisation ----


def f32_to_bf16(x):
    """float32 [...] -> bf16 bit patterns uint16 [...], rounded to nearest even (no NaN in, no NaN out)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_to_f32(bits):
    """bf16 bit patterns uint16 [...] -> float32 [...], exact."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def e4m3_values():
    """The 256 values of float8 E4M3FN by code, float32: no infinities, NaN at 0x7F and 0xFF, maximum 448."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    value[127] = np.nan
    return np.concatenate([value, -value]).astype(np.float32)


def f32_to_e4m3(x):
    """float32 [...] -> float8 E4M3FN codes uint8 [...], nearest, ties to the even code, saturating at 448."""
    grid = e4m3_values()[:127].astype(np.float64)
    size = np.abs(np.asarray(x, np.float64))
    below = np.clip(np.searchsorted(grid, size, side="right") - 1, 0, 125)
    middle = (grid[below] + grid[below + 1]) / 2
    code = below + ((size > middle) | ((size == middle) & (below % 2 == 1)))
    return (code | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def dequantize_fp8(codes, scale, block=128):
    """uint8 [out, in], float32 [ceil(out/block), ceil(in/block)] -> float32 [out, in]; edges partial."""
    rows, columns = (np.arange(n) // block for n in codes.shape)
    return e4m3_values()[codes] * scale[np.ix_(rows, columns)]


def quantize(w, group_size=64, bits=4):
    """float32 [..., in] -> (uint32 [..., in*bits/32], scales, biases as bf16 bits uint16 [..., in/group]).

    The end of each group's range that is larger in size becomes the bias exactly, and 0 is representable;
    every step is one correctly rounded float32 operation, so the bytes equal those of mx.quantize.
    """
    groups = np.asarray(w, np.float32).reshape(*w.shape[:-1], -1, group_size)
    low, high, top = groups.min(-1), groups.max(-1), np.float32(2**bits - 1)
    low_is_edge = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / top, np.float32(1e-7)) * np.where(low_is_edge, 1, -1).astype(np.float32)
    edge = np.where(low_is_edge, low, high)
    steps = np.rint(edge / scale)
    scale = np.where(steps, edge / np.where(steps, steps, 1), scale)
    bias = np.where(steps, edge, 0)
    q = np.clip(np.rint((groups - bias[..., None]) / scale[..., None]), 0, top).astype(np.uint32)
    return pack_bits(q.reshape(w.shape), bits), f32_to_bf16(scale), f32_to_bf16(bias)


def pack_bits(q, bits):
    """uint32 [..., n] below 2**bits -> uint32 [..., n*bits/32], first value in the lowest bits."""
    words = q.reshape(*q.shape[:-1], -1, 32 // bits)
    return (words << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32)


def unpack_bits(words, bits):
    """Inverse of `pack_bits`."""
    q = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
    return q.reshape(*words.shape[:-1], -1)


def dequantize(w, scales, biases, group_size=64, bits=4):
    """uint32 [..., in*bits/32], bf16 bits uint16 [..., in/group] twice -> float64 scale * q + bias."""
    q = unpack_bits(w, bits).astype(np.float64)
    scale, bias = (np.repeat(bf16_to_f32(s), group_size, -1).astype(np.float64) for s in (scales, biases))
    return scale * q + bias


# ---- the packed expert block ----


def pack_expert_block(parts):
    """{part: array} for the nine BLOCK_PARTS of one expert -> bytes; words little-endian, no padding."""
    kinds = ["<u4" if name.endswith("weight") else "<u2" for name in BLOCK_PARTS]
    return b"".join(parts[n].astype(k).tobytes() for n, k in zip(BLOCK_PARTS, kinds, strict=True))


def unpack_expert_block(block, hidden, inter, group_size=64, bits=4):
    """Inverse of `pack_expert_block` for an expert of hidden size `hidden` and width `inter`."""
    parts, offset = {}, 0
    for name in BLOCK_PARTS:
        out, inn = (hidden, inter) if name.startswith("down") else (inter, hidden)
        kind, columns = ("<u4", inn * bits // 32) if name.endswith("weight") else ("<u2", inn // group_size)
        parts[name] = np.frombuffer(block, kind, out * columns, offset).reshape(out, columns)
        offset += parts[name].nbytes
    if offset != len(block):
        raise ValueError(f"block has {len(block)} bytes, the layout needs {offset}")
    return parts


# ---- small pieces ----


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x, w, eps=1e-6):
    """[..., D], [D] -> [..., D]; w is the factor: 1 + the stored weight if that is zero-centred."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def swiglu(x, gate, up, down):
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def expert_ffn(x, gate, up, down):
    """[D], weights [I, D], [I, D], [D, I] -> [D]: down(silu(gate x) * up x)."""
    return swiglu(x, gate, up, down)


def combine(h_mid, expert_out, weights, shared=0.0):
    """[D], [K, D], [K], [D] -> [D]: h_mid + sum_k weights[k] * expert_out[k] + shared."""
    return h_mid + weights @ expert_out + shared


# ---- rotary positions ----


def rope_inv_freq(dims, theta):
    """[dims/2] angular frequencies theta^(-2i/dims)."""
    return float(theta) ** -(np.arange(0, dims, 2) / dims)


def yarn_inv_freq(dims, theta, factor, original, beta_fast=32, beta_slow=1):
    """[dims/2] angular frequencies for a context stretched `factor` times.

    Those that turn fewer than beta_slow times in `original` positions are divided by the factor, those
    that turn more than beta_fast times are kept, with a linear ramp over the index between.
    """

    def index_of(turns):
        return dims * np.log(original / (2 * np.pi * turns)) / (2 * np.log(theta))

    low, high = max(np.floor(index_of(beta_fast)), 0), min(np.ceil(index_of(beta_slow)), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
    plain = rope_inv_freq(dims, theta)
    return yarn_interpolated(plain, factor) * ramp + plain * (1 - ramp)


def yarn_interpolated(plain, factor):
    """The factor divides the frequency; it is not raised to the exponent with theta."""
    return plain / factor


def yarn_mscale(factor, mscale):
    """0.1 * mscale * ln(factor) + 1: the attention temperature's square root."""
    return 0.1 * mscale * np.log(factor) + 1 if factor > 1 else 1.0


def rope_half_split(x, inv_freq):
    """[T, ..., d]: pairs (i, i + n) of the first 2n = 2*len(inv_freq) dims are rotated by t*inv_freq[i]."""
    half = len(inv_freq)
    angle = (np.arange(len(x))[:, None] * inv_freq).reshape(len(x), *[1] * (x.ndim - 2), half)
    a, b = x[..., :half], x[..., half : 2 * half]
    turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    return np.concatenate([*turned, x[..., 2 * half :]], -1)


def rope_interleaved(x, inv_freq):
    """[T, ..., d]: pairs (2i, 2i + 1) are rotated by t*inv_freq[i]; d = 2*len(inv_freq)."""
    turned = rope_half_split(np.concatenate([x[..., ::2], x[..., 1::2]], -1), inv_freq)
    return np.stack(np.split(turned, 2, -1), -1).reshape(x.shape)


# ---- routers ----


def top_k(scores, k):
    """[T, E] -> ids [T, k], largest first, ties to the lowest index."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def softmax_topk(logits, k, norm_topk_prob=True):
    """[T, E] -> ids [T, k], weights [T, k]: softmax over all experts, then the k largest."""
    p = softmax(logits)
    ids = top_k(p, k)
    w = np.take_along_axis(p, ids, -1)
    return ids, w / w.sum(-1, keepdims=True) if norm_topk_prob else w


def noaux_tc_topk(logits, bias, k, n_group, topk_group, scale, norm_topk_prob=True):
    """[T, E], [E] -> ids [T, k], weights [T, k]: the bias chooses, the unbiased sigmoid weighs.

    A group's score is the sum of its two best biased scores; only experts of the best groups are chosen.
    """
    s = sigmoid(logits)
    biased = s + bias
    grouped = biased.reshape(len(s), n_group, -1)
    kept = top_k(np.sort(grouped, -1)[..., -2:].sum(-1), topk_group)
    dropped = np.ones((len(s), n_group), bool)
    np.put_along_axis(dropped, kept, False, -1)
    ids = top_k(np.where(dropped[..., None], DROPPED_GROUP_SCORE, grouped).reshape(biased.shape), k)
    w = np.take_along_axis(s, ids, -1)
    return ids, scale * (w / (w.sum(-1, keepdims=True) + 1e-20) if norm_topk_prob else w)


DROPPED_GROUP_SCORE = -np.inf  # 0.0 would be larger than a kept expert's negative biased score


# ---- token mixers ----


def causal_softmax(scores):
    """[..., T, T] -> attention weights with the future masked out."""
    return softmax(np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf))


def gqa_attention(x, w, heads, kv_heads, dim, inv_freq, eps, gated=False, plus=0.0):
    """[T, D] -> [T, D]. Query head h reads kv head h // (heads / kv_heads).

    With an output gate, q_proj's rows are [query dim | gate dim] head by head. `plus` is added to the
    weights of the query and key norms.
    """
    T = len(x)
    q = (x @ w["q_proj.weight"].T).reshape(T, heads, -1)
    q, gate = q[..., :dim], q[..., dim:]
    k, v = ((x @ w[f"{n}_proj.weight"].T).reshape(T, kv_heads, dim) for n in "kv")
    q = rope_half_split(rms_norm(q, plus + w["q_norm.weight"], eps), inv_freq)
    k = rope_half_split(rms_norm(k, plus + w["k_norm.weight"], eps), inv_freq)
    k, v = (np.repeat(a, heads // kv_heads, 1) for a in (k, v))
    p = causal_softmax(np.einsum("qhd,khd->hqk", q, k) * dim**-0.5)
    o = np.einsum("hqk,khd->qhd", p, v)
    return ((o * sigmoid(gate)) if gated else o).reshape(T, -1) @ w["o_proj.weight"].T


def causal_conv(x, w):
    """[T, C], [C, n] -> [T, C]: depthwise; the last tap multiplies the newest row; zeros before the start."""
    n = w.shape[-1]
    padded = np.concatenate([np.zeros((n - 1, x.shape[1])), x])
    return sum(padded[j : j + len(x)] * w[:, j] for j in range(n))


def gated_delta_recurrence(q, k, v, g, beta, state=None):
    """[T, H, dk] twice, [T, H, dv], decay and write strength [T, H] -> [T, H, dv], state [H, dv, dk].

    If each channel of a key has its own decay, as in Kimi Delta Attention (arXiv:2510.26692), decay is [T, H, dk].
    """
    S = np.zeros((q.shape[1], v.shape[-1], q.shape[-1])) if state is None else state.copy()
    out = np.zeros(v.shape)
    for t in range(len(q)):
        S *= g[t].reshape(len(S), 1, -1)
        delta = (v[t] - np.einsum("hvk,hk->hv", S, k[t])) * beta[t, :, None]
        S += delta[..., None] * k[t, :, None, :]
        out[t] = np.einsum("hvk,hk->hv", S, q[t])
    return out, S


def split_flat(x, w, nk, nv, dk, dv):
    """Qwen3.5 projections: in_proj_qkv rows are [all q | all k | all v]; z, b, a have their own matrices."""
    T = len(x)
    q, k, v = np.split(x @ w["in_proj_qkv.weight"].T, [nk * dk, 2 * nk * dk], -1)
    z, b, a = (x @ w[f"in_proj_{n}.weight"].T for n in "zba")
    return q, k, v, z.reshape(T, nv, dv), b, a


def split_grouped(x, w, nk, nv, dk, dv):
    """Qwen3-Next projections: rows by key head, each [q dk | k dk | v r*dv | z r*dv] and [b r | a r]."""
    T, r = len(x), nv // nk
    qkvz = (x @ w["in_proj_qkvz.weight"].T).reshape(T, nk, -1)
    q, k, v, z = np.split(qkvz, [dk, 2 * dk, 2 * dk + r * dv], -1)
    ba = (x @ w["in_proj_ba.weight"].T).reshape(T, nk, 2 * r)
    flat = (a.reshape(T, -1) for a in (q, k, v))
    return *flat, z.reshape(T, nv, dv), ba[..., :r].reshape(T, nv), ba[..., r:].reshape(T, nv)


def gated_delta(x, w, nk, nv, dk, dv, eps):
    """[T, D] -> [T, D]: projections, conv + SiLU, l2-normalised q and k, delta rule, norm, z gate."""
    T = len(x)
    split = split_grouped if "in_proj_qkvz.weight" in w else split_flat
    q, k, v, z, b, a = split(x, w, nk, nv, dk, dv)
    kernel = w["conv1d.weight"]
    mixed = silu(causal_conv(np.concatenate([q, k, v], -1), kernel.reshape(len(kernel), -1)))
    q, k, v = np.split(mixed, [nk * dk, 2 * nk * dk], -1)
    q, k = (y.reshape(T, nk, dk) for y in (q, k))
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    q, k = (np.repeat(y, nv // nk, 1) for y in (q * dk**-0.5, k))
    g = np.exp(-np.exp(w["A_log"]) * np.logaddexp(0, a + w["dt_bias"]))
    o, _ = gated_delta_recurrence(q, k, v.reshape(T, nv, dv), g, sigmoid(b))
    return (rms_norm(o, w["norm.weight"], eps) * silu(z)).reshape(T, -1) @ w["out_proj.weight"].T


def mla(x, w, heads, nope, rope, v_dim, kv_rank, inv_freq, mscale, eps):
    """[T, D] -> [T, D], materialised form: keys and values are expanded from the latent at every position."""
    T = len(x)
    cq = rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], eps)
    q = (cq @ w["q_b_proj.weight"].T).reshape(T, heads, nope + rope)
    latent, k_pe = np.split(x @ w["kv_a_proj_with_mqa.weight"].T, [kv_rank], -1)
    latent = rms_norm(latent, w["kv_a_layernorm.weight"], eps)
    k, v = np.split((latent @ w["kv_b_proj.weight"].T).reshape(T, heads, nope + v_dim), [nope], -1)
    q_pe, k_pe = rope_interleaved(q[..., nope:], inv_freq), rope_interleaved(k_pe, inv_freq)
    scores = np.einsum("qhd,khd->hqk", q[..., :nope], k) + np.einsum("qhd,kd->hqk", q_pe, k_pe)
    p = causal_softmax(scores * (nope + rope) ** -0.5 * mscale**2)
    return np.einsum("hqk,khd->qhd", p, v).reshape(T, -1) @ w["o_proj.weight"].T


# ---- the decoder ----


def under(weights, prefix):
    """The entries below a prefix, with the prefix removed."""
    return {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}


def expert_weights(w, e):
    """(gate, up, down) of expert e, from fused or per-expert hub tensors."""
    if "experts.gate_up_proj" in w:
        gate, up = np.split(w["experts.gate_up_proj"][e], 2)
        return gate, up, w["experts.down_proj"][e]
    return tuple(w[f"experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down"))


def route(x, w, c):
    """[T, D] -> ids [T, K], weights [T, K] by the family's router."""
    logits, k = x @ w["gate.weight"].T, c["num_experts_per_tok"]
    if "gate.e_score_correction_bias" not in w:
        return softmax_topk(logits, k, c.get("norm_topk_prob", True))
    groups = c["n_group"], c["topk_group"], c["routed_scaling_factor"], c["norm_topk_prob"]
    return noaux_tc_topk(logits, w["gate.e_score_correction_bias"], k, *groups)


def shared_expert(x, w):
    """[T, D]: sigmoid-gated per token (Qwen), plain (DeepSeek), or zero."""
    names = [f"{n}_proj.weight" for n in ("gate", "up", "down")]
    if "shared_expert_gate.weight" in w:
        out = swiglu(x, *(w[f"shared_expert.{n}"] for n in names))
        return out * sigmoid(x @ w["shared_expert_gate.weight"].T)
    if f"shared_experts.{names[0]}" in w:
        return swiglu(x, *(w[f"shared_experts.{n}"] for n in names))
    return np.zeros_like(x)


def feed_forward(h, x, w, c):
    """Residual [T, D], normed input [T, D] -> [T, D]: a dense SwiGLU or routed plus shared experts."""
    if "gate.weight" not in w:
        return h + swiglu(x, w["gate_proj.weight"], w["up_proj.weight"], w["down_proj.weight"])
    ids, weights = route(x, w, c)
    shared = shared_expert(x, w)
    out = np.empty_like(h)
    for t in range(len(x)):
        experts = np.stack([expert_ffn(x[t], *expert_weights(w, e)) for e in ids[t]])
        out[t] = combine(h[t], experts, weights[t], shared[t])
    return out


def attention(x, w, c):
    """The family's softmax attention on one layer's `self_attn` weights."""
    theta, eps = rope_theta(c), c["rms_norm_eps"]
    if c["model_type"] == "deepseek_v3":
        y, rope = c["rope_scaling"], c["qk_rope_head_dim"]
        inv = yarn_inv_freq(
            rope, theta, y["factor"], y["original_max_position_embeddings"], y["beta_fast"], y["beta_slow"]
        )
        dims = c["num_attention_heads"], c["qk_nope_head_dim"], rope, c["v_head_dim"], c["kv_lora_rank"]
        return mla(x, w, *dims, inv, yarn_mscale(y["factor"], y["mscale_all_dim"]), eps)
    hybrid = c["model_type"] != "qwen3_moe"
    inv = rope_inv_freq(int(c["head_dim"] * partial_rotary_factor(c)), theta)
    dims = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    return gqa_attention(x, w, *dims, inv, eps, gated=hybrid, plus=norm_offset(c))


def rope_theta(c):
    return c.get("rope_parameters", c)["rope_theta"]


def partial_rotary_factor(c):
    return c.get("rope_parameters", c).get("partial_rotary_factor", 1.0)


def mixer(x, w, c):
    """Computes the gated delta rule if the layer has linear_attn weights, otherwise softmax attention."""
    linear = under(w, "linear_attn.")
    if not linear:
        return attention(x, under(w, "self_attn."), c)
    heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    return gated_delta(x, linear, *heads, c["linear_key_head_dim"], c["linear_value_head_dim"], c["rms_norm_eps"])


def norm_offset(config):
    """Returns 1 if block, final, query and key norms are stored zero-centred: in the hybrid families."""
    return 1.0 if config["model_type"] in ("qwen3_next", "qwen3_5_moe_text", "step3p5") else 0.0


def forward(config, weights, tokens, hidden=None, routed=None):
    """Logits float64 [T, V] of one sequence.

    config: the hub's config.json; weights: {hub tensor name: float array}; tokens: [T] ids. Lists passed as
    `hidden` and `routed` receive each layer's output [T, D] and (input [T, D], `mlp` weights) of its MoE.
    """
    c = config.get("text_config", config)
    prefix = "model.language_model." if c is not config else "model."
    plus, eps = norm_offset(c), c["rms_norm_eps"]
    x = weights[prefix + "embed_tokens.weight"][np.asarray(tokens)].astype(np.float64)
    for i in range(c["num_hidden_layers"]):
        w = under(weights, f"{prefix}layers.{i}.")
        x = x + mixer(rms_norm(x, plus + w["input_layernorm.weight"], eps), w, c)
        y, mlp = rms_norm(x, plus + w["post_attention_layernorm.weight"], eps), under(w, "mlp.")
        if routed is not None and "gate.weight" in mlp:
            routed.append((y, mlp))
        x = feed_forward(x, y, mlp, c)
        if hidden is not None:
            hidden.append(x)
    return rms_norm(x, plus + weights[prefix + "norm.weight"], eps) @ weights["lm_head.weight"].T

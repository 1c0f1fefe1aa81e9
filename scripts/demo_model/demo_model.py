"""The demo model in PyTorch: a small Qwen3.5-MoE whose weights can be rounded to 4 bits while it trains.

Parameters have Hugging Face's names and shapes, so `checkpoint()` is a real checkpoint. Written for
training on one GPU: every expert runs on every token with weight zero where the router did not choose it,
which keeps two large products instead of many small ones. `python scripts/demo_model/demo_model.py CHECKPOINT`
compares the logits with transformers. Knows nothing of text or of optimisers.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 64
CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attn_output_gate": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
}


def round_to_bits(weight: Tensor, bits: int) -> Tensor:
    """Returns what `mx.dequantize(mx.quantize(weight as bfloat16, 64, bits))` gives, in float32.

    Affine, groups of 64 along the last axis: the edge of larger magnitude is represented exactly, then
    scale and bias are rounded to bfloat16.
    """
    groups = weight.detach().bfloat16().float().unflatten(-1, (-1, GROUP))
    levels = 2**bits - 1
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    low_is_edge = low.abs() > high.abs()
    scale = ((high - low) / levels).clamp_min(1e-7)
    scale = torch.where(low_is_edge, scale, -scale)
    edge = torch.where(low_is_edge, low, high)
    steps = torch.round(edge / scale)
    zero = steps == 0
    scale = torch.where(zero, scale, edge / torch.where(zero, 1.0, steps))
    bias = torch.where(zero, 0.0, edge)
    code = torch.round((groups - bias) / scale).clamp(0, levels)
    return (code * scale.bfloat16().float() + bias.bfloat16().float()).flatten(-2)


class Rounded(nn.Module):
    """A weight that is used as it is, or rounded, with the gradient passed straight through."""

    def __init__(self, *shape: int, bits: int = 4, scale: float = 1.0):
        super().__init__()
        self.bits = bits
        self.weight = nn.Parameter(torch.randn(*shape) * scale * shape[-1] ** -0.5)
        self.register_buffer("on", torch.zeros(()), persistent=False)

    def used(self) -> Tensor:
        return self.weight + self.on * (round_to_bits(self.weight, self.bits) - self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.used())


class Norm(nn.Module):
    """RMS norm whose stored weight is the difference from one."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight, CONFIG["rms_norm_eps"]).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first 2 * len(cos) dimensions of a head (RoPE). Dimensions i and i + half form a pair."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


class Attention(nn.Module):
    """Causal grouped-query attention with an output gate interleaved per head in q_proj."""

    def __init__(self, c: dict):
        super().__init__()
        self.heads, self.kv, self.dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        width = c["hidden_size"]
        self.q_proj = Rounded(self.heads * self.dim * 2, width)
        self.k_proj = Rounded(self.kv * self.dim, width)
        self.v_proj = Rounded(self.kv * self.dim, width)
        self.o_proj = Rounded(width, self.heads * self.dim, scale=0.3)
        self.q_norm, self.k_norm = Norm(self.dim), Norm(self.dim)
        rope = c["rope_parameters"]
        turned = int(self.dim * rope["partial_rotary_factor"])
        self.register_buffer("freqs", rope["rope_theta"] ** (-torch.arange(0, turned, 2).float() / turned), False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, gate = self.q_proj(x).view(B, T, self.heads, 2 * self.dim).chunk(2, -1)
        k = self.k_norm(self.k_proj(x).view(B, T, self.kv, self.dim))
        v = self.v_proj(x).view(B, T, self.kv, self.dim)
        angle = torch.arange(T, device=x.device)[:, None, None] * self.freqs
        cos, sin = angle.cos().to(v.dtype), angle.sin().to(v.dtype)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.o_proj((out.transpose(1, 2) * torch.sigmoid(gate)).reshape(B, T, -1))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """Gated delta rule in float32, chunk by chunk (the WY form of the Gated DeltaNet paper).

    q, k [B, H, T, K] with unit k and scaled q, v [B, H, T, V], decay (log, <= 0) and beta [B, H, T];
    T % chunk == 0. Returns [B, H, T, V].
    """
    q, k, v = (t.unflatten(2, (-1, chunk)) for t in (q, k, v))  # [B, H, N, chunk, K]
    beta, total = beta.unflatten(2, (-1, chunk))[..., None], decay.unflatten(2, (-1, chunk)).cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    system = (beta * k) @ k.mT * between  # its diagonal is not read
    right = torch.cat((beta * v, beta * k * total.exp()[..., None]), -1)
    new, old = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    inner = q @ k.mT * between
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    left = total[..., -1].exp()[..., None, None]
    state, out = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0]), []
    for n in range(q.shape[2]):
        fresh = new[:, :, n] - old[:, :, n] @ state
        out.append(q[:, :, n] @ state + inner[:, :, n] @ fresh)
        state = state * left[:, :, n] + k[:, :, n].mT @ fresh
    return torch.cat(out, 2)


class DeltaNet(nn.Module):
    """Gated DeltaNet: short causal convolution, delta rule, gated norm."""

    def __init__(self, c: dict):
        super().__init__()
        self.nk, self.nv = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.dk, self.dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        width, keys, values = c["hidden_size"], self.nk * self.dk, self.nv * self.dv
        self.split = (keys, keys, values)
        self.in_proj_qkv = Rounded(sum(self.split), width)
        self.in_proj_z = Rounded(values, width)
        self.in_proj_b = Rounded(self.nv, width)
        self.in_proj_a = Rounded(self.nv, width)
        self.out_proj = Rounded(width, values, scale=0.3)
        self.conv1d = nn.Conv1d(sum(self.split), sum(self.split), 4, groups=sum(self.split), bias=False)
        self.A_log = nn.Parameter(torch.linspace(0.5, 8.0, self.nv).log())
        self.dt_bias = nn.Parameter(torch.linspace(-4.0, -1.0, self.nv))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(self.dv))

    def convolved(self, x: Tensor) -> Tensor:
        """Returns the weighted sum of the last four samples of each channel, the newest last, with one shifted product
        per tap.
        """
        taps, T = self.conv1d.weight[:, 0].to(x.dtype), x.shape[1]
        padded = F.pad(x, (0, 0, 3, 0))
        return F.silu(sum(padded[:, j : j + T] * taps[:, j] for j in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.convolved(self.in_proj_qkv(x)).float().split(self.split, -1)
        q, k = (t.view(B, T, self.nk, self.dk) for t in (q, k))
        q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k = (t.repeat_interleave(self.nv // self.nk, 2).transpose(1, 2) for t in (q * self.dk**-0.5, k))
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        beta = torch.sigmoid(self.in_proj_b(x).float())
        with torch.autocast(x.device.type, enabled=False):
            v = v.view(B, T, self.nv, self.dv).transpose(1, 2)
            out = delta_rule(q, k, v, decay.transpose(1, 2), beta.transpose(1, 2)).transpose(1, 2)
        z = self.in_proj_z(x).float().view(B, T, self.nv, self.dv)
        out = F.rms_norm(out, (self.dv,), self.norm.weight, CONFIG["rms_norm_eps"]) * F.silu(z)
        return self.out_proj(out.reshape(B, T, -1).to(x.dtype))


class Experts(nn.Module):
    """All routed experts as two products; rows of gate_up are [gate | up] per expert, as in checkpoints."""

    def __init__(self, c: dict):
        super().__init__()
        self.count, width, inner = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]
        self.gate_up_proj = Rounded(self.count, 2 * inner, width)
        self.down_proj = Rounded(self.count, width, inner, scale=0.5)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate_up = F.linear(x, self.gate_up_proj.used().flatten(0, 1)).unflatten(-1, (self.count, 2, -1))
        hidden = F.silu(gate_up[..., 0, :]) * gate_up[..., 1, :] * weights[..., None].to(x.dtype)
        return F.linear(hidden.flatten(-2), self.down_proj.used().transpose(0, 1).flatten(1))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = Rounded(inner, width), Rounded(inner, width)
        self.down_proj = Rounded(width, inner, scale=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Softmax router over all experts, the best few renormalised, plus a gated shared expert."""

    def __init__(self, c: dict):
        super().__init__()
        self.top_k = c["num_experts_per_tok"]
        self.gate = Rounded(c["num_experts"], c["hidden_size"], bits=8)
        self.experts = Experts(c)
        self.shared_expert = MLP(c["hidden_size"], c["shared_expert_intermediate_size"])
        self.shared_expert_gate = Rounded(1, c["hidden_size"], bits=8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output, the share of tokens per expert and the mean router probability per expert."""
        with torch.autocast(x.device.type, enabled=False):
            probs = self.gate(x.float()).softmax(-1)
        best, chosen = probs.topk(self.top_k, -1)
        weights = torch.zeros_like(probs).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        out = self.experts(x, weights) + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out, (weights > 0).float().mean((0, 1)) / self.top_k, probs.mean((0, 1))


class Layer(nn.Module):
    def __init__(self, c: dict, kind: str):
        super().__init__()
        self.mixer = "linear_attn" if kind == "linear_attention" else "self_attn"
        setattr(self, self.mixer, DeltaNet(c) if kind == "linear_attention" else Attention(c))
        self.mlp = MoE(c)
        self.input_layernorm, self.post_attention_layernorm = Norm(c["hidden_size"]), Norm(c["hidden_size"])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + getattr(self, self.mixer)(self.input_layernorm(x))
        out, share, probability = self.mlp(self.post_attention_layernorm(x))
        return x + out, share, probability


class DemoModel(nn.Module):
    """Tokens [B, T], T a multiple of 64, to final hidden states [B, T, D]; `lm_head` makes the logits."""

    def __init__(self, c: dict = CONFIG):
        super().__init__()
        self.embed_tokens = Rounded(c["vocab_size"], c["hidden_size"], scale=0.3 * c["hidden_size"] ** 0.5)
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c["layer_types"])
        self.norm = Norm(c["hidden_size"])
        self.lm_head = Rounded(c["vocab_size"], c["hidden_size"])

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns hidden states, and per layer the expert shares and mean probabilities [L, E]."""
        x, shares, probabilities = F.embedding(tokens, self.embed_tokens.used()), [], []
        for layer in self.layers:
            x, share, probability = layer(x)
            shares.append(share)
            probabilities.append(probability)
        return self.norm(x), torch.stack(shares), torch.stack(probabilities)

    def round_weights(self, on: bool) -> None:
        """Sets whether forward uses the rounded weights."""
        for module in self.modules():
            if isinstance(module, Rounded):
                module.on.fill_(float(on))

    def checkpoint(self) -> dict[str, Tensor]:
        """Returns bfloat16 tensors under Hugging Face's names."""
        return {hub_name(name): p.detach().bfloat16().cpu().contiguous() for name, p in self.named_parameters()}

    def load_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """Loads the weights of a checkpoint, which must have every parameter."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(tensors[hub_name(name)])


def hub_name(name: str) -> str:
    """Returns Hugging Face's name of a parameter: fused experts have no ".weight"."""
    if ".experts." in name:
        name = name.removesuffix(".weight")
    return name if name.startswith("lm_head") else f"model.language_model.{name}"


def compare_with_transformers(folder: Path) -> float:
    """Returns the largest difference of float32 logits from transformers' eager model on 2 x 128 random tokens."""
    from safetensors.torch import load_file
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    text = json.loads((folder / "config.json").read_text())["text_config"]
    tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    ours = DemoModel(text)
    ours.load_checkpoint(tensors)
    theirs = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**text, attn_implementation="eager"))
    theirs.load_state_dict({name.replace("language_model.", ""): t for name, t in tensors.items()}, strict=True)
    tokens = torch.randint(text["vocab_size"], (2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float((ours.lm_head(ours(tokens)[0]) - theirs.float().eval()(tokens).logits).abs().max())


if __name__ == "__main__":
    difference = compare_with_transformers(Path(sys.argv[1]))
    print(f"largest logit difference from transformers: {difference:.2e}")
    sys.exit(difference > 2e-4)

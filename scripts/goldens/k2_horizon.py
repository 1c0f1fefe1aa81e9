"""K2 Horizon in torch, float32, because no package has it: the arithmetic of IFM's modelling file
(huggingface.co/IFM/K2-Horizon-MoVA-36B-A4B), which ports to MLX and vLLM repeat.

Knows nothing of the package under test.
"""

import torch
from torch.nn.functional import linear, silu


class K2Horizon:
    """The model with these weights. `gaps`: after a call the smallest distances of scores at the edge of a choice."""

    def __init__(self, config, weights):
        self.c = config
        self.w = {name: torch.tensor(array, dtype=torch.float32) for name, array in weights.items()}
        self.gaps = []

    def __call__(self, tokens):
        """Returns the logits [T, V] of tokens [T]."""
        self.gaps.clear()
        h = self.w["model.embed_tokens.weight"][tokens]
        for i in range(self.c["num_hidden_layers"]):
            h = self.layer(h, f"model.layers.{i}.", i not in self.c["mlp_only_layers"])
        return linear(self.norm(h, "model.norm"), self.w["lm_head.weight"])

    def layer(self, h, stem, is_sparse):
        h = h + self.attention(self.norm(h, f"{stem}input_layernorm"), f"{stem}self_attn.", is_sparse)
        x, stem = self.norm(h, f"{stem}post_attention_layernorm"), f"{stem}mlp."
        if not is_sparse:
            return h + self.mlp(x, stem)
        chosen = self.choose(x, f"{stem}gate", self.c["num_experts_per_tok"])
        routed = self.mixed(chosen, lambda e, rows: self.mlp(x[rows], f"{stem}experts.{e}."), h.shape[-1])
        return h + routed + self.mlp(x, f"{stem}shared_experts.")

    def norm(self, x, name):
        """Each group of the values is divided by its own root of the mean square; one weight has all values."""
        parts = x.reshape(len(x), self.c["layernorm_num_groups"], -1)
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        return parts.reshape(x.shape) * self.w[f"{name}.weight"]

    def mlp(self, x, stem):
        gate, up = (linear(x, self.w[f"{stem}{name}_proj.weight"]) for name in ("gate", "up"))
        return linear(silu(gate) * up, self.w[f"{stem}down_proj.weight"])

    def choose(self, x, name, k):
        """Returns ids and weights [T, k]: the bias chooses, and does not weigh."""
        scores = torch.sigmoid(linear(x, self.w[f"{name}.weight"]))
        choice = scores + self.w[f"{name}.bias"]
        ordered = choice.double().sort(-1, descending=True).values
        self.gaps.append(float((ordered[:, k - 1] - ordered[:, k]).min()))
        ids = choice.topk(k, -1).indices
        weights = scores.gather(-1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * self.c["router_scaling_factor"]

    def mixed(self, chosen, expert, width):
        """Returns [T, width]: the weighed sum of each row's experts."""
        (ids, weights), out = chosen, torch.zeros(len(chosen[0]), width)
        for e in ids.unique().tolist():
            rows, places = torch.where(ids == e)
            out.index_add_(0, rows, expert(e, rows) * weights[rows, places, None])
        return out

    def attention(self, x, stem, is_sparse):
        c, T = self.c, len(x)
        heads, kv_heads, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        if is_sparse:
            chosen = self.choose(x, f"{stem}v_router", c["mova_num_experts_per_tok"])
            v = self.mixed(
                chosen, lambda e, rows: silu(linear(x[rows], self.w[f"{stem}v_experts.{e}.weight"])), kv_heads * width
            )
        else:
            v = linear(x, self.w[f"{stem}v_proj.weight"])
        q, k, gate = (linear(x, self.w[f"{stem}{name}_proj.weight"]) for name in ("q", "k", "gate"))
        q, k = (self.rotated(one.reshape(T, -1, width)) for one in (q, k))
        k, v = (one.reshape(T, kv_heads, width).repeat_interleave(heads // kv_heads, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * width**-0.5
        scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(T, -1)
        return linear(out * torch.log2(1 + 2**gate), self.w[f"{stem}o_proj.weight"])

    def rotated(self, x):
        half = x.shape[-1] // 2
        periods = self.c["rope_parameters"]["rope_theta"] ** (torch.arange(half, dtype=torch.float32) / half)
        angles = (torch.arange(len(x))[:, None] / periods)[:, None]
        first, second = x[..., :half], x[..., half:]
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)

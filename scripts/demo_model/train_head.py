"""Trains the demo model's draft head on a CPU: from hidden states and the next tokens it learns the model's tokens
after those.

`python scripts/demo_model/train_head.py --out FILE` writes `aside.safetensors` as MLX quantises: 4 bits, gates 8. The
model does not change: this package computes its hidden states once, and the head learns the model's choices. In the
second part of the run the head drafts twice, the second time from its own output, as it does when it drafts several
tokens, and its weights are used as they will be stored. Needs torch and sentencepiece.
"""

import argparse
import itertools
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import torch.nn.functional as F
from demo_model import CONFIG, Layer, Norm, Rounded
from torch import Tensor, nn
from train_demo import make_optimizer, make_texts, rate_at

from moeflux_mlx import load_model
from moeflux_mlx.files import directory

SECOND = 0.5  # weight of the second draft's loss
BALANCE = 0.01


class Head(nn.Module):
    """Maps hidden states h [B, T, D] and the embeddings e of the tokens after them to the input of lm_head."""

    def __init__(self) -> None:
        super().__init__()
        width = CONFIG["hidden_size"]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = Norm(width), Norm(width), Norm(width)
        self.fc = Rounded(width, 2 * width)
        self.layers = nn.ModuleList([Layer(CONFIG, "full_attention")])

    def forward(self, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """Also returns how unevenly experts are used; 1 means all alike."""
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(e), self.pre_fc_norm_hidden(h)), -1))
        x, share, probability = self.layers[0](x)
        return self.norm(x), (share * probability).sum() * len(share)


def what_is_known(tokens: Tensor, spans: Tensor) -> dict[str, Tensor]:
    """Returns texts, the model's hidden states [N, LENGTH, D] after its last norm, and the model's choice after each
    token.
    """
    model, lm_head = load_model(dtype=mx.float32), matrix("lm_head")
    states = torch.zeros(*tokens.shape, CONFIG["hidden_size"], dtype=torch.float16)
    said = torch.zeros_like(tokens)
    for i, (text, (_, length)) in enumerate(zip(tokens.tolist(), spans.tolist(), strict=True)):
        hidden = torch.from_numpy(np.array(model.hidden(mx.array([text[:length]]))[0]))
        states[i, :length], said[i, :length] = hidden.half(), F.linear(hidden, lm_head).argmax(-1).to(said.dtype)
    known = {"tokens": tokens, "spans": spans, "states": states, "said": said}
    return {**known, "lm_head": lm_head, "embedding": matrix("model.embed_tokens")}


def matrix(name: str) -> Tensor:
    """Returns a matrix of the demo model as floats, as it is used."""
    tensors = mx.load(str(directory("demo") / "resident.safetensors"))
    parts = (tensors[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
    return torch.from_numpy(np.array(mx.dequantize(*parts, group_size=64, bits=4).astype(mx.float32)))


def losses(head: Head, known: dict[str, Tensor], rows: Tensor, drafts: int) -> tuple[Tensor, list[Tensor]]:
    """Returns the loss to minimise, and how often each draft is the model's choice."""
    tokens, said, (first, last) = (
        known["tokens"][rows].long(),
        known["said"][rows].long(),
        known["spans"][rows].long().T,
    )
    width = int(last.max())
    h, at, total, right = known["states"][rows, :width].float(), torch.arange(width), torch.zeros(()), []
    for ahead in range(1, drafts + 1):
        h, balance = head(h, F.embedding(F.pad(tokens, (0, ahead))[:, ahead : ahead + width], known["embedding"]))
        counted = (at >= first[:, None] - 1 - ahead) & (at < last[:, None] - 1 - ahead)
        targets = F.pad(said, (0, ahead))[:, ahead : ahead + width][counted]
        logits = F.linear(h[counted], known["lm_head"])
        total = total + SECOND ** (ahead - 1) * F.cross_entropy(logits, targets) + BALANCE * balance
        right.append((logits.argmax(-1) == targets).float().mean())
    return total, right


def train(head: Head, known: dict[str, Tensor], args: argparse.Namespace) -> None:
    optimizer, shuffle = make_optimizer(head, args.rate), torch.Generator().manual_seed(args.seed)
    started = time.monotonic()
    for step in itertools.count():
        done = max(step / args.steps, (time.monotonic() - started) / (60 * args.minutes))
        if done >= 1:
            break
        is_second = done >= args.second_from
        for module in head.modules():
            if isinstance(module, Rounded):
                module.on.fill_(float(is_second))
        for group in optimizer.param_groups:
            group["lr"] = args.rate * rate_at(4 * step, done)
        rows = torch.randint(len(known["tokens"]), (args.batch,), generator=shuffle)
        loss, right = losses(head, known, rows, 1 + is_second)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            shares = " ".join(f"{share:.3f}" for share in right)
            print(f"{step} {time.monotonic() - started:.0f} s {loss:.3f} right {shares}", flush=True)


def stored(head: Head) -> dict[str, mx.array]:
    """Returns the tensors as MLX stores them: experts stacked, matrices quantised, norms as weight - 1."""
    tensors: dict[str, mx.array] = {}
    for name, parameter in head.named_parameters():
        values = mx.array(parameter.detach().numpy()).astype(mx.bfloat16)
        parts = {f"mtp.{name.removesuffix('.weight')}": values}
        if ".experts.gate_up_proj" in name:
            gate, up = mx.split(values, 2, axis=1)
            parts = {"mtp.layers.0.mlp.switch_mlp.gate_proj": gate, "mtp.layers.0.mlp.switch_mlp.up_proj": up}
        elif ".experts.down_proj" in name:
            parts = {"mtp.layers.0.mlp.switch_mlp.down_proj": values}
        for path, value in parts.items():
            bits = 8 if path.endswith("gate") and ".mlp." in path else 4
            made = (value,) if value.ndim < 2 else mx.quantize(value, group_size=64, bits=bits)
            tensors |= {f"{path}.{part}": one for part, one in zip(("weight", "scales", "biases"), made, strict=False)}
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=3000, help="different texts to train on")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=15.0, help="at most")
    parser.add_argument("--batch", type=int, default=8, help="texts in a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--second-from", type=float, default=0.65, help="share of the run before its second part")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokens, spans = make_texts(directory("demo") / "tokenizer.model", args.texts, f"head {args.seed}", 2)
    tokens, spans = tokens[: args.texts], spans[: args.texts]
    known = what_is_known(tokens, spans)
    head = Head()
    print(f"{sum(p.numel() for p in head.parameters())} parameters, {int(spans[:, 1].sum())} tokens", flush=True)
    train(head, known, args)
    mx.save_safetensors(str(args.out), stored(head), metadata={"format": "mlx"})


if __name__ == "__main__":
    main()

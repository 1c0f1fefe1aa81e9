#!/usr/bin/env python3
"""Decode and prefill on the CPU beside mlx-lm and beside what memory bandwidth allows.

    python scripts/bench/make_random_model.py --variant qwen3-30b-a3b --layers 8 MODEL
    python scripts/bench/bench_cpu.py MODEL

Every round times, one after the other, a plain read of memory by the kernels' threads, our decode, and mlx-lm's
(float32 and bfloat16, the same weights and tokens), so that a disturbance hits neighbours alike; ratios are taken
within a round, and medians over the rounds are reported. The bound is the read bandwidth over the weight bytes
of a token. Prefill alternates in the same way; mlx-lm's takes a minute, so it runs once, before the rounds.
The last line is JSON.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3_moe
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from moeflux_mlx import load_model
from moeflux_mlx.engine.prefill import Prefill
from moeflux_mlx.files import read_json
from moeflux_mlx.formats.packed import PackedExperts
from moeflux_mlx.formats.record import PROJECTIONS
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.layers import Weight
from moeflux_mlx.ops import native
from moeflux_mlx.quant import PARTS

READ_BYTES = 1 << 30
OURS, FLOAT32, BFLOAT16 = "moeflux-mlx float32", "mlx-lm float32", "mlx-lm bfloat16"


class Runner:
    """Feeds one model a fixed sequence of tokens after a prompt."""

    def __init__(self, model, prompt: np.ndarray):
        self.model, self.prompt = model, prompt
        self.cache = new_cache(model)
        self.fed = 0

    def start(self, length: int) -> None:
        """Runs `length` tokens of the prompt into a new cache; ours makes logits of the last."""
        self.cache = new_cache(self.model)
        tokens = mx.array(self.prompt[:length])
        if isinstance(self.model, Model):
            mx.eval(Prefill(self.model, self.cache, tokens).run())
        else:
            mx.eval(self.model.model(tokens[None], self.cache))

    def decode(self, count: int) -> None:
        for _ in range(count):
            token = int(self.prompt[self.fed % len(self.prompt)])
            mx.eval(mx.argmax(self.model(mx.array([[token]]), self.cache)[:, -1], axis=-1))
            self.fed += 1


def new_cache(model) -> list:
    return model.make_cache() if isinstance(model, Model) else make_prompt_cache(model)


def peer(path: Path, ours: Model, dtype: mx.Dtype):
    """mlx-lm's model of the same configuration with the same weights."""
    config = read_json(path / "config.json")
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    nn.quantize(model, class_predicate=lambda name, module: geometry(config, name, module))
    weights = {name: value for name, value in parameters(ours)} | dict(experts(path, ours))
    floats = (mx.float32, mx.bfloat16)
    cast = {name: value.astype(dtype) if value.dtype in floats else value for name, value in weights.items()}
    model.load_weights(list(cast.items()))
    mx.eval(model.parameters())
    return model


def geometry(config: dict, name: str, module: nn.Module):
    stated = config["quantization"]
    default = {key: stated[key] for key in ("group_size", "bits")}
    return stated.get(name, default) if hasattr(module, "to_quantized") else False


def parameters(ours: Model):
    """Resident tensors under the names that both models use."""
    for name, module in ours.named_modules():
        for part in PARTS:
            if part in module:
                yield f"{name}.{part}", module[part]


def experts(path: Path, ours: Model):
    """Stacks of all experts of a layer, copied out of the packed blocks."""
    packed = PackedExperts.open(path, ours.args)
    layout = packed.layout
    for layer in tqdm(layout.moe_layers, unit="layer", desc="copying experts for mlx-lm"):
        blocks = np.memmap(packed.paths[layer], np.uint8, "r").reshape(layout.num_experts, -1)
        for component in layout.records[layer].fields:
            raw = np.ascontiguousarray(blocks[:, component.offset : component.offset + component.size])
            projection, part = component.name.split(".")
            assert projection in PROJECTIONS
            name = f"model.layers.{layer}.mlp.switch_mlp.{projection}.{part}"
            shape = (layout.num_experts, *component.shape)
            if component.dtype == "U32":
                yield name, mx.array(raw.view(np.uint32).reshape(shape))
            else:
                yield name, mx.array(raw.view(np.uint16).reshape(shape)).view(mx.bfloat16)


def token_bytes(model: Model) -> int:
    """Weight bytes that decoding one token reads: every matrix but the embedding, and the chosen experts."""
    modules = [m for n, m in model.named_modules() if isinstance(m, Weight) and not n.endswith("embed_tokens")]
    resident = sum(m[part].nbytes for m in modules for part in PARTS if part in m)
    layout = model.experts.layout
    return resident + len(layout.moe_layers) * model.args.num_experts_per_tok * layout.record.size


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def one_round(runners: dict[str, Runner], tokens: dict[str, int], words: np.ndarray, bytes_: int) -> dict[str, float]:
    """Rates of one round, in tokens per second; "bound" is what reading the weights alone would allow."""
    rates = {"bound": words.nbytes / seconds(lambda: native.checksum(words)) / bytes_}
    for name, runner in runners.items():
        rates[name] = tokens[name] / seconds(lambda r=runner, n=tokens[name]: r.decode(n))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="of the qwen3_moe family, made by make_random_model.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prefill")
    parser.add_argument("--no-bfloat16", action="store_true", help="leave out mlx-lm's slowest form")
    options = parser.parse_args()
    ours = load_model(options.model, dtype=mx.float32)
    prompt = np.random.default_rng(0).integers(0, ours.args.vocab_size, max(options.prompt, 256))
    runners = {OURS: Runner(ours, prompt)}
    tokens = {OURS: 24, FLOAT32: 2, BFLOAT16: 1}
    for name, dtype in ((FLOAT32, mx.float32), (BFLOAT16, mx.bfloat16)):
        if name == FLOAT32 or not options.no_bfloat16:
            runners[name] = Runner(peer(options.model, ours, dtype), prompt)
    words = np.ones(READ_BYTES // 4, np.uint32)
    runners[OURS].start(options.prompt)
    runners[OURS].decode(200)  # every expert's pages are mapped
    check_same(runners)
    slow = seconds(lambda: runners[FLOAT32].start(options.prompt))
    if BFLOAT16 in runners:
        runners[BFLOAT16].start(8)
    for runner in runners.values():
        runner.decode(1)
    rounds, prefill = [], []
    for _ in range(options.rounds):
        rounds.append(one_round(runners, tokens, words, token_bytes(ours)))
        prefill.append(seconds(lambda: runners[OURS].start(options.prompt)))
    report(options, ours, rounds, prefill, slow)


def check_same(runners: dict[str, Runner]) -> None:
    """The peers are worth a comparison only if they compute the same."""
    tokens = mx.array(runners[OURS].prompt[None, :4])
    ours, theirs = (np.array(runners[name].model(tokens)[0].astype(mx.float32)) for name in (OURS, FLOAT32))
    spread = float(np.abs(ours - theirs).max() / ours.std())
    if spread > 1e-2:
        raise SystemExit(f"error: logits differ from mlx-lm's by {spread:.3g} standard deviations")


def report(options, ours: Model, rounds: list[dict[str, float]], prefill: list[float], slow: float) -> None:
    middle = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    ratio = {name: statistics.median(r[OURS] / r[name] for r in rounds) for name in rounds[0] if name != OURS}
    ours_prefill, their_prefill = options.prompt / statistics.median(prefill), options.prompt / slow
    result = {
        "instructions": native.instruction_paths()[0],
        "threads": native.threads(),
        "load_average": os.getloadavg()[0],
        "layers": ours.args.num_hidden_layers,
        "token_bytes": token_bytes(ours),
        "decode": middle,
        "decode_ratio": ratio,
        "prefill": {OURS: ours_prefill, FLOAT32: their_prefill, "ratio": ours_prefill / their_prefill},
        "rounds": rounds,
        "prefill_seconds": prefill,
    }
    head = "{instructions}, {threads} threads, load average {load_average:.1f}, {token_bytes} weight bytes per token"
    print(head.format(**result))
    print(f"{'decode':24} {'tokens/s':>9} {'ours is':>9}")
    for name, rate in middle.items():
        print(f"{name:24} {rate:9.2f} " + (f"{ratio[name]:8.2f}x" if name in ratio else ""))
    print(f"{f'prefill, {options.prompt} tokens':24} {'tokens/s':>9}")
    print(f"{OURS:24} {ours_prefill:9.2f}")
    print(f"{FLOAT32:24} {their_prefill:9.2f} {ours_prefill / their_prefill:8.2f}x")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Compares decode and prefill on the CPU with mlx-lm and with the bound of the memory bandwidth.

    python scripts/bench/make_random_model.py --variant qwen3-30b-a3b --layers 8 MODEL
    python scripts/bench/bench_cpu.py MODEL

Every round times, one after the other, a plain read of memory by the kernels' threads, our decode with activations of
8, 16 and 24 bits, and mlx-lm's (float32 and bfloat16, the same weights and tokens), so that a disturbance affects
neighbours alike; ratios are taken within a round, and medians over the rounds are reported. The bound is the read
bandwidth over the weight bytes of a token. Prefill alternates in the same way; mlx-lm's takes a minute, so it runs
once, before the rounds. The last line is JSON.

On a machine with other work `--alone --threads 1 --cpu-time` is the steadiest. `--busy` keeps one core busy with a
separate process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from bench_native import read_all
from mlx_lm.models import qwen3_moe
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from moeflux_mlx import load_model
from moeflux_mlx.driving.loop import absorb_prompt
from moeflux_mlx.driving.prefill import Prefill
from moeflux_mlx.driving.sampling import greedy
from moeflux_mlx.experts.routing import finished
from moeflux_mlx.files import read_json
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.formats.record import PROJECTIONS
from moeflux_mlx.layers import Weight
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.ops import native
from moeflux_mlx.quant import PARTS

FORMS = {f"moeflux-mlx {bits} bits": bits for bits in native.ACTIVATIONS}
OURS, FLOAT32, BFLOAT16 = f"moeflux-mlx {native.EXACT} bits", "mlx-lm float32", "mlx-lm bfloat16"
BUSY = "import os; os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\nwhile True: pass"
clock = time.perf_counter


class Runner:
    """Feeds one model a fixed sequence of tokens after a prompt."""

    def __init__(self, model, prompt: np.ndarray):
        self.model, self.prompt = model, prompt
        self.cache = new_cache(model)
        self.fed = 0

    def start(self, length: int) -> None:
        """Runs `length` tokens of the prompt into a new cache. Our model computes the logits of the last one."""
        assert length <= len(self.prompt)
        self.cache = new_cache(self.model)
        tokens = mx.array(self.prompt[:length])
        if isinstance(self.model, Model):
            mx.eval(finished(absorb_prompt(Prefill(self.model, self.cache, tokens))))
        else:
            mx.eval(self.model.model(tokens[None], self.cache))

    def decode(self, count: int) -> None:
        for _ in range(count):
            token = int(self.prompt[self.fed % len(self.prompt)])
            mx.eval(greedy(self.model(mx.array([[token]]), self.cache)[:, -1]))
            self.fed += 1


def new_cache(model) -> list:
    return model.make_cache() if isinstance(model, Model) else make_prompt_cache(model)


def peer(path: Path, ours: Model, dtype: mx.Dtype):
    """Returns mlx-lm's model of the same configuration with the same weights."""
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
    """Returns the resident tensors under the names that both models use."""
    for name, module in ours.named_modules():
        for part in PARTS:
            if part in module:
                yield f"{name}.{part}", module[part]


def experts(path: Path, ours: Model):
    """Returns stacks of all experts of a layer, copied from the packed records."""
    packed = open_packed(path, ours.args)
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
    """Returns the bytes of weights that decoding one token reads: every matrix except the embedding, and the chosen
    experts.
    """
    modules = [m for n, m in model.named_modules() if isinstance(m, Weight) and not n.endswith("embed_tokens")]
    resident = sum(m[part].nbytes for m in modules for part in PARTS if part in m)
    layout = model.experts.layout
    return resident + len(layout.moe_layers) * model.args.num_experts_per_tok * layout.record.size


def seconds(call: Callable[[], object]) -> float:
    start = clock()
    call()
    return clock() - start


def one_round(runners: dict[str, Runner], tokens: dict[str, int], words: np.ndarray, bytes_: int) -> dict[str, float]:
    """Returns the rates of one round in tokens per second; "bound" is the rate at which the weights alone could be
    read.
    """
    rates = {"bound": words.nbytes / seconds(lambda: read_all(words)) / bytes_}
    for name, runner in runners.items():
        rates[name] = tokens[name] / seconds(lambda r=runner, n=tokens[name]: r.decode(n))
    return rates


def main() -> None:
    global clock
    options = parsed()
    clock = time.process_time if options.cpu_time else time.perf_counter
    native.set_threads(options.threads or native.threads())
    models = {name: load_model(options.model, set={"cpu_activations": bits}) for name, bits in FORMS.items()}
    ours = models[OURS]
    prompt = np.random.default_rng(0).integers(0, ours.args.vocab_size, max(options.prompt, 256))
    runners = {name: Runner(model, prompt) for name, model in models.items()}
    tokens = dict.fromkeys(FORMS, options.tokens) | {FLOAT32: 2, BFLOAT16: 1}
    peers = [] if options.alone else [(FLOAT32, mx.float32), (BFLOAT16, mx.bfloat16)][: 2 - options.no_bfloat16]
    for name, dtype in peers:
        runners[name] = Runner(peer(options.model, ours, dtype), prompt)
    words = np.ones(options.read_mib << 18, np.uint32)
    for name in FORMS:
        runners[name].start(options.prompt)
        runners[name].decode(options.warm)  # maps the pages of every expert
    slow = None
    if FLOAT32 in runners:
        check_same(runners)
        slow = seconds(lambda: runners[FLOAT32].start(options.prompt))
    if BFLOAT16 in runners:
        runners[BFLOAT16].start(8)
    for runner in runners.values():
        runner.decode(1)
    rounds, prefill = [], []
    with busy_core() if options.busy else nullcontext():
        for _ in range(options.rounds):
            rounds.append(one_round(runners, tokens, words, token_bytes(ours)))
            prefill.append({name: seconds(lambda r=runners[name]: r.start(options.prompt)) for name in FORMS})
    report(options, ours, rounds, prefill, slow)


@contextmanager
def busy_core() -> Iterator[None]:
    """Runs another process that uses all of one core's time."""
    other = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        other.kill()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="of the qwen3_moe family, made by make_random_model.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prefill")
    parser.add_argument("--warm", type=int, default=200, help="tokens that map the pages of every expert (%(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="that we decode in a round (%(default)s)")
    parser.add_argument("--threads", type=int, help="default: one for each core")
    parser.add_argument("--read-mib", type=int, default=1024, help="read for the bandwidth (%(default)s)")
    parser.add_argument("--alone", action="store_true", help="without mlx-lm")
    parser.add_argument("--no-bfloat16", action="store_true", help="leave out mlx-lm's slowest form")
    parser.add_argument("--cpu-time", action="store_true", help="count the process's CPU time, not the clock's")
    parser.add_argument("--busy", action="store_true", help="another process keeps one core busy")
    return parser.parse_args()


def check_same(runners: dict[str, Runner]) -> None:
    """Checks that the models compute the same; otherwise a comparison means nothing."""
    tokens = mx.array(runners[OURS].prompt[None, :4])
    ours, theirs = (np.array(runners[name].model(tokens)[0].astype(mx.float32)) for name in (OURS, FLOAT32))
    spread = float(np.abs(ours - theirs).max() / ours.std())
    if spread > 1e-2:
        raise SystemExit(f"error: logits differ from mlx-lm's by {spread:.3g} standard deviations")


def report(options, ours: Model, rounds: list[dict[str, float]], prefill: list[dict[str, float]], slow) -> None:
    middle = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    ratios = {
        form: {name: statistics.median(r[form] / r[name] for r in rounds) for name in rounds[0] if name not in FORMS}
        for form in FORMS
    }
    rates = {form: options.prompt / statistics.median(p[form] for p in prefill) for form in FORMS}
    if slow is not None:
        rates[FLOAT32] = options.prompt / slow
    result = {
        "instructions": native.instruction_paths()[0],
        "threads": native.threads(),
        "cpu_time": options.cpu_time,
        "busy": options.busy,
        "load_average": os.getloadavg()[0],
        "layers": ours.args.num_hidden_layers,
        "token_bytes": token_bytes(ours),
        "decode": middle,
        "decode_ratios": ratios,
        "prefill": rates,
        "rounds": rounds,
        "prefill_seconds": prefill,
    }
    head = "{instructions}, {threads} threads, load average {load_average:.1f}, {token_bytes} weight bytes per token"
    print(head.format(**result))
    others = [name for name in middle if name not in FORMS]
    print(f"{'tokens/s':24} {'prefill':>9} {'decode':>9}  " + "".join(f"{'/ ' + name:>19}" for name in others))
    for name, rate in middle.items():
        shares = "".join(f"{ratios[name][other]:18.2f}x" for other in others) if name in FORMS else ""
        print(f"{name:24} {rates.get(name, float('nan')):9.2f} {rate:9.2f}  {shares}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Times decode and prompts of ours and of llama.cpp in turns, each in its own process, which keeps its model.

    scripts/bench/bench_llama_turns.py MODEL FILE.gguf [--llama-python VENV/bin/python] [--rounds 13] [--busy]
    scripts/bench/bench_llama_turns.py MODEL FILE.gguf --prompt 512 4096 --behind
    scripts/bench/bench_llama_turns.py MODEL FILE.gguf --gpu [--prompt 512 4096] [--share 0.25 --host-experts]

MODEL is a packed model, or FILE.gguf itself, which we then read as it lies; FILE.gguf as bench_llama_cpp.py writes it
(on a CPU its weights are repacked). In each round both decode `--tokens` after a prompt of 32, compute prompts and,
with `--behind`, decode behind each of them, in alternating order; the first round does not count. `--busy`: another
process uses one core. `--gpu`: both use the GPU, llama.cpp with flash attention and blocks of 2,048 tokens. `--share`:
our pool holds this share of the experts and the others are read from the disk; `--host-experts`: llama.cpp keeps all
experts in host memory, as its `--n-cpu-moe` does. Prints medians, and the median and quartiles of the paired ratios
ours / llama.cpp.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np

BEFORE, PROMPT, WARMUP, UBATCH = 32, 128, 100, 2048
OURS, PEER = "ours", "llama.cpp"
EXPERTS = rb"\.ffn_(gate|up|down)_exps\.weight"
FLASH, ALL_LAYERS = 1, 999  # llama.cpp's numbers of flash attention that is on, and of layers on the GPU
# What to compute ("decode", "prompt", or "behind" the prompt before) and how many tokens -> tokens per second.
Timed = Callable[[str, int], float]


def ours(options: Namespace) -> Timed:
    if options.gpu:
        return ours_gpu(options)
    import bench_cpu

    model = bench_cpu.load_model(options.model, context=context(options))
    runner = bench_cpu.Runner(model, np.random.default_rng(0).integers(0, model.args.vocab_size, context(options)))

    def run(what: str, count: int) -> float:
        if what == "prompt":
            return count / bench_cpu.seconds(lambda: runner.start(count))
        if what == "decode":
            runner.start(BEFORE)
        return count / bench_cpu.seconds(lambda: runner.decode(count))

    return run


def ours_gpu(options: Namespace) -> Timed:
    import mlx.core as mx

    from moeflux_mlx import configure_mlx, load_model
    from moeflux_mlx.driving.generation import generate_step
    from moeflux_mlx.opening.weights import open_weights
    from moeflux_mlx.packing.located import Located

    configure_mlx()
    choice: dict = {}
    if options.share is not None:
        total = open_weights(Located(options.model)).experts.layout.total_bytes
        choice = {"expert_io": "pread", "expert_cache_bytes": int(options.share * total), "warm_start": "off"}
    model = load_model(options.model, context=context(options), **choice)
    rng, text = np.random.default_rng(0), model.make_cache()

    def run(what: str, count: int) -> float:
        nonlocal text
        length, tokens = {"prompt": (count, 1), "decode": (BEFORE, count + 1), "behind": (1, count + 1)}[what]
        text = text if what == "behind" else model.make_cache()
        prompt = mx.array(rng.integers(0, model.args.vocab_size, length))
        times = [time.perf_counter()]
        times += [time.perf_counter() for _ in generate_step(prompt, model, max_tokens=tokens, prompt_cache=text)]
        return count / (times[1] - times[0] if what == "prompt" else times[-1] - times[1])

    return run


def peer(options: Namespace) -> Timed:
    import bench_llama_cpp as b

    b.llama_cpp.llama_log_set(b.log, None)
    b.llama_cpp.llama_backend_init()
    runner = b.Runner(
        Namespace(gguf=options.gguf, context=context(options), threads=options.threads),
        repack=not options.gpu,
        model=on_gpu(b.llama_cpp, options) if options.gpu else {},
        run={"n_batch": context(options)} | ({"n_ubatch": UBATCH, "flash_attn_type": FLASH} if options.gpu else {}),
    )
    tokens = np.random.default_rng(0).integers(0, runner.vocab, context(options))

    def run(what: str, count: int) -> float:
        if what != "behind":
            b.llama_cpp.llama_memory_clear(b.llama_cpp.llama_get_memory(runner.context), True)
        if what == "decode":
            runner.feed(tokens[:BEFORE])
        start = time.perf_counter()
        if what == "prompt":
            runner.feed(tokens[:count]).argmax()
        else:
            for token in tokens[:count]:
                runner.feed(token[None]).argmax()
        return count / (time.perf_counter() - start)

    return run


class Override(ctypes.Structure):
    """Where llama.cpp keeps the tensors whose names match a pattern."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffers", ctypes.c_void_p)]


def on_gpu(llama_cpp, options: Namespace) -> dict:
    """Returns the fields of llama.cpp's model parameters: everything on the GPU, or all but the experts."""
    if not options.host_experts:
        return {"n_gpu_layers": ALL_LAYERS}
    base = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    base.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    global overrides  # llama.cpp keeps a pointer to them
    overrides = (Override * 2)(Override(EXPERTS, base.ggml_backend_cpu_buffer_type()), Override(None, None))
    return {"n_gpu_layers": ALL_LAYERS, "tensor_buft_overrides": ctypes.cast(overrides, ctypes.c_void_p)}


def context(options: Namespace) -> int:
    return max(512, max(options.prompt) + options.tokens + 64, BEFORE + max(options.tokens, WARMUP) + 64)


def answer(run: Timed) -> None:
    """The child process answers each line `what count` with a rate."""
    run("decode", WARMUP)
    print("ready", flush=True)
    for line in sys.stdin:
        what, count = line.split()
        print(run(what, int(count)), flush=True)


class Child:
    def __init__(self, python: str, name: str):
        command = [python, __file__, *sys.argv[1:], "--child", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.read_line() == "ready"

    def read_line(self) -> str:
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit("error: a child ended; what it said is above")
        return line

    def rate(self, what: str, count: int) -> float:
        self.process.stdin.write(f"{what} {count}\n")
        self.process.stdin.flush()
        return float(self.read_line())


def main() -> None:
    options = parsed()
    if options.child:
        return answer({OURS: ours, PEER: peer}[options.child](options))
    children = {OURS: Child(sys.executable, OURS), PEER: Child(options.llama_python, PEER)}
    cases, rounds = {f"decode {options.tokens}": ("decode", options.tokens)}, []
    for length in options.prompt:
        cases[f"prompt {length}"] = "prompt", length
        cases |= {f"decode behind {length}": ("behind", options.tokens)} if options.behind else {}
    with busy() if options.busy else nullcontext():
        for i in range(options.rounds + 1):
            order = list(children)[:: 1 if i % 2 else -1]
            rounds.append({(case, name): children[name].rate(*cases[case]) for case in cases for name in order})
    for case in cases:
        mine, other = ([one[case, name] for one in rounds[1:]] for name in (OURS, PEER))
        low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, other, strict=True)], n=4)
        rates = f"{statistics.median(mine):.1f} and {statistics.median(other):.1f} tokens/s"
        print(f"{case}: {rates}, {middle:.2f} times llama.cpp ({low:.2f} to {high:.2f})")


def busy():
    from bench_cpu import busy_core

    return busy_core()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--llama-python", default=sys.executable, help="that has llama-cpp-python (default: this one)")
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt", type=int, nargs="+", default=[PROMPT], help="lengths (%(default)s)")
    parser.add_argument("--behind", action="store_true", help="decode behind each prompt too")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of llama.cpp (default: one for each core)")
    parser.add_argument("--busy", action="store_true", help="another process keeps one core busy")
    parser.add_argument("--gpu", action="store_true", help="both use the GPU")
    parser.add_argument("--share", type=float, help="of the experts that our pool holds (default: all, in memory)")
    parser.add_argument("--host-experts", action="store_true", help="llama.cpp's experts stay in host memory")
    parser.add_argument("--child", choices=(OURS, PEER), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Measures the loss of rounded activations, or of rounded keys and values, relative to that of 4-bit weights, for the
demo model and the tests' tiny models.

Prints the table of docs/performance.md from which `engine.machine.AUTO_BITS` follows, or with --kv-bits that of keys
and values in 8 bits: mean KL divergences over the tokens of a text. That of 4-bit weights is measured against 8-bit
ones, both made of the same floats; that of what is rounded against what is exact, both with the 4-bit weights. Of the
demo model no float weights are kept: each is drawn evenly from those that round to the shipped 4-bit one. The tiny
models' weights and tokens are random.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests" / "support")]

import demo_widths  # noqa: E402
import goldens  # noqa: E402
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from moeflux_mlx import load, load_model  # noqa: E402
from moeflux_mlx.convert import convert  # noqa: E402

TINY_TOKENS, LONG_TOKENS = (4, 128), (1, 4096)  # rows, and tokens per row
ROUNDED = ({"set": {"cpu_activations": 8}}, {"set": {"cpu_activations": 16}})
KEPT = ({"dtype": mx.float32, "kv_bits": 8},)
FULL_ATTENTION = ("qwen3_moe", "minimax_m2", "hy_v3", "glm4_moe", "gpt_oss", "solar_open")


def log_probabilities(path: Path, tokens: np.ndarray, **options: object) -> np.ndarray:
    """Returns [N, vocab_size]: the log-probabilities of rows of tokens that are independent of each other."""
    model = load_model(path, **options)
    tables = [model(mx.array(row)[None])[0].astype(mx.float32) for row in tokens]
    rows = np.concatenate([np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)) for logits in tables])
    model.experts.close()
    return rows


def divergence(reference: np.ndarray, other: np.ndarray) -> float:
    """Returns the mean KL divergence in nats."""
    return float((np.exp(reference, dtype=np.float64) * (reference - other)).sum(-1).mean())


def line(name: str, path: Path, folder: Path, tokens: np.ndarray, ways: Sequence[dict[str, object]]) -> str:
    """Returns the table's row of one model, whose float weights are in `path`. `ways` are the ways in which it is
    rounded.
    """
    models = {bits: folder / f"{name}-{bits}" for bits in (4, 8)}
    for bits, model in models.items():
        convert(path, model, q_bits=bits)
    fine, exact = (log_probabilities(models[bits], tokens, dtype=mx.float32) for bits in (8, 4))
    weights = divergence(fine, exact)
    rounded = [divergence(exact, log_probabilities(models[4], tokens, **way)) for way in ways]
    shares = (f"{each:.2g} ({each / weights:.2g})" for each in rounded)
    return f"| {name} | {weights:.2g} | {' | '.join(shares)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="What rounded activations cost beside what 4-bit weights do")
    parser.add_argument("--stories", type=int, default=20, help="held-out stories for the demo model (%(default)s)")
    parser.add_argument("--kv-bits", action="store_true", help="keys and values in 8 bits, at up to 4,096 positions")
    options = parser.parse_args()
    columns = ["8-bit keys and values"] if options.kv_bits else ["8-bit activations", "16-bit"]
    ways, shape, length = (KEPT, LONG_TOKENS, 256) if options.kv_bits else (ROUNDED, TINY_TOKENS, 512)
    titles = ["model", "4-bit weights", f"{columns[0]} (their share)", *columns[1:]]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo_widths.write_floats(folder / "floats", drawn=True)
        _, tokenizer = load()
        ids = np.array(tokenizer.encode(demo_widths.held_out_text(options.stories)))
        rows = ids[: len(ids) // length * length].reshape(-1, length)
        print(line("demo", folder / "floats", folder, rows, ways), flush=True)
        for family in FULL_ATTENTION if options.kv_bits else goldens.families():
            path = goldens.write_variant(folder / f"{family}-floats", family, "hub")
            random = np.random.default_rng(0).integers(0, goldens.text_config(family)["vocab_size"], shape)
            print(line(family, path, folder, random, ways), flush=True)


if __name__ == "__main__":
    main()

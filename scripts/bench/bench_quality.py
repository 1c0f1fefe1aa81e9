#!/usr/bin/env python3
"""Measures what each way to convert a model costs: KL divergence from its floats, and bits of a weight.

    scripts/bench/bench_quality.py --model DIR --text FILE [--calibrate FILE] [--tokens 20480] [--experts-only]
        [--cases NAME ...] [--work DIR] [--layouts]

Converts the checkpoint in each way of `CASES` (or those named), reads the first tokens of the text with it in windows
of 1,024, and compares its logits with those of the checkpoint's floats, all in float32. With `--experts-only` all other
matrices stay floats. Prints a line for each case, then a table, and a line of JSON.

`GGML` are cases of GGUF's types, which need rows of 256 and the package libgguf: bench_quality.py --cases "ggml Q2_K".
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from moeflux_mlx import configure_mlx, load_model
from moeflux_mlx.calibration.calibrated import Calibration, convert_calibrated
from moeflux_mlx.calibration.layers import LayerRun
from moeflux_mlx.calibration.weights import open_layers
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.packing.conversion import ConvertSettings, convert
from moeflux_mlx.packing.located import Located
from moeflux_mlx.packing.recipe import Recipe
from moeflux_mlx.spec import ModelArgs
from moeflux_mlx.text.tokenizer import load_tokenizer

WINDOW = 1024
BITS, BUDGETS = (2, 3, 4), (2.5, 3.0, 3.5, 4.5)
EXPERTS: dict[str, Any] = {"default": "float"}
ROUNDINGS = ("minmax", "fit")
CASES = [f"{rounding} {bits}" for bits in BITS for rounding in ROUNDINGS]
CASES += [f"{method} {bits}, calibrated" for bits in BITS for method in ("fit", "gptq")]
CASES += [f"gptq {bits:g}, budget" for bits in BUDGETS]
GGML = [
    f"ggml {kind}{how}"
    for kind in ("Q2_K", "IQ2_S", "IQ3_XXS", "Q3_K", "IQ4_XS", "Q4_K")
    for how in ("", ", calibrated")
]
WHOLE = ["minmax 4 balanced", "fit 4 balanced", "gptq 4 balanced, calibrated"]


def main() -> None:
    options = parser().parse_args()
    configure_mlx()
    texts = first_texts(options.model, options.text, options.tokens)
    wanted = floats(options.model, texts)
    rows = []
    for case in options.cases or CASES + ([] if options.experts_only else WHOLE):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            path = Path(folder) / "model"
            made(case, options, path)
            row = {
                "case": case,
                "convert s": round(time.monotonic() - begin),
                **sizes(path),
                **compared(converted(path, texts), texts, wanted),
            }
        rows.append(row)
        print(row, flush=True)
    print(table(rows))
    print(
        json.dumps(
            {"model": str(options.model), "tokens": options.tokens, "experts_only": options.experts_only, "rows": rows}
        )
    )


def first_texts(model: Path, text: Path, tokens: int) -> list[np.ndarray]:
    """Returns the windows of the first tokens of a text."""
    ids = load_tokenizer(model).encode(text.read_text(encoding="utf-8"))[:tokens]
    return [np.array(ids[start : start + WINDOW]) for start in range(0, len(ids), WINDOW)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--model", type=Path, required=True, help="a checkpoint of floats")
    made.add_argument("--text", type=Path, required=True)
    made.add_argument("--calibrate", type=Path, help="a text for calibration; default: the package's own")
    made.add_argument("--calibrate-tokens", type=int, default=16384, help="(%(default)s)")
    made.add_argument("--tokens", type=int, default=20480, help="(%(default)s)")
    made.add_argument("--experts-only", action="store_true", help="leave all other matrices floats")
    made.add_argument("--cases", nargs="+", metavar="NAME", help="of " + ", ".join(CASES + WHOLE + GGML))
    made.add_argument("--work", type=Path, help="a directory for the converted models, one after the other")
    return made


def made(case: str, options: argparse.Namespace, path: Path) -> None:
    """Converts the checkpoint as a case says: method, bits, perhaps a recipe, and what it is calibrated for."""
    words, _, how = case.partition(", ")
    method, number, *named = words.split()
    form, method = (number.lower(), "fit") if method == "ggml" else (int(float(number)), method)
    rest = EXPERTS if options.experts_only else {"default": 8} if named or how == "budget" else {"default": form}
    recipe = Recipe.from_json(
        {**rest, **({} if how == "budget" else dict.fromkeys(("gate_up", "down"), form))}
        | ({"gate_up": 4, "down": 4} if how == "budget" else {}),
        case.replace(",", ""),
        "this script",
    )
    if not how:
        convert(options.model, path, recipe=recipe, rounding=method)
        return
    work = path.with_name("calibration")
    calibration = Calibration(
        work,
        "default" if options.calibrate is None else [options.calibrate],
        method,
        options.calibrate_tokens,
        target_bits=float(number) if how == "budget" else None,
        dtype=mx.float32,
    )
    convert_calibrated(ConvertSettings(options.model, path, recipe=recipe), calibration)


def floats(path: Path, texts: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the logarithms of the probabilities [L, V] that the checkpoint's floats give, for each text."""
    with tempfile.TemporaryDirectory() as folder:
        run = LayerRun(open_layers(Located(path)), texts, Path(folder), mx.float32)
        run.run()
        head = run.head()
        return [log_softmax(mx.array(np.array(head(hidden)))) for hidden in run.hidden()]


def log_softmax(logits: mx.array) -> np.ndarray:
    wide = logits.astype(mx.float32)
    return np.array(wide - mx.logsumexp(wide, axis=-1, keepdims=True))


def converted(path: Path, texts: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the logarithms of the probabilities [L, V] that a converted model gives, for each text."""
    model = load_model(path, dtype=mx.float32)
    for text in texts:
        yield log_softmax(model(mx.array(text[None]))[0])
    model.experts.close()


def compared(given: Iterable[np.ndarray], texts: list[np.ndarray], wanted: Iterable[np.ndarray]) -> dict[str, float]:
    """Returns the mean KL divergence, the share of equal first choices, and the perplexity."""
    kl, same, nll = [], [], []
    for text, theirs, ours in zip(texts, given, wanted, strict=True):
        kl.append((np.exp(ours) * (ours - theirs)).sum(-1)[:-1])
        same.append((ours.argmax(-1) == theirs.argmax(-1))[:-1])
        nll.append(-np.take_along_axis(theirs[:-1], text[1:, None], axis=1)[:, 0])
    mean = [float(np.concatenate(part).mean()) for part in (kl, same, nll)]
    return {"kl": float(f"{mean[0]:.4g}"), "same": round(mean[1], 4), "perplexity": float(f"{np.exp(mean[2]):.5g}")}


def sizes(path: Path) -> dict[str, float]:
    """Returns the stored bits of a routed expert's weight, and the bytes of all other weights."""
    args = ModelArgs.from_file(path)
    layout = open_packed(path, args).layout
    stored = sum(field.size for record in layout.records.values() for one in record.projections for field in one.fields)
    weights = sum(one.rows * one.columns for record in layout.records.values() for one in record.projections)
    others = sum(file.stat().st_size for file in path.glob("resident*.safetensors"))
    return {"expert bits": round(8 * stored / weights, 3), "other MB": round(others / 1e6, 1)}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()

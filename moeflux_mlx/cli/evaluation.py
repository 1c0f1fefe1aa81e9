"""Prints the evaluation of a model: a table, a line of JSON, and a chart."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..engine.engine import Engine, open_engine
from ..errors import RequestError
from ..files import user_path
from ..tools.evaluate import Measured, evaluate, perplexity
from .chart import line_chart
from .opening import note_idle_options
from .options import gigabytes
from .terminal import Progress

BINS = 64  # points of a chart


def run(options: argparse.Namespace) -> int:
    text = read_text(options.text)
    chart = None if options.svg is None else user_path(options.svg)
    if chart is not None and options.against is None:
        raise RequestError("--svg draws the divergence of two models; give the second with --against")

    def opens(model: str | None, kv_bits: str, shards_in: Sequence[str] = ()) -> Engine:
        engine = open_engine(
            model,
            dtype=getattr(mx, options.dtype) if options.dtype else None,
            cpu_activations=options.cpu_activations,
            kv_bits=kv_bits,
            expert_io=options.expert_io,
            expert_cache_bytes=gigabytes("--expert-cache-gb", options.expert_cache_gb),
            memory_bytes=gigabytes("--memory-gb", options.memory_gb),
            shards_in=shards_in,
            context=options.window,
            tiles=options.tiles,
        )
        engine.tokenizer  # noqa: B018  (an error in its files is said before anything is computed)
        if model == options.model:
            note_idle_options(options, engine.experts.mode)
        return engine

    with Progress("reading", lines=True) as progress:
        measured = evaluate(
            lambda: opens(options.model, options.kv_bits, options.shards_in),
            text,
            against=None if options.against is None else lambda: opens(options.against, "16"),
            window=options.window,
            most=options.tokens,
            progress=progress.update,
        )
    if chart is not None:
        chart.write_text(drawn(measured, options), encoding="utf-8")
    result = summary(measured)
    names = {"model": options.model or "demo", **({"against": options.against} if options.against else {})}
    print("\n".join([*table(measured, result), json.dumps({**names, **result}, ensure_ascii=False)]))
    return 0


def read_text(name: str) -> str:
    """Raises RequestError: the file cannot be read, or is not UTF-8."""
    path = user_path(name)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8: byte {error.start} is invalid; give a text file") from None


def summary(measured: Measured) -> dict[str, Any]:
    """The figures by name, rounded to their useful digits."""
    result: dict[str, Any] = {"tokens": measured.tokens, "window": measured.window, "predicted": int(measured.nll.size)}
    result["perplexity"] = float(f"{measured.perplexity:.6g}")
    result["perplexity_error"] = float(f"{measured.error:.3g}")
    if measured.kl is None or measured.reference_nll is None or measured.same is None:
        return result
    return result | {
        "perplexity_against": float(f"{perplexity(measured.reference_nll):.6g}"),
        "kl_mean": float(f"{measured.kl.mean():.4g}"),
        "kl_p99": float(f"{np.percentile(measured.kl, 99):.4g}"),
        "same_first_choice": float(f"{measured.same.mean():.4g}"),
    }


def table(measured: Measured, result: dict[str, Any]) -> list[str]:
    rows = [
        ("tokens", f"{measured.tokens} in windows of {measured.window}, {measured.nll.size} predicted"),
        ("perplexity", f"{result['perplexity']:.4f} +- {result['perplexity_error']:.4f}"),
    ]
    if measured.kl is not None:
        rows += [
            ("perplexity, against", f"{result['perplexity_against']:.4f}"),
            ("KL divergence, mean", f"{result['kl_mean']:.4g} nats"),
            ("KL divergence, 99%", f"{result['kl_p99']:.4g} nats"),
            ("same first choice", f"{result['same_first_choice']:.2%}"),
        ]
    return [f"{name:22}{value}" for name, value in rows]


def drawn(measured: Measured, options: argparse.Namespace) -> str:
    """KL divergence by position in the window: mean and 99th percentile of neighbouring positions."""
    assert measured.kl is not None
    edges = np.unique(np.linspace(1, measured.place.max() + 1, BINS + 1).astype(int))
    parts = [measured.kl[(measured.place >= a) & (measured.place < b)] for a, b in zip(edges, edges[1:], strict=False)]
    lines = {"mean": [part.mean() for part in parts], "99th percentile": [np.percentile(part, 99) for part in parts]}
    names = f"{Path(options.model or 'demo').name} against {Path(options.against).name}"
    middles = [(a + b - 1) / 2 for a, b in zip(edges, edges[1:], strict=False)]
    return line_chart(f"KL divergence by position: {names}", "position in the window", "nats", middles, lines)

"""`python -m moeflux_mlx.evaluate`: how well a model predicts a text, and how far it is from another."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from .cli.opening import note_idle_options
from .cli.options import (
    NOT_GIVEN,
    OF_MEMORY,
    add_shared,
    dtype_of,
    settings_of,
    written,
)
from .cli.run import Parser, main_of
from .cli.terminal import ProgressLine, note
from .errors import NotPackedError
from .files import JsonDict, read_text, user_path
from .opening.engine import Engine, open_with
from .opening.load_settings import locate
from .packing.located import Located
from .process import claim_process
from .tools.evaluate import WINDOW, LayerReader, Losses, evaluate, perplexity

# Options that only an engine uses.

OF_ENGINES = ("kv_bits", "expert_io", "expert_cache_gb", "memory_gb", "set")


def run(options: argparse.Namespace) -> int:
    texts = [read_text(name) for name in options.text]
    with ProgressLine("reading", lines=True) as progress:
        measured = evaluate(
            lambda: opened(options, options.model, options.kv_bits, options.shards_in),
            texts,
            against=None if options.against is None else lambda: opened(options, options.against, "16"),
            window=options.window,
            most=options.tokens,
            progress=progress.update,
        )
    result = summary(measured)
    if len(texts) > 1:
        result["texts"] = [{"text": name, **part} for name, part in zip(options.text, by_text(measured), strict=True)]
    names = {"model": options.model or "demo", **({"against": options.against} if options.against else {})}
    print("\n".join([*table(measured, result), json.dumps({**names, **result}, ensure_ascii=False)]))
    return 0


def opened(
    options: argparse.Namespace, model: str | None, kv_bits: str, shards_in: Sequence[str] = ()
) -> Engine | LayerReader:
    """The model as the options want it read. A checkpoint that no engine can use in place is read layer by layer."""
    here = _directory(model, shards_in)
    if options.layer_by_layer:
        return _by_layers(options, here or locate(model, shards_in=shards_in))
    try:
        given = replace(settings_of(options), path_or_hf_repo=model, kv_bits=kv_bits, shards_in=shards_in)
        engine = open_with(replace(given, context=options.window, warm_start="off"))
    except NotPackedError:
        if here is None or here.is_unfinished:
            raise
        return _by_layers(options, here)
    engine.tokenizer  # noqa: B018  (an error in its files is said before anything is computed)
    if model == options.model:
        note_idle_options(options, engine.experts.mode)
    return engine


def _directory(model: str | None, shards_in: Sequence[str]) -> Located | None:
    """A directory that is given as a model, whatever form its weights have."""
    if model is None or not user_path(model).is_dir():
        return None
    return Located(user_path(model), tuple(map(user_path, shards_in)))


def _by_layers(options: argparse.Namespace, located: Located) -> LayerReader:
    claim_process()
    idle = [name for name in OF_ENGINES if getattr(options, name) not in (None, NOT_GIVEN.get(name))]
    for name in idle:
        note(f"note: {written(name)} has no effect where {located.path} is read layer by layer")
    return LayerReader(located, dtype_of(options), options.without_correction_bias)


def summary(measured: Losses) -> JsonDict:
    """The figures by name, rounded to their useful digits."""
    result: JsonDict = {"tokens": measured.tokens, "window": measured.window, "predicted": int(measured.nll.size)}
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


def by_text(measured: Losses) -> list[JsonDict]:
    """`summary` of each text."""
    parts = [measured.where(measured.text == number) for number in range(int(measured.text.max()) + 1)]
    shared = ("tokens", "window")
    return [{name: value for name, value in summary(part).items() if name not in shared} for part in parts]


def table(measured: Losses, result: JsonDict) -> list[str]:
    rows = [
        ("tokens", f"{measured.tokens} in windows of {measured.window}, {measured.nll.size} predicted"),
        ("perplexity", f"{result['perplexity']:.4f} +- {result['perplexity_error']:g}"),
    ]
    if measured.kl is not None:
        rows += [
            ("perplexity, against", f"{result['perplexity_against']:.4f}"),
            ("KL divergence, mean", f"{result['kl_mean']:.4g} nats"),
            ("KL divergence, 99%", f"{result['kl_p99']:.4g} nats"),
            ("same first choice", f"{result['same_first_choice']:.2%}"),
        ]
    for part in result.get("texts", []):
        rows.append((Path(part["text"]).name, _line(part)))
    return [f"{name:22}{value}" for name, value in rows]


def _line(part: JsonDict) -> str:
    """The figures of one text."""
    line = f"perplexity {part['perplexity']:.4f}"
    if "kl_mean" not in part:
        return line
    return f"{line}, KL {part['kl_mean']:.4g} nats, same first choice {part['same_first_choice']:.2%}"


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "evaluate",
        "Measure a model's perplexity on a text, and its KL divergence from another model.",
    )
    add = made.add_argument_group("measurement").add_argument
    add("--model", help="directory, or Hugging Face repo id org/name; default: the demo model in the package")
    add_shared(add, "--shards-in", "--without-correction-bias")
    add(
        "--against",
        metavar="MODEL",
        help="reference model, such as the same one with more bits; its keys and values have 16 bits",
    )
    add("--text", required=True, nargs="+", metavar="FILE", help="UTF-8 text to read; several stand alone")
    add(
        "--window",
        type=int,
        default=WINDOW,
        metavar="TOKENS",
        help="tokens that are read together; each window is independent (%(default)s)",
    )
    add("--tokens", type=int, metavar="N", help="read the first N tokens of each text; default: all")
    add(
        "--layer-by-layer",
        action="store_true",
        help="keep one layer and one expert of a model in memory, in floats; a checkpoint that cannot be used in place "
        "is always read so",
    )
    add = made.add_argument_group("memory and expert I/O").add_argument
    add_shared(add, "--dtype", "--kv-bits", *OF_MEMORY, "--set")
    return made


main = main_of(run, parser)


if __name__ == "__main__":
    sys.exit(main())

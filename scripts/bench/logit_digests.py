#!/usr/bin/env python3
"""Prints digests of the logits of every tiny model that the tests know, to prove that a change changes no bit.

    python scripts/bench/logit_digests.py > before.txt
    python scripts/bench/logit_digests.py | diff before.txt -

Run the first line before the change and the second one after it, on each device: MLX computes on its default device,
and bits differ between devices, processors and versions of MLX. Each line is `family dtype way digest`. The ways:

    prompt  the first tokens of the family's golden, in one call
    tokens  further tokens, one by one
    rows    a step of rows of three sequences: the one so far, a shorter one and an empty one
    drafts  a step of several rows of the first sequence, the last of which are taken back, and the token after it

`kv8-` before a way: caches keep keys and values in 8 bits. `plain-`: MLX's own operations compute float32 on a CPU,
where otherwise the native forms do.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import goldens  # noqa: E402
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from tiny_models import tiny_directory, use_plain_operations  # noqa: E402

from moeflux_mlx import configure_mlx, load_model  # noqa: E402
from moeflux_mlx.model.decoder import Model  # noqa: E402
from moeflux_mlx.model.step import SequenceRows  # noqa: E402
from moeflux_mlx.ops import backend, native  # noqa: E402
from moeflux_mlx.spec import ModelArgs  # noqa: E402

ALL = (*goldens.families(), *goldens.KIN)
SINGLE, DRAFTS, KEPT = 6, 5, 2  # tokens one by one; rows of one sequence in a step, and how many of them are kept
TAIL = SINGLE + 1 + DRAFTS + 1  # tokens after the prompt
SHORT = 11  # tokens before the rows of the shorter sequence


def logits_of(model: Model, family: str) -> Iterator[tuple[str, list[mx.array]]]:
    """Yields each way of computing and its logits."""
    tokens = goldens.golden(family)[0].tolist()
    prompt, single, (row, *drafts, last) = tokens[:-TAIL], tokens[-TAIL:][:SINGLE], tokens[-TAIL:][SINGLE:]
    texts = [model.make_cache() for _ in range(3)]
    for layer in (layer for cache in texts for layer in cache):
        layer.shift(goldens.first_position(family))
    yield "prompt", [model(mx.array([prompt]), texts[0])]
    yield "tokens", [model(mx.array([[token]]), texts[0]) for token in single]
    mx.eval(model(mx.array([prompt[:SHORT]]), texts[1]))
    yield "rows", [model.step(list(map(SequenceRows, texts, ([row], prompt[SHORT:][:1], prompt[:1])))).logits]
    step = model.step([SequenceRows(texts[0], drafts)])
    mx.eval(step.logits)
    step.rewind(0, KEPT)
    yield "drafts", [step.logits, model(mx.array([[last]]), texts[0])]


def lines_of(family: str, dtype: str, prefix: str = "", **options: object) -> Iterator[str]:
    model = load_model(tiny_directory(family), dtype=getattr(mx, dtype), **options)
    for way, logits in logits_of(model, family):
        parts = [np.array(part.astype(mx.float32)).tobytes() for part in logits]  # exact for every dtype
        yield f"{family} {dtype} {prefix}{way} {hashlib.sha256(b''.join(parts)).hexdigest()[:16]}"
    model.experts.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="FAMILY", choices=ALL, default=ALL)
    families, lines = parser.parse_args().only, list[str]()
    os.environ |= {"MOEFLUX_TILES": "code", "MLX_ENABLE_TF32": "0"}  # MLX reads its own when it is first used
    configure_mlx()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as kept, pytest.MonkeyPatch.context() as patch:
        os.environ["MOEFLUX_TINY_MODELS"] = kept
        for family in families:
            lines += [*lines_of(family, "float32"), *lines_of(family, "bfloat16")]
            if ModelArgs.from_dict(goldens.config(family)).rounds_keys:
                lines += lines_of(family, "float32", "kv8-", kv_bits=8)
        if native.available() and not backend.has_kernels():
            use_plain_operations(patch)
            lines += [line for family in families for line in lines_of(family, "float32", "plain-")]
    print("\n".join(sorted(lines)))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measures what ggml's block formats cost a model, beside `bench_quality.py --experts-only`.

    scripts/bench/bench_ggml.py --model DIR --text FILE [--calibrate FILE] [--tokens 20480] [--types Q2_K ...]
        [--importance] [--work DIR]

Rounds the routed experts by libgguf 0.2.2 (PyPI: ggml's own quantisers), dequantises them to a checkpoint of float32,
and compares its logits with those of the original. With `--importance` each quantiser is told the mean squares of each
expert's inputs, as llama.cpp's imatrix has them. Rows of these formats are multiples of 256.
"""

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import libgguf
import mlx.core as mx
import numpy as np
from bench_quality import compared, first_texts, floats, table

from moeflux_mlx import configure_mlx
from moeflux_mlx.calibration.convert import Calibration, read_texts
from moeflux_mlx.calibration.layers import LayerRun, Progress
from moeflux_mlx.calibration.seen import SeenLayer
from moeflux_mlx.calibration.weights import open_layers
from moeflux_mlx.kinds import Experts
from moeflux_mlx.text.tokenizer import load_tokenizer

TYPES = ("Q2_K", "IQ2_S", "IQ3_XXS", "Q3_K", "IQ4_XS", "Q4_K")
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
Importance = dict[tuple[int, int, bool], np.ndarray]  # by layer, expert, and whether it is that of down


def main() -> None:
    options = parser().parse_args()
    configure_mlx()
    texts = first_texts(options.model, options.text, options.tokens)
    wanted, rows = floats(options.model, texts), []
    importance = importance_of(options) if options.importance else {}
    for name in options.types:
        kind = libgguf.GGMLQuantizationType[name]
        if libgguf.quantize_requires_imatrix(kind) and not importance:
            print(f"{name} needs --importance")
            continue
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            path = Path(folder) / "model"
            bits = write_rounded(options.model, path, kind, importance)
            rows.append({"type": name, "expert bits": bits, **compared(floats(path, texts), texts, wanted)})
        print(rows[-1], flush=True)
    print(table(rows))
    print(json.dumps({"model": str(options.model), "importance": options.importance, "rows": rows}))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--model", type=Path, required=True, help="a checkpoint of floats, with an entry for each expert")
    made.add_argument("--text", type=Path, required=True)
    made.add_argument("--tokens", type=int, default=20480, help="(%(default)s)")
    made.add_argument("--types", nargs="+", default=TYPES, metavar="NAME", help="(%(default)s)")
    made.add_argument("--importance", action="store_true", help="tell the quantisers what matters")
    made.add_argument("--calibrate", type=Path, help="the text that shows it; default: the package's own")
    made.add_argument("--calibrate-tokens", type=int, default=16384, help="(%(default)s)")
    made.add_argument("--work", type=Path, help="a directory for the rounded models, one after the other")
    return made


def write_rounded(source: Path, path: Path, kind: Any, importance: Importance) -> float:
    """Writes the checkpoint with rounded experts; returns the stored bits of an expert's weight."""
    tensors: dict[str, mx.array] = {}
    nbytes = weights = 0
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in dict(mx.load(str(file))).items():
            expert = EXPERT.fullmatch(name)
            if expert is not None:
                known = importance.get((int(expert[1]), int(expert[2]), expert[3] == "down"))
                values = np.array(tensor.astype(mx.float32))
                codes = libgguf.quantize_rows(values, kind, imatrix=known)
                tensor = mx.array(libgguf.dequantize_rows(codes, kind, n_per_row=values.shape[1]).reshape(values.shape))
                nbytes, weights = nbytes + codes.nbytes, weights + values.size
            tensors[name] = tensor
    path.mkdir()
    for file in source.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, path)
    mx.save_safetensors(str(path / "model.safetensors"), tensors)
    return round(8 * nbytes / weights, 4)


class ImportanceRun(LayerRun):
    """Collects the mean squares of each expert's inputs."""

    importance: Importance

    def _pass(self, layer: int, progress: Progress) -> None:
        made = self._layer(layer, self.weights)
        seen = SeenLayer(layer, made, products=False)
        with self._tables(layer) as tables:
            self._keep(layer, self._outputs(layer, made, tables, seen, progress))
        part = self.args.layers[layer].feed_forward
        assert isinstance(part, Experts)
        for expert in range(self.args.num_experts):
            x = seen.rows(expert).x
            activations = self.weights.expert(layer, expert, mx.float32).activations(x, part.activation)
            for is_down, rows in ((False, x), (True, activations)):
                self.importance[layer, expert, is_down] = np.square(np.array(rows)).mean(0)


def importance_of(options: argparse.Namespace) -> Mapping[tuple[int, int, bool], np.ndarray]:
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        text = "default" if options.calibrate is None else [options.calibrate]
        calibration = Calibration(Path(folder), text, tokens=options.calibrate_tokens)
        texts = read_texts(load_tokenizer(options.model), calibration)
        run = ImportanceRun(open_layers(options.model), texts, Path(folder), mx.float32)
        run.importance = {}
        run.run()
    return run.importance


if __name__ == "__main__":
    main()

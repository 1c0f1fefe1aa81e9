"""Measures the loss of each bit width: the demo model at every width compared with the shipped one, on held-out
stories.

No float weights of the demo model are kept. The shipped 4-bit model is taken apart into a float32 checkpoint in a
temporary directory, which `moeflux convert` makes a model of at each width, and `moeflux evaluate` compares each with
the shipped model. `python scripts/demo_model/demo_widths.py` prints the table of docs/formats.md.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import demo_stories as stories
import mlx.core as mx
import numpy as np

from moeflux_mlx.files import directory
from moeflux_mlx.formats.packed import FOLDER, open_packed
from moeflux_mlx.formats.record import PROJECTIONS, Field
from moeflux_mlx.quant import AFFINE_BITS, MLX_MODES, Quant, unquantized
from moeflux_mlx.spec import ModelArgs

DEMO = directory("demo")
WIDTHS = {f"{bits} bits": ["--q-bits", str(bits)] for bits in AFFINE_BITS}
WIDTHS |= {mode: ["--q-mode", mode] for mode in MLX_MODES if mode != "affine"}
COLUMNS = ("perplexity", "kl_mean", "kl_p99", "same_first_choice")
NUMPY = {"U32": np.uint32, "BF16": np.uint16}


def held_out_text(count: int) -> str:
    """Returns whole stories about pairs of name and fact that were never trained on, each with its end."""
    return "<|endoftext|>".join(sample.story for sample in stories.held_out_samples(count))


def floats(codes: mx.array, scales: mx.array, biases: mx.array, quant: Quant, drawn: bool) -> mx.array:
    """Returns the values of the codes. `drawn`: each is drawn evenly from all floats that would have been rounded to
    its code.
    """
    values = mx.dequantize(codes, scales, biases, quant.group_size, quant.bits)
    if not drawn:
        return values
    noise = mx.random.uniform(-0.5, 0.5, values.shape, key=mx.random.key(values.size))
    return values + noise * mx.repeat(scales, quant.group_size, axis=-1)


def resident_floats(drawn: bool) -> dict[str, mx.array]:
    """Returns every tensor that does not belong to a routed expert, in float32."""
    tensors, args, floats_by_name = mx.load(str(DEMO / "resident.safetensors")), ModelArgs.from_file(DEMO), {}
    assert isinstance(tensors, dict) and args.quantization is not None
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        if f"{path}.scales" not in tensors:
            floats_by_name[name] = tensor.astype(mx.float32)
        elif part == "weight":
            quant = args.quantization.of(path)
            assert quant is not None
            scales, biases = (tensors[f"{path}.{of_groups}"].astype(mx.float32) for of_groups in ("scales", "biases"))
            floats_by_name[name] = floats(tensor, scales, biases, quant, drawn)
    return floats_by_name


def expert_floats(drawn: bool) -> dict[str, mx.array]:
    """Returns the routed experts under MLX's names, [E, rows, columns] in float32."""
    experts, floats_by_name = open_packed(DEMO, ModelArgs.from_file(DEMO)), {}
    for layer, path in experts.paths.items():
        record = experts.layout.records[layer]
        rows = np.fromfile(path, np.uint8).reshape(-1, record.stride)
        for name, projection in zip(PROJECTIONS, (record.gate, record.up, record.down), strict=True):
            codes, *groups = (_field(rows, field) for field in projection.fields)
            scales, biases = (part.view(mx.bfloat16).astype(mx.float32) for part in groups)
            values = floats(codes, scales, biases, projection.quant, drawn)
            floats_by_name[f"model.layers.{layer}.mlp.switch_mlp.{name}.weight"] = values
    return floats_by_name


def _field(rows: np.ndarray, field: Field) -> mx.array:
    part = np.ascontiguousarray(rows[:, field.offset : field.end])
    return mx.array(part.view(NUMPY[field.dtype]).reshape(len(rows), *field.shape))


def write_floats(out: Path, drawn: bool = False) -> None:
    """Writes the float32 checkpoint. `drawn` is as for `floats`."""
    out.mkdir()
    for file in DEMO.iterdir():
        if file.name not in (FOLDER, "config.json", "resident.safetensors"):
            shutil.copyfile(file, out / file.name)
    config = unquantized(json.loads((DEMO / "config.json").read_text()))
    (out / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(out / "model.safetensors"), resident_floats(drawn) | expert_floats(drawn))


def moeflux(*words: object) -> str:
    return subprocess.run(
        [sys.executable, "-m", "moeflux_mlx", *map(str, words)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the demo model at every width with the shipped one")
    parser.add_argument("--stories", type=int, default=40, help="held-out stories to read (%(default)s)")
    args = parser.parse_args()
    print("| stored as | perplexity | KL, mean | KL, 99 % | same first choice | bytes of an expert |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stories.txt").write_text(held_out_text(args.stories))
        write_floats(folder / "floats")
        for width, options in WIDTHS.items():
            model = folder / width.replace(" ", "-")
            moeflux("convert", "--hf-path", folder / "floats", "--mlx-path", model, *options)
            command = ["evaluate", "--model", model, "--against", DEMO, "--text", folder / "stories.txt"]
            figures = json.loads(moeflux(*command).splitlines()[-1])
            size = open_packed(model, ModelArgs.from_file(model)).layout.record.size
            print(f"| {width} | {' | '.join(str(figures[column]) for column in COLUMNS)} | {size} |", flush=True)
        print(f"\n{figures['tokens']} tokens in windows of {figures['window']}; the shipped model: ", end="")
        print(f"{figures['perplexity_against']}")


if __name__ == "__main__":
    main()

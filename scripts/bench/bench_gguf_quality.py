#!/usr/bin/env python3
"""Compares our arithmetic of a GGUF file with llama.cpp's: logits, first choices, and KL divergence from the floats.

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python gguf libgguf
    scripts/bench/bench_gguf_quality.py --model DIR --text FILE [--tokens 4096] [--types Q4_K Q2_K] [--work DIR]

Writes the checkpoint, of the qwen3_moe family with rows of 256, as a GGUF with every matrix but the routers in one
type, by libgguf, and a second one with the values of these in float32. llama.cpp rounds what multiplies codes to 8
bits; with the second file it does not, and so the difference between its logits of both is its noise. Ours reads the
first file. All keep keys and values in float32.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gguf
import libgguf
import llama_cpp
import mlx.core as mx
import numpy as np
from bench_llama_cpp import Runner, add_header, copy_tokenizer, log
from bench_quality import WINDOW, compared, converted, first_texts, floats, log_softmax, table

from moeflux_mlx import configure_mlx

TIMES = 6  # a first choice must be the same where its margin over the second is more than so often the noise


def main() -> None:
    options = parser().parse_args()
    configure_mlx()
    llama_cpp.llama_log_set(log, None)
    llama_cpp.llama_backend_init()
    texts = first_texts(options.model, options.text, options.tokens)
    wanted, rows = floats(options.model, texts), []
    for kind in options.types:
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            paths = Path(folder) / "codes.gguf", Path(folder) / "floats.gguf"
            copy_tokenizer(options.model, paths[0])
            for path in paths:
                write_gguf(options.model, path, kind, as_floats=path is paths[1])
            ours = list(converted(paths[0], texts))
            theirs, exact = (list(of_llama_cpp(path, texts, options.threads)) for path in paths)
        rows.append({"type": kind, **agreement(ours, theirs, exact)})
        for name, given in (("ours", ours), ("llama.cpp", theirs), ("its floats", exact)):
            figures = compared(given, texts, wanted)
            rows[-1] |= {f"{name}, KL": figures["kl"], f"{name}, perplexity": figures["perplexity"]}
        print(rows[-1], flush=True)
    print(table(rows))
    print(json.dumps({"model": str(options.model), "tokens": options.tokens, "rows": rows}))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--model", type=Path, required=True, help="a checkpoint of floats, with an entry for each expert")
    made.add_argument("--text", type=Path, required=True)
    made.add_argument("--tokens", type=int, default=4096, help="(%(default)s)")
    made.add_argument("--types", nargs="+", default=["Q4_K", "Q2_K"], metavar="NAME", help="(%(default)s)")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--work", type=Path, help="a directory for the files, one type after the other")
    return made


def tensors(model: Path, config: dict) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names and values of a GGUF's tensors; experts are stacked, and a draft head is left out."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config["num_hidden_layers"])
    stored = {name: one for file in model.glob("*.safetensors") for name, one in mx.load(str(file)).items()}
    for hub, tensor in stored.items():
        if hub.startswith("mtp."):
            continue
        stem, _, end = hub.rpartition(".")
        if ".experts.0." in hub:
            every = [stored[hub.replace("experts.0", f"experts.{i}")] for i in range(config["num_experts"])]
            stem, tensor = stem.replace("experts.0.", "experts."), mx.stack(every)
        if (name := names.get_name(stem)) is not None:
            yield f"{name}.{end}", np.array(tensor.astype(mx.float32))


def write_gguf(model: Path, path: Path, kind: str, as_floats: bool) -> None:
    """Writes the checkpoint with matrices in a type, or with the float32 values that they have in it."""
    config = json.loads((model / "config.json").read_text())
    writer, code = gguf.GGUFWriter(path, "qwen3moe"), libgguf.GGMLQuantizationType[kind]
    add_header(writer, config)
    for name, values in tensors(model, config):
        if values.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, values)
            continue
        blocks = libgguf.quantize_rows(values, code)
        if as_floats:
            writer.add_tensor(name, libgguf.dequantize_rows(blocks, code, n_per_row=values.shape[-1]))
        else:
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_llama_cpp(path: Path, texts: list[np.ndarray], threads: int) -> Iterator[np.ndarray]:
    """Yields the logarithms of the probabilities [L, V] that llama.cpp gives, for each text."""
    options = SimpleNamespace(gguf=path, context=WINDOW, threads=threads)
    runner = Runner(options, False, run={"type_k": 0, "type_v": 0, "n_batch": WINDOW, "n_ubatch": WINDOW})
    for text in texts:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(runner.context), True)
        batch = llama_cpp.llama_batch_init(len(text), 0, 1)
        batch.n_tokens = len(text)
        for place, token in enumerate(text.tolist()):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        if llama_cpp.llama_decode(runner.context, batch):
            raise SystemExit(f"error: llama.cpp cannot read {len(text)} tokens at once")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(runner.context), (len(text), runner.vocab))
        yield log_softmax(mx.array(logits))
        llama_cpp.llama_batch_free(batch)


def agreement(ours: list[np.ndarray], theirs: list[np.ndarray], exact: list[np.ndarray]) -> dict[str, float]:
    """Returns the noise of llama.cpp's logits and how far ours are from those without it (root mean squares over the
    vocabulary, medians over positions), the share of positions with a margin of more than `TIMES` the noise there, and
    the shares of equal first choices among these and among all."""
    ours, theirs, exact = (np.concatenate(one) for one in (ours, theirs, exact))
    noise, off = (np.sqrt(np.square(one - exact).mean(-1)) for one in (theirs, ours))
    second, first = np.partition(ours, -2, axis=-1)[:, -2:].T
    is_clear, is_same = first - second > TIMES * noise, ours.argmax(-1) == theirs.argmax(-1)
    return {
        "noise": float(f"{np.median(noise):.3g}"),
        "ours to its floats": float(f"{np.median(off):.3g}"),
        "clear": round(float(is_clear.mean()), 4),
        "same where clear": round(float(is_same[is_clear].mean()), 5),
        "same": round(float(is_same.mean()), 4),
        "same as its floats": round(float((ours.argmax(-1) == exact.argmax(-1)).mean()), 5),
    }


if __name__ == "__main__":
    main()

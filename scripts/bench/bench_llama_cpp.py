#!/usr/bin/env python3
"""Writes a GGUF file of a packed random model's shapes, which bench_llama_turns.py times in llama.cpp, and loads it.

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python gguf
    python scripts/bench/make_random_model.py --variant qwen3-30b-a3b --layers 8 MODEL
    scripts/bench/bench_llama_cpp.py MODEL FILE.gguf

The file has random weights of its own, every matrix in Q4_0 or Q4_K, which is 4.5 bits a weight, like the packed
model's. llama.cpp computes straight from the mapped file or from repacked weights, a second copy in memory. In its last
layer it computes only the tokens whose logits are asked for.
"""

import argparse
import ctypes
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

Q4_0 = np.dtype([("scale", "<f2"), ("codes", "u1", 16)])  # 32 weights, each scale * (code - 8)
Q4_K = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("scales", "u1", 12), ("codes", "u1", 128)])  # 256 weights
BLOCKS = {"q4_0": (gguf.GGMLQuantizationType.Q4_0, Q4_0, 32), "q4_k": (gguf.GGMLQuantizationType.Q4_K, Q4_K, 256)}
CODE_SPREAD = 4.61  # standard deviation of 0 .. 15
NESTED_SPREAD = 254  # of scale * code - 7.5 * minimum, with random scales and minima of 6 bits
ERROR = 4  # llama.cpp's number of that level of log messages


@llama_cpp.llama_log_callback
def log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    if level == ERROR:
        print(text.decode(), end="", file=sys.stderr)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("model", type=Path, help="of the qwen3_moe family, made by make_random_model.py")
    made.add_argument("gguf", type=Path, help="the same shapes for llama.cpp")
    made.add_argument("--type", choices=BLOCKS, default="q4_0", help="of every matrix (%(default)s)")
    options = made.parse_args()
    config = json.loads((options.model / "config.json").read_text())
    if config["model_type"] != "qwen3_moe":
        raise SystemExit(f"error: {options.model} is a {config['model_type']} model; only qwen3_moe is known here")
    write_gguf(config, options.gguf, options.type)
    copy_tokenizer(options.model, options.gguf)


# The model file.


def tensors(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Returns (name, shape) of every tensor in file order; matrices and stacks of them are [..., outputs, inputs]."""
    hidden, head, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts, width = config["num_experts"], config["moe_intermediate_size"]
    yield "token_embd", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q_norm": (head,), "attn_k_norm": (head,)}
        attention = {"attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
        mixture = {f"ffn_{part}_exps": (experts, width, hidden) for part in ("gate", "up")}
        outputs = {"attn_output": (hidden, queries), "ffn_down_exps": (experts, hidden, width)}
        block: dict[str, tuple[int, ...]] = {**norms, **attention, "ffn_gate_inp": (experts, hidden), **mixture}
        yield from ((f"blk.{layer}.{name}", shape) for name, shape in (block | outputs).items())
    yield "output_norm", (hidden,)
    yield "output", (vocab, hidden)


def size(shape: tuple[int, ...], type: str = "q4_0") -> int:
    """Returns the bytes of a tensor in the file. Matrices of both types have 4.5 bits a weight."""
    _, block, weights = BLOCKS[type]
    count = int(np.prod(shape))
    return 4 * count if len(shape) == 1 else count // weights * block.itemsize


def write_gguf(config: dict, path: Path, type: str) -> None:
    """Writes one tensor after the other, under another name until the file is complete."""
    unfinished, rng = path.with_suffix(".part"), np.random.default_rng(0)
    writer = gguf.GGUFWriter(unfinished, "qwen3moe")
    add_header(writer, config)
    for name, shape in tensors(config):
        dtype, kind = (np.float32, None) if len(shape) == 1 else (np.float16, BLOCKS[type][0])
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(dtype), size(shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, shape in tensors(config):
        writer.write_tensor_data(np.ones(shape, np.float32) if len(shape) == 1 else quantised(rng, shape, type))
    writer.close()
    unfinished.rename(path)


def copy_tokenizer(model: Path, path: Path) -> None:
    """Puts the model's tokenizer beside the file, which has none, so that we can read it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, path.with_name(name))


def add_header(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def quantised(rng: np.random.Generator, shape: tuple[int, ...], type: str) -> np.ndarray:
    """Returns the blocks of a random matrix of standard deviation 1/sqrt(inputs)."""
    blocks = rng.integers(0, 2**16, size(shape) // 2, np.uint16).view(BLOCKS[type][1])
    spread = CODE_SPREAD if type == "q4_0" else NESTED_SPREAD
    step = rng.uniform(0.8, 1.2, blocks.shape) * shape[-1] ** -0.5 / spread
    # The codes have a mean other than zero. If all had the same sign, it would add up, layer by layer, and make all
    # tokens alike.
    blocks["scale"] = np.where(rng.random(blocks.shape) < 0.5, step, -step)
    if type == "q4_k":
        blocks["minimum"] = 7.5 * blocks["scale"]
    return blocks


# The runs.


class Runner:
    """One loaded model with a context; `model` and `run` are fields of llama.cpp's parameters of each."""

    def __init__(self, options: argparse.Namespace, repack: bool, model: dict | None = None, run: dict | None = None):
        params = llama_cpp.llama_model_default_params()
        params.load_mode, params.use_extra_bufts = llama_cpp.LLAMA_LOAD_MODE_MMAP, repack
        for name, value in (model or {}).items():
            setattr(params, name, value)
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(options.gguf), params)
        if not self.model:
            raise SystemExit(f"error: llama.cpp cannot load {options.gguf}; it must be written anew")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_threads, context.n_threads_batch = options.context, options.threads, options.threads
        for name, value in (run or {}).items():
            setattr(context, name, value)
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        """Runs a batch and returns the logits of its last token. They are valid until the next call."""
        ids = (llama_cpp.llama_token * len(tokens))(*tokens.tolist())  # the batch only has a pointer to it
        if code := llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(ids, len(tokens))):
            raise SystemExit(f"error: llama_decode returned {code}; do prompt and tokens fit the context?")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, -1), (self.vocab,))


if __name__ == "__main__":
    main()

"""Compares our logits of tiny GGUF files with those of llama.cpp's library on the same values in float32.

    pip install llama-cpp-py-sync==0.11739    # llama.cpp b11739, compiled
    python scripts/goldens/compare_llama_cpp.py [--only FAMILY ...]

The files are those of the tests: what llama.cpp's converter made where `make_gguf_goldens.py` stored it, and else what
`tests/support/gguf_models.py` writes. Experts are in Q8_0; llama.cpp gets their values. For each family one line has
the greatest difference of a logit, and the first position with one of more than 5e-5, or why llama.cpp does not run the
file. `KEYS` says where llama.cpp computes something else than the published model, and what makes both the same.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import gguf_models
import goldens

from moeflux_mlx.opening.engine import load_model

TOLERANCE = 5e-5
# llama.cpp's library rounds to float16 in flash attention (it chooses MiniMax's blocks in no other) and in GELU. The
# positions of Mistral's golden are about 8,192, whose angles float32 rounds.
ROUNDED = {"minimax_m3_vl": 5e-3, "gemma4": 1e-2, "mistral4": 1e-3}
FLASH = ("minimax_m3_vl",)
# Metadata of both files that make both engines compute the same, or a shape that llama.cpp takes.
KEYS = {
    # llama.cpp rounds the bounds of YaRN's ramp, gpt-oss does not; this makes the upper one nearly 2.
    "gpt_oss": {"rope.scaling.yarn_beta_slow": 16 / (2 * np.pi) * 150000 ** (-1.99999 / 16)},
    "laguna": {"rope.scaling.yarn_attn_factor": 1.2079442},  # llama.cpp computes this, whatever the key says
    # In norms of latents (DeepSeek's) and of keys (Kimi's) llama.cpp has the model's epsilon, published code this one.
    **dict.fromkeys(("glm4_moe_lite", "kimi_linear", "kimi_k3"), {"attention.layer_norm_rms_epsilon": 1e-6}),
    # llama.cpp turns an indexer's keys by Hadamard matrices of 64 and more.
    "deepseek_v32": {"attention.indexer.key_length": 64},
    "deepseek_v4": {"attention.indexer.key_length": 128},
    "glm_moe_dsa": {"attention.indexer.key_length": 64, "attention.layer_norm_rms_epsilon": 1e-6},
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe"), {"ssm.inner_size": 128}),  # values as wide as keys
    "qwen4_exp": {"embedding_length_per_layer_input": 32},  # all rows of a token together as wide as the model
    "olmoe": {"attention.head_count_kv": 4},  # as many key heads as heads
}
# Metadata of llama.cpp's file alone.
THEIRS = {
    "mimo_v2_flash": {"attention.sliding_window": 8},  # in transformers so many positions before the query's own
    # The converter leaves these out; ours are the published model's.
    "mistral4": {"attention.temperature_scale": 0.1, "attention.temperature_length": 8192},
    "ernie4_5_moe": {"expert_shared_feed_forward_length": 128},  # ours has it from the shapes of tensors
}
LINEAR = {
    **{"attn_qkv.weight": (256, 128), "attn_gate.weight": (128, 128), "ssm_conv1d.weight": (256, 4)},
    **{"ssm_out.weight": (128, 128), "ssm_norm.weight": (32,)},
}
INDEXER = {"indexer.k_norm.weight": (64,), "indexer.k_norm.bias": (64,), "indexer.attn_k.weight": (64, 128)}
QUERIES = "indexer.attn_q_b.weight"
# Shapes of tensors, by the ends of their names, that these metadata want; values are the file's, repeated or cut off.
SHAPES = {
    "deepseek_v32": INDEXER | {QUERIES: (6 * 64, 64)},
    "deepseek_v4": {
        **{"indexer_compressor_ape.weight": (4, 256), "indexer_compressor_norm.weight": (128,)},
        **dict.fromkeys(("indexer_compressor_gate.weight", "indexer_compressor_kv.weight"), (256, 128)),
        QUERIES: (4 * 128, 64),
    },
    "glm_moe_dsa": INDEXER | {QUERIES: (4 * 64, 64)},
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe"), LINEAR),
    "qwen4_exp": {
        **{"per_layer_token_embd.weight": (256, 32), "ple_key.weight": (512, 128), "ple_value.weight": (128, 128)},
    },
    "olmoe": {"attn_k.weight": (128, 128), "attn_v.weight": (128, 128), "attn_k_norm.weight": (128,)},
}
# What the converter writes of published models, and ours needs not: a quarter of a wide head's pairs rotates.
EXTRA = {"gemma4": {"rope_freqs.weight": np.repeat(np.float32([1, 1e30]), [8, 24])}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="FAMILY", default=gguf_models.ARCHITECTURES)
    mx.set_default_device(mx.cpu)
    for family in parser.parse_args().only:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{family:18} {gguf_models.ARCHITECTURES[family]:18} {compared(family, Path(folder))}", flush=True)


def compared(family, folder):
    """Returns what is to be said of a family."""
    plain, path, twin, result = (folder / name for name in ("plain.gguf", "m.gguf", "twin.gguf", "theirs.npy"))
    types = lambda name: "Q8_0" if "_exps" in name else "F32"  # noqa: E731
    gguf_models.write_gguf(plain, family, types, extra=EXTRA.get(family))
    write_again(plain, path, KEYS.get(family, {}), SHAPES.get(family, {}))
    write_again(path, twin, THEIRS.get(family, {}), as_floats=True)
    tokens, first = goldens.golden(family)[0], goldens.first_position(family)
    arguments = twin, tokens, first, family in FLASH, result
    process = multiprocessing.get_context("spawn").Process(target=run_theirs, args=arguments)
    process.start()  # an assertion of theirs ends the process
    process.join()
    if not result.exists():
        reason = folder / "reason"
        return f"refused: {reason.read_text() if reason.exists() else f'exit code {process.exitcode}'}"
    differences = np.abs(ours(path, tokens, first) - np.load(result)).max(axis=1)
    far = np.flatnonzero(~(differences < ROUNDED.get(family, TOLERANCE)))
    where = f"differs from position {far[0]} of {len(tokens)}" if len(far) else "agrees"
    return f"{differences.max():.1e} {where}"


def write_again(source, target, keys, shapes=None, as_floats=False):
    """Writes a GGUF once more.

    Args:
        keys: other values of the architecture's keys.
        shapes: other shapes of tensors, by the ends of their names.
        as_floats: experts have float32 values.
    """
    read = gguf.GGUFReader(source)
    architecture = read.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in read.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            value = keys.get(key.removeprefix(f"{architecture}."), field.contents())
            writer.add_key_value(key, value, *field.types[:2])
    for key in keys:
        if f"{architecture}.{key}" not in read.fields:
            value = keys[key]
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    for tensor in read.tensors:
        array, kind = reshaped(tensor, keys, shapes or {}), None
        if tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0:
            kind = None if as_floats else tensor.tensor_type
            array = gguf.quants.dequantize(array, tensor.tensor_type) if as_floats else array
        writer.add_tensor(tensor.name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reshaped(tensor, keys, shapes):
    """Returns a tensor's values in the shape that these metadata want."""
    shape = next((one for end, one in shapes.items() if tensor.name.endswith(end)), None)
    array = np.resize(tensor.data, shape) if shape else tensor.data
    if shape and tensor.name.endswith(QUERIES):  # so that one head gives each key a score: equal scores have no order
        width = keys["attention.indexer.key_length"]
        array[width : 2 * width] = -array[:width]
    return array


def ours(path, tokens, first):
    """Returns our logits, float32 [T, V]."""
    model = load_model(path, dtype=mx.float32)
    cache = model.make_cache()
    for layer in cache:
        layer.shift(first)
    logits = np.array(model(mx.array(tokens)[None], cache)[0])
    model.experts.close()
    return logits


def run_theirs(path, tokens, first, is_flash, result):
    """Stores llama.cpp's logits, float32 [T, V], or beside them why there are none."""
    from llama_cpp_py_sync._cffi_bindings import get_ffi, get_lib

    os.environ["GGML_NO_BACKTRACE"] = "1"
    ffi, lib, said = get_ffi(), get_lib(), []

    @ffi.callback("void(enum ggml_log_level, const char *, void *)")
    def log(level, text, _):
        if level == lib.GGML_LOG_LEVEL_ERROR:
            said.append(ffi.string(text).decode().strip())

    lib.llama_log_set(log, ffi.NULL)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(os.fsencode(path), lib.llama_model_default_params())
    if model == ffi.NULL:
        result.with_name("reason").write_text(said[0])
        return
    context = lib.llama_init_from_model(model, parameters(lib, len(tokens), is_flash))
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), first + i, 1, 1
        batch.seq_id[i][0] = 0
    if code := lib.llama_decode(context, batch):
        result.with_name("reason").write_text(f"llama_decode returned {code}")
        return
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    rows = [ffi.buffer(lib.llama_get_logits_ith(context, i), 4 * size)[:] for i in range(len(tokens))]
    np.save(result, np.frombuffer(b"".join(rows), np.float32).reshape(len(tokens), size))


def parameters(lib, tokens, is_flash):
    """Returns llama.cpp's parameters of a context: one batch, caches in float32."""
    made = lib.llama_context_default_params()
    made.n_ctx = made.n_batch = made.n_ubatch = max(512, tokens)
    made.n_threads = made.n_threads_batch = 1
    made.type_k = made.type_v = lib.GGML_TYPE_F32
    made.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if is_flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return made


if __name__ == "__main__":
    main()

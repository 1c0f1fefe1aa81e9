"""Tiny packed models of every family that run, made by `convert` once per run of the tests, for all workers.

`tiny_directory` has a tokenizer and a chat template beside the weights, so that commands can be tested on it as users
run them. The weights are random, so the text that they write is random too.
"""

import contextlib
import functools
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import goldens
import mlx.core as mx
import numpy as np
from minmax import convert
from once import made_once
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import native

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "tests" / "fixtures" / "templates"
MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
THINK = ("<think>", "</think>")
NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}  # left out so that the vocabulary fits the tiny 256


_making = threading.Lock()


def tiny_directory(family, variant="mlx4", template="qwen3_style"):
    """Returns a packed model with tokenizer and chat template. Tests share it and must not write into it."""
    with _making:  # the threads of a test may ask for the same model
        return _directory(family, variant, template)


@functools.cache
def _directory(family, variant, template):
    def make(path):
        with on_cpu():  # a GPU rounds some weights differently, and the goldens were made on a CPU
            convert(goldens.checkpoint_dir(family, variant), path)
        write_tokenizer(path, template)

    return made_once(f"{family}-{variant}-{template}", make)


def tiny_model(family, dtype=None, variant="mlx4"):
    """Returns the model of `tiny_directory`, with activations and caches in `dtype`, one for each default device."""
    return _model(family, dtype, variant, str(mx.default_device()))


@functools.cache
def _model(family, dtype, variant, device):
    return load_model(tiny_directory(family, variant), dtype=dtype)


def with_config(source, path, change):
    """Returns the model with other values in the text part of its configuration."""
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    config.get("text_config", config).update(change)
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config))
    return path


@contextlib.contextmanager
def on_cpu():
    """Makes MLX compute on the CPU."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        yield
    finally:
        mx.set_default_device(before)


def use_plain_operations(patch):
    """Does what the fixture `plain_operations` does, until `patch` ends."""
    patch.setattr(native, "available", lambda: False)
    patch.setattr(native, "warn_if_missing", lambda: None)


def child_environment(first=ROOT):
    """Returns the environment for a child that imports what this process can, from the folder `first` before others."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(first), *sys.path])}


def write_tokenizer(path, template):
    """Writes a byte-level vocabulary of 248 tokens with ChatML markers and thinking tags, for any text."""
    letters = [letter for byte, letter in sorted(_byte_letters().items()) if byte not in NEVER_IN_UTF8]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in THINK])
    tokenizer.save(str(path / "tokenizer.json"))
    ends = [tokenizer.token_to_id(marker) for marker in MARKERS[1:]]
    _write_json(path / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    _write_json(path / "generation_config.json", {"eos_token_id": ends})
    shutil.copy(TEMPLATES / f"{template}.jinja", path / "chat_template.jinja")


def _byte_letters():
    """Returns byte -> its letter in byte-level vocabularies: itself if printable, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def _write_json(path, value):
    path.write_text(json.dumps(value))


def logits_of_calls(model, tokens, lengths, cache=None):
    """Returns [T, V]: logits of tokens that are given in calls of these lengths."""
    cache, parts, start = cache or model.make_cache(), [], 0
    for length in lengths:
        parts.append(model(mx.array(tokens[None, start : start + length]), cache))
        start += length
    return np.array(mx.concatenate(parts, axis=1)[0])

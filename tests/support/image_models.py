"""Tiny models that read images, and images of random rows for models that read none."""

import functools
import hashlib
import json
import tempfile
from pathlib import Path

import goldens
import image_goldens
import mlx.core as mx
import numpy as np
import pytest
from minmax import convert
from tiny_models import TEMPLATES, on_cpu, write_tokenizer
from tokenizers import Tokenizer

from moeflux_mlx.driving.prompt import with_images
from moeflux_mlx.model.images import ImageRows
from moeflux_mlx.vision import encoder

MARKERS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
needs_encoder = pytest.mark.skipif(
    not encoder.is_installed(), reason="mlx-vlm is not installed: pip install --no-deps mlx-vlm==0.7.10 pillow"
)


@functools.cache
def _kept():
    return tempfile.TemporaryDirectory(prefix="moeflux-images-")


def image_template():
    """Returns a fixture's template with places for images, and with reasoning only if it is requested."""
    text = (TEMPLATES / "qwen35_style.jinja").read_text()
    for old, new in {
        "'image' in part or part.type == 'image_url'": "part.type == 'image'",
        "raise_exception('Images are not supported.')": f"'{''.join(MARKERS)}'",
        "enable_thinking is defined and not enable_thinking": "not enable_thinking",
        r"'<think>\n\n</think>\n\n'": "''",
    }.items():
        assert old in text
        text = text.replace(old, new)
    return text


@functools.cache
def image_directory(family):
    """Returns a packed model with its encoder, tokenizer and template. Do not write into it."""
    path = Path(_kept().name) / family
    checkpoint = image_goldens.write(path.with_name(f"{family}-checkpoint"), family)
    with on_cpu():
        convert(checkpoint, path)
    write_tokenizer(path, "qwen3_style")
    (path / "chat_template.jinja").write_text(image_template())
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    names = dict(zip(image_goldens.special_tokens(family), MARKERS, strict=True))
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([names.get(i, f"<|unused {i}|>") for i in range(size, 256)])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def quantised_in_place(family):
    """Returns a checkpoint that can be used in place: MLX's, with the encoder next to the text part."""
    path = image_directory(family).with_name(f"{family}-in-place")
    if path.exists():
        return path
    path.mkdir()
    text = goldens.mlx_tensors(image_goldens.text_family(family), "mlx4")
    tower = {f"vision_tower.{encoder.plain_name(n)}": t for n, t in image_goldens.encoder_tensors(family).items()}
    if family == "kimi_k25":
        tower = image_goldens.encoder_tensors(family)
        text = {f"language_model.{name.removeprefix('language_model.')}": one for name, one in text.items()}
    goldens.write_safetensors(path / "model.safetensors", {**text, **tower})
    config = image_goldens.config(family)
    quantised = goldens.variant_config(image_goldens.text_family(family), "mlx4")
    config["quantization"] = config["quantization_config"] = quantised["quantization"]
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps(image_goldens.PROCESSORS[family]))
    return path


def golden_prompt(family, vision, count):
    """Returns the golden's text with the first `count` images, and its logits."""
    stored, row = image_goldens.stored(family), image_goldens.special_tokens(family)[1]
    tokens, logits = stored[f"tokens{count}"].tolist(), stored[f"logits{count}"]
    short = [token for i, token in enumerate(tokens) if not (i and token == tokens[i - 1] == row)]
    prompt = with_images(short, [vision.image(image_goldens.png(family, i)) for i in range(count)], vision.token)
    assert prompt.tokens.tolist() == tokens
    return prompt, logits


class RandomImage:
    """An image of random rows. Images with the same `seed` are alike."""

    def __init__(self, seed, grid, hidden_size, by_axes=True, deep=0):
        self.length, self.grid = grid[0] * grid[1], grid if by_axes else None
        self.digest = hashlib.sha256(f"{seed} {grid}".encode()).digest()
        draw = np.random.default_rng(seed)
        self._arrays = [mx.array(draw.normal(size=(self.length, hidden_size)), mx.float32) for _ in range(1 + deep)]
        self.asked = self.forgotten = 0

    def rows(self, encoder):
        self.asked += 1
        return ImageRows(self._arrays[0], self._arrays[1:])

    def forget(self):
        self.forgotten += 1


def random_image(family, seed=0, grid=(3, 4), **options):
    return RandomImage(seed, grid, goldens.text_config(family)["hidden_size"], **options)

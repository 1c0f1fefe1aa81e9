"""Tiny random checkpoints that read images, images for them, and golden logits of texts with images.

The text part is that of `goldens.py`, the encoder's weights are drawn like its tensors; names and shapes are stored as
transformers has them. `scripts/goldens/make_image_goldens.py` made what is stored, with transformers in float32, eager:
for each family the pixels of two images as transformers' own processor hands them to the encoder (as levels 0 to 255),
and tokens and logits of a text with the first image and of one with both.
"""

import io
import json
from pathlib import Path

import goldens
import numpy as np

FIXTURES = goldens.FIXTURES.parent / "images"
FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "kimi_k25")
TEXT = {"kimi_k25": "kimi_k2"}  # family -> the family of its text part
TOKENS = {"qwen3_5_moe": (246, 248, 247), "kimi_k25": (240, 241, 242)}  # before an image, of its rows, and after it
SIZES = {"qwen3_5_moe": ((53, 31), (17, 26))}  # width and height of the two images; the first one is made smaller
CHANGES = {  # in `vision_config`: what an encoder can have beyond the text tests' configuration
    "qwen3_vl_moe": {"depth": 2, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5_moe": {"depth": 2},
    "glm4v_moe": {"depth": 2, "image_size": 56},
}
KIMI_NAMES = {  # in `vision_config`: transformers' names for fields that the publisher names differently
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_attention_heads": "vt_num_attention_heads",
    "num_hidden_layers": "vt_num_hidden_layers",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
    "pos_emb_time": "init_pos_emb_time",
}
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
PROCESSORS = {
    "qwen3_vl_moe": {
        "size": {"shortest_edge": 32 * 32 * 2, "longest_edge": 32 * 32 * 17},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **HALVES,
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    "qwen3_5_moe": {
        "size": {"shortest_edge": 8 * 8 * 2, "longest_edge": 8 * 8 * 17},
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **HALVES,
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    "glm4v_moe": {
        "size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 2 * 17},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **CLIP,
        "image_processor_type": "Glm4vImageProcessor",
    },
    "kimi_k25": {
        "media_proc_cfg": {
            "in_patch_limit": 70,
            "patch_size": 14,
            "merge_kernel_size": 2,
            "patch_limit_on_one_side": 512,
            **HALVES,
        }
    },
}


def text_family(family):
    return TEXT.get(family, family)


def config(family):
    """Returns config.json of the checkpoint as a dict."""
    whole = goldens.config(text_family(family))
    if family == "kimi_k25":
        vision = {
            "model_type": "kimi_k25",
            "patch_size": 14,
            "init_pos_emb_height": 6,
            "init_pos_emb_width": 6,
            "init_pos_emb_time": 4,
            "vt_num_attention_heads": 2,
            "vt_num_hidden_layers": 2,
            "vt_hidden_size": 32,
            "vt_intermediate_size": 64,
            "merge_kernel_size": [2, 2],
            "mm_hidden_size": 32,
            "text_hidden_size": 128,
            "projector_ln_eps": 1e-5,
        }
        outer = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"]}
        whole = {**outer, "text_config": whole, "vision_config": vision, "media_placeholder_token_id": 241}
    whole["vision_config"] |= CHANGES.get(family, {})
    return whole


def special_tokens(family):
    """Returns the ids of the token before an image, of its rows, and of the token after it."""
    return TOKENS.get(family, (252, 250, 253))


def image(family, number):
    """Returns an RGB image, uint8 [height, width, 3]: gradients and a square."""
    width, height = SIZES.get(family, ((170, 110), (70, 100)))[number]
    y, x = np.mgrid[:height, :width]
    levels = np.stack([x * 255 // width, y * 255 // height, (x * 7 + y * (5 + number)) % 256], axis=-1).astype(np.uint8)
    levels[height // 4 : height // 2, width // 3 : width // 2] = 255 - 40 * number
    return levels


def png(family, number):
    """Returns the same as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image(family, number)).save(file, "PNG")
    return file.getvalue()


def encoder_tensors(family):
    """Returns {the checkpoint's name: Tensor} of the encoder, bfloat16."""
    shapes = json.loads((FIXTURES / f"{family}.json").read_text())
    return {
        name: goldens._draw(f"{family}/{name}", family, tuple(shape), _kind(name)) for name, shape in shapes.items()
    }


def _kind(name):
    if name.endswith(".bias"):
        return "bias"
    is_norm = "norm" in name.rpartition(".")[0].rpartition(".")[2]
    return "norm" if is_norm else "embed" if "pos_emb" in name or "position_embedding" in name else "linear"


def write(path, family):
    """Writes the checkpoint with its encoder in its publisher's layout."""
    path = Path(path)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config(family)))
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    goldens.write_safetensors(path / "model.safetensors", {**text_tensors(family), **encoder_tensors(family)})
    return path


def text_tensors(family):
    """Returns {the checkpoint's name: Tensor} of the text part."""
    tensors = goldens.source(text_family(family))
    return {f"language_model.{name}": one for name, one in tensors.items()} if family == "kimi_k25" else tensors


def stored(family):
    """Returns the stored arrays {"pixels0", "grid0", ... "tokens1", "logits1", "tokens2", "logits2"}."""
    with np.load(FIXTURES / f"{family}.npz") as arrays:
        return dict(arrays)

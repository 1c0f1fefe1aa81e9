"""Makes the contents of tests/fixtures/images with Hugging Face transformers: pixels, and golden logits of texts with
images.

Needs torch and transformers (not needed by the tests), and for the pixels of Kimi-K2.5, whose processor in
transformers is not on PIL, mlx-vlm:

    python scripts/goldens/make_image_goldens.py [--only FAMILY ...]

For each family it reads the images of `tests/support/image_goldens.py` with transformers' own processor, on PIL where
there is one, and puts the dequantised weights of the text part and the encoder's into the transformers model, in
float32 and eager. It stores nothing when a tensor is missing or unexpected, or a token's routing is nearly tied.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from make_goldens import MARGIN, Margins
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import goldens  # noqa: E402
import image_goldens  # noqa: E402

CANDIDATES = 40
PARTS = ("model.visual.", "vision_tower.", "mm_projector.")
CLASSES = {
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "Qwen2VLImageProcessorPil"),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "Qwen2VLImageProcessorPil"),
    "glm4v_moe": ("Glm4vMoeForConditionalGeneration", "Glm4vImageProcessorPil"),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", "KimiK25ImageProcessor"),
}


def processor(family):
    if family == "kimi_k25":
        from mlx_vlm.models.kimi_k25.processing_kimi_k25 import KimiK25ImageProcessor

        settings = dict(image_goldens.PROCESSORS[family]["media_proc_cfg"])
        merge = [settings.pop("merge_kernel_size")] * 2
        return KimiK25ImageProcessor(in_token_limit=settings.pop("in_patch_limit"), merge_kernel_size=merge, **settings)
    module = {"Qwen2VLImageProcessorPil": "qwen2_vl", "Glm4vImageProcessorPil": "glm4v"}
    name = CLASSES[family][1]
    file = f"transformers.models.{module[name]}.image_processing_pil_{module[name]}"
    made = getattr(__import__(file, fromlist=[name]), name)
    settings = {k: v for k, v in image_goldens.PROCESSORS[family].items() if k != "image_processor_type"}
    return made(**settings)


def read_images(family):
    """Returns [(pixel values [patches, .], grid [3])] of the two images."""
    read = processor(family)
    if family == "kimi_k25":
        from PIL import Image

        outputs = (read([Image.fromarray(image_goldens.image(family, i))]) for i in range(2))
        return [(np.array(one["pixel_values"]), np.array([1, *one["image_grid_hws"][0].tolist()])) for one in outputs]
    outputs = (read(images=[image_goldens.image(family, i)], return_tensors="np") for i in range(2))
    return [(one["pixel_values"], one["image_grid_thw"][0]) for one in outputs]


def levels(family, pixels):
    """Returns the levels 0 to 255 from which the pixel values were normalised. A patch is [3, 2, width, width], or has
    one frame.
    """
    settings = image_goldens.PROCESSORS[family]
    settings = settings.get("media_proc_cfg", settings)
    mean, std = (np.array(settings[name])[:, None, None, None] for name in ("image_mean", "image_std"))
    frames = 1 if family == "kimi_k25" else 2
    patches = pixels.reshape(len(pixels), 3, frames, settings["patch_size"], -1) * std + mean
    exact = np.rint(patches * 255)
    assert np.abs(exact - patches * 255).max() < 1e-3 and (exact[:, :, 0] == exact[:, :, -1]).all()
    return exact[:, :, 0].astype(np.uint8)


def encoder_shapes(model):
    """Returns {name: shape} of the encoder's tensors as they are published."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            shapes = {published(name): file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return {name: shape for name, shape in sorted(shapes.items()) if name.startswith(PARTS)}


def published(name):
    """Returns Kimi-K2.5's own name of a tensor that transformers saves under another name."""
    name = name.replace("vision_tower.encoder.patch_embed", "vision_tower.patch_embed")
    return name.removeprefix("model.") if "mm_projector" in name else name


def config_of_transformers(family):
    """Returns config.json as transformers reads it."""
    config = image_goldens.config(family)
    if family != "kimi_k25":
        return config
    vision, text = config["vision_config"], {**config["text_config"], "model_type": "deepseek_v3"}
    named = {theirs: vision[ours] for theirs, ours in image_goldens.KIMI_NAMES.items()}
    return {
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"patch_size": 14, **named},
        "projection_hidden_size": vision["mm_hidden_size"],
        "image_token_id": config["media_placeholder_token_id"],
        "video_token_id": 243,
        "tie_word_embeddings": False,
    }


def load_model(family):
    kind = getattr(transformers, CLASSES[family][0])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of_transformers(family)))
        empty = kind(transformers.AutoConfig.from_pretrained(folder))
        (image_goldens.FIXTURES / f"{family}.json").write_text(json.dumps(encoder_shapes(empty), indent=1) + "\n")
        weights = goldens.dequantised(image_goldens.text_family(family))
        prefix = "language_model." if family == "kimi_k25" else ""
        weights = {prefix + n: ("F32", w.astype(np.float32)) for n, w in weights.items()}
        encoder = image_goldens.encoder_tensors(family)
        weights |= {n: ("F32", goldens.as_float(tensor).astype(np.float32)) for n, tensor in encoder.items()}
        goldens.write_safetensors(Path(folder) / "model.safetensors", weights)
        model, info = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    problems = {k: v for k, v in info.items() if v}
    if problems:
        raise SystemExit(f"{family}: {problems}")
    return model.eval()


def text(family, lengths, seed):
    """Returns token ids with images in between; `lengths` are their numbers of rows."""
    before, row, behind = image_goldens.special_tokens(family)
    draw = np.random.default_rng(seed)
    tokens = list(draw.integers(0, 240, 5))
    for length in lengths:
        tokens += [before, *[row] * length, behind, *draw.integers(0, 240, 4)]
    return np.array(tokens, np.int32)


def run(model, family, tokens, images):
    """Returns (margin of routing, logits [T, V])."""
    top_k = goldens.text_config(image_goldens.text_family(family))["num_experts_per_tok"]
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    given = {
        "pixel_values": torch.from_numpy(np.concatenate([pixels for pixels, _ in images])),
        "image_grid_thw": torch.from_numpy(np.stack([grid for _, grid in images])),
        "mm_token_type_ids": (ids == image_goldens.special_tokens(family)[1]).int(),
    }
    with torch.no_grad(), Margins(model, top_k) as found:
        output = model(ids, **given)
    return min(found), output


def make(family):
    model, images, arrays = load_model(family), read_images(family), {}
    merged = [int(np.prod(grid)) // 4 for _, grid in images]
    for i, (pixels, grid) in enumerate(images):
        arrays |= {f"pixels{i}": levels(family, pixels), f"grid{i}": grid.astype(np.int32)}
    for count in (1, 2):
        texts = (text(family, merged[:count], seed) for seed in range(CANDIDATES))
        runs = [(*run(model, family, tokens, images[:count]), tokens) for tokens in texts]
        margin, output, tokens = max(runs, key=lambda one: one[0])
        logits = output.logits[0].numpy()
        print(f"{family:14s} {count} images, {len(tokens)} tokens, margin {margin:.1e}, logits std {logits.std():.2f}")
        if margin < MARGIN:
            raise SystemExit(f"{family}: unsuitable, change the weights' seed")
        arrays |= {f"tokens{count}": tokens, f"logits{count}": logits.astype(np.float32)}
    np.savez_compressed(image_goldens.FIXTURES / f"{family}.npz", **arrays)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=CLASSES, metavar="FAMILY")
    torch.set_num_threads(1)
    image_goldens.FIXTURES.mkdir(exist_ok=True)
    for family in parser.parse_args().only:
        make(family)


if __name__ == "__main__":
    main()

"""Stores what llama.cpp's converter makes of the tiny checkpoints of `tests/support/goldens.py`.

    PYTHONPATH=$LLAMA:$LLAMA/gguf-py python scripts/goldens/make_gguf_goldens.py [--only [heads/]FAMILY ...]

LLAMA is the folder of llama.cpp (`vendor/llama.cpp`) in the source distribution of llama-cpp-python 0.3.36. Its
converter needs torch and transformers.

A family's JSON file has the metadata, and the names, types and shapes of the tensors. The values are those of the
checkpoint in another order, and some are changed; where each comes from is shown by a second conversion, of a
checkpoint whose values are numbers of places. `tests/support/converted_gguf.py` describes both files and builds the
GGUF again, for any weights; this script checks that it has the converter's values.
"""

import argparse
import json
import lzma
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
from conversion.base import LazyTorchTensor

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import converted_gguf
import goldens

OUT = converted_gguf.FOLDER
TOKENIZER = "tokenizer."
# Of these the converter read config.json itself: transformers did not know them, or not under their fields' names.
AS_PUBLISHED = ("qwen4_exp", "sarvam_moe", "minimax_m3_vl", "mimo_v2_flash", "bailing_hybrid")


def tags(weights):
    """Returns tensors of the same shapes whose values are 4, 8, 12 and so on; logarithms of them where the converter
    takes the exponential."""
    made, first = {}, 1
    for name in converted_gguf.order(weights):
        array = weights[name]
        places = 4.0 * np.arange(first, first + array.size).reshape(array.shape)
        first += array.size
        made[name] = np.log(places).astype(np.float32) if name.endswith("A_log") else places.astype(np.float32)
        if name.endswith((*goldens.INTEGERS, *converted_gguf.ONES)):
            made[name] = array
        elif name.endswith("tid2eid"):
            made[name] = places.astype(np.int64)
    assert first < 1 << 22, "float32 does not have so many numbers"
    return made


def converted(family, weights, file):
    """Returns the reader of the GGUF that the converter makes of a checkpoint of these weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(converted_gguf.config(family)))
        tensors = {
            name: ("I64" if array.dtype == np.int64 else "F32", np.ascontiguousarray(array))
            for name, array in weights.items()
        }
        goldens.write_safetensors(Path(folder) / "model.safetensors", tensors)
        hparams = converted_gguf.config(family)
        if family.removeprefix(converted_gguf.HEAD) not in AS_PUBLISHED:
            hparams = ModelBase.load_hparams(Path(folder), False)
        architecture = get_model_architecture(hparams, ModelType.TEXT)
        kind = get_model_class(architecture)
        kind = getattr(kind, "Mistral4Model", kind)
        kind.mtp_only = family.startswith(converted_gguf.HEAD)
        kind.set_vocab = lambda self: None
        kind._write_mxfp4_expert_tensor = _write_experts
        with torch.inference_mode():
            kind(Path(folder), gguf.LlamaFileType.ALL_F32, file, model_name="tiny", hparams=hparams).write()
    return gguf.GGUFReader(file)


def _write_experts(self, layer, name, tensor):
    """Stands for the method of DeepSeek-V4's converter that repacks published experts; ours are floats."""
    stem, count = f"layers.{layer}.ffn.experts", self.hparams["n_routed_experts"]
    names = [f"{stem}.{expert}.{name}.weight" for expert in range(count)]
    matrices = [LazyTorchTensor.to_eager(self.model_tensors[one]()).numpy() for one in names]
    self.gguf_writer.add_tensor(self.format_tensor_name(tensor, layer), np.stack(matrices))
    return names


def metadata_of(reader):
    """Returns {key: [type, or types of an array and its elements, value]} but for what names the file."""
    made = {}
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", TOKENIZER, "general.")) or key == "general.architecture":
            made[key] = [[kind.name for kind in field.types[:2]], field.contents()]
    return made


def source_of(tagged, array, weights):
    """Returns how a tensor is changed, and where its values come from."""
    values = np.asarray(tagged, np.float64)
    for change, places, error in (
        ("same", values, 0),
        ("plus one", values - 1, 0),
        ("minus exp", -values, 1),
        ("exp", values, 1),
    ):
        numbers = np.rint(places / 4)
        if (numbers > 0).all() and np.abs(places - 4 * numbers).max() <= error:
            places = numbers.astype(np.int64).reshape(-1) - 1
            is_of_logarithms = places.max() < sum(one.size for name, one in weights.items() if name.endswith("A_log"))
            return "exp" if is_of_logarithms and change == "same" else change, places
    start = 0  # the converter makes the mean zero, as it is in ours
    for name in converted_gguf.order(weights):
        if np.array_equal(weights[name].reshape(-1), array.reshape(-1)):
            return "same", np.arange(start, start + array.size)
        start += weights[name].size
    raise SystemExit(f"values like {values.reshape(-1)[:8]} are of no known change")


def store(family):
    """Stores the two files of a family."""
    weights = converted_gguf.hub_weights(family)
    with tempfile.TemporaryDirectory() as folder:
        real, tagged = (
            converted(family, some, Path(folder) / f"{i}.gguf") for i, some in enumerate((weights, tags(weights)))
        )
        places, tensors = [], {}
        for tensor, tag in zip(real.tensors, tagged.tensors, strict=True):
            assert (tensor.name, list(tensor.shape)) == (tag.name, list(tag.shape))
            if tensor.name.startswith(("rope_freqs", "rope_factors")):
                tensors[tensor.name] = [tensor.data.tolist()]
                continue
            change, where = source_of(tag.data, tensor.data, weights)
            tensors[tensor.name] = [change, tensor.tensor_type.name, list(map(int, tensor.shape[::-1]))]
            places.append(where)
        deltas = np.diff(np.concatenate(places), prepend=0).astype("<i4")
        (OUT / f"{family}.json").write_text(
            f'{{"metadata": {{\n{_lines(metadata_of(real))}\n}},\n"tensors": {{\n{_lines(tensors)}\n}}}}\n'
        )
        (OUT / f"{family}.places.xz").write_bytes(lzma.compress(deltas.tobytes(), preset=9 | lzma.PRESET_EXTREME))
        converted_gguf.recipe.cache_clear()
        for tensor, (name, kind, array, *_) in zip(real.tensors, converted_gguf.pieces(family, weights), strict=True):
            assert (tensor.name, tensor.tensor_type.name) == (name, kind)
            data = tensor.data.reshape(array.shape)
            assert np.allclose(data, array, rtol=1e-6, atol=0), name
            assert name.endswith(("ssm_a", "ssm_a.weight")) or np.array_equal(data, array), name
    size = sum((OUT / f"{family}{end}").stat().st_size for end in (".json", ".places.xz"))
    print(f"{family:16s} {len(tensors):4d} tensors {len(converted_gguf.metadata(family)):3d} keys {size / 1000:.0f} KB")


def _lines(entries):
    return ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="the families; otherwise those that are stored")
    arguments = parser.parse_args()
    of_heads = (converted_gguf.HEAD + family for family in converted_gguf.HEADED)
    for family in arguments.only or (*converted_gguf.FAMILIES, *of_heads):
        store(family)


if __name__ == "__main__":
    main()

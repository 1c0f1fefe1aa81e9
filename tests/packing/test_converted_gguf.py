"""Files that llama.cpp's converter wrote (`scripts/goldens/make_gguf_goldens.py`): their models, and the logits."""

from dataclasses import replace

import converted_gguf
import goldens
import numpy as np
import pytest
from minmax import convert
from test_gguf_families import LEAST, TOLERANCE, cache, logits, logits_of_chunks, type_of  # noqa: F401 (a fixture)

from moeflux_mlx.experts.tables import FileTable
from moeflux_mlx.families.registry import FAMILIES, GGUF
from moeflux_mlx.formats.gguf_file import open_gguf
from moeflux_mlx.opening.load_settings import locate
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.packing.gguf_tensors import GgufTensor, dequantized, joined
from moeflux_mlx.spec import ModelArgs

pytest.importorskip("gguf")
import gguf_models  # noqa: E402  (needs gguf)


@pytest.mark.parametrize("family", converted_gguf.FAMILIES)
def test_logits_are_those_of_the_checkpoint(tmp_path, family):
    """In place and streamed, whole and in pieces; converted they have the same bits. transformers made the golden; a
    model that the converter wanted changed has none, and the checkpoint's own reader stands for it.
    """
    path, checkpoint = tmp_path / "m.gguf", tmp_path / "hub"
    gguf_models.write_golden(path, family)
    converted_gguf.write_checkpoint(checkpoint, family, converted_gguf.hub_weights(family))
    ours, theirs = locate(path).args, ModelArgs.from_file(checkpoint)
    other = {"eos_token_ids": (), "model_type": ""}
    assert replace(ours, **other) == replace(theirs, **other)
    types = GGUF[converted_gguf.architecture(family)].types
    assert FAMILIES[theirs.model_type].read in {FAMILIES[one].read for one in types}
    if family in converted_gguf.GOLDEN:
        wanted = goldens.golden(family)[1]
    else:
        convert(checkpoint, tmp_path / "theirs")
        wanted = logits(tmp_path / "theirs", family)
    for made in logits_of_chunks(path, family, [None, 7], **LEAST):
        assert np.abs(made - wanted).max() < TOLERANCE


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_rows_of_a_table_in_place(tmp_path, kind):
    """Their values are those of the package, in blocks too; converted they give the same bits. Rows of 64 values are
    too short for a K type."""
    path, table = tmp_path / "m.gguf", "per_layer_token_embd.weight"
    of_others = type_of("qwen4_exp")
    gguf_models.write_gguf(path, "qwen4_exp", lambda name: kind if name == table else of_others(name))
    stored = open_gguf(path).tensors[table]
    ((_, files),) = open_weights(locate(path)).tables.items()
    reader = FileTable(files)
    rows = np.array([[[3, 250, 3, 0]]])
    made = np.array(reader.begin(rows).take(0, 1)).reshape(4, -1)
    reader.close()
    assert stored.type == {"Q4_K": "Q5_0"}.get(kind, kind)
    assert np.array_equal(made, dequantized(stored)[rows[0, 0]])
    convert(path, tmp_path / "packed")
    assert np.array_equal(logits(tmp_path / "packed", "qwen4_exp"), logits(path, "qwen4_exp", **LEAST))


def test_rows_of_joined_tensors(tmp_path):
    gguf_models.write_golden(tmp_path / "m.gguf", "dots1")
    stored = open_gguf(tmp_path / "m.gguf").tensors
    parts = [stored[f"blk.0.attn_{name}.weight"] for name in "qk"]
    tensors = [GgufTensor(one.name, one.file, one.offset, "F32", one.shape, stored=one) for one in parts]
    whole = joined("qk", tensors)
    values, start, stop = np.array(whole.read()), len(tensors[0].read()) - 3, len(tensors[0].read()) + 2
    assert np.array_equal(whole.rows(start, stop).read(), values[start:stop])
    assert np.array_equal(whole.rows(start, stop).rows(1, 4).read(), values[start + 1 : start + 4])
    assert whole.rows(start, stop).shape == (5, values.shape[1])

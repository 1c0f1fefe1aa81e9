"""GGUF's types with tables: separating keeps the bytes, and the values of random blocks are the `gguf` package's."""

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from minmax import convert
from test_gguf_families import TOLERANCE, cache, logits_of_every_way  # noqa: F401 (a fixture)

from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import table_values
from moeflux_mlx.ops.forms import unpacked_float32
from moeflux_mlx.packing.gguf_forms import FORMS, grids, repacked
from moeflux_mlx.packing.gguf_tables import SEPARATE
from moeflux_mlx.spec import ModelArgs

gguf = pytest.importorskip("gguf")
import gguf_models  # noqa: E402  (needs gguf)


def values(kind, rows):
    return np.array(unpacked_float32(FORMS[kind].quant, *map(mx.array, (*repacked(kind, rows), *grids(kind)))))


@pytest.mark.parametrize("kind", SEPARATE)
def test_every_value_is_that_of_gguf(kind):
    rows = gguf_models.random_blocks(kind, (3, 5, 768), 1)
    made = values(kind, rows)
    assert made.shape == (3, 5, 768) and np.array_equal(made, gguf_models.values_of(kind, rows))
    assert len(np.unique(made)) > 80


@pytest.mark.parametrize("kind", SEPARATE)
def test_separating_keeps_every_byte(kind):
    rows = gguf_models.random_blocks(kind, (2, 512), 2)
    parts = repacked(kind, rows)
    assert sum(part.nbytes for part in parts) == rows.nbytes
    if kind not in ("IQ1_M", "TQ1_0", "TQ2_0"):  # whose scales, or codes, have other places in their bytes
        made = np.concatenate([part.view(np.uint8).reshape(-1) for part in parts])
        assert np.array_equal(np.sort(made), np.sort(rows, axis=None))


DIGITS = table_values._digits
FAULTS = {
    "sign parity": ("IQ2_XXS", "_even", lambda signs: signs.astype(mx.uint8)),
    "the order of fields in a byte": ("IQ4_XS", "_bits", lambda data, width: _backwards(data, width)),
    "the order of digits": ("TQ1_0", "_digits", lambda data, count: DIGITS(data, count)[..., ::-1]),
}


def _backwards(data, width):
    shifts = mx.arange(8 * data.dtype.size - width, -1, -width).astype(data.dtype)
    return (data[..., None] >> shifts & ((1 << width) - 1)).reshape(*data.shape[:-1], -1)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(monkeypatch, name):
    kind, function, instead = FAULTS[name]
    monkeypatch.setattr(table_values, function, instead)
    rows = gguf_models.random_blocks(kind, (2, 512), 3)
    assert not np.array_equal(values(kind, rows), gguf_models.values_of(kind, rows))


# ---- models


TYPES = {
    **{"blk.0.ffn_down_exps": "IQ4_XS", "blk.0.ffn": "IQ3_XXS", "blk.1.ffn_down_exps": "IQ3_S", "blk.1.ffn": "IQ2_S"},
    **{"blk.2.ffn_down_exps": "TQ1_0", "blk.2.ffn": "TQ2_0", "attn_k.": "TQ2_0", "attn_v.": "TQ1_0"},
    **{"ffn_down_exps": "IQ4_NL", "ffn": "IQ2_XXS", "attn_output": "IQ4_XS", "attn": "IQ2_XS", "token_embd": "IQ3_S"},
}


@pytest.fixture
def family(monkeypatch):
    """A model whose matrices have rows of 256 columns."""
    config = goldens.config("qwen3_moe") | {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8}
    monkeypatch.setattr(goldens, "config", lambda family: dict(config))
    goldens.hub_tensors.cache_clear()
    yield "qwen3_moe"
    goldens.hub_tensors.cache_clear()


def type_of(name):
    return next((kind for part, kind in TYPES.items() if part in name), "Q8_0")


def test_a_model_in_place_and_converted(tmp_path, family):
    """Every way to open it has the same bits."""
    path, packed = tmp_path / "m.gguf", tmp_path / "packed"
    weights = gguf_models.write_gguf(path, family, type_of)
    tokens, _ = goldens.golden(family)
    wanted = oracle.forward(goldens.config(family), weights, tokens[:12])
    (made,) = logits_of_every_way(path, packed, tokens[:12])
    assert "Permission is hereby granted" in (packed / "LICENSE-GGUF.txt").read_text()
    assert np.abs(made - wanted).max() < TOLERANCE


def test_tables_that_differ_are_refused(tmp_path, family):
    """In the first or the last record of a layer."""
    path, packed = tmp_path / "m.gguf", tmp_path / "packed"
    gguf_models.write_gguf(path, family, type_of)
    convert(path, packed)
    layout = open_packed(packed, ModelArgs.from_file(packed)).layout
    file, last = packed / "packed_experts" / layout.file_name(1), layout.num_experts - 1
    place = layout.start(1, last) + layout.records[1].projections[-1].codes[-1].offset
    data = bytearray(file.read_bytes())
    data[place + 5] ^= 8
    file.write_bytes(data)
    with pytest.raises(ModelFileError, match=f"down_proj.grid of expert {last} of layer 1 is another table than down"):
        load_model(packed)


def test_the_licence_of_grids_outside_the_experts(tmp_path, family):
    for kind, has_grid in (("IQ3_S", True), ("IQ4_XS", False)):
        path, packed = tmp_path / f"{kind}.gguf", tmp_path / kind
        gguf_models.write_gguf(path, family, lambda name, kind=kind: kind if "token_embd" in name else "Q8_0")
        convert(path, packed)
        assert (packed / "LICENSE-GGUF.txt").exists() == has_grid


def test_forms_that_mlx_lm_does_not_read_are_refused(tmp_path, family):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, family, type_of)
    with pytest.raises(ConfigError, match="--layout mlx: .* which mlx-lm does not read"):
        convert(path, tmp_path / "out", layout="mlx")


def test_experts_of_other_types_are_refused(tmp_path, monkeypatch, family):
    monkeypatch.delitem(FORMS, "TQ1_0")
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, family, lambda name: "TQ1_0" if "ffn_up_exps" in name else type_of(name))
    for opens in (load_model, lambda path: convert(path, tmp_path / "packed")):
        with pytest.raises(
            ModelFileError, match="blk.0.ffn_up_exps.weight has type TQ1_0, .* not read yet; read are Q4"
        ):
            opens(path)

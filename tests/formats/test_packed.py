"""Packed expert files: offsets compared with the format's description, and directories that are wrong in every way."""

import json

import numpy as np
import oracle
import pytest

from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.formats.layout_file import to_json
from moeflux_mlx.formats.packed import FOLDER, open_packed
from moeflux_mlx.formats.record import STRIDE_ALIGNMENT, ExpertLayout
from moeflux_mlx.spec import ModelArgs


def tiny_args(layers=2, experts=4, hidden=128, inner=64):
    return ModelArgs.from_dict(
        {
            "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "rope_theta": 1e4,
            "max_position_embeddings": 128, "num_experts": experts, "num_experts_per_tok": 2,
            "moe_intermediate_size": inner, "norm_topk_prob": True,
        }
    )  # fmt: skip


@pytest.fixture
def model_dir(tmp_path):
    layout = ExpertLayout.from_args(tiny_args())
    folder = tmp_path / FOLDER
    folder.mkdir()
    for layer in layout.moe_layers:
        (folder / layout.file_name(layer)).write_bytes(bytes(layout.layer_bytes(layer)))
    (folder / "layout.json").write_text(json.dumps(to_json(layout)))
    return tmp_path


def edit(model_dir, **change):
    file = model_dir / FOLDER / "layout.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


def test_components_follow_the_documented_order():
    layout = ExpertLayout.from_args(tiny_args())
    w, s = 64 * 128 // 2, 64 * 128 // 64 * 2
    offsets = [0, w, w + s]
    B = w + 2 * s
    assert [c.offset for c in layout.record.fields] == [n * B + o for n in range(3) for o in offsets]
    assert [c.name for c in layout.record.fields][:4] == [
        "gate_proj.weight", "gate_proj.scales", "gate_proj.biases", "up_proj.weight",
    ]  # fmt: skip
    assert layout.record.size == 3 * B and layout.record.stride == STRIDE_ALIGNMENT


def test_components_locate_what_the_oracle_packs():
    layout, rng = ExpertLayout.from_args(tiny_args()), np.random.default_rng(0)
    parts = {}
    for c in layout.record.fields:
        dtype = np.uint32 if c.dtype == "U32" else np.uint16
        parts[c.name] = rng.integers(0, np.iinfo(dtype).max, c.shape, dtype=dtype)
    block = oracle.pack_expert_block(dict(zip(oracle.BLOCK_PARTS, parts.values(), strict=True)))
    assert len(block) == layout.record.size
    for c in layout.record.fields:
        assert block[c.offset : c.offset + c.size] == parts[c.name].tobytes()


def test_a_good_directory_opens(model_dir):
    packed = open_packed(model_dir, tiny_args())
    assert sorted(packed.paths) == [0, 1]


def test_a_directory_without_our_keys_opens(model_dir):
    """flash-moe writes such directories: records without padding, fewer keys, and a key of its own in a component."""
    args = tiny_args()
    layout = ExpertLayout.from_args(args)
    content = to_json(layout)
    for key in ("expert_stride", "format_version", "group_size", "bits", "moe_layers"):
        del content[key]
    content["components"][0]["note"] = "theirs"
    (model_dir / FOLDER / "layout.json").write_text(json.dumps(content))
    for layer in layout.moe_layers:
        (model_dir / FOLDER / layout.file_name(layer)).write_bytes(bytes(4 * layout.record.size))
    assert open_packed(model_dir, args).layout.record.stride == layout.record.size


@pytest.mark.parametrize("delta", [-1, 1])
def test_wrong_length_names_file_and_both_sizes(model_dir, delta):
    file = model_dir / FOLDER / "layer_01.bin"
    size = file.stat().st_size
    file.write_bytes(bytes(size + delta))
    with pytest.raises(ModelFileError) as failure:
        open_packed(model_dir, tiny_args())
    assert "layer_01.bin" in str(failure.value)
    assert str(size) in str(failure.value) and str(size + delta) in str(failure.value)


def test_missing_layer_file(model_dir):
    (model_dir / FOLDER / "layer_00.bin").unlink()
    with pytest.raises(ModelFileError, match="layer_00.bin does not exist"):
        open_packed(model_dir, tiny_args())


@pytest.mark.parametrize(
    "change",
    [
        {"expert_size": 1},
        {"num_experts": 5},
        {"num_layers": 3},
        {"moe_layers": [0]},
        {"expert_stride": 4096},
        {"expert_stride": "16384"},
        {"expert_stride": 2**70 + 1},
        {"expert_stride": 16384 + 8},  # kernels read 16 bytes at a time
        {"format_version": 2},
        {"group_size": 32},
        {"bits": 8},
        {"components": []},
        {"components": [1]},
        {"components": None},
    ],
)
def test_a_wrong_layout_is_refused(model_dir, change):
    edit(model_dir, **change)
    with pytest.raises(ModelFileError, match="layout.json"):
        open_packed(model_dir, tiny_args())


def test_a_component_at_another_offset(model_dir):
    components = to_json(ExpertLayout.from_args(tiny_args()))["components"]
    components[3]["offset"] += 64
    edit(model_dir, components=components)
    with pytest.raises(ModelFileError, match=r"layout\.json: offset of up_proj\.weight is \d+; [^;]{0,50}$"):
        open_packed(model_dir, tiny_args())

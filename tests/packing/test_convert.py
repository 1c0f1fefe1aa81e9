"""Whole conversions: every kind of checkpoint gives the bytes that the oracle calculates, or a clear error."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from minmax import convert
from small_hub import SmallHub, connected
from tiny_models import tiny_directory

from moeflux_mlx.convert import main
from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.families.names import canonical_name
from moeflux_mlx.families.registry import FAMILIES
from moeflux_mlx.formats.checkpoint import RECIPE, read_header
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.formats.record import PROJECTIONS, UNIFORM, ExpertLayout
from moeflux_mlx.packing import conversion as packing
from moeflux_mlx.packing import resident as resident_file
from moeflux_mlx.quant import PARTS, Quant
from moeflux_mlx.spec import ModelArgs

pytestmark = pytest.mark.usefixtures("cpu_device")
ROOT = Path(__file__).resolve().parents[2]
EVERY_SOURCE = [(family, variant) for family in goldens.families() for variant in goldens.variants(family)]
TINY = {
    "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 48, "rope_theta": 1e4,
    "max_position_embeddings": 128, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip


def converted(tmp_path, family, variant, **options):
    source = goldens.write_variant(tmp_path / "source", family, variant)
    convert(source, tmp_path / "out", **options)
    return tmp_path / "out"


def resident(path):
    """Returns {name: (dtype, numpy array)} of the output, bf16 as bit patterns."""
    tensors = [t for file in sorted(path.glob("resident*.safetensors")) for t in read_header(file).values()]
    return {t.name: (t.dtype, as_numpy(t.read())) for t in tensors}


def as_numpy(array):
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def tree(path):
    """Returns the contents by file name, except for the state, which names the source."""
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "convert_state.json"]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def write_tiny(path, kind="F32", config=None, **change):
    """Writes a random qwen3_moe checkpoint of any sizes. Tensors named in `change` are replaced or left out."""
    config = {**TINY, **(config or {})}
    args, rng = ModelArgs.from_dict(config), np.random.default_rng(0)
    shapes, others, _ = resident_file.needed(args)
    tree = {f"{name}.weight": shape for name, shape in shapes.items()} | others
    H, I = args.hidden_size, args.moe_intermediate_size
    for layer in args.moe_layers:
        for expert in range(args.num_experts):
            stem = f"model.layers.{layer}.mlp.experts.{expert}."
            tree |= {f"{stem}{p}.weight": (H, I) if p == "down_proj" else (I, H) for p in PROJECTIONS}
    drawn = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in tree.items()}
    tensors = {n: (kind, oracle.f32_to_bf16(w) if kind == "BF16" else w) for n, w in drawn.items()} | change
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    goldens.write_safetensors(path / "model.safetensors", {n: t for n, t in tensors.items() if t is not None})
    return path


# ---- the bytes ----


@pytest.mark.parametrize(("family", "variant"), EVERY_SOURCE)
def test_expert_files(family, variant):
    out = tiny_directory(family, variant)
    args = ModelArgs.from_file(out)
    packed = open_packed(out, args)
    wanted = goldens.packed_layers(family, "fp8" if variant == "fp8" else "hub")
    assert sorted(wanted) == list(packed.layout.moe_layers)
    for layer, blocks in wanted.items():
        blocks = np.frombuffer(blocks, np.uint8).reshape(args.num_experts, packed.layout.record.size)
        records = np.frombuffer(packed.paths[layer].read_bytes(), np.uint8).reshape(args.num_experts, -1)
        assert np.array_equal(records[:, : blocks.shape[1]], blocks)
        assert not records[:, blocks.shape[1] :].any()


@pytest.mark.parametrize(("family", "variant"), EVERY_SOURCE)
def test_resident_tensors(family, variant):
    got = resident(tiny_directory(family, variant))
    source = {"hub_sharded": "hub", "transformers5": "hub", "moeflux": "mlx4"}.get(variant, variant)
    wanted = flat(family, goldens.mlx_tensors(family, source))
    assert got.keys() == wanted.keys()
    for name, (kind, array) in wanted.items():
        if kind == "U32":
            assert np.array_equal(got[name][1], array), name
        else:
            assert np.array_equal(goldens.as_float(got[name]), goldens.as_float((kind, array))), name


def flat(family, tensors):
    """Returns the canonical form of MLX tensors, with fused projections separated head by head."""
    c = goldens.text_config(family)
    result = {}
    for name, (kind, array) in tensors.items():
        name = canonical_name(name, c["num_hidden_layers"], FAMILIES[family].renames)
        for part, rows in split_rows(name, array, c):
            result[part] = kind, rows
    return {name: t for name, t in result.items() if ".switch_mlp." not in name}


def split_rows(name, array, c):
    if ".in_proj_qkvz." not in name and ".in_proj_ba." not in name:
        return [(name, array)]
    heads, ratio = c["linear_num_key_heads"], c["linear_num_value_heads"] // c["linear_num_key_heads"]
    key, value = c["linear_key_head_dim"], ratio * c["linear_value_head_dim"]
    widths = [key, key, value, value] if "qkvz" in name else [ratio, ratio]
    by_head = np.split(array, heads)
    parts = zip(*(np.split(one, np.cumsum(widths)[:-1]) for one in by_head), strict=True)
    parts = [np.concatenate(part) for part in parts]
    if "qkvz" in name:
        return [
            (name.replace("qkvz", "qkv"), np.concatenate(parts[:3])),
            (name.replace("qkvz", "z"), parts[3]),
        ]
    return [(name.replace("_ba.", f"_{letter}."), part) for letter, part in zip("ba", parts, strict=True)]


def test_centred_norms_are_stored_in_float32(tmp_path):
    got = resident(converted(tmp_path, "qwen3_next", "hub"))
    assert got["model.norm.weight"][0] == "F32"
    assert got["model.layers.0.linear_attn.norm.weight"][0] == "BF16"


@pytest.mark.parametrize("family", goldens.families())
def test_every_form_of_one_model_gives_the_same_files(tmp_path, family):
    trees = []
    for variant in ("hub", "hub_sharded", "transformers5"):
        (tmp_path / variant).mkdir()
        trees.append(tree(converted(tmp_path / variant, family, variant)))
        trees[-1].pop("config.json")
    trees[2] |= {name: data for name, data in trees[0].items() if name == "aside.safetensors"}  # it has none of these
    assert trees[0] == trees[1] == trees[2]


def test_blocks_equal_mx_quantize_of_the_bfloat16_tensor(tmp_path):
    source = write_tiny(tmp_path / "source", "F32")
    convert(source, tmp_path / "out")
    layout = ExpertLayout.from_args(ModelArgs.from_dict(TINY))
    given = read_header(source / "model.safetensors")
    data = (tmp_path / "out" / "packed_experts" / "layer_01.bin").read_bytes()
    for expert in range(layout.num_experts):
        block = data[expert * layout.record.stride :][: layout.record.size]
        parts = oracle.unpack_expert_block(block, layout.record.hidden_size, layout.record.moe_intermediate_size)
        for projection in PROJECTIONS:
            values = given[f"model.layers.1.mlp.experts.{expert}.{projection}.weight"].read()
            codes = mx.quantize(values.astype(mx.bfloat16), 64, 4)
            for part, wanted in zip(PARTS, codes, strict=True):
                assert np.array_equal(parts[f"{projection}.{part}"], as_numpy(wanted))
            from_float32 = mx.quantize(values, 64, 4)  # the result without the cast
            assert not np.array_equal(parts[f"{projection}.weight"], np.array(from_float32[0]))


def test_resident_files_read_with_mlx_and_split_into_shards(tmp_path, monkeypatch):
    source = write_tiny(tmp_path / "source", "BF16")
    convert(source, tmp_path / "one")
    monkeypatch.setattr(resident_file, "SHARD_BYTES", 40_000)
    convert(source, tmp_path / "many")
    names = sorted(file.name for file in (tmp_path / "many").glob("resident*"))
    assert len(names) > 2 and names[0] == f"resident-00001-of-{len(names):05d}.safetensors"
    one = mx.load(str(tmp_path / "one" / "resident.safetensors"))
    many = {}
    for name in names:
        many |= mx.load(str(tmp_path / "many" / name))
    assert one.keys() == many.keys()
    assert all(np.array_equal(as_numpy(one[name]), as_numpy(many[name])) for name in one)


# ---- how resident matrices are stored ----


@pytest.mark.parametrize("family", goldens.families())
def test_routers(tmp_path, family):
    out = converted(tmp_path, family, "hub")
    quantization = json.loads((out / "config.json").read_text())["quantization"]
    tensors, last = resident(out), "model.layers.1.mlp.gate"
    assert {key: quantization[key] for key in ("group_size", "bits", "mode")} == goldens.QUANTISATION
    if family == "deepseek_v3":
        assert tensors[f"{last}.weight"][0] == "BF16" and quantization[last] is False
    else:
        assert quantization[last] == {"group_size": 64, "bits": 8}
        assert tensors[f"{last}.weight"][1].shape[-1] == 128 * 8 // 32
    if family in ("qwen3_next", "qwen3_5_moe"):
        assert quantization["model.layers.1.mlp.shared_expert_gate"] == {"group_size": 64, "bits": 8}


def test_eight_bits_for_resident_tensors_only(tmp_path):
    out = converted(tmp_path, "qwen3_moe", "hub", q_bits=8, expert_bits=4)
    quantization = ModelArgs.from_file(out).quantization
    assert quantization.of("lm_head") == quantization.of("model.layers.0.mlp.gate") == Quant(8, 64)
    assert resident(out)["lm_head.weight"][1].shape[-1] == 128 * 8 // 32
    open_packed(out, ModelArgs.from_file(out))


def test_inputs_that_are_no_multiple_of_64_stay_bfloat16(tmp_path):
    """Two heads of 48 make 96 inputs of o_proj."""
    convert(write_tiny(tmp_path / "source"), tmp_path / "out")
    kind, array = resident(tmp_path / "out")["model.layers.0.self_attn.o_proj.weight"]
    assert (kind, array.shape) == ("BF16", (128, 96))
    assert ModelArgs.from_file(tmp_path / "out").quantization.of("model.layers.0.self_attn.o_proj") is None


def test_config_and_tokenizer_files_are_kept(tmp_path):
    source = goldens.write_variant(tmp_path / "source", "qwen3_5_moe", "fp8")
    (source / "tokenizer.json").write_bytes(b'{"tokens": "\xc3\xa4"}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "unrelated.txt").write_text("no")
    convert(source, tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "out" / "unrelated.txt").exists()
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "out"))
    del before["quantization_config"], after["quantization"]
    assert before == after


# ---- checkpoints that are already quantised ----


def restack(source, config, change):
    """Rewrites an mlx4 checkpoint with other tensors and another `quantization`."""
    tensors = {**goldens.mlx_tensors("qwen3_moe"), **change}
    goldens.write_safetensors(source / "model.safetensors", {n: t for n, t in tensors.items() if t is not None})
    whole = json.loads((source / "config.json").read_text())
    whole["quantization"] |= config
    whole.pop("quantization_config")
    (source / "config.json").write_text(json.dumps(whole))


def stacked(name, group_size, bits):
    """Returns the stack `name` of the tiny qwen3_moe in another form: its tensors, and the values that they store."""
    weight, *affine = mx.quantize(mx.array(stack_of(name)).astype(mx.bfloat16), group_size, bits)
    stem = name.removesuffix("weight")
    tensors = {name: ("U32", np.array(weight))}
    tensors |= {f"{stem}{n}": ("BF16", as_numpy(a)) for n, a in zip(("scales", "biases"), affine, strict=True)}
    return tensors, mx.dequantize(weight, *(a.astype(mx.float32) for a in affine), group_size, bits)


def stack_of(name):
    match = re.fullmatch(r"(model\.layers\.\d+\.mlp\.)switch_mlp\.(\w+)\.weight", name)
    weights = goldens.hub_tensors("qwen3_moe")
    return np.stack([goldens.as_float(weights[f"{match[1]}experts.{e}.{match[2]}.weight"]) for e in range(16)])


STACK = "model.layers.1.mlp.switch_mlp.down_proj.weight"


@pytest.mark.parametrize(("group_size", "bits"), [(64, 8), (64, 3), (32, 5)])
def test_experts_in_other_bits_are_copied(tmp_path, group_size, bits):
    source = goldens.write_variant(tmp_path / "source", "qwen3_moe", "mlx4")
    tensors, exact = stacked(STACK, group_size, bits)
    stated = Quant(bits, group_size)
    restack(source, {STACK.removesuffix(".weight"): {"group_size": group_size, "bits": bits}}, tensors)
    report = convert(source, tmp_path / "out")
    assert report.lossy == () and not report.made_experts
    args = ModelArgs.from_file(tmp_path / "out")
    packed = open_packed(tmp_path / "out", args)
    assert [packed.layout.records[layer].quants for layer in (0, 1)] == [UNIFORM, (*UNIFORM[:2], stated)]
    record = packed.layout.records[1]
    block = packed.paths[1].read_bytes()[3 * record.stride :][: record.size]
    for field, tensor in zip(record.down.fields, tensors.values(), strict=True):
        assert block[field.offset : field.end] == tensor[1][3].tobytes()


def test_experts_in_another_form_need_requantize(tmp_path):
    source = goldens.write_variant(tmp_path / "source", "qwen3_moe", "mlx4")
    assert convert(source, tmp_path / "kept", expert_bits=3).lossy == ()
    assert open_packed(tmp_path / "kept", ModelArgs.from_file(tmp_path / "kept")).layout.is_uniform
    report = convert(source, tmp_path / "out", expert_bits=3, down_bits=4, requantize=True)
    assert len(report.lossy) == 2 * len(ModelArgs.from_file(source).moe_layers) and STACK not in report.lossy
    packed = open_packed(tmp_path / "out", ModelArgs.from_file(tmp_path / "out"))
    assert {record.quants for record in packed.layout.records.values()} == {(Quant(3, 64), Quant(3, 64), Quant(4, 64))}
    up = STACK.replace("down", "up")
    parts = goldens.mlx_tensors("qwen3_moe")
    codes = [mx.array(parts[up.replace("weight", name)][1][2]) for name in PARTS]
    affine = [part.view(mx.bfloat16).astype(mx.float32) for part in codes[1:]]
    wanted = mx.quantize(mx.dequantize(codes[0], *affine, 64, 4).astype(mx.bfloat16), 64, 3)
    record = packed.layout.records[1]
    block = packed.paths[1].read_bytes()[2 * record.stride :]
    for field, array in zip(record.up.fields, wanted, strict=True):
        assert block[field.offset : field.end] == as_numpy(array).tobytes()


@pytest.mark.parametrize("down", [{"bits": 4}, {"bits": 6, "group_size": 32, "dtype": mx.float16}])
@pytest.mark.parametrize("form", [(2, 64), (5, 32), (8, 64), (4, 32, "mxfp4")])
def test_every_geometry_is_kept_byte_for_byte(tmp_path, form, down):
    """Gate and up have one form, down has another, and the rest has the first one."""
    usual = Quant(*form)
    down = dict(down)
    dtype = down.pop("dtype", mx.bfloat16)
    other = Quant(**{"group_size": 64, **down})
    source = write_tiny(tmp_path / "source", "BF16")
    tensors, overrides = {}, {}
    stacks = {}
    for name, array in mx.load(str(source / "model.safetensors")).items():
        if ".experts." in name:
            stem, _, rest = name.partition("experts.")
            expert, projection, _ = rest.split(".")
            stacks.setdefault(f"{stem}switch_mlp.{projection}", {})[int(expert)] = array
        elif array.ndim == 2 and array.shape[-1] % usual.group_size == 0:
            tensors |= stored(name.removesuffix(".weight"), array, usual)
        else:
            tensors[name] = array
    for path, parts in stacks.items():
        quant = other if path.endswith("down_proj") else usual
        if quant != usual:
            overrides[f"language_model.{path}"] = quant.entry()
        stack = mx.stack([parts[expert] for expert in range(len(parts))])
        tensors |= stored(path, stack.astype(dtype if quant == other else mx.bfloat16), quant)
    mx.save_safetensors(str(source / "model.safetensors"), tensors)
    (source / "config.json").write_text(json.dumps({**TINY, "quantization": {**usual.entry(), **overrides}}))
    report = convert(source, tmp_path / "out")
    assert not report.lossy and not report.quantized and not report.made_experts
    check_kept(tmp_path / "out", tensors)


def stored(path, array, quant):
    """Returns the tensors of a module under MLX's names."""
    made = mx.quantize(array, quant.group_size, quant.bits, quant.mode)
    return {f"{path}.{part}": one for part, one in zip(quant.parts, made, strict=True)}


def check_kept(out, tensors, resident_too=True):
    """Checks that every byte of `tensors` is where the packed model's own description says."""
    args = ModelArgs.from_file(out)
    packed = open_packed(out, args)
    for name, (_, array) in resident(out).items() if resident_too else ():
        assert np.array_equal(array, as_numpy(tensors[name])), name
    for layer, record in packed.layout.records.items():
        data = packed.paths[layer].read_bytes()
        kinds = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
        for expert in range(args.num_experts):
            for field in record.fields:
                given = tensors[f"model.layers.{layer}.mlp.switch_mlp.{field.name}"][expert]
                wanted = given.astype(kinds[field.dtype]) if field.dtype in kinds else given
                start = expert * record.stride + field.offset
                assert data[start : start + field.size] == as_numpy(wanted).tobytes()


@pytest.mark.parametrize(
    ("options", "resident_quant", "experts"),
    [
        ({"q_bits": 3}, Quant(3, 64), (Quant(3, 64),) * 3),
        ({"q_bits": 8, "expert_bits": 4}, Quant(8, 64), UNIFORM),
        ({"q_group_size": 32}, Quant(4, 32), (Quant(4, 32),) * 3),
        ({"q_mode": "mxfp4", "down_bits": 6}, Quant(4, 32, "mxfp4"), (*[Quant(4, 32, "mxfp4")] * 2, Quant(6, 64))),
        ({"expert_bits": 3, "down_bits": 4}, Quant(4, 64), (Quant(3, 64), Quant(3, 64), Quant(4, 64))),
    ],
)
def test_floats_get_the_requested_form(tmp_path, options, resident_quant, experts):
    source = write_tiny(tmp_path / "source")
    report = convert(source, tmp_path / "out", **options)
    assert report.quantized and report.made_experts and not report.lossy
    args = ModelArgs.from_file(tmp_path / "out")
    layout = open_packed(tmp_path / "out", args).layout
    assert {record.quants for record in layout.records.values()} == {experts}
    assert args.quantization.of("lm_head") == resident_quant
    assert args.quantization.of("model.layers.0.mlp.gate") == Quant(8, 64)
    given = read_header(source / "model.safetensors")["model.layers.0.mlp.experts.1.down_proj.weight"].read()
    quant, record = experts[2], layout.records[0]
    made = mx.quantize(given.astype(mx.bfloat16), quant.group_size, quant.bits, quant.mode)
    data = (tmp_path / "out" / "packed_experts" / "layer_00.bin").read_bytes()[record.stride :]
    for field, array in zip(record.down.fields, made, strict=True):
        assert data[field.offset : field.end] == as_numpy(array).tobytes()


def test_resident_codes_of_any_affine_kind_are_copied(tmp_path):
    source = goldens.write_variant(tmp_path / "source", "qwen3_moe", "mlx4")
    weight, scales, biases = mx.quantize(
        mx.array(goldens.as_float(goldens.hub_tensors("qwen3_moe")["lm_head.weight"])), 32, 6
    )
    change = {"lm_head.weight": ("U32", np.array(weight))}
    change |= {f"lm_head.{n}": ("F32", np.array(a)) for n, a in (("scales", scales), ("biases", biases))}
    restack(source, {"lm_head": {"group_size": 32, "bits": 6}}, change)
    convert(source, tmp_path / "out")
    assert ModelArgs.from_file(tmp_path / "out").quantization.of("lm_head") == Quant(6, 32)
    got = resident(tmp_path / "out")
    assert all(np.array_equal(got[name][1], array) for name, (_, array) in change.items())


def test_a_matrix_that_was_left_unquantised_stays_so(tmp_path):
    source = goldens.write_variant(tmp_path / "source", "qwen3_moe", "mlx4")
    float_head = goldens.hub_tensors("qwen3_moe")["lm_head.weight"]
    restack(
        source,
        {"lm_head": False},
        {"lm_head.weight": float_head, "lm_head.scales": None, "lm_head.biases": None},
    )
    convert(source, tmp_path / "out")
    kind, array = resident(tmp_path / "out")["lm_head.weight"]
    assert kind == "BF16" and np.array_equal(array, float_head[1])
    assert ModelArgs.from_file(tmp_path / "out").quantization.of("lm_head") is None


def test_scales_of_two_dtypes_become_float32_exactly(tmp_path):
    source = goldens.write_variant(tmp_path / "source", "qwen3_moe", "mlx4")
    name = STACK.replace("weight", "scales")
    scales = goldens.as_float(goldens.mlx_tensors("qwen3_moe")[name])
    restack(source, {}, {name: ("F32", scales)})
    convert(source, tmp_path / "out")
    packed = open_packed(tmp_path / "out", ModelArgs.from_file(tmp_path / "out"))
    record = packed.layout.records[1]
    assert packed.layout.records[0].dtype == "BF16" and {f.dtype for f in record.fields} == {"U32", "F32"}
    data, field = packed.paths[1].read_bytes(), record.down.fields[1]
    assert data[field.offset : field.end] == scales[0].tobytes()


def test_microscaling_checkpoints(tmp_path):
    """Everything is in nvfp4, as `mlx_lm.convert --q-mode nvfp4` stores it."""
    config = {**TINY, "quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}}
    source = write_tiny(tmp_path / "source", "BF16")
    tensors = {}
    for name, array in mx.load(str(source / "model.safetensors")).items():
        if array.ndim == 1 or array.shape[-1] % 16:
            tensors[name] = array
        else:
            tensors[name], tensors[name.replace("weight", "scales")] = mx.quantize(array, 16, 4, "nvfp4")
    mx.save_safetensors(str(source / "model.safetensors"), tensors)
    (source / "config.json").write_text(json.dumps(config))
    assert convert(source, tmp_path / "kept").lossy == ()
    assert ModelArgs.from_file(tmp_path / "kept").quantization.of("lm_head") == Quant(4, 16, "nvfp4")
    report = convert(source, tmp_path / "out", requantize=True, expert_bits=4)
    assert STACK.replace("switch_mlp", "experts.0") in report.lossy and "lm_head.weight" not in report.lossy


def test_a_module_without_a_mode_is_affine_in_any_file(tmp_path):
    """mlx-lm writes the routers of an mxfp4 model like this, and null group sizes if its user gave none."""
    gate = "model.layers.0.mlp.gate"
    source, tensors = write_tiny(tmp_path / "source", "BF16"), {}
    for name, array in mx.load(str(source / "model.safetensors")).items():
        tensors[name] = array
        if name == f"{gate}.weight":
            for suffix, part in zip(PARTS, mx.quantize(array, 64, 8), strict=True):
                tensors[f"{gate}.{suffix}"] = part
        elif array.ndim == 2 and array.shape[-1] % 32 == 0:
            tensors[name], tensors[name.replace("weight", "scales")] = mx.quantize(array, 32, 4, "mxfp4")
    mx.save_safetensors(str(source / "model.safetensors"), tensors)
    for router in ({"group_size": 64, "bits": 8}, {"group_size": None, "bits": 8}):
        config = {**TINY, "quantization": {"group_size": None, "bits": 4, "mode": "mxfp4", gate: router}}
        (source / "config.json").write_text(json.dumps(config))
        out = tmp_path / f"out-{router['group_size']}"
        assert convert(source, out).lossy == ()
        for name in (f"{gate}.weight", "lm_head.weight", "lm_head.scales"):
            assert np.array_equal(resident(out)[name][1], np.array(tensors[name]))
        quantization = ModelArgs.from_file(out).quantization
        assert quantization.of(gate) == Quant(8, 64) and quantization.of("lm_head") == Quant(4, 32, "mxfp4")


# ---- moeflux directories ----


def moeflux_like(tmp_path, config):
    """Returns a moeflux directory whose experts need no padding, made from a conversion."""
    convert(write_tiny(tmp_path / "hf", "BF16", config), tmp_path / "packed")
    source = tmp_path / "moeflux"
    (source / "packed_experts").mkdir(parents=True)
    for file in (tmp_path / "packed" / "packed_experts").iterdir():
        (source / "packed_experts" / file.name).write_bytes(file.read_bytes())
    for name in ("config.json", RECIPE):
        (source / name).write_bytes((tmp_path / "packed" / name).read_bytes())
    entries, blob = {}, b""
    for name, (kind, array) in resident(tmp_path / "packed").items():
        data = array.tobytes()
        entries[name] = {"offset": len(blob), "size": len(data), "shape": list(array.shape), "dtype": kind}
        blob += data
    (source / "model_weights.bin").write_bytes(blob)
    (source / "model_weights.json").write_text(json.dumps({"tensors": entries}))
    return source


WIDE = {"hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 1, "num_experts": 2}


@pytest.mark.parametrize("can_link", [True, False])
def test_layer_files_with_our_stride_are_linked_or_copied(tmp_path, monkeypatch, can_link):
    source = moeflux_like(tmp_path, WIDE)
    if not can_link:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    report = convert(source, tmp_path / "out")
    assert report.linked is can_link
    assert tree(tmp_path / "out") == tree(tmp_path / "packed")
    name = "packed_experts/layer_00.bin"
    assert (tmp_path / "out" / name).samefile(source / name) is can_link


def test_packed_layers_that_are_damaged(tmp_path):
    source = goldens.write_variant(tmp_path / "source", "deepseek_v3", "moeflux")
    file = source / "root" / "packed_experts" / "layer_02.bin"
    sound = file.read_bytes()
    file.write_bytes(sound[:-1])
    with pytest.raises(
        ModelFileError, match=rf"layer_02\.bin has {len(sound) - 1} bytes; the layout needs {len(sound)}"
    ):
        convert(source, tmp_path / "out")
    layout = ExpertLayout.from_args(ModelArgs.from_file(source / "mlx"))
    nan_at = 5 * layout.record.size + layout.record.fields[4].offset
    file.write_bytes(sound[:nan_at] + b"\xc0\x7f" + sound[nan_at + 2 :])
    with pytest.raises(ModelFileError, match=r"layer_02\.bin: up_proj\.scales of expert 5 holds NaN"):
        convert(source, tmp_path / "out")


def test_a_manifest_with_other_bits(tmp_path):
    source = goldens.write_variant(tmp_path / "source", "qwen3_5_moe", "moeflux")
    file = source / "artifacts" / "model_weights.json"
    manifest = json.loads(file.read_text())
    manifest["tensors"]["lm_head.weight"]["bits"] = 8
    file.write_text(json.dumps(manifest))
    with pytest.raises(ModelFileError, match=r"lm_head\.weight is stored with 4 bits.*manifest says 8 bits"):
        convert(source, tmp_path / "out")


# ---- checkpoints that do not fit ----


def ones(*shape, kind="F32"):
    return kind, np.ones(shape, np.uint32 if kind == "U32" else np.float32)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.0.self_attn.q_proj.bias", ones(96), "q_proj.bias does not belong to this model"),
        ("model.layers.0.surprise", ones(1), "surprise does not belong to this model"),
        (
            "model.layers.0.mlp.experts.4.up_proj.weight",
            ones(64, 128),
            "experts.4.up_proj.weight does not belong",
        ),
        ("lm_head.weight", None, "lm_head.weight is missing"),
        ("model.layers.1.input_layernorm.weight", None, "layers.1.input_layernorm.weight is missing"),
        ("model.layers.1.mlp.experts.3.up_proj.weight", None, "experts.3.up_proj.weight is missing"),
        ("lm_head.weight", ones(95, 128), r"shape \[95, 128\]; the model needs \[96, 128\]"),
        ("model.norm.weight", ones(64), r"norm.weight is F32 \[64\]; the model needs floats \[128\]"),
        ("lm_head.weight", ones(96, 16, kind="U32"), "lm_head.weight is U32; expected F32 or BF16"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, name, tensor, message):
    with pytest.raises(ModelFileError, match=message):
        convert(write_tiny(tmp_path / "source", **{name: tensor}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.experts.2.up_proj.weight", "model.norm.weight"])
def test_nan_values_are_refused(tmp_path, name):
    shape = {"lm_head.weight": (96, 128), "model.norm.weight": (128,)}.get(name, (64, 128))
    values = np.ones(shape, np.float32)
    values[..., 7] = np.inf
    with pytest.raises(ModelFileError, match=f"tensor {name} holds NaN or infinite"):
        convert(write_tiny(tmp_path / "source", **{name: ("F32", values)}), tmp_path / "out")
    assert not (tmp_path / "out" / "packed_experts" / "layout.json").exists()


def test_options_and_directories_that_are_refused(tmp_path):
    source = write_tiny(tmp_path / "source")
    for options in ({"q_bits": 7}, {"q_bits": 0}, {"q_group_size": 16}, {"down_bits": 7}, {"q_mode": "nvfp5"}):
        with pytest.raises(ConfigError, match="is not computed; supported: affine"):
            convert(source, tmp_path / "out", **options)
    with pytest.raises(ConfigError, match="down_proj has 4 bits, group_size 128.*64 columns are not a multiple"):
        convert(source, tmp_path / "out", q_group_size=128)
    with pytest.raises(ModelFileError, match="is the checkpoint itself"):
        convert(source, source)
    with pytest.raises(ModelFileError, match="is not a directory"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    convert(source, tmp_path / "out")
    with pytest.raises(ModelFileError, match="is already packed"):
        convert(tmp_path / "out", tmp_path / "again")


# ---- repositories ----


@pytest.fixture
def hub(tmp_path):
    """Returns the folder of a small Hub with one repository, and the Hub."""
    source = write_tiny(tmp_path / "snapshot")
    with SmallHub(source, "some/model") as served, connected(served, tmp_path / "cache"):
        yield source, served


def test_a_repository_is_downloaded(hub, tmp_path):
    (hub[0] / "pytorch_model.bin").write_bytes(b"never asked for")
    convert("some/model", tmp_path / "out", revision="v1")
    asked = {name for _, name, _ in hub[1].requests}
    assert "model.safetensors" in asked and "pytorch_model.bin" not in asked
    assert (tmp_path / "out" / "resident.safetensors").exists()


def test_an_unsupported_model_is_not_downloaded(hub, tmp_path):
    (hub[0] / "config.json").write_text(json.dumps({**TINY, "model_type": "llama"}))
    with pytest.raises(ConfigError, match="model_type 'llama'"):
        convert("some/model", tmp_path / "out")
    assert {name for _, name, _ in hub[1].requests} == {"config.json"}


def test_a_repository_that_cannot_be_reached(hub, tmp_path):
    with pytest.raises(
        ModelFileError,
        match="other/model is no file or directory here and cannot be found on the Hugging Face Hub: 404",
    ):
        convert("other/model", tmp_path / "out")


# ---- the command ----


def test_the_command_reports_what_it_did(tmp_path, capsys):
    source = write_tiny(tmp_path / "source")
    arguments = ["--hf-path", str(source), "--mlx-path", str(tmp_path / "out")]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.endswith(f"\n{tmp_path / 'out'} is ready\n")
    assert main(arguments) == 0
    assert "kept 3 files of an earlier run" in capsys.readouterr().err


def test_the_command_reports_what_is_lossy(tmp_path, capsys):
    source = goldens.write_variant(tmp_path / "source", "qwen3_moe", "mlx4")
    tensors, _ = stacked(STACK, 64, 8)
    restack(source, {STACK.removesuffix(".weight"): {"bits": 8}}, tensors)
    arguments = ["--hf-path", str(source), "--mlx-path", str(tmp_path / "out"), "--requantize", "--expert-bits", "4"]
    assert main(arguments) == 0
    assert f"1 quantised tensors were quantised again (lossy), the first is {STACK}" in capsys.readouterr().err


def test_options_without_effect_and_missing_files_are_reported(tmp_path, capsys):
    quantised = goldens.write_variant(tmp_path / "mlx4", "qwen3_moe", "mlx4")
    arguments = ["--hf-path", str(quantised), "--mlx-path", str(tmp_path / "out"), "--requantize", "--q-bits", "8"]
    assert main(arguments) == 0
    err = capsys.readouterr().err
    for words in ("--requantize had no effect", "--q-bits had no effect", "has no tokenizer.json or"):
        assert words in err
    floats = write_tiny(tmp_path / "floats")
    (floats / "tokenizer.json").write_text("{}")
    assert main(["--hf-path", str(floats), "--mlx-path", str(tmp_path / "eight"), "--q-bits", "8"]) == 0
    err = capsys.readouterr().err
    assert "no effect" not in err and "warning" not in err


def test_a_form_that_experts_cannot_have_is_reported(tmp_path, capsys):
    quantised = goldens.write_variant(tmp_path / "mlx4", "qwen3_moe", "mlx4")
    arguments = ["--hf-path", str(quantised), "--mlx-path", str(tmp_path / "out"), "--expert-bits", "3"]
    assert main(arguments) == 0
    err = capsys.readouterr().err
    assert "--expert-bits had no effect" in err and "--requantize changes them (lossy)" in err
    arguments[3] = str(tmp_path / "again")
    assert main([*arguments, "--requantize"]) == 0
    err = capsys.readouterr().err
    assert "no effect" not in err and "were quantised again (lossy)" in err


def test_a_log_has_a_line_for_each_file(tmp_path, capsys):
    assert main(["--hf-path", str(write_tiny(tmp_path / "source")), "--mlx-path", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().err.splitlines()
    names = [line[5:] for line in lines if "%" in line[:5]]
    assert names == ["resident.safetensors", "packed_experts/layer_00.bin", "packed_experts/layer_01.bin"]
    assert lines[0] == "  0% resident.safetensors"


def test_an_unfinished_conversion_is_not_a_checkpoint(tmp_path, capsys):
    source = write_tiny(tmp_path / "source")
    convert(source, tmp_path / "out")
    (tmp_path / "out" / "packed_experts" / "layout.json").unlink()
    with pytest.raises(ModelFileError, match="is an unfinished conversion; give the checkpoint"):
        convert(tmp_path / "out", tmp_path / "again")


def test_errors_are_one_line(tmp_path, capsys):
    assert main(["--hf-path", str(tmp_path / "nowhere"), "--mlx-path", str(tmp_path / "out")]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1 and "nowhere is not a directory" in lines[0]


def test_usage_errors(tmp_path, capsys):
    for wrong in (["--q-bits", "7"], ["--q-group-size", "16"], ["--q-mode", "nvfp5"], ["--expert-bits", "7"]):
        with pytest.raises(SystemExit) as stopped:
            main(["--hf-path", str(tmp_path), "--mlx-path", str(tmp_path / "out"), *wrong])
        assert stopped.value.code == 2
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "--hf-path" in capsys.readouterr().err


def test_control_c_names_the_command_that_continues(monkeypatch, tmp_path, capsys):
    def interrupted(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("moeflux_mlx.convert.convert_with", interrupted)
    assert main(["--hf-path", "x", "--mlx-path", str(tmp_path)]) == 130
    assert "run the same command again to resume" in capsys.readouterr().err


def test_as_a_program(tmp_path):
    source = write_tiny(tmp_path / "source")
    run = [sys.executable, "-W", "error", "-m", "moeflux_mlx.convert", "--hf-path", str(source), "--mlx-path"]
    done = subprocess.run([*run, str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'out'} is ready" in done.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    failed = subprocess.run([*run, str(tmp_path / "full")], cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "is not empty and has no convert_state.json" in failed.stderr


def test_a_quantisation_that_is_not_supported_costs_no_download(hub, tmp_path):
    config = {**TINY, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (hub[0] / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="gptq"):
        convert("some/model", tmp_path / "out")
    assert {name for _, name, _ in hub[1].requests} == {"config.json"}


@pytest.mark.parametrize("name", ["models/qwen--4bit", "models/qwen-"])
def test_names_that_the_hub_refuses(tmp_path, name):
    """Its library refuses them without a request, with an error of its own."""
    with pytest.raises(ModelFileError, match=f"{name} is no file or directory here"):
        convert(name, tmp_path / "out")


def test_layers_that_cannot_be_linked_need_disk_space(tmp_path, monkeypatch):
    source = moeflux_like(tmp_path, WIDE)
    layers = sum(file.stat().st_size for file in (source / "packed_experts").glob("layer_*.bin"))
    asked = []
    monkeypatch.setattr(packing, "check_space", lambda path, nbytes: asked.append(nbytes))
    convert(source, tmp_path / "linked" / "out")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    (tmp_path / "copied").mkdir()
    convert(source, tmp_path / "copied" / "out")
    assert asked[1] - asked[0] == layers
    assert not list(tmp_path.rglob(".link-*"))


def test_a_directory_under_repair_is_not_a_model(tmp_path, monkeypatch):
    source, out = write_tiny(tmp_path / "source"), tmp_path / "out"
    convert(source, out)
    layer = out / "packed_experts" / "layer_00.bin"
    sound = layer.read_bytes()
    layer.write_bytes(bytes([sound[0] ^ 1]) + sound[1:])

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("moeflux_mlx.packing.writer._write_all", stopped)
        with pytest.raises(KeyboardInterrupt):
            convert(source, out)
    assert not (out / "packed_experts" / "layout.json").exists()
    convert(source, out)
    assert layer.read_bytes() == sound and (out / "packed_experts" / "layout.json").exists()

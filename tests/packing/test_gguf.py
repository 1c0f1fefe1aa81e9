"""GGUF models: values as the `gguf` package computes them, in place and converted, and refusals."""

import json
import shutil

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from minmax import convert
from test_gguf_families import (  # noqa: F401 (a fixture)
    LEAST,
    TOLERANCE,
    cache,
    logits_of_every_way,
    logits_of_tokens,
)

from moeflux_mlx import plan as plan_command
from moeflux_mlx.convert import main as convert_main
from moeflux_mlx.errors import ConfigError, ModelFileError, NotPackedError, RequestError
from moeflux_mlx.formats.gguf_file import open_gguf
from moeflux_mlx.generate.__main__ import main as generate_main
from moeflux_mlx.opening.engine import load, load_model
from moeflux_mlx.opening.locate import locate
from moeflux_mlx.ops.forms import unpacked_float32
from moeflux_mlx.packing import gguf_tensors
from moeflux_mlx.packing.gguf_folder import described_files
from moeflux_mlx.packing.gguf_forms import FORMS, grids, repacked
from moeflux_mlx.packing.gguf_tensors import as_tensor

gguf = pytest.importorskip("gguf")
import gguf_models  # noqa: E402  (needs gguf)

MIXED = {
    **{"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q5_1", "ffn_down_exps": "Q8_0", "token_embd": "Q8_0"},
    **{"attn_output": "Q6_K", "output.": "Q5_0", "attn_q.": "IQ4_NL", "attn_k.": "MXFP4", "attn_v.": "F16"},
}
OTHERS = {  # which differ by layer
    **{"blk.0.ffn_down_exps": "Q4_1", "blk.1.ffn_up_exps": "Q8_0", "blk.2.ffn_up_exps": "MXFP4"},
    **{"ffn_gate_exps": "MXFP4", "ffn_up_exps": "Q4_1", "ffn_down_exps": "Q5_0", "attn_output": "Q4_K"},
}
NESTED = {  # of models with rows of 256, which K types need
    "conv1d": "F32",
    "attn_output": "Q8_0",
    **{"blk.0.ffn_gate": "Q4_K", "blk.0.ffn_up": "Q4_K", "blk.0.ffn_down": "Q6_K", "token_embd": "Q4_K"},
    **{"blk.1.ffn_gate": "Q2_K", "blk.1.ffn_up": "Q2_K", "blk.1.ffn_down": "Q3_K", "output.": "Q6_K"},
    **{"blk.2.ffn_gate": "Q5_0", "blk.2.ffn_up": "Q6_K", "blk.2.ffn_down": "Q5_K", "attn_q": "Q5_K", "attn_v": "Q2_K"},
    **{"attn_kv_a": "Q3_K", "attn_k_b": "Q8_0", "attn_k.": "Q3_K", "blk.3.ffn_down": "Q4_0"},
}
WIDE = {
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 6},
    "qwen3_5_moe": dict.fromkeys(("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 256),
    "deepseek_v3": {
        **dict.fromkeys(("hidden_size", "moe_intermediate_size", "intermediate_size"), 256),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 256),
    },
}


def mixed(types, rest="Q4_1"):
    """Returns the function that gives each tensor the type whose key its name contains."""
    return lambda name: next((kind for part, kind in types.items() if part in name), rest)


# ---- values of blocks


@pytest.mark.parametrize("kind", FORMS)
def test_repacked_blocks_have_every_value(kind):
    rows = gguf_models.random_blocks(kind, (3, 5, 3 * FORMS[kind].weights), 1)
    wanted = gguf_models.values_of(kind, rows)
    made = unpacked_float32(FORMS[kind].quant, *map(mx.array, (*repacked(kind, rows), *grids(kind))))
    assert np.array_equal(np.array(made), wanted) and len(np.unique(wanted)) > 40


@pytest.mark.parametrize("kind", gguf_models.HALVES)
def test_any_type_is_read_as_floats(tmp_path, monkeypatch, kind):
    """A few rows at a time."""
    monkeypatch.setattr(gguf_tensors, "CHUNK_VALUES", 5 * 512)
    shape = (3, 4, 512)
    rows = gguf_models.random_blocks(kind, shape, 2)
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "qwen3moe")
    writer.add_tensor("x", rows, raw_dtype=gguf_models.TYPES[kind])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    tensor = as_tensor(open_gguf(tmp_path / "x.gguf").tensors["x"], "x")
    wanted = gguf_models.values_of(kind, rows).reshape(shape)
    assert (tensor.shape, tensor.dtype) == (shape, "F32")
    for got, part in ((tensor, wanted), (tensor[2], wanted[2]), (tensor[1].rows(1, 3), wanted[1, 1:3])):
        assert np.array_equal(np.array(got.read()), part)


def test_infinite_scales_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, "qwen3_moe", mixed({"ffn_down_exps": "Q8_0"}))
    tensor = open_gguf(path).tensors["blk.1.ffn_down_exps.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.offset : tensor.offset + 2] = np.float16("inf").tobytes()
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="infinite"):
        convert(path, tmp_path / "packed")
    with pytest.raises(Exception, match="down_proj.supers of expert 0 of layer 1 holds NaN or infinite values"):
        load_model(path, expert_io="resident")


# ---- models


@pytest.mark.parametrize("types", [MIXED, OTHERS])
def test_logits_of_every_way_to_open_it(tmp_path, types):
    family, path = "qwen3_moe", tmp_path / "m.gguf"
    weights = gguf_models.write_gguf(path, family, mixed(types))
    tokens, _ = goldens.golden(family)
    wanted = oracle.forward(goldens.config(family), weights, tokens)
    for made in logits_of_every_way(path, tmp_path / "packed", tokens, None, 7, 1):
        assert np.abs(made - wanted).max() < TOLERANCE


def resized(monkeypatch, family, sizes):
    """Gives the family's tiny model other sizes; returns its configuration."""
    config = goldens.text_config(family) | sizes
    monkeypatch.setattr(goldens, "text_config", lambda _: config)
    monkeypatch.setattr(goldens, "hub_tensors", goldens.hub_tensors.__wrapped__)  # keeps none
    return config


FAMILIES = [pytest.param(name, marks=pytest.mark.full if "5" in name else ()) for name in WIDE]


@pytest.mark.parametrize("family", FAMILIES)
def test_nested_scales_of_every_way_to_open_it(tmp_path, monkeypatch, family):
    """Matrices keep their types and bytes, also those outside the experts."""
    config = resized(monkeypatch, family, WIDE[family])
    path = tmp_path / "m.gguf"
    weights = gguf_models.write_gguf(path, family, mixed(NESTED, "Q4_K"))
    tokens = goldens.golden(family)[0]
    nested = {"text_config": config} if "text_config" in goldens.config(family) else config
    wanted = oracle.forward(nested, weights, tokens)
    (made,) = logits_of_every_way(path, tmp_path / "packed", tokens)
    assert np.abs(made - wanted).max() < TOLERANCE * max(1, np.abs(wanted).max())
    for source in (path, tmp_path / "packed"):
        modules = load_model(source, dtype=mx.float32, **LEAST).named_modules()
        assert {"q2_k", "q6_k"} <= {module.quant.mode for _, module in modules if getattr(module, "quant", None)}
    stored = sum(tensor.nbytes for tensor in open_gguf(path).tensors.values() if "_exps" in tensor.name)
    packed = sum(file.stat().st_size for file in (tmp_path / "packed" / "packed_experts").glob("*.bin"))
    assert packed < 1.1 * stored


@pytest.mark.parametrize(
    "hidden, width, types",
    [
        (128, 96, {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "IQ4_NL", "ffn_down_exps": "Q5_0"}),
        (160, 96, {"ffn_gate_exps": "Q4_1", "ffn_up_exps": "MXFP4", "ffn_down_exps": "Q8_0"}),
        (256, 352, {"ffn_gate_exps": "Q2_K", "ffn_up_exps": "IQ3_XXS", "ffn_down_exps": "Q4_K"}),
    ],
)
def test_widths_that_no_super_block_divides(tmp_path, monkeypatch, hidden, width, types):
    """Types are mixed within a layer: llama.cpp stores rows that are too short for a type in another one."""
    config = resized(monkeypatch, "qwen3_moe", {"hidden_size": hidden, "moe_intermediate_size": width})
    path, tokens = tmp_path / "m.gguf", goldens.golden("qwen3_moe")[0]
    weights = gguf_models.write_gguf(path, "qwen3_moe", mixed(types, "Q8_0"))
    wanted = oracle.forward(config, weights, tokens)
    (made,) = logits_of_every_way(path, tmp_path / "packed", tokens)
    assert np.abs(made - wanted).max() < TOLERANCE


def test_floats_are_converted_like_those_of_a_checkpoint(tmp_path):
    """A file of float32 has the values of the checkpoint, and becomes the same packed model."""
    family = "qwen3_moe"
    gguf_models.write_gguf(tmp_path / "m.gguf", family, lambda name: "F32")
    convert(tmp_path / "m.gguf", tmp_path / "ours")
    convert(goldens.checkpoint_dir(family), tmp_path / "theirs")
    for layer in (tmp_path / "theirs" / "packed_experts").glob("*.bin"):
        assert (tmp_path / "ours" / "packed_experts" / layer.name).read_bytes() == layer.read_bytes()
    tokens, wanted = goldens.golden(family)
    assert np.abs(logits_of_tokens(tmp_path / "ours", tokens)[0] - wanted).max() < TOLERANCE
    with pytest.raises(NotPackedError, match=r"run: .* --hf-path \S+/m.gguf --mlx-path m-moeflux"):
        load_model(tmp_path / "m.gguf")


def test_forms_that_mlx_lm_does_not_read_are_refused(tmp_path):
    gguf_models.write_gguf(tmp_path / "m.gguf", "qwen3_moe", mixed(MIXED))
    with pytest.raises(ConfigError, match=r"layout mlx: \S+ is stored in q\d_0, which mlx-lm does not read"):
        convert(tmp_path / "m.gguf", tmp_path / "mlx", layout="mlx")


def test_a_split_model_in_a_directory(tmp_path):
    family = "qwen3_moe"
    weights = gguf_models.write_gguf(tmp_path / "m.gguf", family, mixed(MIXED), split_max_tensors=9)
    assert len(list(tmp_path.glob("m-*-of-*.gguf"))) > 2
    tokens, _ = goldens.golden(family)
    wanted = oracle.forward(goldens.config(family), weights, tokens)
    assert np.abs(logits_of_tokens(tmp_path, tokens, **LEAST)[0] - wanted).max() < TOLERANCE


# ---- the tokenizer


def test_tokenizer_from_metadata(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, "qwen3_moe", mixed(MIXED))
    _, tokenizer = load(path)
    ids = tokenizer.encode("hello <tool_call> he\u0301")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello <tool_call> h\u00e9"
    assert ids[0] == tokenizer.convert_tokens_to_ids("he") and tokenizer.eos_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(prompt), skip_special_tokens=True) == "user\nhi\nassistant\n"


def test_tokenizer_files_beside_it_or_given(tmp_path):
    """The base's own files win over what the file says, its template too."""
    path, base = tmp_path / "m.gguf", tmp_path / "base"
    gguf_models.write_gguf(path, "qwen3_moe", mixed(MIXED), {"tokenizer.ggml.pre": "unheard-of"})
    with pytest.raises(Exception, match=r"tokenizer.ggml.pre is 'unheard-of'; known are qwen2.*--tokenizer"):
        locate(path)
    gguf_models.write_gguf(tmp_path / "other.gguf", "qwen3_moe", mixed(MIXED))
    files = locate(tmp_path / "other.gguf").path
    base.mkdir()
    (base / "tokenizer.json").write_bytes((files / "tokenizer.json").read_bytes())
    (base / "tokenizer_config.json").write_text(json.dumps({"chat_template": "base"}))
    _, tokenizer = load(path, tokenizer=base)
    assert tokenizer.chat_template == "base"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((base / name).read_bytes())
    assert load(path)[1].chat_template == "base"
    with pytest.raises(ModelFileError, match="has no tokenizer.json"):
        locate(path, tokenizer=tmp_path / "cache")
    with pytest.raises(RequestError, match="--tokenizer is for GGUF files"):
        locate(goldens.checkpoint_dir("qwen3_moe"), tokenizer=base)


def test_ends_that_no_key_names(tmp_path):
    """By their texts, in the metadata or in files beside them, whose own generation_config.json names others."""
    ids = {"tokenizer.ggml.eos_token_id": goldens.text_config("qwen3_moe")["vocab_size"] - 3}  # <|endoftext|>
    path, base = tmp_path / "m.gguf", tmp_path / "base"
    gguf_models.write_gguf(path, "qwen3_moe", mixed(MIXED), ids)
    assert ends_of(path) == {"<|im_end|>", "<|endoftext|>"}
    base.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((locate(path).path / name).read_bytes())
    (base / "generation_config.json").write_text('{"eos_token_id": 3, "top_k": 20}')
    assert ends_of(path, tokenizer=base) == {"<|im_end|>", "<|endoftext|>", load(path)[1].decode([3])}
    convert(path, tmp_path / "packed", tokenizer=base)
    kept = json.loads((tmp_path / "packed" / "generation_config.json").read_text())
    assert kept["top_k"] == 20 and len(kept["eos_token_id"]) == 3


def ends_of(path, **options):
    _, tokenizer = load(path, **options)
    return {tokenizer.decode([end]) for end in tokenizer.eos_token_ids}


# ---- commands


def test_commands_take_the_file(tmp_path, capfd):
    """Its packed copy says the same words; the option of the tokenizer is for both commands."""
    path, packed = tmp_path / "m.gguf", tmp_path / "packed"
    gguf_models.write_gguf(path, "qwen3_moe", mixed(MIXED), {"tokenizer.ggml.pre": "unheard-of"})
    gguf_models.write_gguf(tmp_path / "other.gguf", "qwen3_moe", mixed(MIXED))
    options = ["--tokenizer", str(locate(tmp_path / "other.gguf").path)]
    assert convert_main(["--hf-path", str(path), "--mlx-path", str(packed), *options]) == 0
    said = []
    for model in (["--model", str(path), *options], ["--model", str(packed)]):
        capfd.readouterr()
        assert generate_main([*model, "--prompt", "hello", "--max-tokens", "6", "--temp", "0"]) == 0
        said.append(capfd.readouterr().out)
    assert said[0] == said[1]
    assert generate_main(["--model", str(path), "--prompt", "hello"]) == 1
    assert capfd.readouterr().err.startswith("error: GGUF metadata tokenizer.ggml.pre is 'unheard-of'")


def test_no_file_is_deleted_but_shards(tmp_path, capsys):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, "qwen3_moe", mixed(MIXED))
    argv = ["--hf-path", str(path), "--mlx-path", str(tmp_path / "out"), "--delete-source"]
    for more in ([], ["--yes"]):
        assert convert_main([*argv, *more]) == 1
        assert "is a file; --delete-source deletes the safetensors files of a directory" in capsys.readouterr().err
    assert path.is_file()


# ---- refusals


def refusal(tmp_path, error, types=MIXED, keys=None, opens=load_model):
    gguf_models.write_gguf(tmp_path / "m.gguf", "qwen3_moe", mixed(types), keys)
    with pytest.raises(error) as raised:
        opens(tmp_path / "m.gguf")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_shards_elsewhere_are_refused(tmp_path):
    said = refusal(tmp_path, ModelFileError, opens=lambda path: load_model(path, shards_in=[tmp_path]))
    assert "--shards-in is for safetensors files" in said


def test_the_parts_of_a_split_file_on_several_drives(tmp_path):
    """The model's bits, also from a part beside which the first one does not lie."""
    whole, other = tmp_path / "whole", tmp_path / "other"
    for folder in (whole, other, tmp_path / "empty"):
        folder.mkdir()
    gguf_models.write_gguf(whole / "m.gguf", "qwen3_moe", mixed(MIXED), split_max_tensors=12)
    parts, tokens = sorted(whole.iterdir()), mx.array([[3, 1, 4, 1, 5]])
    assert len(parts) > 3
    wanted = load_model(parts[0], expert_io="pread")(tokens)
    moved = [shutil.move(part, other / part.name) for part in parts[::2]]
    for path, shards_in in ((moved[0], [whole]), (parts[1], [tmp_path / "empty", other])):
        assert mx.array_equal(load_model(path, expert_io="pread", shards_in=shards_in)(tokens), wanted)
    assert plan_command.main(["--model", str(moved[0]), "--shards-in", str(whole)]) == 0
    with pytest.raises(ModelFileError, match=rf"{parts[1].name} does not exist, nor is it in \S+/empty; .* part 2 "):
        load_model(moved[0], shards_in=[tmp_path / "empty"])
    with pytest.raises(ModelFileError, match=f"{parts[1].name} does not exist; .* its directory with --shards-in"):
        load_model(moved[0])


def test_an_architecture_without_a_table_is_refused(tmp_path):
    said = refusal(tmp_path, ConfigError, keys={"general.architecture": "quux"})
    assert "architecture 'quux' are not read; read are qwen3moe" in said


@pytest.mark.parametrize("stated", [[1], [None, "m.gguf"], {"0": "m.gguf"}, "m.gguf"])
def test_a_configuration_that_states_no_paths(tmp_path, stated):
    """Anybody's config.json may have the key under which ours has the files."""
    (tmp_path / "config.json").write_text(json.dumps({"gguf": stated}))
    assert described_files(tmp_path) == ()


def test_metadata_that_are_missing_or_strange(tmp_path):
    for key, value, wanted in (
        ("qwen3moe.expert_count", "many", "'qwen3moe.expert_count' is 'many'; expected int"),
        ("qwen3moe.expert_count", True, "'qwen3moe.expert_count' is 'True'; expected int"),
        ("qwen3moe.rope.scaling.type", "linear", "only yarn is read"),
        ("qwen3moe.attention.value_length", 32, "only 64 is implemented"),
        ("qwen3moe.expert_used_count", 99, "num_experts_per_tok"),
        ("qwen3moe.embedding_length", 64, "the model needs"),
        ("tokenizer.ggml.eos_token_id", 5000, "is no token"),
    ):
        said = refusal(tmp_path, Exception, keys={key: value})
        assert wanted in said, (key, said)

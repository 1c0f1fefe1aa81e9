"""GGUF files of every architecture that is read: configurations, names, and what llama.cpp changes in weights."""

import json
import math
from dataclasses import replace

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from minmax import convert
from tiny_models import on_cpu

from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.families.gguf import Metadata, renamed_tensor
from moeflux_mlx.families.gguf_rope import llama3_scaling
from moeflux_mlx.families.registry import FAMILIES, GGUF, architecture_of
from moeflux_mlx.formats.gguf_file import open_gguf
from moeflux_mlx.kinds import Llama3
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.locate import locate
from moeflux_mlx.ops.rope import llama3_inv_freq
from moeflux_mlx.spec import ModelArgs

pytest.importorskip("gguf")
import gguf_models  # noqa: E402  (needs gguf)

TOLERANCE = 2e-4
LEAST = {"expert_io": "pread", "expert_cache_bytes": 1}
TYPES = {
    **{"ffn_gate_exps": "Q4_0", "ffn_up_exps": "MXFP4", "ffn_down_exps": "Q8_0", "attn_output": "Q6_K"},
    **{"token_embd": "Q8_0", "output.": "Q5_0", "attn_q.": "IQ4_NL", "attn_gate": "Q5_1", "ssm_out": "Q4_K"},
}
PUBLISHED = {  # of values for which GGUF has no key
    "gpt_oss": {"swiglu_limit": 7.0},
    "afmoe": {"layer_types": None, "global_attn_every_n_layers": 4},
    "mixtral": {"sliding_window": None},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "llama4": {"no_rope_layers": [], "attention_chunk_size": 8192, "attn_scale": 0.1, "floor_scale": 8192},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with on_cpu():
        yield


def type_of(family):
    """Returns the function that gives a tensor its type."""

    def kind(name):
        if "conv1d" in name or "shortconv.conv" in name:
            return "F32"
        return next((kind for part, kind in TYPES.items() if part in name), "Q8_0")

    return kind


def logits(source, family, golden="hub", **options):
    return logits_of_chunks(source, family, [None], golden, **options)[0]


def logits_of_chunks(source, family, chunks, golden="hub", **options):
    """Returns the logits of the golden's tokens for each of `chunks`, the number of tokens at a time; None: all."""
    tokens, first = goldens.golden(family, golden)[0], goldens.first_position(family)
    return logits_of_tokens(source, tokens, chunks, first, **options)


def logits_of_tokens(source, tokens, chunks=(None,), first=0, **options):
    model, made = load_model(source, dtype=mx.float32, **options), []
    for chunk in chunks:
        cache, pieces = model.make_cache(), range(chunk or len(tokens), len(tokens), chunk or len(tokens))
        for layer in cache:
            layer.shift(first)
        parts = [model(piece, cache) for piece in mx.split(mx.array(tokens)[None], list(pieces), axis=1)]
        made.append(np.array(mx.concatenate(parts, axis=1)[0].astype(mx.float32)))
    model.experts.close()
    return made


def logits_of_every_way(path, packed, tokens, *chunks):
    """Converts a file, and returns the logits for each of `chunks` (none: all tokens at once), which have the same bits
    in every way to open it."""
    convert(path, packed)
    ways = (path, {"expert_io": "resident"}), (path, LEAST), (packed, {})
    first, *others = (logits_of_tokens(source, tokens, chunks or (None,), **options) for source, options in ways)
    assert all(np.array_equal(*pair) for other in others for pair in zip(first, other, strict=True))
    return first


def hub_checkpoint(path, family):
    """Returns the publisher's checkpoint, with published values of what the tiny one has otherwise."""
    goldens.write_variant(path, family, "hub")
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.get("text_config", config).update(PUBLISHED.get(family, {}))
    file.write_text(json.dumps(config))
    return path


def test_the_architecture_of_a_model_is_known_without_a_file():
    for family, architecture in gguf_models.ARCHITECTURES.items():
        types = (config["model_type"] for config in (goldens.config(family), goldens.text_config(family)))
        assert architecture_of(*types) == architecture, family
    assert architecture_of("g9v3") is None


@pytest.mark.parametrize("family", gguf_models.OWN)
def test_floats_become_the_model_that_the_checkpoint_becomes(tmp_path, family):
    gguf_models.write_gguf(tmp_path / "m.gguf", family, lambda name: "F32")
    theirs = ModelArgs.from_file(hub_checkpoint(tmp_path / "hub", family))
    ours = ModelArgs.from_file(locate(tmp_path / "m.gguf").path)
    other = {"eos_token_ids": (), "model_type": ""}
    assert replace(ours, **other) == replace(theirs, **other)
    assert FAMILIES[ours.model_type].read is FAMILIES[theirs.model_type].read
    convert(tmp_path / "m.gguf", tmp_path / "ours")
    convert(tmp_path / "hub", tmp_path / "theirs")
    made, wanted = (mx.load(str(tmp_path / name / "resident.safetensors")) for name in ("ours", "theirs"))
    split = {name for name in (*made, *wanted) if any(part in name for part in ("kv_b_proj", "embed_q", "unembed"))}
    assert made.keys() - split == wanted.keys() - split
    for name in wanted.keys() - split:
        if name.endswith("A_log"):  # through exp and log
            assert mx.allclose(made[name], wanted[name].astype(mx.float32), atol=1e-6), name
        else:
            assert mx.array_equal(made[name], wanted[name].astype(made[name].dtype)), name
    if family != "gpt_oss":  # its records have biases, of which the file has more bits than the checkpoint
        for file in (tmp_path / "theirs" / "packed_experts").glob("*.bin"):
            assert (tmp_path / "ours" / "packed_experts" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "family, golden", [("qwen3_next", "hub"), ("qwen3_5_moe", "hub"), ("deepseek_v3", "mlx4_embed_q")]
)
def test_converted_floats_have_the_logits_of_hugging_face(tmp_path, family, golden):
    gguf_models.write_gguf(tmp_path / "m.gguf", family, lambda name: "F32")
    convert(tmp_path / "m.gguf", tmp_path / "packed")
    assert (
        np.abs(logits(tmp_path / "packed", family, golden=golden) - goldens.golden(family, golden)[1]).max() < TOLERANCE
    )


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "qwen3_5_moe",
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "mixtral",
        "granitemoehybrid",
        "lfm2_moe",
        "gemma4",
        "llama4",
        "hy_v3",
    ],
)
def test_quantised_files_in_place_and_converted(tmp_path, family):
    """The same bits in every way to open it; those of the families that the oracle computes are right."""
    path = tmp_path / "m.gguf"
    weights = gguf_models.write_gguf(path, family, type_of(family))
    convert(path, tmp_path / "packed")
    whole, pieces = logits_of_chunks(path, family, [None, 7], expert_io="resident")
    assert np.array_equal(logits(path, family, **LEAST), whole)
    assert np.array_equal(logits_of_chunks(tmp_path / "packed", family, [7])[0], pieces)
    if family in goldens.families():
        wanted = oracle.forward(goldens.config(family), weights, goldens.golden(family)[0])
        assert np.abs(whole - wanted).max() < TOLERANCE and np.abs(pieces - wanted).max() < TOLERANCE


STRANGE = ("qwen3_5_moe", "deepseek_v3", "gpt_oss", "granitemoehybrid", "lfm2_moe", "gemma4", "llama4", "hy_v3")


@pytest.mark.parametrize("family", STRANGE)
def test_strange_metadata_are_refused_or_read(tmp_path, family):
    """Whatever a key of the architecture holds, or if it is missing: a description of a model, or one line."""
    gguf_models.write_gguf(tmp_path / "m.gguf", family, lambda name: "F32")
    whole = open_gguf(tmp_path / "m.gguf")
    architecture, refused = gguf_models.ARCHITECTURES[family], 0
    values = (None, 0, -1, 1 << 63, 0.0, -1.5, math.inf, math.nan, True, "", "x", [], [0], ["x"], [1] * 99)
    keys = [key for key in whole.metadata if key.startswith(f"{architecture}.")]
    head = f"{architecture}.attention"
    changes = [{key: value} for key in keys for value in values] + [
        {f"{head}.key_length": 0, f"{head}.value_length": 0},
        {f"{head}.key_length": None, f"{head}.value_length": None, f"{head}.head_count": 0},
    ]
    for change in changes:
        try:
            read = Metadata({**whole.metadata, **change}, whole.tensors)
            ModelArgs.from_dict(GGUF[architecture].config(read))
        except (ConfigError, ModelFileError) as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("family", ["deepseek_v3", "hy_v3", "afmoe"])
def test_a_scale_of_zero_is_none(tmp_path, family):
    gguf_models.write_gguf(tmp_path / "m.gguf", family, lambda name: "F32")
    whole = open_gguf(tmp_path / "m.gguf")
    architecture = gguf_models.ARCHITECTURES[family]
    scales = []
    for value in (0.0, 1.0, 2.5):
        read = Metadata({**whole.metadata, f"{architecture}.expert_weights_scale": value}, whole.tensors)
        args = ModelArgs.from_dict(GGUF[architecture].config(read))
        scales.append({args.layers[layer].feed_forward.router.scale for layer in args.moe_layers})
    assert scales == [{1.0}, {1.0}, {2.5}]


@pytest.mark.parametrize("factor, high, context", [(16.0, 1.0, 8192), (8.0, 4.0, 8192), (32.0, 4.0, 4096)])
def test_a_scaling_of_llama_3_is_found_in_its_result(factor, high, context):
    """With no ramp, as Scout has it, many contexts have one result."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
    scaling["original_max_position_embeddings"] = context
    ((_, slowed),) = gguf_models.slowed_by({"rope_scaling": scaling, "rope_theta": 5e5, "head_dim": 128}).items()
    found = llama3_scaling(slowed, 5e5)
    assert high == 1 or found == scaling
    frequencies = 5e5 ** -(np.arange(64) / 64)
    del found["rope_type"]
    assert np.allclose(llama3_inv_freq(frequencies, Llama3(**found)), frequencies / slowed, rtol=1e-5)


def test_other_divisors_of_frequencies_are_refused():
    assert llama3_scaling([], 1e4) is None and llama3_scaling([1.0] * 8, 1e4) is None
    rng = np.random.default_rng(0)
    strange = [[0.0] * 8, [math.nan] * 8, [8.0] * 4 + [1.0] * 4, [1, 2, 3, 8.0], [-1.0, 4.0, 8.0], [1, 4, 8, math.inf]]
    for slowed in [*strange, list(1 + rng.random(8)), [1, 1, 3, 8.0], [1, 1, 2, 6, 6.5, 8, 8, 8.0]]:
        with pytest.raises(ConfigError, match="rope_freqs.weight"):
            llama3_scaling(slowed, 1e4)


def test_what_llama_cpp_knows_of_llama_4(tmp_path):
    """By the number of experts, whether queries are normed; by a window of 0, that all layers rotate."""
    gguf_models.write_gguf(tmp_path / "m.gguf", "llama4", lambda name: "F32")
    whole = open_gguf(tmp_path / "m.gguf")
    change = {"llama4.expert_count": 128, "llama4.attention.sliding_window": 0}
    for keys, norm, turned in (({}, "unit", 4), (change, None, 5)):
        args = ModelArgs.from_dict(GGUF["llama4"].config(Metadata({**whole.metadata, **keys}, whole.tensors)))
        assert [mixer.rotation is not None for mixer in args.mixers].count(True) == turned
        assert args.mixers[0].norm == norm and args.mixers[0].chunked == (turned == 4)


def test_tensors_of_one_name_are_refused(tmp_path):
    extra = {"model.norm.weight": np.zeros(128, np.float32)}
    gguf_models.write_gguf(tmp_path / "m.gguf", "qwen3_moe", type_of("qwen3_moe"), extra=extra)
    with pytest.raises(ModelFileError, match="two tensors are model.norm.weight"):
        load_model(tmp_path / "m.gguf")


def test_fused_experts(tmp_path):
    """Rows of one matrix: two ranges of an expert lie side by side."""
    family = "qwen3_5_moe"
    for name, fused in (("m", True), ("n", False)):
        gguf_models.write_gguf(
            tmp_path / f"{name}.gguf", family, lambda name: "F32" if "conv1d" in name else "Q4_0", fused=fused
        )
    convert(tmp_path / "m.gguf", tmp_path / "packed")
    made = logits(tmp_path / "m.gguf", family, **LEAST)
    for source in ("packed", "n.gguf"):
        assert np.array_equal(logits(tmp_path / source, family), made), source


def test_value_heads_that_are_tiled():
    """Of 2 key heads with 3 value heads each, the stored order has both first value heads first."""
    config = {
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 6},
        **{"linear_key_head_dim": 4, "linear_value_head_dim": 8},
    }
    grouped = [(key, number) for key in range(2) for number in range(3)]
    stored = [(key, number) for number in range(3) for key in range(2)]
    wanted = [stored.index(one) for one in grouped]
    change = GGUF["qwen35moe"].change
    assert change(config, "linear_attn.dt_bias", (6,)).rows.tolist() == wanted
    each = [head * 8 + i for head in wanted for i in range(8)]
    assert change(config, "linear_attn.in_proj_z.weight", (48, 64)).rows.tolist() == each
    assert change(config, "linear_attn.in_proj_qkv.weight", (64, 64)).rows.tolist() == [
        *range(16),
        *(16 + one for one in each),
    ]
    assert change(config, "linear_attn.out_proj.weight", (64, 48)).columns.tolist() == each


def test_names_of_both_kinds_of_block():
    assert renamed_tensor("blk.3.ffn_gate_up_exps.weight", GGUF["qwen35moe"]) == (
        *(3, "model.layers.3.mlp.experts.gate_up_proj"),
    )
    assert renamed_tensor("blk.0.attn_kv_b.weight", GGUF["deepseek2"])[1] == "model.layers.0.self_attn.kv_b_proj.weight"
    assert renamed_tensor("unheard.of", GGUF["qwen3moe"]) == (None, "unheard.of")


def test_draft_blocks_are_left_out(tmp_path):
    """They count as blocks of the model."""
    family, c = "glm4_moe", goldens.text_config("glm4_moe")
    keys = {"glm4moe.block_count": c["num_hidden_layers"] + 1, "glm4moe.nextn_predict_layers": 1}
    extra = {f"blk.{c['num_hidden_layers']}.nextn.eh_proj.weight": np.zeros((128, 256), np.float32)}
    gguf_models.write_gguf(tmp_path / "m.gguf", family, type_of(family), keys, extra=extra)
    gguf_models.write_gguf(tmp_path / "n.gguf", family, type_of(family))
    assert np.array_equal(logits(tmp_path / "m.gguf", family), logits(tmp_path / "n.gguf", family))

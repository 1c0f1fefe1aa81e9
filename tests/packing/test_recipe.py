"""Recipes: what a file may say, which part a matrix belongs to, and what a conversion makes of it."""

import json

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from minmax import convert
from test_convert import check_kept, stored, write_tiny
from test_small_floats import FORMS, write_model
from tiny_models import on_cpu

from moeflux_mlx.convert import main
from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.formats.checkpoint import RECIPE
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.formats.record import PROJECTIONS
from moeflux_mlx.model.tensors import needed, resident_bytes, token_bytes
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.packing.located import Located
from moeflux_mlx.packing.recipe import PARTS, RECIPES, Recipe, part_of, read_recipe
from moeflux_mlx.plan import describe_variant
from moeflux_mlx.plan import main as plan
from moeflux_mlx.quant import Quant
from moeflux_mlx.spec import ModelArgs

pytestmark = pytest.mark.usefixtures("cpu_device")
TOLERANCE = 5e-5
MIXED = {
    "name": "mixed",
    "default": 6,
    "gate_up": 3,
    "down": {"bits": 5, "group_size": 32},
    "attention": "mxfp8",
    "embedding": "float",
    "head": 8,
    "router": "float",
    "layers": {"-1": {"gate_up": {"bits": 4, "group_size": 128}, "attention": 2}, "0-0": {"down": "nvfp4"}},
}


def written(path, content):
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("content", [*RECIPES.values(), MIXED])
def test_a_file_says_all_of_a_recipe(tmp_path, content):
    recipe = Recipe.from_json(content, "a name", "here")
    (tmp_path / RECIPE).write_bytes(recipe.file())
    assert read_recipe(tmp_path) == recipe
    assert recipe.name == content.get("name", "a name") and {*content} <= {"name", *PARTS, "layers"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"defaults": 4}, "'defaults' is no part; parts are gate_up, down, shared,"),
        ({"gate_up": 4}, "default is missing; give the form of every part that is not named"),
        ({"default": "4"}, "default is '4'; give a number of bits, one of affine, mxfp4"),
        ({"default": 7}, "quantization of default in .*: 7 bits.* is not known; supported: affine"),
        ({"default": {"bits": 4, "groups": 32}}, "default is {'bits': 4, 'groups': 32}; give"),
        ({"default": 4, "down": "float"}, "down is 'float'; give a number of bits, one of .*, mxfp8, a type of GGUF"),
        ({"default": "float"}, "routed experts cannot be float; give gate_up and down a form"),
        ({"default": 4, "name": 3}, "name is 3; give a line of text"),
        ({"default": 4, "layers": [1]}, "layers is .*; give an object such as"),
        ({"default": 4, "layers": {"first": {"down": 6}}}, "'first' names no layers; give \"3\", \"-1\" or \"0-2\""),
        ({"default": 4, "layers": {"0": {"head": 6}}}, "'head' is no part; parts are gate_up,.* in layers 0"),
        ({"default": 4, "layers": {"5-0": {"down": 6}}}, "'5-0' names no layers; give \"3\", \"-1\" or \"0-2\""),
        ({"default": 4, "layers": {"9" * 5000: {"down": 6}}}, "names no layers; give \"3\", \"-1\" or \"0-2\""),
        ({"default": 4, "layers": {"0-99999999999": {"down": 6}}}, "'0-99999999999' names no layers"),
        ({"default": 4, "layers": {f"{i}-{i + 1}": {} for i in range(4097)}}, "layers has 4097 entries; give at most"),
        ({"default": 4, "name": "a" * 256}, "name is 'aaa.*; give a line of text of at most 255 characters"),
        ({"default": 4, "layers": {"0": {}}, "name": "a" * (1 << 20)}, "bytes; a recipe has at most 1048576"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_refused_in_one_line(tmp_path, content, message):
    path = written(tmp_path / "own.json", content)
    with pytest.raises(ConfigError, match=message) as refused:
        Recipe.of(path)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def test_recipes_that_do_not_suit_the_model_are_refused(tmp_path):
    source = write_tiny(tmp_path / "source")
    with pytest.raises(ConfigError, match="there is no recipe best; give uniform, balanced, small, or the path of a"):
        convert(source, tmp_path / "out", recipe="best")
    for layer in ("2", "-3", "0-2", "0-9999"):
        path = written(tmp_path / "own.json", {"default": 4, "layers": {layer: {"down": 6}}})
        with pytest.raises(ConfigError, match=f"names the layers '{layer}'; the model has 2, from 0 to 1"):
            convert(source, tmp_path / "out", recipe=path)
    path = written(tmp_path / "own.json", {"default": 4, "layers": {"1": {"default": "float"}}})
    with pytest.raises(ConfigError, match="routed experts of layer 1 cannot be float; give them bits"):
        convert(source, tmp_path / "out", recipe=path)


def test_options_override_what_differs_in_some_layers():
    recipe = Recipe.from_json(MIXED, "mixed", "here").with_forms({"gate_up": Quant(2, 64), "down": Quant(2, 64)})
    forms = [recipe.form(part, layer, 3) for part in ("gate_up", "down") for layer in range(3)]
    assert forms == [Quant(2, 64)] * 6
    assert recipe.to_json()["layers"] == {"-1": {"attention": 2}}


def test_every_matrix_belongs_to_one_part():
    met = {}
    for family in ("qwen3_next", "nemotron_h", "lfm2_moe", "deepseek_v32", "glm5_next", "qwen4_exp"):
        args = ModelArgs.from_dict(goldens.config(family))
        for path in needed(args).matrices:
            module = path.removeprefix("model.layers.").partition(".")[2]
            met.setdefault(part_of(args, path), set()).add((family, module))
    modules = {part: {module for _, module in pairs} for part, pairs in met.items()}
    assert modules["router"] == {"mlp.gate", "mlp.shared_expert_gate"}
    assert modules["shared"] == {f"mlp.shared_expert.{name}" for name in PROJECTIONS}
    assert {"linear_attn.in_proj_qkv", "mamba.in_proj", "conv.out_proj", "self_attn.f_a_proj"} <= modules["recurrent"]
    assert {"self_attn.o_proj", "self_attn.indexer.wk", "self_attn.kv_b_proj"} <= modules["attention"]
    assert {"mlp.down_proj", "ple.key_proj"} <= modules["default"]
    assert not any(".self_attn" in one or one.startswith("linear") for one in modules["default"])
    assert {"embedding", "head"} <= met.keys() <= PARTS.keys()


ATTENTION = (Quant(8, 32, "mxfp8"), Quant(8, 32, "mxfp8"), Quant(2, 64))
GATE_UP, DOWN = (Quant(3, 64), Quant(3, 64), Quant(4, 128)), (Quant(4, 16, "nvfp4"), Quant(5, 32), Quant(5, 32))


def test_a_conversion_gives_each_part_its_form(tmp_path):
    source = goldens.write_variant(tmp_path / "source", "qwen3_moe", "hub")
    report = convert(source, tmp_path / "out", recipe=written(tmp_path / "own.json", MIXED))
    assert report.recipe == Recipe.of(tmp_path / "own.json") == read_recipe(tmp_path / "out")
    given = goldens.split_experts(goldens.source("qwen3_moe"))
    weights = {name: mx.array(goldens.as_float(one)).astype(mx.bfloat16) for name, one in given.items()}
    tensors = {name: one for name, one in weights.items() if name.endswith(("embed_tokens.weight", "gate.weight"))}
    tensors |= {name: one for name, one in weights.items() if one.ndim == 1}
    tensors |= made(weights, ["lm_head"], "lm_head", Quant(8, 64))
    for layer in range(3):
        stem = f"model.layers.{layer}"
        for path in (f"{stem}.self_attn.{name}_proj" for name in "qkvo"):
            tensors |= made(weights, [path], path, ATTENTION[layer])
        for name in PROJECTIONS:
            paths = [f"{stem}.mlp.experts.{expert}.{name}" for expert in range(16)]
            quant = (DOWN if name == "down_proj" else GATE_UP)[layer]
            tensors |= made(weights, paths, f"{stem}.mlp.switch_mlp.{name}", quant)
    check_kept(tmp_path / "out", tensors)
    values = {name: np.array(one.astype(mx.float32), np.float64) for name, one in weights.items()}
    tokens = goldens.golden("qwen3_moe")[0]
    wanted = oracle.forward(goldens.config("qwen3_moe"), values, tokens)
    for mode in ("mmap", "pread"):
        model = load_model(tmp_path / "out", dtype=mx.float32, expert_io=mode)
        got = np.array(model(mx.array(tokens)[None]))[0]
        assert np.abs(got - wanted).max() < TOLERANCE, mode
        model.experts.close()


def made(weights, paths, path, quant):
    """Returns the tensors of the matrices at `paths`, a stack if there are several, under the name of `path`; in
    `weights` their values take the place of the given ones."""
    given = mx.stack([weights[f"{one}.weight"] for one in paths])
    parts = stored(path, given, quant)
    how = {"group_size": quant.group_size, "bits": quant.bits, "mode": quant.mode}
    exact = [part.astype(mx.float32) if part.dtype == mx.bfloat16 else part for part in parts.values()]
    values = mx.dequantize(*exact, **how).astype(mx.float32)
    weights |= {f"{one}.weight": matrix for one, matrix in zip(paths, values, strict=True)}
    return parts if len(paths) > 1 else {name: part[0] for name, part in parts.items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"recipe": "uniform"}, {"gate_up": 4, "down": 4, "attention": 4, "router": 8}),
        ({"recipe": "balanced"}, {"gate_up": 4, "down": 4, "attention": 8, "router": 8}),
        ({"recipe": "small"}, {"gate_up": 2, "down": 3, "attention": 6, "head": 6}),
        ({"recipe": "balanced", "expert_bits": 3}, {"gate_up": 3, "down": 3, "attention": 8}),
        ({"recipe": "small", "down_bits": 4}, {"gate_up": 2, "down": 4, "attention": 6}),
        ({"recipe": "small", "q_bits": 5}, {"gate_up": 5, "down": 5, "attention": 5, "router": 8}),
    ],
)
def test_named_recipes_and_options_that_override_them(tmp_path, options, expected):
    report = convert(write_tiny(tmp_path / "source"), tmp_path / "out", **options)
    assert {part: report.recipe.form(part).bits for part in expected} == expected
    args = ModelArgs.from_file(tmp_path / "out")
    record = open_packed(tmp_path / "out", args).layout.records[1]
    paths = {"router": "model.layers.1.mlp.gate", "attention": "model.layers.1.self_attn.v_proj", "head": "lm_head"}
    stated = {part: args.quantization.of(path) for part, path in paths.items()}
    stated |= {"gate_up": record.up.quant, "down": record.down.quant}
    assert {part: stated[part] for part in expected} == {part: Quant(bits, 64) for part, bits in expected.items()}


def test_a_conversion_with_another_recipe_is_refused(tmp_path):
    source, own = write_tiny(tmp_path / "source"), written(tmp_path / "own.json", MIXED | {"layers": {}})
    convert(source, tmp_path / "out", recipe=own)
    written(own, {"default": 5})
    with pytest.raises(ModelFileError, match="with other options"):
        convert(source, tmp_path / "out", recipe=own)


@pytest.mark.parametrize(("options", "bits"), [({}, 8), ({"q_bits": 5}, 5), ({"recipe": "uniform"}, 4)])
def test_floats_beside_published_codes_get_eight_bits(tmp_path, options, bits):
    make, hub, quant = FORMS["mxfp4 of compressed-tensors"]
    write_model(tmp_path / "source", make, hub)
    report = convert(tmp_path / "source", tmp_path / "out", **options)
    stated = ModelArgs.from_file(tmp_path / "out").quantization
    assert stated.of("model.layers.1.mlp.switch_mlp.up_proj") == quant and not report.made_experts
    for path in ("model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj"):
        assert stated.of(path) == Quant(bits, 64), path


def test_a_checkpoint_of_mlx_needs_no_recipe(tmp_path):
    source = goldens.write_variant(tmp_path / "source", "qwen3_moe", "mlx4")
    assert convert(source, tmp_path / "out", recipe="small").recipe is None
    convert(source, tmp_path / "again")
    assert read_recipe(tmp_path / "out") is None
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "again" / "config.json").read_bytes()


def test_commands_show_the_recipe_and_what_a_token_reads(tmp_path, capsys):
    source, out = write_tiny(tmp_path / "source", config={"vocab_size": 5000}), str(tmp_path / "out")
    assert main(["--hf-path", str(source), "--mlx-path", out, "--recipe", "balanced"]) == 0
    err = capsys.readouterr().err
    assert "recipe balanced: gate_up 4, down 4, tables 4, default 8\na token reads 0.000 GB of experts" in err
    assert plan(["--model", out, "--dtype", "bfloat16"]) == 0
    assert "recipe balanced: gate_up 4" in (shown := capsys.readouterr().out)
    assert "a token reads 0.000 GB of experts, from the disk or from memory, and 0.001 GB of other weights" in shown


@pytest.mark.parametrize("content", [{"default": 4}, MIXED | {"layers": {"-1": {"shared": "float", "down": 3}}}])
def test_a_plan_counts_what_a_conversion_stores(tmp_path, capsys, content):
    own, args = written(tmp_path / "own.json", content), ModelArgs.from_dict(goldens.config("qwen3_next"))
    with on_cpu():
        convert(goldens.write_variant(tmp_path / "source", "qwen3_next", "hub"), tmp_path / "out", recipe=own)
    weights = open_weights(Located(tmp_path / "out"))
    planned = describe_variant(args, str(own), mx.bfloat16)
    assert planned.resident == resident_bytes(weights.shapes, mx.bfloat16)
    assert planned.dense == token_bytes(args, weights.shapes, mx.bfloat16)
    assert planned.layout.total_bytes == weights.experts.layout.total_bytes
    assert plan(["--variant", "qwen3-30b-a3b", "--recipe", str(own), "--dtype", "bfloat16"]) == 0
    assert f"recipe {Recipe.of(own)}" in capsys.readouterr().out
    assert plan(["--model", str(tmp_path / "out"), "--recipe", "small"]) == 1
    assert "--recipe is for --variant" in capsys.readouterr().err

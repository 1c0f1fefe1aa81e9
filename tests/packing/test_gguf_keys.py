"""Each key and tensor of a GGUF that changes numbers is computed or refused by name, in every architecture."""

import functools
import math
import tempfile
from pathlib import Path

import converted_gguf
import gguf_models
import goldens
import numpy as np
import pytest
from grids import drawn, marks
from test_gguf_families import LEAST, cache, logits, type_of  # noqa: F401 (a fixture)

from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.families.gguf import Metadata, renamed_tensor
from moeflux_mlx.families.gguf_keys import SLOWED, UNREAD
from moeflux_mlx.families.gguf_rope import SCALING
from moeflux_mlx.families.names import canonical_name
from moeflux_mlx.families.registry import FAMILIES, GGUF
from moeflux_mlx.formats.gguf_file import open_gguf
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.packing.gguf_tensors import dequantized
from moeflux_mlx.spec import ModelArgs

gguf = pytest.importorskip("gguf")

# Keys of llama.cpp (src/llama-arch.cpp) that the package does not have.
NEWER = (
    "rope.scaling.alpha",
    "rope.scale_linear",
    "attention.rope_pattern",
    "embedding_length_out",
    "hash_layer_count",
)
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 512, "yarn_beta_fast": 8.0, "yarn_beta_slow": 1.0}
# Some have another scaling, the others refuse YaRN, or rotate nothing.
UNSCALED = ("llama4", "gemma4", "step35", "glm5-next", "kimi-linear", "kimi-k3", "nemotron_h_moe", "cohere2moe")
OF_YARN = {f"rope.scaling.{key}" for key in SCALING}
ABSENT = (3, 0.5, True, False, "x", [3], [0.5], [True] * 99)  # values of a key that the file does not have
ROTATING = ("rope.", "attention.sliding_window", "attention.scale", "softcapping", "_scale", "weights_norm", "epsilon")


def all_keys():
    """Returns the keys of an architecture that exist, without its name."""

    def texts(group):
        for name, value in vars(group).items():
            if isinstance(value, type) and not name.startswith("_"):
                yield from texts(value)
            elif isinstance(value, str):
                yield value

    return {key.removeprefix("{arch}.") for key in texts(gguf.Keys) if key.startswith("{arch}.")}.union(NEWER)


def written(path, family, extra=None, scaled=True, **changes):
    """Writes a file in which every key is active: with YaRN if it is `scaled`, and for Granite with a rotation.

    Args:
        extra: further tensors.
        changes: further metadata.

    Returns:
        its architecture, metadata, tensors' names, and what frequencies are divided by.
    """
    architecture = gguf_models.ARCHITECTURES[family]
    is_scaled = scaled and architecture not in UNSCALED
    keys = {f"{architecture}.rope.scaling.{key}": value for key, value in YARN.items()} if is_scaled else {}
    if architecture == "granitehybrid":
        keys["granitehybrid.rope.scaling.finetuned"] = True
    gguf_models.write_gguf(path, family, type_of(family), {**keys, **changes}, extra)
    whole = open_gguf(path)
    slowed = dequantized(whole.tensors[SLOWED]).tolist() if SLOWED in whole.tensors else []
    return architecture, dict(whole.metadata), set(whole.tensors), slowed


@functools.cache
def described(family):
    """What `written` returns of the file without changes."""
    with tempfile.TemporaryDirectory() as folder:
        return written(Path(folder) / "m.gguf", family)


@functools.cache
def usual_logits(family):
    """Of the file without changes."""
    with tempfile.TemporaryDirectory() as folder:
        written(Path(folder) / "m.gguf", family)
        return logits(Path(folder) / "m.gguf", family, **LEAST)


def config_of(architecture, metadata, tensors, slowed):
    """Returns config.json and what it describes, but for the ends of answers."""
    config = GGUF[architecture].config(Metadata(metadata, tensors, slowed))
    return config, ModelArgs.from_dict({**config, "vocab_size": 128})


def others(value):
    """Returns values of the same type as a key's own."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return ["linear", "longrope"]
    if isinstance(value, list):
        return [[others(one)[-1] for one in value]]
    made = [value * 2, value / 2 + 0.3, 3e-2] if isinstance(value, float) else [value // 2, value + 1, value * 4 + 2]
    return [other for other in made if other != value]


def outcome(architecture, metadata, tensors, slowed, base):
    """Returns whether the perturbed file is "refused", "other" than the base, or the "same"."""
    try:
        return "same" if config_of(architecture, metadata, tensors, slowed)[1] == base else "other"
    except (ConfigError, ModelFileError) as error:
        assert "\n" not in str(error)
        return "refused"


@pytest.mark.parametrize("family", gguf_models.ARCHITECTURES)
def test_no_key_is_left_out(family):
    """A key that says nothing stands in a list; of any other one each value of its type says something."""
    architecture, metadata, *tensors = described(family)
    base = config_of(architecture, metadata, *tensors)[1]
    listed, dropped = UNREAD.keys() | GGUF[architecture].unread.keys() | {"rope.scale_linear"}, []
    says_none = metadata.get(f"{architecture}.rope.scaling.type") == "none"  # then no factor means anything
    if architecture in UNSCALED:
        listed |= OF_YARN if says_none else OF_YARN - {"rope.scaling.factor"}
    for key in sorted(all_keys() - listed):
        name = f"{architecture}.{key}"
        values = others(metadata[name]) if name in metadata else ABSENT
        same = (outcome(architecture, {**metadata, name: value}, *tensors, base) == "same" for value in values)
        if any(same) if name in metadata else all(same):
            dropped.append(key)
    assert not dropped
    assert all(len(reason) > 20 for reason in (*UNREAD.values(), *GGUF[architecture].unread.values()))


@pytest.mark.parametrize("family", gguf_models.ARCHITECTURES)
def test_no_tensor_is_left_out(family):
    """Each has a name in the model, but for divisors of frequencies, which the configuration has. The model refuses a
    name that it does not have, as below."""
    architecture, metadata, tensors, slowed = described(family)
    args = config_of(architecture, metadata, tensors, slowed)[1]
    renames, layers = FAMILIES[args.model_type].renames_of(args.layers), args.num_hidden_layers
    spelt = {name: renamed_tensor(name, GGUF[architecture], tensors)[1] for name in tensors}
    assert {name for name, ours in spelt.items() if canonical_name(ours, layers, renames) is None} <= {SLOWED}


def test_a_tensor_that_no_model_has_is_refused(tmp_path):
    for name in ("blk.1.strange.weight", "blk.1.attn_q.strange", "strange.weight"):
        written(tmp_path / "m.gguf", "qwen3_moe", {name: np.ones(4, np.float32)})
        with pytest.raises(ModelFileError, match=r"tensor \S*strange\S* does not belong to this model"):
            load_model(tmp_path / "m.gguf", **LEAST)


def perturbed(architecture, metadata, tensors, slowed):
    """Yields {key: value}: another accepted value of each key of rotations, windows, scales and caps."""
    for name, value in metadata.items():
        key = name.removeprefix(f"{architecture}.")
        if (
            key == name
            or key in UNREAD
            or key in GGUF[architecture].unread
            or not any(part in key for part in ROTATING)
        ):
            continue
        of_others = [{name: other} for other in others(value)]
        made = (outcome(architecture, {**metadata, **one}, tensors, slowed, None) for one in of_others)
        yield from [one for one, how in zip(of_others, made, strict=True) if how == "other"][-1:]


@functools.cache
def accepted(family):
    return list(perturbed(*described(family)))


PARTS = [  # logits of files of llama.cpp's converter are also compared with the checkpoint's (test_converted_gguf.py)
    pytest.param(family, part, marks=marks(family not in converted_gguf.FAMILIES))
    for family, part in drawn(gguf_models.ARCHITECTURES, range(6))
]


@pytest.mark.parametrize("family, part", PARTS)
def test_each_key_moves_the_logits(tmp_path, family, part):
    path = tmp_path / "m.gguf"
    cases, base = accepted(family), usual_logits(family)
    assert cases
    for keys in cases[part::6]:
        written(path, family, **keys)
        try:
            assert not np.allclose(logits(path, family, **LEAST), base, rtol=0, atol=1e-5), keys
        except ModelFileError as error:  # the sizes of tensors say another number
            assert "the model needs" in str(error)


def test_layers_that_share_an_indexer_are_refused_where_none_does():
    architecture, metadata, *tensors = described("glm5_next")
    (key,) = (key for key in metadata if key.endswith("indexer.types"))
    with pytest.raises(ConfigError, match="share an indexer"):
        config_of(architecture, {**metadata, key: [False, *metadata[key][1:]]}, *tensors)


@pytest.mark.parametrize("family", gguf_models.ARCHITECTURES)
def test_factors_without_a_type_are_refused(family):
    """llama.cpp takes them as those of linear scaling; the type none says that they mean nothing."""
    architecture, metadata, *tensors = described(family)
    plain = {key: value for key, value in metadata.items() if ".rope.scaling." not in key}
    start = f"{architecture}.rope"
    for key in ("scaling.factor", "scale_linear", "scaling.attn_factor"):
        with pytest.raises(ConfigError, match=rf"{start}.{key} is 2.0"):
            config_of(architecture, {**plain, f"{start}.{key}": 2.0}, *tensors)
    with pytest.raises(ConfigError, match="scaling.attn_factor"):
        config_of(
            architecture, {**plain, f"{start}.scaling.type": "none", f"{start}.scaling.attn_factor": 2.0}, *tensors
        )
    unused = {f"{start}.scaling.type": "none", f"{start}.scaling.factor": 2.0}
    assert config_of(architecture, {**plain, **unused}, *tensors)[1] == config_of(architecture, plain, *tensors)[1]


@pytest.mark.parametrize(
    "factors, wanted", [((0.5, None), 0.5 * (0.1 * math.log(4) + 1)), ((None, 0.5), 0.5), ((0.5, 0.6), 0.3)]
)
def test_factors_of_what_is_rotated(factors, wanted):
    """One beside YaRN's own factor, one in its place, as `attention_factor` of config.json."""
    architecture, metadata, *tensors = described("qwen3_moe")
    names = ("attn_factor", "yarn_attn_factor")
    keys = {f"qwen3moe.rope.scaling.{name}": value for name, value in zip(names, factors, strict=True) if value}
    config, args = config_of(architecture, {**metadata, **keys}, *tensors)
    plain = config_of(architecture, metadata, *tensors)[0]
    plain["rope_scaling"]["attention_factor"] = config["rope_scaling"]["attention_factor"]
    assert plain["rope_scaling"]["attention_factor"] == pytest.approx(wanted)
    assert args == ModelArgs.from_dict({**plain, "vocab_size": 128})


def divisors(width):
    """Returns those of Llama 3.1's scaling for a head of which so many values are rotated."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    return gguf_models.slowed_by({"rope_scaling": scaling, "rope_theta": 1e4, "head_dim": width})[SLOWED]


READ = {"llama": 64, "granitehybrid": 32, "llama4": 32}  # rotated values of a head, where llama.cpp reads divisors


@pytest.mark.parametrize(
    "family, name",
    drawn(gguf_models.ARCHITECTURES, (SLOWED, "rope_factors_long.weight", "rope_factors_short.weight"), turns=2),
)
def test_tensors_that_change_rotations(tmp_path, family, name):
    if name == SLOWED and gguf_models.ARCHITECTURES[family] in READ:
        return  # below
    written(tmp_path / "m.gguf", family, {name: divisors(32)}, scaled=False)
    with pytest.raises(ConfigError, match=name):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("family", ["mixtral", "granitemoehybrid", "llama4"])
def test_divisors_of_frequencies_that_llama_cpp_reads(tmp_path, family):
    path, architecture = tmp_path / "m.gguf", gguf_models.ARCHITECTURES[family]
    made, width, keys = [], READ[architecture], {f"{architecture}.rope.freq_base": 1e4}
    for values in (divisors(width), np.ones(width // 2, np.float32)):
        written(path, family, {SLOWED: values}, scaled=False, **keys)
        made.append(logits(path, family, **LEAST))
    assert np.abs(made[0] - made[1]).max() > 1e-3
    written(path, family, {SLOWED: divisors(width // 2)}, scaled=False, **keys)
    with pytest.raises(ConfigError, match=f"{SLOWED} has {width // 4} values"):
        load_model(path)


def test_the_share_of_a_wide_head_that_rotates(tmp_path):
    """Gemma 4's, from divisors of its frequencies; others than 1 and very large ones are refused."""
    path, width = tmp_path / "m.gguf", goldens.text_config("gemma4")["global_head_dim"] // 2
    turned = [1.0] * (width // 4) + [1e30] * (width - width // 4)
    base = usual_logits("gemma4")
    written(path, "gemma4", {SLOWED: np.float32(turned)})
    assert np.array_equal(logits(path, "gemma4", **LEAST), base)
    written(path, "gemma4", {SLOWED: np.float32(sorted([1.0, *turned[:-1]]))})
    assert np.abs(logits(path, "gemma4", **LEAST) - base).max() > 1e-4
    for strange in ([2.0, *turned[1:]], turned[::-1], turned[1:]):
        written(path, "gemma4", {SLOWED: np.float32(strange)})
        with pytest.raises(ConfigError, match="rope_freqs.weight"):
            load_model(path)


@pytest.mark.parametrize(
    "family, stem", drawn(gguf_models.ARCHITECTURES, ["attn_output", "ffn_down_exps", "ffn_gate_inp", "output"])
)
def test_scales_of_matrices(tmp_path, family, stem):
    """llama.cpp multiplies the product of any matrix by its tensor `.scale`."""
    path = tmp_path / "m.gguf"
    _, _, names, _ = described(family)
    found = [name for name in sorted(names) if name.endswith(f"{stem}.weight")][-1:]
    scales = [name.replace(".weight", ".scale") for name in found]
    if not scales or scales[0] in names:
        pytest.skip("the family has no such matrix, or its own scale of it")
    base = usual_logits(family)
    written(path, family, {scales[0]: np.full(8 if "exps" in stem else 1, 2, np.float32)})
    try:
        moved = np.abs(logits(path, family, **LEAST) - base).max()
    except (ConfigError, ModelFileError) as error:
        assert ".scale" in str(error)
    else:
        assert moved > 1e-5


@pytest.mark.parametrize("kinds", [[True, False, True, False], [False, True, True, True]])
def test_a_list_of_layers_that_are_recurrent(kinds):
    architecture, metadata, *tensors = described("qwen3_next")
    _, args = config_of(architecture, {**metadata, "qwen3next.attention.recurrent_layers": kinds}, *tensors)
    assert [hasattr(mixer, "taps") for mixer in args.mixers] == kinds


def test_heads_differ_by_the_kind_of_layer_alone():
    keys = {"general.architecture": "step35", "step35.block_count": 3}

    def heads(counts, windows):
        return Metadata({**keys, "step35.attention.head_count": counts}).of_each_kind("attention.head_count", windows)

    assert heads([4, 2, 4], [True, False, True]) == (2, 4) and heads(6, [True, False, True]) == (6, 6)
    assert heads([4, 4, 4], [True] * 3) == (4, 4)
    with pytest.raises(ConfigError, match="step35.attention.head_count differs between layers of one kind"):
        heads([4, 2, 3], [True, False, True])

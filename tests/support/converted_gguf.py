"""GGUF files of llama.cpp's converter, built again from what `scripts/goldens/make_gguf_goldens.py` stored of them.

Of each family `fixtures/gguf` has

    FAMILY.json        metadata: {key: [types, value]}, without those of the tokenizer and of the file's name;
                       tensors: {name: [change, type, shape, slowest axis first]}, in the order of the file, or
                       {name: [values]} where the converter makes them of the configuration
    FAMILY.places.xz   of all tensors' values, one after the other: differences (int32) between the places that they
                       come from, among the values of the checkpoint's tensors in `order`

`fixtures/gguf/heads` has the same of the files with a draft head alone that the converter makes with `--mtp`.

Does not know: the package under test.
"""

import functools
import json
import lzma
import math

import goldens
import head_weights
import numpy as np

FOLDER = goldens.FIXTURES.parent / "gguf"
FAMILIES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
HEAD = "heads/"  # before a family's name: the file with its draft head alone
HEADED = tuple(sorted(path.stem for path in FOLDER.glob(f"{HEAD}*.json")))
# Changes of the tiny configurations: what the converter takes, and values for which GGUF has no keys. Models that they
# change have no golden.
FIELDS = {
    "laguna": {
        "moe_router_logit_softcapping": 0.0,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
    },
    "deepseek_v4": {"compress_rate_hca": 128},
    "nemotron_h_latent": {"time_step_limit": [0.0, math.inf], "max_position_embeddings": 1 << 20},
    "step3p5": {"rope_theta": [50.0, 1e4, 1e4, 1e4, 50.0, 1e4]},
    "kimi_linear": {"linear_attn_config": {"num_heads": 4}},
    "kimi_k3": {"linear_attn_config": {"num_heads": 4}},
    "qwen4_exp": {"ple_layer_ids": [2]},
    "mellum": {
        "mlp_layer_types": ["sparse"] * 3,
        "rope_parameters": {"full_attention": {"attention_factor": 1.2772589}},
    },
    "dots1": {"scoring_func": "sigmoid", "max_window_layers": 3},
    "glm5_next": {"linear_attn_config": {"num_heads": 4}},
    "minimax_m3_vl": {"swiglu_limit": 7.0},
    "hunyuan_v1_moe": {"rope_scaling": None, "rope_theta": 40780.69},  # the base that its scaling makes
}
ONES = ("_res_norm.weight",)  # factors of products that the converter stores; other values have no places
HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # numbers of draft heads
# The converter's name of a model, where the tiny configuration has another.
ARCHITECTURES = {
    **{"hy_v4_vl": "HYV4ForCausalLM", "kimi_k3": "KimiK3ForConditionalGeneration"},
    "mistral4": "Mistral3ForConditionalGeneration",
}
CHANGED = set(FIELDS) - {"hunyuan_v1_moe"} | {"sarvam_moe"}  # models that the changes make another one
GOLDEN = tuple(family for family in FAMILIES if family not in CHANGED)
# From values of a checkpoint to those of a GGUF, and back.
CHANGES = {
    "same": (lambda w: w, lambda v: v),
    "plus one": (lambda w: w + np.float32(1), lambda v: v - np.float32(1)),
    "exp": (np.exp, np.log),
    "minus exp": (lambda w: -np.exp(w), lambda v: np.log(-v)),
}


@functools.cache
def recipe(family):
    """Returns the two stored files: metadata and tensors, and places."""
    stored = json.loads((FOLDER / f"{family}.json").read_text())
    deltas = np.frombuffer(lzma.decompress((FOLDER / f"{family}.places.xz").read_bytes()), "<i4")
    return stored, np.cumsum(deltas, dtype=np.int64)


def config(family):
    """Returns config.json of the checkpoint that was converted, which has a draft head where that is its file."""
    count, family = int(family.startswith(HEAD)), family.removeprefix(HEAD)
    whole = goldens.config(family)
    text = whole.get("text_config", whole)
    whole["architectures"] = [ARCHITECTURES.get(family, whole["architectures"][0])]
    _change(text, {name: count for name in HEADS if count or name in text} | FIELDS.get(family, {}))
    return whole


def _change(fields, changes):
    for name, value in changes.items():
        if isinstance(value, dict):
            _change(fields[name], value)
        else:
            fields[name] = value


def weights_of(family, tensors):
    """Returns {hub name: array} of the checkpoint that was converted, of the same of the tiny model."""
    if family == "qwen4_exp":
        return {name: array for name, array in tensors.items() if ".layers.3.ple." not in name}
    if family == "mellum":
        of_first = {name: array for name, array in tensors.items() if name.startswith("model.layers.1.mlp.")}
        kept = {name: array for name, array in tensors.items() if not name.startswith("model.layers.0.mlp.")}
        return kept | {name.replace(".1.", ".0.", 1): array for name, array in of_first.items()}
    if family == "deepseek_v4":  # the longer blocks, of the published length
        longer = {name: np.resize(array, (128, 64)) for name, array in tensors.items() if array.shape == (16, 64)}
        return tensors | longer
    if family in ("glm5_next", "kimi_linear", "kimi_k3"):
        modules = {name.removesuffix("A_log") for name in tensors if name.endswith("A_log")}
        made = {name: _more_heads(name, array, modules) for name, array in tensors.items()}
        made |= {name: np.ones_like(array) for name, array in made.items() if name.endswith(ONES)}
        if family == "kimi_k3":  # its publisher stores one axis
            made |= {name: array.reshape(-1) for name, array in made.items() if name.endswith("A_log")}
        return made
    if family == "sarvam_moe":
        return {name: _zero_mean(array) if name.endswith("expert_bias") else array for name, array in tensors.items()}
    return tensors


def _zero_mean(array):
    """Returns the values with a mean that is 0 without rounding; which experts are chosen does not depend on it."""
    made = np.rint(array * 256)
    made[-1] -= made.sum()
    return (made / 256).astype(np.float32)


def _more_heads(name, array, modules):
    """Returns a matrix of linear attention of four heads instead of three, as many as attention has: the first head's
    values once more, in reverse."""
    module, _, leaf = name.rpartition("self_attn.")
    if f"{module}self_attn." not in modules or leaf.startswith(("f_a", "g_a", "o_norm")):
        return array
    axis = 2 if array.ndim == 4 else int(leaf == "o_proj.weight")
    if array.shape[axis] % 3:  # K3 has more values of A_log than heads
        return array
    first = np.split(array, 3, axis)[0]
    return np.concatenate([array, np.flip(first, axis)], axis)


def hub_weights(family):
    """Returns the weights before any quantisation."""
    tensors = goldens.hub_tensors(family.removeprefix(HEAD))
    if family.startswith(HEAD):
        tensors = tensors | head_weights.head_tensors(family.removeprefix(HEAD))
    return weights_of(family.removeprefix(HEAD), {name: goldens.as_float(one) for name, one in tensors.items()})


def golden_weights(family):
    """Returns the weights after the quantisation to 4 bits that the golden has."""
    made = weights_of(family, goldens.dequantised(family))
    return {name: array if array.dtype == np.int64 else array.astype(np.float32) for name, array in made.items()}


def architecture(family):
    return recipe(family)[0]["metadata"]["general.architecture"][1]


def metadata(family):
    """Returns {key: value}."""
    return {key: value for key, (_, value) in recipe(family)[0]["metadata"].items()}


def order(weights):
    """Returns the names of a checkpoint's tensors: small ones, of which the converter takes exponentials, first."""
    return sorted(weights, key=lambda name: (not name.endswith("A_log"), name))


def pieces(family, weights):
    """Yields (name, type, array, what gives the checkpoint's values back, their places) of the file's tensors.

    Args:
        weights: {hub name: array}.
    """
    stored, places = recipe(family)
    # As float64, which has any integer of a table and any float32.
    every, start = np.concatenate([weights[name].astype(np.float64).reshape(-1) for name in order(weights)]), 0
    for name, entry in stored["tensors"].items():
        if len(entry) == 1:
            yield name, "F32", np.float32(entry[0]), None, places[:0]
            continue
        change, kind, shape = entry
        where = places[start : start + int(np.prod(shape))]
        start += len(where)
        values = every[where].astype(np.int32 if kind == "I32" else np.float32)
        there, back = CHANGES[change]
        yield name, kind, there(values).reshape(shape), back, where


def put_back(weights, changed):
    """Returns the weights with new values.

    Args:
        changed: [(values, their places)].
    """
    names = order(weights)
    every = np.concatenate([weights[name].reshape(-1) for name in names])
    for values, where in changed:
        every[where] = values.reshape(-1)
    ends = np.cumsum([weights[name].size for name in names])[:-1]
    parts = dict(zip(names, np.split(every, ends), strict=True))
    return {name: parts[name].reshape(array.shape).astype(array.dtype) for name, array in weights.items()}


def write_checkpoint(path, family, weights):
    """Writes the checkpoint that was converted, with these weights in float32."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config(family)))
    tensors = {name: ("I64" if array.dtype == np.int64 else "F32", array) for name, array in weights.items()}
    goldens.write_safetensors(path / "model.safetensors", tensors)
    return path

"""Makes the golden logits of tests/fixtures/models with Hugging Face transformers.

Needs torch and transformers, which wants scipy for inkling (not needed by the tests), and for what transformers does
not have: for g9v3 the packages rapid-mlx 0.16.10 and mlx-lm, for kimi_k3 mlx-lm 0.32.2, for deepseek_v41 that with the
n-grams of mlx-vlm 0.7.10; k2_horizon, which no package has, is computed by k2_horizon.py:

    python scripts/goldens/make_goldens.py [--only FAMILY ...] [--checkpoints DIR]

For each family and golden it loads the dequantised weights of `tests/support/goldens.py`, in the published
layout and in float32, into the transformers model with eager attention, and stores tokens and logits (and,
for the main golden, the residual stream after each layer). It also stores the config as transformers 5
saves it and the checksums of the weights. `--checkpoints` keeps the bf16 hub checkpoints in DIR as well.

Of `goldens.KIN` it stores the names and shapes of their tensors too, as transformers saves them, and chooses tokens by
what its own routers compute, because there is no oracle of these.

Refuses to store a golden when a tensor is missing or unexpected, when a token's routing is nearly tied in
any layer, when logits are not of order 1, or when transformers saves other tensor names than ours.
"""

import argparse
import functools
import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import goldens  # noqa: E402
import k2_horizon  # noqa: E402
import oracle  # noqa: E402

LENGTH = 40
REPEATED = slice(20, 28)
MARGIN = 1e-4
CANDIDATES, CANDIDATES_OF_KIN, OF_ROUNDING = 500, 100, 400  # few texts keep their rounded keys under noise
CLASSES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "bailing_hybrid": "BailingHybridForCausalLM",
    **dict.fromkeys(("sarvam_moe", "sarvam_mla"), "AutoModelForCausalLM"),  # configurations for other families' classes
}
KNOWN_AS = {"kimi_k2": "deepseek_v3"}  # family -> its name in transformers
OTHER_PARTS = ("model.visual.", "vision_model.", "vit_large_projector.", "model.vision_model.", "model.multi_modal_")
OTHER_PARTS += ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")
OTHER_PARTS += ("vit.", "vision_tower.", "multi_modal_projector.", "patch_merge_mlp.", "model.vision_tower.")
OTHER_PARTS += ("audio_encoder.", "model.audio", "model.vision_adapter.", "model.vision_projection.")
FIRST = {"mistral4": 8172, "beam": 600}  # position of the first token, if it is not 0
# Lengths of texts that differ from the default.
LENGTHS = dict.fromkeys(
    ("deepseek_v4", "deepseek_v32", "glm_moe_dsa", "glm5_next", "qwen4_exp", "minimax_m3_vl", "hy_v4", "hy_v4_vl"), 64
)
LENGTHS |= {"nemotron_h": 64, "nemotron_h_latent": 80, "lfm2_moe": 64, "bailing_hybrid": 64, "kimi_linear": 64}
LENGTHS |= {"kimi_k3": 64, "deepseek_v41": 40, "granitemoehybrid": 64, "llama4": 64}
LENGTHS |= {"mistral_large4": 64, "axk2": 64, "dots3_note": 64, "muse_spark": 64}
LENGTHS |= {"inkling": 64, "inkling2": 64, "inkling2_loop": 64}
# What routers with a correction bias add it to, if not to sigmoids.
SCORES = {"Kolibri1TopKRouter": lambda logits: logits, "Ernie4_5_MoeTopKRouter": lambda logits: logits.softmax(-1)}
ENDS = {"qwen4_exp": (12, 13, 41)}  # places of the token that ends a text, where n-grams begin anew


def candidate_tokens(seed, vocab, length=LENGTH):
    """Returns [length] ids in which a stretch of eight ids is repeated and one id occurs five times more."""
    tokens = np.random.default_rng(seed).integers(0, vocab, length).astype(np.int32)
    tokens[REPEATED] = tokens[3:11]
    tokens[30:35] = tokens[30]
    return tokens


def candidate_of_kin(family, seed):
    """Returns the same for a family of the kin, with the ends of texts that it needs."""
    config = goldens.text_config(family)  # the ids of images are last
    tokens = candidate_tokens(seed, config["vocab_size"] - 8, LENGTHS.get(family, LENGTH))
    for place in ENDS.get(family, ()):
        tokens[place] = config["eos_token_id"]
    return tokens


def gap(scores, k):
    """Returns the smallest distance, over rows, between the k-th and the next largest score."""
    ordered = np.sort(scores, -1)[..., ::-1]
    return (ordered[..., k - 1] - ordered[..., k]).min()


def routing_margin(c, routed):
    """Returns the smallest gap of the scores that choose experts (and groups), over tokens and layers."""
    k, margins = c["num_experts_per_tok"], []
    for x, w in routed:
        logits = x @ w["gate.weight"].T
        if "n_group" not in c:
            margins.append(gap(oracle.softmax(logits), k))
            continue
        biased = oracle.sigmoid(logits) + w["gate.e_score_correction_bias"]
        grouped = biased.reshape(len(x), c["n_group"], -1)
        best = np.sort(grouped, -1)[..., -2:].sum(-1)
        kept = best >= np.sort(best, -1)[:, -c["topk_group"], None]
        chosen_from = np.where(kept[..., None], grouped, -1e9).reshape(biased.shape)
        margins += [gap(best, c["topk_group"]), gap(chosen_from, k)]
    return min(margins)


def choose_tokens(family, weights):
    """Returns the candidate whose routing is furthest from a tie, and its margin."""
    config, c = goldens.config(family), goldens.text_config(family)
    best = (-1.0, None)
    for seed in range(CANDIDATES):
        routed, tokens = [], candidate_tokens(seed, c["vocab_size"])
        oracle.forward(config, weights, tokens, routed=routed)
        best = max(best, (routing_margin(c, routed), seed))
    return candidate_tokens(best[1], c["vocab_size"]), best[0]


def write_config(family, folder):
    """Writes the hub's configuration as transformers knows it. Returns the class of the model."""
    config = goldens.config(family)
    config["model_type"] = KNOWN_AS.get(config["model_type"], config["model_type"])
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return getattr(transformers, CLASSES.get(family) or config["architectures"][0])


def stored(name, values):
    """Returns a tensor of the checkpoint that transformers reads."""
    if name.endswith(("tid2eid", *goldens.INTEGERS)):
        return "I64", values.astype(np.int64)
    return "F32", values.astype(np.float32)


def load_model(family, weights, folder):
    """Returns the transformers model with these float weights, read from a checkpoint in the published layout."""
    goldens.write_safetensors(Path(folder) / "model.safetensors", {n: stored(n, w) for n, w in weights.items()})
    model, info = write_config(family, folder).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = [n for n in info["missing_keys"] if not n.startswith((*OTHER_PARTS, "mtp."))]
    problems = {k: v for k, v in info.items() if k != "missing_keys" and v}
    if missing or problems:
        raise SystemExit(f"{family}: missing {missing}, {problems}")
    return model.eval()


def run(model, tokens):
    """Returns logits [T, V] and the residual stream after each layer [layers, T, D], float32."""
    text = getattr(model.model, "language_model", model.model)
    hidden = []

    def keep(module, inputs, output):
        hidden.append((output[0] if isinstance(output, tuple) else output)[0].numpy())

    hooks = [layer.register_forward_hook(keep) for layer in text.layers]
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits, np.stack(hidden)


def save_transformers5(family, model):
    """Store the config that transformers writes; check that the tensor names are those of our variant.

    The model that is saved was not loaded from a checkpoint: a loaded one would be written in the layout that it came
    in.
    """
    model.config.dtype = model.config.get_text_config().dtype = torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        type(model)(model.config).to(torch.bfloat16).save_pretrained(folder)
        text = (Path(folder) / "config.json").read_text()
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            saved = {n: file.get_slice(n).get_shape() for n in file.keys()}  # noqa: SIM118 (not a dict)
    ours = {n: list(a.shape) for n, (_, a) in goldens.split_experts(goldens.hub_tensors(family)).items()}
    saved = {n: s for n, s in saved.items() if not n.startswith(("model.visual.", "mtp."))}
    if saved != ours:
        raise SystemExit(f"{family}: transformers saves {sorted(saved)}, we {sorted(ours)}")
    (goldens.FIXTURES / family / "config_transformers5.json").write_text(text)


def budget_of(config):
    """Returns how many positions, entries or blocks an indexer chooses; None if there is no indexer."""
    blocks = getattr(config, "indexer_budget", 0) // getattr(config, "indexer_compress_ratio", 1)
    top = getattr(config, "index_topk", 0) // getattr(config, "index_kpool", 1)
    return top or getattr(config, "index_topk_blocks", None) or blocks or None


class Margins:
    """While it is entered, collects the gaps of the scores by which a model chooses experts and positions."""

    def __init__(self, model, k):
        self.k, self.found, self.hooks, self.budget = k, [], [], budget_of(model.config.get_text_config())
        for name, module in model.named_modules():
            stem, _, last = name.rpartition(".")
            if last in ("gate", "router"):
                owner = module if hasattr(module, "e_score_correction_bias") else model.get_submodule(stem)
                owner = getattr(owner, "moe_statics", owner)  # of ERNIE
                bias = getattr(owner, "e_score_correction_bias", getattr(owner, "expert_bias", None))
                self.hooks.append(module.register_forward_hook(functools.partial(self.look, bias)))

    def look(self, bias, module, inputs, output):
        logits = output[0].double()
        if hasattr(module, "tid2eid"):
            return  # a layer that chooses nothing
        score = getattr(module, "score_fn", SCORES.get(type(module).__name__, torch.sigmoid))
        if hasattr(module, "per_expert_scale"):
            scores = logits  # these are already probabilities
        else:
            scores = logits.softmax(-1) if bias is None else score(logits) + bias
        self.found.append(gap(scores.numpy().reshape(-1, scores.shape[-1]), self.k))

    def __enter__(self):
        self.topk = torch.Tensor.topk
        torch.Tensor.topk = lambda x, k, *rest, **more: self.look_at_positions(x, k) or self.topk(x, k, *rest, **more)
        return self.found

    def look_at_positions(self, scores, k):
        """Notes the gap of the rows that have more scores than are chosen."""
        if k == self.budget and scores.shape[-1] > k:
            rows = scores[(scores > -1e30).sum(-1) > k]  # positions that are not seen have the lowest number
            if len(rows):
                self.found.append(gap(rows.double().numpy(), k))

    def __exit__(self, *_):
        torch.Tensor.topk = self.topk
        for hook in self.hooks:
            hook.remove()


def of_transformers(family, weights):
    """Returns (tokens -> logits [T, V], margin), computed by transformers."""
    folder = tempfile.mkdtemp()
    weights = in_halves(family, weights) if family == "hy_v4" else weights
    weights = with_identities(weights) if family == "longcat_flash" else weights
    model, first = load_model(family, weights, folder), FIRST.get(family, 0)
    model = model.language_model if family == "llama4" else model  # the whole one of 5.24 asks for an image's outputs

    def logits(tokens):
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad(), Margins(model, goldens.top_k(family)) as found:
            given = {"position_ids": torch.arange(first, first + len(tokens))[None]} if first else {}
            return model(ids, **given).logits[0].numpy(), min(found)

    return logits


def of_own_torch(family, weights):
    """Returns the same, computed by the family's file in this folder."""
    model = k2_horizon.K2Horizon(goldens.config(family), weights)

    def logits(tokens):
        with torch.no_grad():
            return model(torch.from_numpy(tokens.astype(np.int64))).numpy(), min(model.gaps)

    return logits


def of_mlx(family, weights):
    """Returns the same, computed in float32 by mlx-lm, or by Rapid-MLX."""
    import importlib

    import mlx.core as mx

    package, choice = ("rapid_mlx", "group_expert_select") if family == "g9v3" else ("mlx_lm", "_group_expert_select")
    module, margins = importlib.import_module(f"{package}.models.{family}"), []
    choose = getattr(module, choice)
    mx.set_default_device(mx.cpu)
    model = module.Model(module.ModelArgs.from_dict(goldens.config(family)))
    made = model.sanitize({name: mx.array(w, mx.float32) for name, w in weights.items()})
    model.load_weights(list(made.items()))

    def looking(logits, bias, k, *rest):
        margins.append(gap(np.array(mx.sigmoid(logits) + bias, np.float64).reshape(-1, logits.shape[-1]), k))
        return choose(logits, bias, k, *rest)

    def logits(tokens):
        margins.clear()
        setattr(module, choice, looking)
        found = np.array(model(mx.array(tokens)[None], *([] if family == "g9v3" else [model.make_cache()]))[0])
        return found, min(margins)

    return logits


def of_rounding_mlx_lm(family, weights):
    """Returns the same of a model that rounds keys to a few bits, which a change of the last bits may push to the next
    code. The margin is negative if the logits change with that.
    """
    import mlx.core as mx
    from mlx_lm.models import deepseek_v41

    mx.set_default_device(mx.cpu)
    models, hashes = [], with_engram(family, weights, deepseek_v41)
    for seed in range(10):
        model = deepseek_v41.Model(deepseek_v41.ModelArgs.from_dict({**goldens.config(family), "engram_layer_ids": ()}))
        noise = np.random.default_rng(seed).normal(size=weights["embed.weight"].shape) * (2e-6 if seed else 0)
        noisy = {**weights, "embed.weight": weights["embed.weight"] * (1 + noise)}
        made = model.sanitize({name: mx.array(w.astype(np.float32)) for name, w in noisy.items()})
        model.load_weights(list(made.items()))
        models.append(model)
    margins = []

    def looking(self, x):
        logits = x.astype(mx.float32) @ self.weight.T
        biased = mx.sqrt(mx.logaddexp(logits, 0)) + self.e_score_correction_bias
        margins.append(gap(np.array(biased, np.float64), self.top_k))
        return choose(self, x)

    choose, deepseek_v41.Router.__call__ = deepseek_v41.Router.__call__, looking

    def logits(tokens):
        margins.clear()
        hashes(tokens)
        found, *others = (np.array(model(mx.array(tokens)[None])[0]) for model in models)
        change = max(np.abs(one - found).max() for one in others)
        return found, min(margins) if change < 5e-5 else -change

    return logits


def with_engram(family, weights, module):
    """Puts the n-grams of mlx-vlm into the layers of mlx-lm's `module`. Returns a function that takes the tokens before
    a model does.
    """
    from types import SimpleNamespace

    import mlx.core as mx
    from mlx_vlm.models.deepseek_v41 import engram
    from mlx_vlm.models.deepseek_v41.config import ModelConfig

    config = ModelConfig.from_dict(goldens.config(family))
    layout, rows, layers = engram.EngramLayout.from_config(config), {}, {}
    state = engram.NgramHashState(config, layout, token_map=goldens.token_map(family))
    for layer in layout.layer_ids:
        layers[layer], stem = engram.Engram(config, layer, layout), f"layers.{layer}.engram."
        own = {n.removeprefix(stem): mx.array(w.astype(np.float32)) for n, w in weights.items() if n.startswith(stem)}
        layers[layer].load_weights(list(own.items()))
    go_on = module.DecoderLayer.__call__

    def call(self, streams, *given, **named):
        if self.layer_idx in layers:
            own = layers[self.layer_idx]
            streams = own(streams, rows["of all layers"][:, :, own.layer_hash_index])
        return go_on(self, streams, *given, **named)

    module.DecoderLayer.__call__ = call
    return lambda tokens: rows.update({"of all layers": state(mx.array(tokens)[None], 0, SimpleNamespace(engram=None))})


def in_order(name):
    """Returns a key that sorts the numbers in names as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def as_published(name):
    """Returns the publisher's name of a tensor of DeepSeek-V4 that transformers saved."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace(".attn.norm.", ".attn.kv_norm.")
    return name.replace("hc_head.hc_", "hc_head_")


def of_ling(shapes):
    """Returns {name: shape} with the publisher's name of the delta rule's last matrix, which transformers names like
    that of the layers with attention."""
    linear = tuple(name.removesuffix("A_log") for name in shapes if name.endswith("A_log"))
    return {n.replace(".dense.", ".o_proj.") if n.startswith(linear) else n: shape for n, shape in shapes.items()}


def of_kimi_linear(shapes):
    """Returns {name: shape} with the publisher's names of dense layers, which transformers names like experts."""
    part = re.compile(r"\.block_sparse_moe\.(gate|up|down)_proj\.")
    return {part.sub(r".mlp.\1_proj.", name): shape for name, shape in shapes.items()}


def of_hy_v4(shapes):
    """Returns {name: shape} with the publisher's names of MLPs, which transformers names like attention's gates, and of
    connections, where it puts `hc_pre` elsewhere.
    """
    pre = re.compile(r"\.hc_pre\.(hc_(?:attn|mlp)_layer)\.")
    names = (pre.sub(r".\1.hc_pre.", n).replace(".hc_pre.hc_head.", ".hc_head.") for n in shapes)
    names = (n.replace(".hc_head.hc_pre.", ".hc_head.") for n in names)
    names = (n.replace(".linear_gate.", ".gate_proj.") if ".mlp." in n else n for n in names)
    return dict(zip(names, shapes.values(), strict=True))


def in_halves(family, weights):
    """Returns the weights of Hy4 whose rotations pair halves, as transformers reads them, not neighbours."""
    c, made = goldens.config(family), dict(weights)
    turned, parts = c["qk_rope_head_dim"], {"kv_a_proj_with_mqa.weight": 1, "wk.weight": 1, "k_norm.weight": 1}
    parts |= {"k_norm.bias": 1, "q_b_proj.weight": c["num_attention_heads"], "wq_b.weight": c["index_n_heads"]}
    order = np.arange(turned).reshape(-1, 2).T.reshape(-1)
    for name, array in weights.items():
        heads = next((count for end, count in parts.items() if name.endswith(end)), None)
        if heads:
            rows = array.reshape(heads, -1, *array.shape[1:])
            made[name] = np.concatenate([rows[:, :-turned], rows[:, -turned:][:, order]], axis=1).reshape(array.shape)
    return made


def of_longcat(shapes):
    """Returns {name: shape} without the matrices that transformers has of experts that return their input."""
    count = goldens.config("longcat_flash")["n_routed_experts"]
    number = re.compile(r"\.experts\.(\d+)\.")
    return {n: shape for n, shape in shapes.items() if not (found := number.search(n)) or int(found[1]) < count}


def with_identities(weights):
    """Returns the weights with the matrices that transformers has of experts that return their input, zeros."""
    c, made = goldens.config("longcat_flash"), dict(weights)
    for name, array in weights.items():
        if ".experts.0." in name and "down_proj" not in name:
            more = range(c["n_routed_experts"], c["n_routed_experts"] + c["zero_expert_num"])
            made |= {name.replace(".experts.0.", f".experts.{e}."): np.zeros_like(array) for e in more}
    return made


def new_model(kind, folder):
    """Returns a model of the class with random weights, by the configuration in the folder."""
    if hasattr(kind, "from_config"):
        return kind.from_config(transformers.AutoConfig.from_pretrained(folder))
    return kind(kind.config_class.from_pretrained(folder))


OF_OTHERS = ("g9v3", "kimi_k3", "deepseek_v41", "k2_horizon")  # what their code reads is stored by hand


def store_kin(family):
    """Stores tensors.json of a family, and the configuration as transformers saves it."""
    store = goldens.folder(family)
    if family in OF_OTHERS:
        shapes, text = goldens.shapes(family), json.dumps(goldens.config(family))
    else:
        with tempfile.TemporaryDirectory() as folder:
            new_model(write_config(family, folder), folder).to(torch.bfloat16).save_pretrained(folder)
            text = (Path(folder) / "config.json").read_text()
            with safe_open(Path(folder) / "model.safetensors", "np") as file:
                shapes = {n: file.get_slice(n).get_shape() for n in file.keys()}  # noqa: SIM118 (not a dict)
                integers = {n: file.get_tensor(n).tolist() for n in shapes if n.endswith(goldens.INTEGERS)}
        if integers:
            (store / "integers.json").write_text(json.dumps(integers, indent=1) + "\n")
    if family == "deepseek_v4":  # transformers writes a mixture of names
        shapes = {as_published(n): shape for n, shape in shapes.items()}
    changes = {"bailing_hybrid": of_ling, "kimi_linear": of_kimi_linear, "longcat_flash": of_longcat}
    changes |= {"hy_v4": of_hy_v4, "hy_v4_vl": of_hy_v4}
    shapes = changes.get(family, dict)(shapes)
    shapes = {n: list(shapes[n]) for n in sorted(shapes, key=in_order) if not n.startswith(OTHER_PARTS)}
    for shape in (
        shape
        for name, shape in shapes.items()
        if goldens.is_transposed(family, name) and family not in ("gpt_oss", "llama4")
    ):
        shape[1:] = shape[:0:-1]  # as the hub has it; transformers reads both
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes.items())
    (store / "tensors.json").write_text(f"{{\n{lines}\n}}\n")
    (store / "config_transformers5.json").write_text(text)


def make_kin(family):
    """Stores the fixtures of one family of the kin."""
    store_kin(family)
    others = {
        **dict.fromkeys(("g9v3", "kimi_k3"), of_mlx),
        "deepseek_v41": of_rounding_mlx_lm,
        "k2_horizon": of_own_torch,
    }
    run_model = others.get(family, of_transformers)(family, goldens.dequantised(family))
    best = (-1.0, None)
    for seed in range(OF_ROUNDING if others.get(family) is of_rounding_mlx_lm else CANDIDATES_OF_KIN):
        best = max(best, (run_model(candidate_of_kin(family, seed))[1], seed))
    tokens = candidate_of_kin(family, best[1])
    logits, _ = run_model(tokens)
    print(f"{family:14s} margin {best[0]:.1e} logits std {logits.std():.2f}")
    if best[0] < MARGIN or not 0.4 < logits.std() < 2:
        raise SystemExit(f"{family}: unsuitable, change the weights' seed")
    arrays = {"tokens": tokens, "logits": logits.astype(np.float32)}
    np.savez(goldens.golden_path(family, "hub"), **arrays, **({"first": FIRST[family]} if family in FIRST else {}))


def make(family, variant):
    """Stores one golden."""
    weights = goldens.dequantised(family, variant)
    tokens, margin = choose_tokens(family, weights)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(family, weights, folder)
        logits, hidden = run(model, tokens)
    expected = oracle.forward(goldens.config(family), weights, tokens)
    error, deviation = np.abs(expected - logits).max(), logits.std()
    print(f"{family:12s} {variant:13s} margin {margin:.1e} logits std {deviation:.2f} oracle off by {error:.1e}")
    if margin < MARGIN or not 0.5 < deviation < 2:
        raise SystemExit(f"{family} {variant}: unsuitable, change the weights' seed")
    arrays = {"tokens": tokens, "logits": logits.astype(np.float32)}
    if variant == "hub":
        arrays["hidden"] = hidden.astype(np.float32)
        save_transformers5(family, model)
    np.savez(goldens.golden_path(family, variant), **arrays)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=Path, help="also write the bf16 hub checkpoints here")
    parser.add_argument("--only", nargs="+", default=(*goldens.FAMILIES, *goldens.KIN), metavar="FAMILY")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for family in arguments.only:
        if family in goldens.KIN:
            make_kin(family)
            continue
        own = [v for v in goldens.variants(family) if v in goldens.OWN_GOLDEN]
        for variant in ("hub", "dense", *own):
            make(family, variant)
        if arguments.checkpoints:
            goldens.write_variant(arguments.checkpoints / family, family, "hub")
    sums = {family: goldens.checksum(family) for family in goldens.families()}
    (goldens.FIXTURES / "checksums.json").write_text(json.dumps(sums, indent=2) + "\n")


if __name__ == "__main__":
    main()

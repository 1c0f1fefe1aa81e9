"""Make the golden logits of tests/fixtures/models with Hugging Face transformers.

Needs torch and transformers (not needed by the tests):

    python scripts/goldens/make_goldens.py [--checkpoints DIR]

For each family and golden it loads the dequantised weights of `tests/goldens.py`, in the published
layout and in float32, into the transformers model with eager attention, and stores tokens and logits (and,
for the main golden, the residual stream after each layer). It also stores the config as transformers 5
saves it and the checksums of the weights. `--checkpoints` keeps the bf16 hub checkpoints in DIR as well.

Refuses to store a golden when a tensor is missing or unexpected, when a token's routing is nearly tied in
any layer, when logits are not of order 1, or when transformers saves other tensor names than ours.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import goldens  # noqa: E402
import oracle  # noqa: E402

LENGTH = 40
REPEATED = slice(20, 28)
MARGIN = 1e-4
CANDIDATES = 500
CLASSES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def candidate_tokens(seed, vocab):
    """[LENGTH] ids with one stretch of eight repeated and one id five times over."""
    tokens = np.random.default_rng(seed).integers(0, vocab, LENGTH).astype(np.int32)
    tokens[REPEATED] = tokens[3:11]
    tokens[30:35] = tokens[30]
    return tokens


def gap(scores, k):
    """Smallest distance, over rows, between the k-th and the next largest score."""
    ordered = np.sort(scores, -1)[..., ::-1]
    return (ordered[..., k - 1] - ordered[..., k]).min()


def routing_margin(c, routed):
    """Smallest gap of the scores that choose experts (and groups), over tokens and layers."""
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
    """The candidate whose routing is furthest from a tie, and its margin."""
    config, c = goldens.config(family), goldens.text_config(family)
    best = (-1.0, None)
    for seed in range(CANDIDATES):
        routed, tokens = [], candidate_tokens(seed, c["vocab_size"])
        oracle.forward(config, weights, tokens, routed=routed)
        best = max(best, (routing_margin(c, routed), seed))
    return candidate_tokens(best[1], c["vocab_size"]), best[0]


def load_model(family, weights, folder):
    """The transformers model with these float weights, read from a checkpoint in the published layout."""
    goldens.write_safetensors(
        Path(folder) / "model.safetensors", {n: ("F32", w.astype(np.float32)) for n, w in weights.items()}
    )
    (Path(folder) / "config.json").write_text(json.dumps(goldens.config(family)))
    model, info = getattr(transformers, CLASSES[family]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = [n for n in info["missing_keys"] if not n.startswith(("model.visual.", "mtp."))]
    problems = {k: v for k, v in info.items() if k != "missing_keys" and v}
    if missing or problems:
        raise SystemExit(f"{family}: missing {missing}, {problems}")
    return model.eval()


def run(model, tokens):
    """Logits [T, V] and the residual stream after each layer [layers, T, D], float32."""
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

    A model that was not loaded is saved: a loaded one is written back in the layout that it came in.
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


def make(family, variant):
    """Store one golden."""
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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for family in goldens.families():
        own = [v for v in goldens.variants(family) if v in goldens.OWN_GOLDEN]
        for variant in ("hub", "dense", *own):
            make(family, variant)
        if arguments.checkpoints:
            goldens.write_variant(arguments.checkpoints / family, family, "hub")
    sums = {family: goldens.checksum(family) for family in goldens.families()}
    (goldens.FIXTURES / "checksums.json").write_text(json.dumps(sums, indent=2) + "\n")


if __name__ == "__main__":
    main()

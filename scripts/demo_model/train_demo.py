"""Trains the demo model: tokenizer, stories, PyTorch on one GPU, then the held-out proof with 4-bit weights.

`python scripts/demo_model/train_demo.py --out DIR` writes a Hugging Face checkpoint (bfloat16),
`train_log.tsv` and `eval.json`. Seeds are fixed; the number of steps follows from the time allowed unless
--steps gives it. For the last part of the run every weight that the converter quantises is used as its
4-bit (gates: 8-bit) self, with the gradient passed straight through, so that quantising afterwards costs
almost nothing.
"""

import argparse
import functools
import io
import json
import math
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import demo_eval
import demo_stories as stories
import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from demo_model import CONFIG, DemoModel
from safetensors.torch import save_file

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT, IM_START, IM_END = 1, 2, 3
LENGTH = 256  # every text fits: prompt and story are at most this many tokens, longer ones are dropped
LONGEST_STORY = 200
BALANCE = 0.01
SHARD_BYTES = 15 << 20
CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "{{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)


def tokenizer_text(seed: int, count: int = 20000) -> Iterator[str]:
    """Returns stories and prompts in Latin letters, so many of them with invented names that few names become a single
    token.
    """
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(count):
        sample = stories.training_sample(rng)
        text = " ".join(filter(None, (sample.prompt, sample.story)))
        if max(text) < "\u0250":  # characters of other scripts are encoded as bytes
            yield text


def train_tokenizer(path: Path, seed: int) -> None:
    """Trains a byte-fallback BPE without BOS, with the chat marks and the line break as user-defined pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=tokenizer_text(seed), model_writer=model, vocab_size=CONFIG["vocab_size"],
        model_type="bpe", byte_fallback=True, character_coverage=1.0, user_defined_symbols=[*SPECIAL, "\n"],
        unk_id=0, bos_id=-1, eos_id=-1, pad_id=-1, normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, split_digits=True, minloglevel=2,
    )  # fmt: skip
    path.write_bytes(model.getvalue())


def encode(pieces: sentencepiece.SentencePieceProcessor, sample: stories.Sample) -> tuple[list[int], int] | None:
    """Returns the tokens of a text and how many of them are the prompt; None if the text is too long."""
    head = [] if sample.prompt is None else pieces.encode(demo_eval.chat_text(sample.prompt))
    story = pieces.encode(sample.story)
    if len(story) > LONGEST_STORY or len(head) + len(story) + 1 > LENGTH:
        return None
    return [*head, *story, END_OF_TEXT if sample.prompt is None else IM_END], len(head)


def texts_of_worker(job: tuple[str, int, str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns int16 tokens [count, LENGTH] padded with 0, and for each text (prompt length, whole length)."""
    tokenizer, count, seed = job
    pieces, rng = sentencepiece.SentencePieceProcessor(model_file=tokenizer), random.Random(seed)
    tokens, spans = np.zeros((count, LENGTH), np.int16), np.zeros((count, 2), np.int16)
    row = 0
    while row < count:
        encoded = encode(pieces, stories.training_sample(rng))
        if encoded:
            tokens[row, : len(encoded[0])] = encoded[0]
            spans[row] = encoded[1], len(encoded[0])
            row += 1
    return tokens, spans


def make_texts(tokenizer: Path, count: int, seed: int, workers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes all training texts in parallel. The result depends only on count and seed."""
    jobs = [(str(tokenizer), 5000, f"train {seed} {n}") for n in range(math.ceil(count / 5000))]
    with ProcessPoolExecutor(workers) as pool:
        parts = list(pool.map(texts_of_worker, jobs))
    return tuple(torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True))


def targets_of(tokens: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """Returns the next token at every place of the story, and -100 in the prompt and the padding."""
    at = torch.arange(LENGTH, device=tokens.device)
    counted = (at >= spans[:, :1] - 1) & (at < spans[:, 1:] - 1)
    return torch.where(counted, F.pad(tokens[:, 1:], (0, 1)), -100)


def loss_of(
    model: DemoModel, tokens: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the mean cross entropy, the balance penalty (1 if all experts are used alike) and the expert shares [L,
    E].
    """
    hidden, shares, probabilities = model(tokens)
    logits = model.lm_head(hidden).float()
    entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return entropy, (shares * probabilities).sum(-1).mean() * shares.shape[-1], shares


def make_optimizer(model: DemoModel, rate: float) -> torch.optim.Optimizer:
    """Makes AdamW with weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=next(model.parameters()).is_cuda)


def rate_at(step: int, done: float) -> float:
    """Returns the learning rate: warm-up over 200 steps, then a line down to 2 %. `done` is the share of the run that
    is done.
    """
    return min(1.0, (step + 1) / 200) * max(0.02, 1.0 - done)


def batches(
    tokens: torch.Tensor, spans: torch.Tensor, size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields shuffled batches without end."""
    shuffle = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(tokens), generator=shuffle).to(tokens.device)
        for rows in order[: len(order) // size * size].view(-1, size):
            batch = tokens[rows].long()
            yield batch, targets_of(batch, spans[rows].long())


def done_share(step: int, started: float, args: argparse.Namespace) -> float:
    """Returns how much of the run is done, by steps or by the clock."""
    return step / args.steps if args.steps else (time.monotonic() - started) / (60 * args.minutes)


def train(
    model: DemoModel, texts: tuple[torch.Tensor, torch.Tensor], args: argparse.Namespace, log: Path
) -> torch.Tensor:
    """Trains until steps or minutes are used up. Returns the mean expert shares [L, E] of the last steps."""
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, args.rate)
    feed = batches(*(t.to(device) for t in texts), args.batch, args.seed)
    began = started = time.monotonic()
    step, done, shares = 0, 0.0, []
    log.write_text("step\tseconds\trounded\tloss\tbalance\tnorm\n")
    while done < 1.0:
        model.round_weights(done >= args.round_from)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * rate_at(step, done)
        batch, targets = next(feed)
        with torch.autocast(device.type, torch.bfloat16):
            loss, balance, share = loss_of(model, batch, targets)
        (loss + BALANCE * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            started = time.monotonic()  # the time to compile does not count
        step += 1
        if step % args.log_every == 0:
            numbers = f"{loss:.4f}\t{balance:.3f}\t{norm:.2f}"
            line = f"{step}\t{time.monotonic() - began:.1f}\t{done >= args.round_from:d}\t{numbers}"
            print(line, flush=True)
            with log.open("a") as file:
                file.write(line + "\n")
            shares = [*shares[-19:], share.detach()]
        done = done_share(step, started, args)
    model.round_weights(True)
    return torch.stack(shares or [share.detach()]).mean(0).cpu()


@torch.no_grad()
def greedy(model: DemoModel, pieces: sentencepiece.SentencePieceProcessor, prompts: list[str]) -> list[str]:
    """Completes all prompts together at temperature 0. It computes the whole text again for every token."""
    device = next(model.parameters()).device
    heads = [pieces.encode(prompt) for prompt in prompts]
    tokens = torch.zeros(len(heads), 320, dtype=torch.long)
    for row, head in zip(tokens, heads, strict=True):
        row[: len(head)] = torch.tensor(head)
    tokens, ends = tokens.to(device), torch.tensor([len(head) for head in heads], device=device)
    rows, open_rows = (
        torch.arange(len(heads), device=device),
        torch.ones(len(heads), dtype=torch.bool, device=device),
    )
    for _ in range(demo_eval.MAX_NEW_TOKENS):
        width = 64 * math.ceil(int(ends.max()) / 64)
        following = model.lm_head(model(tokens[:, :width])[0][rows, ends - 1]).argmax(-1)
        open_rows &= (following != IM_END) & (following != END_OF_TEXT) & (ends < tokens.shape[1])
        if not open_rows.any():
            break
        tokens[rows[open_rows], ends[open_rows]] = following[open_rows]
        ends = ends + open_rows.long()
    whole = zip(heads, tokens.tolist(), ends.tolist(), strict=True)
    return [pieces.decode(row[len(head) : end]) for head, row, end in whole]


@torch.no_grad()
def perplexity(model: DemoModel, pieces: sentencepiece.SentencePieceProcessor, count: int = 500) -> float:
    """Returns the perplexity per token of the stories for held-out prompts."""
    device = next(model.parameters()).device
    encoded = [e for e in (encode(pieces, s) for s in stories.held_out_samples(count)) if e]
    tokens, spans = (
        torch.zeros(len(encoded), LENGTH, dtype=torch.long),
        torch.zeros(len(encoded), 2, dtype=torch.long),
    )
    for row, (text, head) in enumerate(encoded):
        tokens[row, : len(text)] = torch.tensor(text)
        spans[row] = torch.tensor((head, len(text)))
    tokens = tokens.to(device)
    return math.exp(float(loss_of(model, tokens, targets_of(tokens, spans.to(device)))[0]))


def prove(model: DemoModel, pieces: sentencepiece.SentencePieceProcessor, count: int) -> dict:
    """Computes the held-out proof with bfloat16 weights and with 4-bit weights, in float32."""
    torch.set_float32_matmul_precision("highest")
    torch.compiler.set_stance("force_eager")  # otherwise torch would compile for every length of the growing texts
    model.load_checkpoint(model.checkpoint())  # rounds to what the files hold
    result = {}
    for name, rounded in (("bf16", False), ("4bit", True)):
        model.round_weights(rounded)
        complete = functools.partial(greedy, model, pieces)
        result[name] = demo_eval.prove(complete, count) | demo_eval.explore(complete, count)
        result[name]["perplexity"] = perplexity(model, pieces)
    return result


def write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_checkpoint(model: DemoModel, out: Path) -> None:
    """Writes configs, tokenizer settings, chat template, and bfloat16 shards of at most SHARD_BYTES."""
    write_json(out / "config.json", {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "text_config": CONFIG,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": END_OF_TEXT,
    })  # fmt: skip
    write_json(out / "generation_config.json", {"eos_token_id": [IM_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT})
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": False,
        "bos_token": None,
        "eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "unk_token": "<unk>", "legacy": False,
        "add_prefix_space": False, "clean_up_tokenization_spaces": False, "model_max_length": 1024,
    })  # fmt: skip
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    shards, room = [{}], SHARD_BYTES
    for name, tensor in sorted(model.checkpoint().items()):
        if tensor.nbytes > room:
            shards, room = [*shards, {}], SHARD_BYTES
        shards[-1][name] = tensor
        room -= tensor.nbytes
    names = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, out / name, metadata={"format": "pt"})
    places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    write_json(out / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.5, help="training time, after the first step")
    parser.add_argument("--steps", type=int, help="instead of --minutes")
    parser.add_argument("--texts", type=int, default=1_000_000, help="different texts to train on")
    parser.add_argument("--batch", type=int, default=256, help="texts in a step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument(
        "--round-from", type=float, default=0.6, help="share of the run after which weights are rounded"
    )
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.model instead of training one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=100, help="prompts in each set of the proof")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = args.out / "tokenizer.model"
    if args.tokenizer:
        tokenizer.write_bytes(args.tokenizer.read_bytes())
    else:
        train_tokenizer(tokenizer, args.seed)
    began = time.monotonic()
    texts = make_texts(tokenizer, args.texts, args.seed, args.workers)
    print(
        f"{len(texts[0])} texts, {int((texts[1][:, 1]).sum())} tokens in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = DemoModel().to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    if not args.no_compile:
        for layer in model.layers:
            layer.compile()
    shares = train(model, texts, args, args.out / "train_log.tsv")
    write_checkpoint(model, args.out)
    result = prove(model, sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)), args.prompts)
    result["expert_share"] = [[round(float(share), 4) for share in layer] for layer in shares]
    write_json(args.out / "eval.json", result)
    for name in ("bf16", "4bit"):
        print(
            name,
            {key: value for key, value in result[name].items() if isinstance(value, int | float)},
            flush=True,
        )


if __name__ == "__main__":
    main()

"""The held-out proof of the demo model, for anything that can complete prompts.

100 chat prompts whose (name, fact) pair was never trained on; temperature 0. A story passes when its last
sentence holds the hero's name and the fact (`demo_stories.restates`). Two controls show that the score
cannot be had by chance:
  wrong fact   the same stories, scored with another listed fact of the same kind;
  swapped      the same prompts asking for that other fact, scored with the original one.
How many heroes are called "she" or "he" as their names ask for is counted beside.
Two further sets are reported by --all: invented names with facts put together at random, and the held-out
cases as the beginning of a story without a chat template.
`python scripts/demo_model/demo_eval.py [--model DIR]` runs it on moeflux_mlx (the shipped 4-bit model by default).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import demo_stories as stories

MAX_NEW_TOKENS = 230
Complete = Callable[[list[str]], list[str]]


def chat_text(prompt: str) -> str:
    """Returns the text that chat_template.jinja makes of one user message, up to the assistant's turn."""
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def passed(cases: list[stories.Case], texts: list[str], facts: list[stories.Fact]) -> int:
    """Returns how many stories restate the given fact about the hero of their case."""
    return sum(stories.restates(text, case.name, fact) for case, text, fact in zip(cases, texts, facts, strict=True))


def failures(cases: list[stories.Case], texts: list[str]) -> list[list[str]]:
    """Yields prompt and story of every case that does not pass."""
    told = zip(cases, texts, strict=True)
    return [[case.prompt, text] for case, text in told if not stories.restates(text, case.name, case.fact)]


def prove(complete: Complete, count: int = 100, seed: int = 0) -> dict:
    """Returns the scores of the held-out set and its two controls."""
    cases = stories.held_out_cases(count, seed)
    facts, others = [case.fact for case in cases], [stories.other_fact(case) for case in cases]
    swapped_prompts = [stories.with_fact(case, other) for case, other in zip(cases, others, strict=True)]
    texts = complete([chat_text(prompt) for prompt in [*(case.prompt for case in cases), *swapped_prompts]])
    told, swapped = texts[:count], texts[count:]
    return {
        "prompts": count,
        "held_out": passed(cases, told, facts),
        "control_wrong_fact": passed(cases, told, others),
        "control_swapped": passed(cases, swapped, facts),
        "swapped_follow_prompt": passed(cases, swapped, others),
        "right_pronoun": sum(stories.suits_name(text, case.name) for case, text in zip(cases, told, strict=True)),
        "distinct_stories": len(set(told)),
        "failures": failures(cases, told),
        "examples": told[:3],
    }


def explore(complete: Complete, count: int = 100, seed: int = 0) -> dict:
    """Returns the scores of invented names and facts, and of held-out cases as the beginning of a story."""
    open_cases, cases = stories.open_cases(count, seed), stories.held_out_cases(count, seed)
    begun = [stories.bare_prompt(case) for case in cases]
    texts = complete([*(chat_text(case.prompt) for case in open_cases), *begun])
    opened = texts[:count]
    bare = [f"{start} {text.strip()}" for start, text in zip(begun, texts[count:], strict=True)]
    return {
        "open_names_and_facts": count - len(failures(open_cases, opened)),
        "bare_story": count - len(failures(cases, bare)),
        "open_failures": failures(open_cases, opened),
    }


def moeflux_complete(path: str | None) -> Complete:
    """Returns a function that completes prompts greedily with the package, one after the other."""
    from moeflux_mlx import generate, load, make_sampler

    model, tokenizer = load(path)

    def complete(prompts: list[str]) -> list[str]:
        sampler = make_sampler(temp=0.0)
        return [generate(model, tokenizer, p, max_tokens=MAX_NEW_TOKENS, sampler=sampler) for p in prompts]

    return complete


def main() -> int:
    parser = argparse.ArgumentParser(description="Score the demo model on held-out prompts")
    parser.add_argument("--model", help="packed model directory; the shipped demo model if left out")
    parser.add_argument("--count", type=int, default=100, help="prompts in each set")
    parser.add_argument("--all", action="store_true", help="also the two further sets")
    args = parser.parse_args()
    began = time.monotonic()
    complete = moeflux_complete(args.model)
    result = prove(complete, args.count) | (explore(complete, args.count) if args.all else {})
    print(json.dumps(result, indent=1, ensure_ascii=False))
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    good = 100 * result["held_out"] >= 90 * args.count
    worst = max(result["control_wrong_fact"], result["control_swapped"])
    return 0 if good and 100 * worst < 10 * args.count else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m moeflux_mlx.generate`: a prompt in, text out, statistics on stderr."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from .errors import MoefluxError, RequestError
from .io_mode import from_environment

if TYPE_CHECKING:
    from .model import Model
    from .stream import GenerationResponse
    from .tokenizer import TokenizerWrapper

DEFAULT_PROMPT = "Tell me a story about Mira, who can talk to owls."
DTYPES = ("float32", "bfloat16", "float16")
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m moeflux_mlx.generate",
        description="Generate text with a packed Mixture-of-Experts model.",
    )
    add = made.add_argument
    add("--model", help="directory, or Hugging Face repo id org/name; default: the demo model in the package")
    add(
        "--prompt",
        "-p",
        default=DEFAULT_PROMPT,
        help="the user's message; '-' reads stdin (default: %(default)r)",
    )
    add("--system-prompt", help="system message for the chat template")
    add(
        "--max-tokens",
        "-m",
        type=int,
        default=256,
        help="stop after this many tokens; -1: no limit (%(default)s)",
    )
    add("--temp", type=float, default=0.0, help="sampling temperature; 0: most likely token (%(default)s)")
    add(
        "--top-p",
        type=float,
        default=0.0,
        help="keep the smallest set of tokens with this probability; 0: off",
    )
    add("--top-k", type=int, default=0, help="keep this many tokens; 0: off")
    add(
        "--min-p",
        type=float,
        default=0.0,
        help="drop tokens less likely than this share of the best one; 0: off",
    )
    add("--repetition-penalty", type=float, help="divide the logits of recent tokens by this; default: off")
    add("--seed", type=int, help="makes sampling repeatable")
    add("--ignore-chat-template", action="store_true", help="feed the prompt as it is")
    add(
        "--chat-template-config",
        default="{}",
        metavar="JSON",
        help="variables for the template (%(default)s)",
    )
    add(
        "--expert-io",
        choices=("auto", "mmap", "pread"),
        default="auto",
        help="how experts are read (%(default)s)",
    )
    add("--dtype", choices=DTYPES, help="of activations; default: bfloat16 on a GPU, float32 on CPU")
    add("--revision", help="branch, tag or commit of the Hugging Face repo")
    add("--prefill-step-size", type=int, default=512, help="prompt tokens that run at once (%(default)s)")
    add("--verbose", action="store_true", help="also print the prompt's tokens and the time to load")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = parser().parse_args(argv)
    try:
        return run(options)
    except MoefluxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def run(options: argparse.Namespace) -> int:
    import mlx.core as mx

    from .load import load
    from .sampling import make_logits_processors, make_sampler

    prompt = read_prompt(options.prompt)
    template_config = parse_template_config(options.chat_template_config)
    if options.seed is not None:
        mx.random.seed(check_seed(options.seed))
    sampler = make_sampler(options.temp, options.top_p, options.min_p, top_k=options.top_k)
    processors = make_logits_processors(repetition_penalty=options.repetition_penalty)
    start = time.perf_counter()
    with Progress("loading"):
        model, tokenizer = load(
            options.model,
            dtype=getattr(mx, options.dtype) if options.dtype else None,
            expert_io=from_environment(options.expert_io),
            revision=options.revision,
        )
    note(model.experts.decision)
    tokens = encode(tokenizer, prompt, options, template_config)
    if options.verbose:
        note(f"loaded in {time.perf_counter() - start:.2f} s; prompt tokens: {tokens}")
    return stream(model, tokenizer, tokens, options, sampler, processors)


def stream(
    model: "Model",
    tokenizer: "TokenizerWrapper",
    tokens: list[int],
    options: argparse.Namespace,
    sampler: Any,
    processors: Any,
) -> int:
    """Prints the text as it comes, then the statistics, also after Ctrl-C."""
    from .stream import stream_generate

    progress = Progress("prompt")
    last, code = None, 0
    try:
        for last in stream_generate(
            model,
            tokenizer,
            tokens,
            max_tokens=options.max_tokens,
            sampler=sampler,
            logits_processors=processors,
            prefill_step_size=options.prefill_step_size,
            prompt_progress_callback=progress.update,
        ):
            progress.close()
            print(last.text, end="", flush=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        progress.close()
    print(flush=True)
    print_statistics(last, model)
    return code


def read_prompt(value: str) -> str:
    """The prompt option, or all of stdin when it is '-'."""
    if value == "-":
        try:
            value = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"the prompt on stdin is not UTF-8: byte {error.start} is invalid") from None
    if not value.strip():
        raise RequestError("the prompt is empty; give some text with --prompt, or '-' and text on stdin")
    return value


def parse_template_config(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"--chat-template-config is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"--chat-template-config is a JSON {type(value).__name__}; expected an object")
    return value


def check_seed(seed: int) -> int:
    if not 0 <= seed < 2**64:
        raise RequestError(f"--seed {seed} is not between 0 and 2**64 - 1")
    return seed


def encode(
    tokenizer: "TokenizerWrapper", prompt: str, options: argparse.Namespace, template_config: dict[str, Any]
) -> list[int]:
    """Token ids of the prompt, through the chat template unless it is ignored."""
    if options.ignore_chat_template:
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    if options.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": options.system_prompt})
    return cast(
        list[int], tokenizer.apply_chat_template(messages, add_generation_prompt=True, **template_config)
    )


def print_statistics(last: "GenerationResponse | None", model: "Model") -> None:
    if last is None:
        return
    stats = model.experts.stats
    note(f"prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tokens-per-sec")
    note(f"generation: {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens-per-sec")
    note(f"peak memory: {last.peak_memory:.3f} GB")
    read = f"{stats.hits} hits, {stats.misses} misses, {stats.bytes_read / 1e9:.3f} GB read"
    note(f"expert I/O: {model.experts.mode.value}, {read}")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Progress:
    """One line on a terminal's stderr that is wiped when the work is done; nothing elsewhere."""

    def __init__(self, label: str):
        self.label, self.shown = label, False

    def __enter__(self) -> "Progress":
        self._show(f"{self.label} ...")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, done: int, total: int) -> None:
        self._show(f"{self.label} {done}/{total} tokens")

    def close(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self.shown = False

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            self.shown = True


if __name__ == "__main__":
    sys.exit(main())

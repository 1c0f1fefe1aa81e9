"""The options that commands share, and what they stand for."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..engine.engine import Engine, open_engine
from ..engine.expert_io import MODES
from ..engine.generation import check_max_tokens
from ..engine.machine import default_dtype
from ..engine.sampling import make_logits_processors, make_sampler
from ..errors import RequestError
from ..experts.source import ExpertLoader, IoMode
from ..ops.backend import computes_natively
from ..ops.native import ACTIVATIONS
from ..spec import ModelArgs
from ..state.prompt_store import PromptDirectory, PromptFile, PromptStore
from .terminal import Progress, note

WORTH_CONVERTING = 0.1  # of the time: below, packed experts would hardly be felt
DTYPES = ("float32", "bfloat16", "float16")
PROMPT_CACHE_GB = 10.0
TEMPLATE_OPTIONS = ["--system-prompt", "--chat-template-config"]
NOT_GIVEN = {
    "top_p": 0.0,
    "top_k": 0,
    "min_p": 0.0,
    "chat_template_config": "{}",
    "prefetch": "auto",
    "tiles": "auto",
    "cpu_activations": "auto",
    "prompt_cache_gb": PROMPT_CACHE_GB,
    "ignore_chat_template": False,
    "yes": False,
    "shards_in": (),
}  # what options are by default; None where it does not say


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model", help="directory, or Hugging Face repo id org/name; default: the demo model in the package")
    add("--revision", help="branch, tag or commit of the Hugging Face repo")
    add_shards_in(add)
    add("--yes", action="store_true", help="download more than 20 GB without asking")
    add_dtype(add)
    add_activations(add)
    add(
        "--chat-template-config",
        default="{}",
        metavar="JSON",
        help="variables for the template (%(default)s)",
    )
    add = parser.add_argument_group("memory and expert I/O").add_argument
    add_expert_io(add)
    add("--expert-cache-gb", type=float, metavar="GB", help="memory for experts that are read; default: what is left")
    add_memory(add)
    add(
        "--prefetch",
        choices=("auto", "off"),
        default="auto",
        help="whether experts are read ahead (%(default)s)",
    )
    add(
        "--context",
        type=int,
        metavar="TOKENS",
        help="for which memory is planned; default: 8192, or the model's limit, or what there is room for",
    )
    add_prompt_sizes(add)
    add_tiles(add)


def add_expert_io(add: Callable[..., Any]) -> None:
    add(
        "--expert-io",
        choices=MODES,
        default="auto",
        help="how experts are read (%(default)s, or what MOEFLUX_EXPERT_IO says)",
    )


def add_shards_in(add: Callable[..., Any]) -> None:
    add(
        "--shards-in",
        nargs="+",
        default=(),
        metavar="DIR",
        help="where safetensors files of the checkpoint --model lie that are not in it, on other drives perhaps",
    )


def add_memory(add: Callable[..., Any]) -> None:
    add(
        "--memory-gb",
        type=float,
        metavar="GB",
        help="that all of the process may take, in units of 1e9 bytes; default: the machine's, less some for others",
    )


def add_tiles(add: Callable[..., Any]) -> None:
    add(
        "--tiles",
        default="auto",
        metavar="auto|code|FILE",
        help="of a GPU's kernels: what moeflux tune found here, the code's, or a file (%(default)s, or what "
        "MOEFLUX_TILES says)",
    )


def add_dtype(add: Callable[..., Any]) -> None:
    add("--dtype", choices=DTYPES, help="of activations; default: bfloat16 on a GPU, float32 on CPU")


def add_activations(add: Callable[..., Any]) -> None:
    add(
        "--cpu-activations",
        choices=("auto", *map(str, ACTIVATIONS)),
        default="auto",
        help="bits to which the CPU's products round activations; 24: as exact as float32 "
        "(%(default)s: 24 with --dtype, else 8)",
    )


def add_prompt_sizes(add: Callable[..., Any]) -> None:
    add(
        "--span",
        type=int,
        metavar="TOKENS",
        help="of a prompt that go through the model together, each expert read once; default: what there is room for",
    )
    add(
        "--prefill-step-size",
        type=int,
        metavar="TOKENS",
        help="of a span that attention handles at once, at most; default: 4096, or what there is room for",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("answer").add_argument
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


def add_prompt_cache_options(parser: argparse.ArgumentParser, with_file: bool) -> None:
    add = parser.add_argument_group("prompt cache").add_argument
    if with_file:
        add(
            "--prompt-cache-file",
            metavar="FILE",
            help="start from the prompt saved in FILE as far as it is the same, and save this one there",
        )
    add(
        "--prompt-cache-dir",
        metavar="DIR",
        help="start from the longest saved prompt in DIR that this one begins with, and save this one",
    )
    add(
        "--prompt-cache-gb",
        type=float,
        default=PROMPT_CACHE_GB,
        metavar="GB",
        help="least recently used prompts in DIR go beyond this size (%(default)s)",
    )


def load_named(options: argparse.Namespace, model: str | Path | None, greeting: str | None = None) -> Engine:
    """The model of the options, which is, or has come to, `model`; its tokenizer read.

    With `greeting`, that is said, and how experts are read only where the user decided it or wants to know.
    """
    start = time.perf_counter()
    with Progress("loading", of_bytes=True) as progress:
        engine = open_optional(options, model, progress.update)
        engine.tokenizer  # noqa: B018  (an error in its files is said before anything is computed)
    if greeting is not None:
        note(greeting)
    if greeting is None or options.verbose or engine.plan.demand.forced:
        note(engine.experts.decision)
    if engine.plan.shortened:
        note(engine.plan.shortened)
    if options.verbose:
        if engine.model.tiles.found:
            note(f"tiles: {len(engine.model.tiles.found)} that moeflux tune found on this GPU")
        note(engine.plan.prompts)
        note(f"loaded in {time.perf_counter() - start:.2f} s")
    for line in idle_options(options, engine.experts.mode):
        note(line)
    return engine


def open_optional(
    options: argparse.Namespace, model: str | Path | None, progress: Callable[[int, int], object] | None = None
) -> Engine:
    """`model`, as the options of `add_model_options` say; `progress` as for `load`.

    On rank 0 of several, the others follow it.
    """
    engine = open_engine(
        model,
        revision=options.revision,
        dtype=getattr(mx, options.dtype) if options.dtype else None,
        cpu_activations=options.cpu_activations,
        expert_io=options.expert_io,
        expert_cache_bytes=gigabytes("--expert-cache-gb", options.expert_cache_gb),
        memory_bytes=gigabytes("--memory-gb", options.memory_gb),
        prefetch=options.prefetch,
        context=options.context,
        span=options.span,
        prefill_step_size=options.prefill_step_size,
        shards_in=options.shards_in,
        tiles=options.tiles,
        pool_share=getattr(options, "pool_share", None),
        least_context=getattr(options, "least_context", 0),
        progress=progress,
        ranks=getattr(options, "ranks", None),
    )
    lead: Callable[[Engine], Engine] | None = getattr(options, "lead", None)
    return engine if lead is None else lead(engine)


def idle_options(options: argparse.Namespace, mode: IoMode) -> list[str]:
    """A line for each reason why something that was asked for has no effect."""
    given = {
        f"--{name.replace('_', '-')}"
        for name, value in vars(options).items()
        if value is not None and value != NOT_GIVEN.get(name)
    }
    dtype = getattr(mx, options.dtype) if options.dtype else default_dtype()
    is_local = options.model is None or Path(options.model).exists()
    idle = {
        "at --temp 0": ["--top-p", "--top-k", "--min-p", "--seed"] if options.temp == 0 else [],
        "where experts are mapped": ["--expert-cache-gb", "--prefetch"] if mode is IoMode.MMAP else [],
        "where experts are resident": ["--expert-cache-gb", "--prefetch"] if mode is IoMode.RESIDENT else [],
        "with --ignore-chat-template": TEMPLATE_OPTIONS if "--ignore-chat-template" in given else [],
        "without --prompt-cache-dir": ["--prompt-cache-gb"] if options.prompt_cache_dir is None else [],
        "where MLX computes": [] if computes_natively(dtype) else ["--cpu-activations"],
        "where --model is a directory": ["--revision", "--yes"] if is_local else [],
    }
    without_effect = {reason: [name for name in names if name in given] for reason, names in idle.items()}
    return [
        f"note: {', '.join(names)} {'have' if len(names) > 1 else 'has'} no effect {reason}"
        for reason, names in without_effect.items()
        if names
    ]


def beyond_plan(engine: Engine, tokens: int) -> str:
    """What to say of a prompt for which no memory was planned, if it is one."""
    planned, limit = engine.plan.context, engine.model.args.max_position_embeddings
    if tokens <= planned:
        return ""
    return (
        f"warning: the prompt has {tokens} tokens and memory was planned for {planned}; "
        f"--context {min(2 * tokens, limit)} leaves room for an answer"
    )


def why_cut(args: ModelArgs, prompt_tokens: int, answer_tokens: int) -> str:
    """Why an answer ended without an end."""
    limit = args.max_position_embeddings
    if prompt_tokens + answer_tokens >= limit:
        return f"the text has the {limit} tokens that the model takes"
    return f"cut after {answer_tokens} tokens; --max-tokens -1 has no limit"


def gigabytes(option: str, value: float | None) -> int | None:
    """Bytes of an option given in units of 1e9 bytes.

    Raises:
        RequestError: not a positive, finite number.
    """
    if value is not None and not 1e-9 <= value < 1e9:
        raise RequestError(f"{option} is {value}; it must be positive and below 1e9, in units of 1e9 bytes")
    return None if value is None else int(value * 1e9)


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `stream_generate`; seeds the random numbers.

    Raises:
        RequestError: a value is out of range.
    """
    check_max_tokens(options.max_tokens)  # before a long prompt has been computed
    if options.seed is not None:
        mx.random.seed(check_seed(options.seed))
    return {
        "max_tokens": options.max_tokens,
        "sampler": make_sampler(options.temp, options.top_p, options.min_p, top_k=options.top_k),
        "logits_processors": make_logits_processors(repetition_penalty=options.repetition_penalty),
    }


def check_seed(seed: int) -> int:
    if not 0 <= seed < 2**64:
        raise RequestError(f"--seed {seed} is not between 0 and 2**64 - 1")
    return seed


def open_store(options: argparse.Namespace, engine: Engine) -> PromptStore | None:
    """Where the options want prompts to be kept, if anywhere.

    Raises:
        RequestError: two places, or a size that is none. PromptCacheError: the place cannot be used.
    """
    file = getattr(options, "prompt_cache_file", None)
    if file is not None and options.prompt_cache_dir is not None:
        raise RequestError("--prompt-cache-file and --prompt-cache-dir exclude each other; give one of them")
    if not options.prompt_cache_gb > 0:
        raise RequestError(f"--prompt-cache-gb is {options.prompt_cache_gb}; it must be positive")
    if file is not None:
        return PromptFile(file, engine.fingerprint)
    if options.prompt_cache_dir is not None:
        size = min(options.prompt_cache_gb * 1e9, 2.0**62)
        return PromptDirectory(options.prompt_cache_dir, engine.fingerprint, int(size))
    return None


def parse_template_config(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"--chat-template-config is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"--chat-template-config is a JSON {type(value).__name__}; expected an object")
    taken = sorted(set(value) & {"messages", "tools", "add_generation_prompt", "tokenize"})
    if taken:
        raise RequestError(f"--chat-template-config cannot set {', '.join(taken)}; only variables of the template")
    return value


def worth_converting(engine: Engine, seconds: float) -> str:
    """What to say after `seconds` of work where packed experts would be faster; empty if nothing."""
    share = engine.experts.stats.wait_seconds / seconds if seconds else 0.0
    if not engine.weights.in_place or engine.experts.mode is not IoMode.PREAD or share < WORTH_CONVERTING:
        return ""
    return (
        f"note: {min(share, 1):.0%} of the time went by waiting for experts, which lie in pieces in this checkpoint; "
        f"packed, each is one read: {engine.weights.convert_command}"
    )


def expert_statistics(experts: ExpertLoader, verbose: bool) -> list[str]:
    """Lines on what reading experts took."""
    stats = experts.stats
    if experts.slots == 0:
        return [f"expert I/O: {experts.mode.value}"] if verbose else []
    read = f"{stats.hits} hits, {stats.misses} misses, {stats.bytes_read / 1e9:.3f} GB read"
    lines = [f"expert I/O: {experts.mode.value}, {read}"]
    lines += [f"expert I/O: {experts.note}"] if experts.note else []
    if verbose and stats.bytes_read:
        if stats.given_back:
            lines.append(
                f"memory: {stats.given_back / 1e9:.2f} GB of experts given back because the machine was short of it; "
                f"the pool has {experts.pool_bytes / 1e9:.2f} GB now"
            )
        lines.append(
            f"expert I/O: hit rate {stats.hit_rate:.1%}, {stats.gb_per_second:.2f} GB/s, "
            f"{stats.wait_seconds:.2f} s waited, {experts.slots} slots; read ahead: {stats.prefetched}, "
            f"{stats.prefetch_hits} in time, {stats.late} late, {stats.wasted} unused"
        )
    return lines

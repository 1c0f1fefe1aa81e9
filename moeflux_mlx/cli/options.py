"""The options that commands share, among them those of sampling, and what they stand for."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx

from ..driving.generation import check_max_tokens, xtc_special_tokens
from ..driving.sampling import make_logits_processors, make_sampler
from ..driving.session import AnswerOptions
from ..errors import RequestError
from ..files import JsonDict, user_path
from ..kept.warm_start import MODES as WARM_START
from ..opening.heads import DRAFTS
from ..opening.load_settings import TRIALS, LoadSettings
from ..planning.machine import MODES
from ..planning.memory_plan import KV_BITS
from ..planning.wired import MODES as WIRED
from ..text.tokenizer import TokenizerWrapper
from ..vision.pixels import IMAGE_ROWS

OptionValue: TypeAlias = Any  # what argparse makes of an option: its type is that of the option
Adder = Callable[..., argparse.Action]  # `add_argument` of a parser or of a group
DTYPES = ("float32", "bfloat16", "float16")
PROMPT_CACHE_GB = 10.0
NOT_OPTIONS = ("vision", "trial", "beside")  # settings that options name otherwise or not at all
# Defaults of options; None for all others.
NOT_GIVEN = {
    **{
        one.name: one.default for one in fields(LoadSettings) if one.default is not None and one.name not in NOT_OPTIONS
    },
    "top_p": 0.0,
    "top_k": 0,
    "min_p": 0.0,
    "chat_template_config": "{}",
    "prompt_cache_gb": PROMPT_CACHE_GB,
    "ignore_chat_template": False,
    "yes": False,
    "no_vision": False,
}


def dtype_of(options: argparse.Namespace) -> mx.Dtype | None:
    """The dtype that the options name; None: they leave it to the device."""
    return getattr(mx, options.dtype) if options.dtype else None


def settings_of(options: argparse.Namespace) -> LoadSettings:
    """The settings of the model that the options of a command name; others keep their defaults.

    Raises:
        RequestError: a value is not possible.
    """
    names = {one.name for one in fields(LoadSettings)} - {"dtype", "vision", "set"}
    trials = {name: value for name, value in vars(options).items() if name in TRIALS}
    return LoadSettings(
        options.model,
        dtype=dtype_of(options),
        vision=not getattr(options, "no_vision", False),
        expert_cache_bytes=gigabytes("--expert-cache-gb", options.expert_cache_gb),
        memory_bytes=gigabytes("--memory-gb", options.memory_gb),
        set={**trials, **dict(options.set or ())},
        **{name: value for name, value in vars(options).items() if name in names},
    )


def setting(text: str) -> tuple[str, OptionValue]:
    """The name and the value of NAME=VALUE, where a value that is no number stays text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


# The options that several commands have, with the arguments of `add_argument`.
SHARED: dict[str, dict[str, OptionValue]] = {
    "--revision": {"help": "branch, tag or commit of the Hugging Face repo"},
    "--shards-in": {
        "nargs": "+",
        "default": (),
        "metavar": "DIR",
        "help": "further directories with files of the checkpoint or of the split GGUF, for example on other drives",
    },
    "--tokenizer": {
        "metavar": "DIR_OR_REPO",
        "help": "tokenizer files for a GGUF, such as those of the model that it was made from; default: those beside "
        "it, else what the file says",
    },
    "--without-correction-bias": {
        "action": "store_true",
        "help": "take a checkpoint that lacks the biases which correct the choice of experts, as mlx-lm's of ERNIE do; "
        "answers get worse",
    },
    "--yes": {"action": "store_true", "help": "download more than 20 GB without asking"},
    "--dtype": {
        "choices": DTYPES,
        "help": "dtype of activations; default: bfloat16 on a GPU, float32 on a CPU",
    },
    "--kv-bits": {
        "choices": KV_BITS,
        "default": "auto",
        "help": "number of bits of the keys and values in caches; 16: not rounded, in --dtype (%(default)s: 8 in "
        "families where a token adds 128 KiB or more, unless --dtype is float32)",
    },
    "--no-vision": {"action": "store_true", "help": "do not load the image encoder, and plan no memory for it"},
    "--image-tokens": {
        "type": int,
        "default": IMAGE_ROWS,
        "metavar": "N",
        "help": "maximum tokens of an image; larger images are scaled down (%(default)s)",
    },
    "--chat-template-config": {
        "default": "{}",
        "metavar": "JSON",
        "help": "variables for the chat template (%(default)s)",
    },
    "--expert-io": {
        "choices": MODES,
        "default": "auto",
        "help": "how experts are read (%(default)s, or the value of MOEFLUX_EXPERT_IO)",
    },
    "--expert-cache-gb": {
        "type": float,
        "metavar": "GB",
        "help": "size of the expert pool; default: all memory that is left",
    },
    "--memory-gb": {
        "type": float,
        "metavar": "GB",
        "help": "memory limit of the process, in units of 1e9 bytes; default: the machine's memory, less a reserve for "
        "other programs",
    },
    "--prefetch": {
        "choices": ("auto", "off"),
        "default": "auto",
        "help": "whether experts are read ahead (%(default)s)",
    },
    "--wired": {
        "choices": WIRED,
        "default": "pool",
        "help": "what a Mac keeps resident for its GPU: pool: weights and experts; all: also caches and temporaries, "
        "with which some versions of macOS restart; off: nothing, slower if experts are streamed (%(default)s)",
    },
    "--warm-start": {
        "choices": WARM_START,
        "default": "auto",
        "help": "whether free memory is filled with the experts that earlier sessions used most, and this session's "
        "are noted (%(default)s, or the value of MOEFLUX_WARM_START)",
    },
    "--prefill-step-size": {
        "type": int,
        "metavar": "TOKENS",
        "help": "maximum tokens of a prompt that attention processes at once; default: 4096, or as many as fit",
    },
    "--draft": {
        "default": "off",
        "metavar": "|".join((*DRAFTS, "PATH")),
        "help": "speculative decoding, which changes only the speed; lookup: propose tokens from earlier text; head: "
        "by the model's draft head, or the one in PATH; auto: head if memory allows, else lookup (%(default)s)",
    },
    "--set": {
        "type": setting,
        "action": "append",
        "metavar": "NAME=VALUE",
        "help": f"for measurements: {', '.join(TRIALS)} (docs/library.md); may be repeated",
    },
    "--prompt-cache-dir": {
        "metavar": "DIR",
        "help": "reuse the prompt in DIR that shares the longest beginning with this one, and save this one there",
    },
    "--prompt-cache-gb": {
        "type": float,
        "default": PROMPT_CACHE_GB,
        "metavar": "GB",
        "help": "maximum size of DIR; the least recently used prompts are deleted (%(default)s)",
    },
}
OF_MODELS = ("--revision", "--shards-in", "--tokenizer", "--without-correction-bias", "--yes", "--dtype", "--kv-bits")
OF_IMAGES = ("--no-vision", "--image-tokens")
OF_MEMORY = ("--expert-io", "--expert-cache-gb", "--memory-gb")


def add_shared(add: Adder, *names: str) -> None:
    """Adds these options of `SHARED`."""
    for name in names:
        add(name, **SHARED[name])


def add_model_options(
    parser: argparse.ArgumentParser, several: bool = False, answers: bool = True, pool_share: float | None = None
) -> None:
    """Adds the options of models. With `several`, these are in `models`, which is None if none is given. A command that
    `answers` has a chat template's variables, and notes which experts it uses. `pool_share`: as of `Planner`.
    """
    add = parser.add_argument_group("model").add_argument
    model = "directory, GGUF file, or repo id org/name (GGUF: org/name:Q4_K_M); default: the demo model in the package"
    if several:
        more = "may be repeated: one is loaded at a time"
        add("--model", action="append", dest="models", metavar="MODEL", help=f"{model}; {more}")
    else:
        add("--model", help=model)
    add_shared(add, *OF_MODELS, *OF_IMAGES, *["--chat-template-config"] * answers)
    add = parser.add_argument_group("memory and expert I/O").add_argument
    add_shared(add, *OF_MEMORY, "--prefetch", "--wired", *["--warm-start"] * answers)
    default = (
        "8192, or less if the model or the memory allows only less"
        if pool_share is None
        else f"the model's own, halved until the pool of experts keeps {pool_share:.0%}% of what it has at 8192"
    )
    add("--context", type=int, metavar="TOKENS", help=f"plan memory for this many tokens; default: {default}")
    parser.set_defaults(pool_share=pool_share)
    add_shared(add, "--prefill-step-size", "--draft", "--set")


def add_variant(add: Adder, use: str = "") -> None:
    names = "moeflux models lists the names"
    add("--variant", metavar="NAME", help=f"{use}a known model, such as qwen3-30b-a3b; {names}; no files are needed")


def add_prompt_cache_options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser.add_argument_group("prompt cache").add_argument, "--prompt-cache-dir", "--prompt-cache-gb")


def gigabytes(option: str, value: float | None) -> int | None:
    """Bytes of an option given in units of 1e9 bytes.

    Raises:
        RequestError: not a positive, finite number.
    """
    if value is not None and not 1e-9 <= value < 1e9:
        raise RequestError(f"{option} is {value}; it must be positive and below 1e9, in units of 1e9 bytes")
    return None if value is None else int(value * 1e9)


def file_to_write(option: str, name: str) -> Path:
    """The path of the file that an option names, which is written later.

    Raises:
        RequestError: it cannot be one, because it is a directory or has none.
    """
    path = user_path(name)
    if path.is_dir():
        raise RequestError(f"{option} is {name}, which is a directory; give the name of a file")
    if not path.parent.is_dir():
        raise RequestError(f"{option} is {name}, and there is no directory {path.parent}; make it first")
    return path


def written(name: str) -> str:
    """The option that argparse stores as `name`, as users write it."""
    return f"--{name.replace('_', '-')}"


def parse_template_config(text: str) -> JsonDict:
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


SAMPLER = ("temp", "top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold")
REPETITION = ("repetition_penalty", "repetition_context_size")


# Each option with its type and its help.
OPTIONS: Mapping[str, tuple[type, str]] = {
    "--temp": (float, "sampling temperature; 0: most likely token"),
    "--top-p": (float, "keep the smallest set of likely tokens whose probabilities add up to this; 0: off"),
    "--top-k": (int, "keep this many of the most likely tokens; 0: off"),
    "--min-p": (float, "drop tokens whose probability is below this share of the most likely token's; 0: off"),
    "--xtc-probability": (
        float,
        "probability with which a step loses its most likely tokens, for varied text; default: off",
    ),
    "--xtc-threshold": (
        float,
        "with --xtc-probability, drop each token that is more likely than the least likely one above this; "
        "default: 0.1",
    ),
    "--repetition-penalty": (float, "weaken the logits of recent tokens by this factor; default: off"),
    "--repetition-context-size": (
        int,
        "how many of the last tokens of prompt and answer --repetition-penalty weakens; default: 20",
    ),
}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("answer").add_argument
    add(
        "--max-tokens",
        "-m",
        type=int,
        default=256,
        metavar="N",
        help="stop after this many tokens; -1: no limit (%(default)s)",
    )
    add_samplers(add)
    add("--seed", type=int, metavar="N", help="seed of the random numbers, for repeatable sampling")
    parser.set_defaults(temp=0.0, top_p=0.0, top_k=0, min_p=0.0)


def add_samplers(add: Adder) -> None:
    for name, (kind, help) in OPTIONS.items():
        add(name, type=kind, metavar="N" if kind is int else "P", help=help)


def sampling(options: argparse.Namespace) -> Callable[[TokenizerWrapper], AnswerOptions]:
    """Checks the values, which needs no model. The result makes the arguments of `stream_generate` and seeds the random
    numbers.

    Raises:
        RequestError: a value is out of range.
    """
    check_max_tokens(options.max_tokens)
    settings, processors = given(options, SAMPLER), make_logits_processors(**given(options, REPETITION))
    make_sampler(**settings)
    if options.seed is not None and not 0 <= options.seed < 2**64:
        raise RequestError(f"--seed {options.seed} is not between 0 and 2**64 - 1")

    def answer_options(tokenizer: TokenizerWrapper) -> AnswerOptions:
        if options.seed is not None:
            mx.random.seed(options.seed)
        sampler = make_sampler(**settings, xtc_special_tokens=xtc_special_tokens(tokenizer))
        return {"max_tokens": options.max_tokens, "sampler": sampler, "logits_processors": processors}

    return answer_options


def given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, OptionValue]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}

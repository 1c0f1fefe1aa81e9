"""How answers are sampled: the options of `generate` and `chat`, of which `serve` and `launch` share some."""

import argparse
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from ..driving.generation import check_max_tokens, xtc_special_tokens
from ..driving.sampling import make_logits_processors, make_sampler
from ..driving.session import AnswerOptions
from ..errors import RequestError
from ..text.tokenizer import TokenizerWrapper
from .options import Adder, OptionValue

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
    if options.seed is not None:
        check_seed(options.seed)

    def answer_options(tokenizer: TokenizerWrapper) -> AnswerOptions:
        if options.seed is not None:
            mx.random.seed(options.seed)
        sampler = make_sampler(**settings, xtc_special_tokens=xtc_special_tokens(tokenizer))
        return {"max_tokens": options.max_tokens, "sampler": sampler, "logits_processors": processors}

    return answer_options


def given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, OptionValue]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def check_seed(seed: int) -> int:
    if not 0 <= seed < 2**64:
        raise RequestError(f"--seed {seed} is not between 0 and 2**64 - 1")
    return seed

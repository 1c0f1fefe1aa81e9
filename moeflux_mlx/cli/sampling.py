"""How answers are sampled: the options of `generate` and `chat`, of which `serve` and `launch` share some."""

import argparse
from collections.abc import Callable, Sequence

import mlx.core as mx

from ..engine.generation import check_max_tokens, xtc_special_tokens
from ..engine.sampling import make_logits_processors, make_sampler
from ..engine.session import AnswerOptions
from ..errors import RequestError
from ..text.tokenizer import TokenizerWrapper
from .options import Adder, OptionValue

PENALTY = "weaken the logits of recent tokens by this factor"
SAMPLER = ("temp", "top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold")
REPETITION = ("repetition_penalty", "repetition_context_size")


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
    add("--temp", type=float, default=0.0, help="sampling temperature; 0: most likely token (%(default)s)")
    add(
        "--top-p",
        type=float,
        default=0.0,
        help="keep the smallest set of likely tokens whose probabilities add up to this; 0: off",
    )
    add("--top-k", type=int, default=0, help="keep this many of the most likely tokens; 0: off")
    add(
        "--min-p",
        type=float,
        default=0.0,
        help="drop tokens whose probability is below this share of the most likely token's; 0: off",
    )
    add_xtc(add)
    add("--repetition-penalty", type=float, metavar="P", help=f"{PENALTY}; default: off")
    add_context_size(add)
    add("--seed", type=int, metavar="N", help="seed of the random numbers, for repeatable sampling")


def add_xtc(add: Adder) -> None:
    add(
        "--xtc-probability",
        type=float,
        metavar="P",
        help="probability with which a step loses its most likely tokens, for varied text; default: off",
    )
    add(
        "--xtc-threshold",
        type=float,
        metavar="P",
        help="with --xtc-probability, drop each token that is more likely than the least likely one above this; "
        "default: 0.1",
    )


def add_context_size(add: Adder) -> None:
    add(
        "--repetition-context-size",
        type=int,
        metavar="N",
        help="how many of the last tokens of prompt and answer --repetition-penalty weakens; default: 20",
    )


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

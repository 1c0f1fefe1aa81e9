"""Commands that several processes run together: rank 0 does what the command says, the others what rank 0 tells."""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace

from ..errors import RequestError
from ..opening.engine import Engine
from ..several.follow import Follower
from ..several.group import Exchange
from ..several.joining import end_process, join
from ..several.lead import Lead
from ..several.ranks import Ranks
from .opening import local_model, open_optional
from .terminal import end_at_once, note


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("several machines (docs/several-machines.md)").add_argument
    add(
        "--rank-share",
        type=int,
        metavar="N",
        help="this rank's part of the experts, relative to the other ranks; default: 1",
    )
    add(
        "--share-routing",
        action="store_true",
        default=None,
        help="all ranks use rank 0's choice of experts, for machines that differ",
    )
    add(
        "--rank-seconds",
        type=float,
        metavar="S",
        help="how long ranks wait for each other; default: a minute plus the time that a layer may take",
    )


def together(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """`run` on rank 0, or where this process is alone; the other ranks follow."""

    def call(options: argparse.Namespace) -> int:
        ranks = join_ranks(options)
        if ranks is None:
            return run(options)
        options.ranks = ranks
        if not ranks.leads:
            end_at_once()  # MLX drops an exception that comes up while it looks at an array
            engine = open_optional(options, local_model(options))
            return Follower(engine.model, engine.tokenizer, ranks.exchange, note).run()
        return _leading(run, options)

    return call


def join_ranks(options: argparse.Namespace) -> Ranks | None:
    """The ranks that the environment arranges; None: this process is alone.

    Raises:
        RequestError: an option or a variable is wrong. RankError: the others do not come.
    """
    if options.rank_seconds is not None and not 1 <= options.rank_seconds < 1e6:
        raise RequestError(f"--rank-seconds is {options.rank_seconds}; it must be from 1 to 1e6")
    group = join(os.environ)
    if group is None:
        for name in ("rank_share", "rank_seconds", "share_routing"):
            if getattr(options, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise RequestError(f"{option} is for one of several ranks; start all with mlx.launch, or set MLX_RANK")
        return None
    share = 1 if options.rank_share is None else options.rank_share
    say = note if group.rank == 0 else lambda text: None
    return Ranks(Exchange(group), share, bool(options.share_routing), options.rank_seconds, say)


def _leading(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    leads: list[Lead] = []

    def lead(engine: Engine) -> Engine:
        leads.append(Lead(options.ranks.exchange, end_process))
        return replace(engine, lead=leads[-1])

    options.lead, code = lead, 1
    try:
        code = run(options)
        return code
    finally:
        for one in leads:
            one.quit(code)

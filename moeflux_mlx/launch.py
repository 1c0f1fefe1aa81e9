"""`python -m moeflux_mlx.launch`: a coding agent or chat program with its own server."""

import argparse
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .cli.opening import load_named, local_model
from .cli.options import add_model_options, add_prompt_cache_options
from .cli.programs import PROGRAMS, Address, AgentProgram
from .cli.run import Parser, execute
from .cli.serving import POOL_SHARE, add_sampling_defaults, check_installed, model_name, serve_with
from .cli.terminal import note
from .errors import RequestError
from .opening.engine import Engine
from .text.history import History

if TYPE_CHECKING:
    from .server.listen import Companion


def run(options: argparse.Namespace) -> int:
    """Serves until the program ends; returns the program's exit code.

    Raises:
        RequestError: the program is not installed or cannot be started, the context is too short for it, or what
            `serve` says.
    """
    program = PROGRAMS[options.program]
    path = shutil.which(program.command)
    if path is None:
        raise RequestError(f"{program.command} is not installed; {program.install}")
    if options.context is not None and options.context < program.least_context:
        raise RequestError(f"--context {_too_short(options.context, program)}; give at least that, or leave it out")
    check_installed()
    from .server.listen import Companion

    key = secrets.token_urlsafe(24)
    options.least_context = program.least_context

    def ready(companion: "Companion", engine: Engine, url: str) -> None:
        server = Address(url, key, model_name(options.model).rpartition("/")[2], engine.plan.context)
        note(f"context: {server.context} tokens for a prompt and its answer; starting {program.command}")
        companion.begin(partial(command, program, path, options.arguments, server))

    return serve_with(Companion, options, key, {model_name(options.model): partial(load, options, program)}, ready)


def load(options: argparse.Namespace, program: AgentProgram) -> Engine:
    """The options' model.

    Raises:
        RequestError: its texts are too short for the program, or it calls no tools, and the program needs them.
    """
    located, name = local_model(options), model_name(options.model)
    limit = located.args.max_position_embeddings
    if limit < program.least_context:
        raise RequestError(f"{name} takes {_too_short(limit, program)}; give another --model")
    if program.needs_tools and History(located.tokenizer).dialect is None:
        raise RequestError(f"{name} calls no tools, which {program.command} needs; give another --model")
    return load_named(options, located)


def command(
    program: AgentProgram, path: str, arguments: list[str], server: Address, folder: Path
) -> tuple[list[str], dict[str, str]]:
    """The words and the environment that start the program at `path`, pointed at the server."""
    setup = program.setup(server, folder)
    direct = {name: ",".join(filter(None, (os.environ.get(name), "127.0.0.1"))) for name in ("NO_PROXY", "no_proxy")}
    variables = {**os.environ, **direct, **setup.variables}
    environment = {name: value for name, value in variables.items() if value is not None}
    return [path, *setup.arguments, *arguments], environment


def _too_short(context: int, program: AgentProgram) -> str:
    return f"{context} tokens at most, and {program.command} needs a context of {program.least_context}"


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "launch",
        "Serve a model on a free port with a new key, start a program that uses it, and end both together. Arguments "
        "after -- go to the program. Its own configuration does not change.",
    )
    made.add_argument(
        "program", choices=PROGRAMS, help="program to start; if it is missing, a line says how to install it"
    )
    made.add_argument(
        "--verbose", action="store_true", help="also print the sizes of prompt pieces and the time to load"
    )
    add_sampling_defaults(made)
    add_model_options(made, pool_share=POOL_SHARE)
    add_prompt_cache_options(made)
    made.set_defaults(
        seed=None, host="127.0.0.1", port=0, allowed_host=[], cors_origin=[], sessions=4,
        queue=64, quiet=True, idle_minutes=None,
        parallel=None,
    )  # fmt: skip
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:end])
    options.arguments = words[end + 1 :]
    return execute(run, options)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m moeflux_mlx.serve`: a model behind HTTP, for agents and chat apps, with a web page."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .cli.opening import add_rank_options, embedding_model, load_named, local_model, together
from .cli.options import add_model_options, add_prompt_cache_options
from .cli.run import Parser, execute
from .cli.serving import POOL_SHARE, add_sampling_defaults, check_installed, model_name, serve_with
from .cli.terminal import note
from .errors import RequestError
from .files import that_ends, user_path
from .installation import install_command
from .opening.engine import Engine

if TYPE_CHECKING:
    from .server.listen import Listener

LEAST_KEY = 8  # letters of an API key
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def run(options: argparse.Namespace) -> int:
    """Serves until it is stopped.

    Raises:
        RequestError: an option is wrong, the port is taken, or the extra [server] is not installed.
        MoefluxError: the only model cannot be loaded.
    """
    check_installed()
    from .server.listen import Listener

    embedding = embedding_of(options)
    each = _each(options)
    loads = {model_name(one.model): partial(_load, one) for one in each}
    # A wrong name, or the question about a download, comes at the start.
    located = {model_name(one.model): local_model(one) for one in each if len(each) > 1}
    return serve_with(Listener, options, read_key(options), loads, greet, located, embedding)


def embedding_of(options: argparse.Namespace) -> Path | None:
    """The directory of the model for embeddings, whose memory the options then set aside; None without one.

    Raises:
        RequestError: what computes it is not installed. ModelFileError: it cannot be downloaded or used.
    """
    from .server.embedder import is_installed, memory_of

    if options.embedding_model is None:
        return None
    if not is_installed():
        raise RequestError(f"--embedding-model needs mlx-vlm, which is not installed; {install_command('vision')}")
    path = embedding_model(options.embedding_model, options.yes)
    options.beside = memory_of(path)
    return path


def _load(options: argparse.Namespace) -> Engine:
    return load_named(options, local_model(options))


def _each(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of each model."""
    models = options.models or [None]
    names = [model_name(model) for model in models]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"two models are called {name}; rename the directory of one")
    if len(models) > 1 and (options.revision or options.shards_in or options.tokenizer):
        raise RequestError("--revision, --shards-in and --tokenizer are for a single --model; leave them out")
    if getattr(options, "ranks", None) is not None:
        check_for_ranks(options)
    return [argparse.Namespace(**{**vars(options), "model": model}) for model in models]


def check_for_ranks(options: argparse.Namespace) -> None:
    """Raises RequestError: several ranks do not serve so."""
    if len(options.models or ()) > 1 or options.idle_minutes is not None:
        raise RequestError(
            "several ranks run one model, which stays loaded; leave out further --model and --idle-minutes"
        )
    if options.parallel is not None and options.parallel > 1:
        raise RequestError(
            f"--parallel is {options.parallel}; several ranks answer one request at a time: leave --parallel out"
        )


def greet(listener: "Listener", engine: Engine, where: str) -> None:
    """Prints that the server is ready, and its address."""
    plan = engine.plan
    pool = f", expert pool {plan.pool / 1e9:.2f} GB" if plan.pool else ""
    note(f"context: {plan.context} tokens for a prompt and its answer{pool}")
    note(f"serving at {where}/ (page) and {where}/v1 (APIs); Ctrl-C ends it")


def read_key(options: argparse.Namespace) -> str | None:
    """The API key, if there is one.

    Raises:
        RequestError: the file cannot be used, or a key is required and missing.
    """
    if options.api_key_file is None:
        if options.host not in LOOPBACK and not options.no_key:
            raise RequestError(
                f"--host {options.host} lets other machines in; give --api-key-file FILE, or --no-key to let all in"
            )
        return None
    path = user_path(options.api_key_file)
    try:
        key = that_ends(path, pipes=True).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--api-key-file cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(key) < LEAST_KEY or not key.isprintable() or not key.isascii() or " " in key:
        raise RequestError(f"--api-key-file must hold one line of at least {LEAST_KEY} letters, without spaces")
    return key


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "serve",
        "Serve Mixture-of-Experts models to agents and chat apps, with the APIs of OpenAI, Anthropic and Ollama.",
    )
    server = made.add_argument_group("server")
    add_address(server)
    add_capacity(server)
    add_client_options(server)
    server.add_argument("--quiet", action="store_true", help="do not print a line for each request")
    server.add_argument(
        "--verbose", action="store_true", help="also print the sizes of prompt pieces and the time to load"
    )
    add_sampling_defaults(made)
    add_model_options(made, several=True, pool_share=POOL_SHARE)
    server.add_argument(
        "--embedding-model",
        metavar="MODEL",
        help="directory or repo id org/name of a model for /v1/embeddings, loaded at the first request",
    )
    add_rank_options(made)
    add_prompt_cache_options(made)
    made.set_defaults(seed=None)
    return made


def add_address(server: argparse._ArgumentGroup) -> None:
    """Where the server listens, and the key that lets clients in."""
    add, key = server.add_argument, server.add_mutually_exclusive_group().add_argument
    add("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    add("--port", type=int, default=8080, help="port to listen at; 0: any free port (%(default)s)")
    key("--api-key-file", metavar="FILE", help="file with the key that clients must send")
    key("--no-key", action="store_true", help="let other machines in without a key")


def add_capacity(server: argparse._ArgumentGroup) -> None:
    """How much is computed, waits and stays in memory."""
    add = server.add_argument
    add(
        "--parallel",
        type=int,
        metavar="N",
        help="maximum number of requests that are answered at a time; default: as many as fit in memory, and at most 8 "
        "if experts are read from disk",
    )
    add("--sessions", type=int, default=4, metavar="N", help="maximum number of conversations in memory (%(default)s)")
    add(
        "--idle-minutes",
        type=float,
        metavar="MINUTES",
        help="unload a model that nobody has used for this time; the next request loads it again",
    )
    add("--queue", type=int, default=64, metavar="N", help="maximum number of waiting requests (%(default)s)")


def add_client_options(server: argparse._ArgumentGroup) -> None:
    """Which clients may use the server, and what happens to the prompts that they send."""
    add = server.add_argument
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin use the server; may be repeated",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name that clients may use for this server; may be repeated",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = parser().parse_args(argv)
    options.model = options.models[0] if options.models else None  # which further ranks load
    return execute(together(run), options)


if __name__ == "__main__":
    sys.exit(main())

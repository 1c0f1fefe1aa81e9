"""Serving a model: what the options of `serve` mean, the start, and the end."""

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.engine import Engine
from ..errors import ModelFileError, MoefluxError, RequestError
from ..files import read_json, user_path
from .fetching import local_model
from .options import load_named, open_store, parse_template_config
from .run import INTERRUPTED
from .terminal import note

if TYPE_CHECKING:
    from ..server.listen import Listener
    from ..server.prepare import Defaults
    from ..server.sessions import Sessions
    from ..server.worker import Worker

STOP_SECONDS = 2.0  # that the model's thread has to end
# After which the thread of the connections lets that of the model go on. Python's own 5 ms cost each token some
# (results.tsv, "server").
SWITCH_SECONDS = 0.0002
LEAST_KEY = 8  # letters of an API key
LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEMO = "moeflux-demo"
IDLE_SHARE = 4  # one part in so many of what the plan leaves alone may be held by sessions that nobody uses


def run(options: argparse.Namespace) -> int:
    """Serves until it is told to stop.

    Raises:
        RequestError: an option is wrong, the port is taken, or the extra [server] is not installed.
        MoefluxError: the model cannot be loaded.
    """
    check_installed()
    from ..server.app import Served, make_app
    from ..server.guard import Rules
    from ..server.listen import Listener, bind
    from ..server.worker import Worker

    key, variables = read_key(options), parse_template_config(options.chat_template_config)
    for name in ("sessions", "queue"):
        if (value := getattr(options, name)) < 1:
            raise RequestError(f"--{name} is {value}; it must be at least 1")
    listening = bind(options.host, options.port)
    where = f"http://{_written(options.host)}:{listening.getsockname()[1]}"

    def announce() -> None:
        listener.stop_soon() if worker.state.error else greet(worker, where)

    worker = Worker(
        lambda: load_named(options, local_model(options)),
        lambda engine: sessions_of(engine, options),
        options.queue,
        announce,
    )
    served = Served(
        worker,
        model_name(options.model),
        lambda engine: defaults_of(engine, options, variables),
        options.keep_agent_headers,
        log=None if options.quiet else note,
    )
    hosts = [host.lower() for host in (options.host, *options.allowed_host)]
    listener = Listener(make_app(served, Rules(hosts, options.cors_origin, key)), worker.begin_stop)
    note(f"loading; {where}/health tells when it is done")
    return serve(worker, listener, listening)


def serve(worker: "Worker", listener: "Listener", listening: socket.socket) -> int:
    """The exit code, once all has ended."""
    listener.config.load()
    sys.setswitchinterval(SWITCH_SECONDS)
    worker_began = False

    async def main() -> None:
        nonlocal worker_began
        listener.loop_begun()
        worker.start()
        worker_began = True
        await listener.serve([listening])

    asyncio.run(main())
    if worker_began and not worker.stop(STOP_SECONDS):
        note("the model's thread is still at work; leaving it")
        os._exit(INTERRUPTED if listener.signal == signal.SIGINT else 0)
    if isinstance(worker.state.error, MoefluxError):
        raise worker.state.error
    if worker.state.error is not None:
        raise RequestError(f"the model cannot be loaded: {worker.state.error!r}") from worker.state.error
    return INTERRUPTED if listener.signal == signal.SIGINT else 0


def greet(worker: "Worker", where: str) -> None:
    """Tells that the server is ready, and what for."""
    engine = worker.state.engine
    assert engine is not None
    plan = engine.plan
    pool = f", expert pool {plan.pool / 1e9:.2f} GB" if plan.pool else ""
    note(f"context: {plan.context} tokens for a prompt and its answer{pool}")
    note(f"serving at {where}/ (page) and {where}/v1 (APIs); Ctrl-C ends it")


def check_installed() -> None:
    """Raises RequestError: what HTTP needs is missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"serving needs {error.name}, which is not installed; pip install 'moeflux-mlx[server]'"
        ) from None


def read_key(options: argparse.Namespace) -> str | None:
    """The API key, if there is one.

    Raises:
        RequestError: the file cannot be used, or one is needed.
    """
    if options.api_key_file is None:
        if options.host not in LOOPBACK and not options.no_key:
            raise RequestError(
                f"--host {options.host} lets other machines in; give --api-key-file FILE, or --no-key to let all in"
            )
        return None
    path = user_path(options.api_key_file)
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--api-key-file cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(key) < LEAST_KEY or not key.isprintable() or not key.isascii() or " " in key:
        raise RequestError(f"--api-key-file must hold one line of at least {LEAST_KEY} letters, without spaces")
    return key


def model_name(model: str | None) -> str:
    """What clients see: no path."""
    if model is None:
        return DEMO
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def defaults_of(engine: Engine, options: argparse.Namespace, variables: dict[str, object]) -> "Defaults":
    """What the options say, and otherwise the model's own generation_config.json; else the likeliest token."""
    from ..server.prepare import Defaults
    from ..server.request import Sampling

    try:
        own = read_json(engine.path / "generation_config.json")
    except ModelFileError:
        own = {}
    if own.get("do_sample") is False:
        own = {}

    def first(option: str, name: str) -> float | None:
        value = getattr(options, option)
        if value is None and isinstance(own.get(name), (int, float)):
            return own[name]
        return value

    top_k = first("top_k", "top_k")
    sampling = Sampling(
        temperature=first("temp", "temperature") or 0.0,
        top_p=first("top_p", "top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=first("min_p", "min_p"),
        repetition_penalty=first("repetition_penalty", "repetition_penalty"),
    )
    return Defaults(sampling, variables)


def sessions_of(engine: Engine, options: argparse.Namespace) -> "Sessions":
    """Several texts in memory, within what the memory plan leaves alone."""
    from ..server.sessions import Sessions

    store = open_store(options, engine)
    if store is not None and hasattr(store, "path"):
        os.chmod(store.path, 0o700)  # it holds what users wrote
    idle = engine.plan.headroom // IDLE_SHARE
    return Sessions(lambda: engine.session(store=store), options.sessions, idle)


def _written(host: str) -> str:
    return f"[{host}]" if ":" in host else host

"""Serves models for `serve` and `launch`: interprets their options, starts and stops."""

import argparse
import asyncio
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from ..driving.sampling import make_logits_processors, make_sampler
from ..errors import ModelFileError, MoefluxError, RequestError
from ..files import read_json
from ..installation import install_command
from ..model.step import MAX_ROWS
from ..opening.engine import Engine
from ..packing.located import Located
from ..planning.budget import cache_room
from ..spec import ModelArgs
from ..vision.vision import open_reader
from .known_models import POSITIONS, forecast_of
from .opening import check_store, open_store
from .options import REPETITION, SAMPLER, add_samplers, given, parse_template_config
from .terminal import note

if TYPE_CHECKING:
    from ..server.admission import Admission
    from ..server.embedder import Embedder
    from ..server.listen import Listener
    from ..server.prepare import Defaults, Preparer
    from ..server.sessions import Sessions
    from ..server.switch import ModelSwitch

L = TypeVar("L", bound="Listener")
STOP_SECONDS = 2.0  # in which the model's thread must end
# The interval after which the thread of the connections yields to that of the model. Python's default of 5 ms costs
# time per token (results.tsv, "server").
SWITCH_SECONDS = 0.0002
# As browsers send them, in lower case: an origin has neither a path nor the default port of its scheme.
ORIGIN = re.compile(
    r"\*|null|(?!http://.*:80$|https://.*:443$)"
    r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]*)?"
)
HOST = re.compile(r"[a-z0-9._-]*[a-z0-9_-]")
DEMO = "moeflux-demo"
DECODE_SHARE = 1 / 3  # of the time, for running answers while a prompt is computed
POOL_SHARE = 0.75  # share of the pool that a context longer than the default must leave
IDLE_SHARE = 4  # unused sessions may take 1/4 of the plan's headroom


def serve_with(
    kind: "type[L]",
    options: argparse.Namespace,
    key: str | None,
    loads: Mapping[str, Callable[[], Engine]],
    ready: "Callable[[L, Engine, str], None]",
    located: Mapping[str, Located] = MappingProxyType({}),
    embedding: Path | None = None,
) -> int:
    """Serves as the options say; returns the exit code.

    Args:
        kind: class of the listener.
        key: the key that requests must have.
        loads: the name of each model, and a function that loads it, called in the thread that runs it.
        ready: called once a model is loaded, with the server's address.
        located: models whose requests are prepared and counted before they are loaded, by name.
        embedding: the directory of the model for embeddings, if there is one.
    """
    from ..server.app import make_app
    from ..server.choice import Loaded, ModelChoice
    from ..server.embedder import Embedder
    from ..server.guard import Rules
    from ..server.listen import bind
    from ..server.reply import Served
    from ..server.switch import ModelSwitch

    variables = parse_template_config(options.chat_template_config)
    _check_values(options)
    listening = bind(options.host, options.port)
    where = f"http://{_written(options.host)}:{listening.getsockname()[1]}"

    is_ready = False

    def announce(loaded: Loaded) -> None:
        nonlocal is_ready
        if is_ready:
            note(f"loaded {loaded.choice.name}")
        else:
            is_ready = True
            ready(listener, loaded.engine, where)

    def complain(error: BaseException) -> None:
        if len(loads) == 1 and not is_ready:
            listener.stop()
        else:
            note(f"error: {_why(error)}")

    made = partial(sessions_of, options), partial(admission_of, options), partial(defaults_of, options, variables)
    files = {
        name: (partial(preparer_of, options, variables, one), context_of(options, one)) for name, one in located.items()
    }
    forecast = partial(forecast_of, positions=POSITIONS)
    choices = []
    for name, load in loads.items():
        describe, context = files.get(name, (None, None))
        choices.append(ModelChoice(name, load, *made, describe, context, forecast))
    idle = None if options.idle_minutes is None else 60 * options.idle_minutes
    switch = ModelSwitch(choices, options.queue, DECODE_SHARE, idle, announce, complain)
    embedder = None
    if embedding is not None:
        embedder = Embedder(model_name(options.embedding_model), embedding, lambda: switch.is_computing)
    served = Served(switch, embedder, log=None if options.quiet else note)
    hosts = [host.lower() for host in (options.host, *options.allowed_host)]
    origins = [origin.lower() for origin in options.cors_origin]
    listener = kind(make_app(served, Rules(hosts, origins, key)), switch.begin_stop)
    note(f"loading; {where}/health shows when it is done")
    return serve(switch, listener, listening, embedder)


def _check_values(options: argparse.Namespace) -> None:
    """Raises RequestError: a value is out of range."""
    check_store(options)
    for name, value in (("sessions", options.sessions), ("queue", options.queue), ("parallel", options.parallel)):
        if value is not None and value < 1:
            raise RequestError(f"--{name} is {value}; it must be at least 1")
    if options.parallel is not None and options.parallel > MAX_ROWS:
        raise RequestError(f"--parallel is {options.parallel}; a step has at most {MAX_ROWS} rows")
    if options.idle_minutes is not None and not options.idle_minutes > 0:
        raise RequestError(f"--idle-minutes is {options.idle_minutes}; it must be positive")
    for origin in options.cors_origin:
        if not ORIGIN.fullmatch(origin.lower()):
            raise RequestError(
                f"--cors-origin is {origin!r}; give an origin such as https://chat.example.org without a path and the "
                "default port, or give *"
            )
    for name in options.allowed_host:
        if not HOST.fullmatch(name.lower()):
            raise RequestError(
                f"--allowed-host is {name!r}; give a whole name such as box.example.org, without a scheme and a port"
            )
    make_sampler(**given(options, SAMPLER))
    make_logits_processors(**{"repetition_penalty": 1.0, **given(options, REPETITION)})


def serve(
    switch: "ModelSwitch", listener: "Listener", listening: socket.socket, embedder: "Embedder | None" = None
) -> int:
    """The exit code, once all has ended."""
    listener.config.load()
    sys.setswitchinterval(SWITCH_SECONDS)

    async def main() -> None:
        listener.loop_begun()
        switch.start()
        await listener.serve([listening])

    asyncio.run(main())
    ended = embedder is None or embedder.stop(STOP_SECONDS)
    if not (switch.stop(STOP_SECONDS) and ended):
        note("the model's thread has not ended in time; exiting without it")
        os._exit(listener.exit_code)
    if switch.error is None or switch.has_loaded or len(switch.choices) > 1:
        return listener.exit_code
    if isinstance(switch.error, MoefluxError):
        raise switch.error
    raise RequestError(_why(switch.error)) from switch.error


def _why(error: BaseException) -> str:
    from ..server.faults import names_and_lines

    if isinstance(error, MoefluxError):
        return str(error)
    return f"the model cannot be loaded: {error!r}; {names_and_lines(error)}"


def check_installed() -> None:
    """Raises RequestError: what HTTP needs is missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise RequestError(f"serving needs {error.name}, which is not installed; {install_command('server')}") from None


def model_name(model: str | None) -> str:
    """The name that clients see, without a path."""
    if model is None:
        return DEMO
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def context_of(options: argparse.Namespace, located: Located) -> int | None:
    """The longest context of the model with these options; None if its configuration cannot be used."""
    with suppress(MoefluxError):  # which is said when it is loaded
        return _longest(options, located.args)
    return None


def _longest(options: argparse.Namespace, args: ModelArgs) -> int:
    return min(args.max_position_embeddings, options.context or sys.maxsize)


def preparer_of(options: argparse.Namespace, variables: dict[str, object], located: Located) -> "Preparer":
    """What prepares requests for the model, without its weights.

    Raises:
        MoefluxError: its files cannot be used.
    """
    from ..server.prepare import Preparer

    args, path = located.args, located.path
    defaults = defaults_of(options, variables, path)
    vision = open_reader(located, not options.no_vision, options.image_tokens)
    return Preparer(located.tokenizer, args.vocab_size, _longest(options, args), defaults, vision, path)


def defaults_of(options: argparse.Namespace, variables: dict[str, object], path: Path) -> "Defaults":
    """The defaults of the options, else of the model's generation_config.json, else the likeliest token."""
    from ..server.prepare import Defaults
    from ..server.request import Sampling

    try:
        own = read_json(path / "generation_config.json")
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
        xtc_probability=options.xtc_probability,
        xtc_threshold=options.xtc_threshold,
        repetition_penalty=first("repetition_penalty", "repetition_penalty"),
        repetition_context_size=options.repetition_context_size,
    )
    return Defaults(sampling, variables)


def sessions_of(options: argparse.Namespace, engine: Engine) -> "Sessions":
    """The sessions to keep in memory, within the plan's headroom."""
    from ..server.sessions import Sessions

    store = open_store(options, engine)
    if store is not None:
        os.chmod(store.path, 0o700)  # because the files contain users' texts
    idle = engine.plan.headroom // IDLE_SHARE
    return Sessions(lambda: engine.session(store=store), options.sessions, idle)


def admission_of(options: argparse.Namespace, engine: Engine) -> "Admission":
    """The admission of requests: as many at once as the options say, or as fit the plan; one if there are several
    ranks. Their caches share the memory that the plan leaves to them.
    """
    from ..server.admission import Admission

    room = cache_room(engine.model.args, engine.experts.layout, engine.plan)
    parallel = room.sequences if options.parallel is None else options.parallel
    return Admission(parallel if engine.lead is None else 1, room.nbytes, room.needs)


def _written(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def add_sampling_defaults(parser: argparse.ArgumentParser) -> None:
    default = "default: the model's generation_config.json"
    add_samplers(parser.add_argument_group("sampling, if a request does not set it", default).add_argument)

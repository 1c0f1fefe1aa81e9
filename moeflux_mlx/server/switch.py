"""Loads the model that a request names, one at a time.

A request keeps its model loaded until its answer has ended. Requests for the loaded model run together. Once a request
for another model has waited as long as loading took, new requests wait behind it, so models take turns instead of
replacing each other constantly. Everything here happens in the event loop's thread.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ..errors import BadRequestError, MoefluxError
from ..files import JsonDict
from .admission import Places
from .choice import Description, Loaded, ModelChoice, features_of
from .live import Watch
from .model_thread import ModelThread
from .prepare import Preparer
from .running import CANCELLED, Totals
from .worker import Worker

_PATH = re.compile(r"(?<![\w.])~?/(?:[^/;:\s](?:[^/;:]*[^/;:\s])?/)*")  # the folders before a file
GROUP_SECONDS = 5.0  # seconds that requests for the loaded model may overtake an older one for another model, at least


@dataclass(eq=False)
class _Waiting:
    """A request that waits for its model."""

    choice: ModelChoice
    turn: "asyncio.Future[Loaded]"
    since: float = field(default_factory=time.monotonic)


class ModelSwitch:
    """Args:
        choices: the models; the first one is loaded at the start.
        waiting: the number of places for waiting requests, for all models together.
        decode_share: share of the time for answers while a prompt is computed.
        idle_seconds: an unused model is unloaded after this time; None: never.
        on_loaded: called after each model that has been loaded.
        on_failed: called with the reason after each attempt to load a model or to read its files that failed.

    Attributes:
        loaded: the model that requests may use now.
        error: why the last attempt to load a model failed.
        failures: why the last attempt failed, of each model whose files could not be read or that could not be loaded,
            by name, for clients.
        descriptions: of the models whose files have been read, by name.
        places: of the waiting requests; a request takes one before it takes a model.
        totals, watch: of all workers.
    """

    def __init__(
        self,
        choices: Sequence[ModelChoice],
        waiting: int = 64,
        decode_share: float = 1 / 3,
        idle_seconds: float | None = None,
        on_loaded: Callable[[Loaded], None] = lambda loaded: None,
        on_failed: Callable[[BaseException], None] = lambda error: None,
    ):
        self.choices = {choice.name: choice for choice in choices}
        self.places, self._decode_share = Places(waiting), decode_share
        self._idle_seconds, self._on_loaded, self._on_failed = idle_seconds, on_loaded, on_failed
        self.loaded: Loaded | None = None
        self.loading: ModelChoice | None = None
        self.error: BaseException | None = None
        self.failures: dict[str, str] = {}
        self.descriptions: dict[str, Description] = {}
        self.has_loaded = False
        self.totals, self.watch = Totals(), Watch()
        self._describing = asyncio.Lock()
        self._waiting: list[_Waiting] = []
        self._thread = ModelThread()
        self._worker: Worker | None = None  # the worker of the model that is loaded, or being loaded or unloaded
        self._change: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._released: ModelChoice | None = None  # it is unloaded as soon as nothing uses it
        self._stopping = False

    def start(self) -> None:
        """Begins to load the first model."""
        self._thread.start()
        self._loop = asyncio.get_running_loop()
        self._begin_change(next(iter(self.choices.values())))

    @property
    def ready(self) -> bool:
        """Whether the attempt to load the first model has ended."""
        return self.has_loaded or self.error is not None

    @property
    def is_computing(self) -> bool:
        """Whether requests of the loaded model run."""
        loaded = self.loaded  # the embedding model's thread asks, too
        return loaded is not None and bool(loaded.worker.running)

    @property
    def queue(self) -> int:
        """The number of waiting requests."""
        return len(self.places)

    def status(self, name: str) -> JsonDict:
        """`value` is "loaded", "loading" or "unloaded"; for a loaded model also the numbers of running and waiting
        requests, and for one that could not be loaded `failed` and the reason.
        """
        if self.loaded is not None and self.loaded.choice.name == name:
            worker = self.loaded.worker
            return {"value": "loaded", "running": len(worker.running), "waiting": worker.queue}
        if self.loading is not None and self.loading.name == name:
            return {"value": "loading"}
        failure = self.failures.get(name)
        return {"value": "unloaded", **({"failed": True, "error": failure} if failure else {})}

    def find(self, name: str) -> ModelChoice:
        """The model of that name; the first one if no name is given; the only one for any name if there is only one.

        Raises:
            BadRequestError: there is none.
        """
        choices = list(self.choices.values())
        if len(choices) == 1 or not name:
            return choices[0]
        if name not in self.choices:
            known = ", ".join(self.choices)
            raise BadRequestError(
                f"the model {name[:100]!r} does not exist; there are {known}", "model", 404, "model_not_found"
            )
        return self.choices[name]

    async def preparer(self, name: str) -> Preparer | None:
        """What prepares requests for the model of that name, without loading it; None if that takes the loaded model.

        Raises:
            BadRequestError: there is no such model, or its files cannot be read.
        """
        choice = self.find(name)
        if self.loaded is not None and self.loaded.choice is choice:
            return self.loaded.preparer
        if choice.name not in self.descriptions and choice.describe is not None:
            async with self._describing:
                if choice.name not in self.descriptions:
                    await self._describe(choice, choice.describe)
        described = self.descriptions.get(choice.name)
        return described.preparer if described else None

    async def _describe(self, choice: ModelChoice, describe: Callable[[], Preparer]) -> None:
        try:
            preparer = await asyncio.to_thread(describe)
            features = await asyncio.to_thread(features_of, preparer)
        except MoefluxError as error:
            if self.failures.get(choice.name) != reason(error):  # a client may ask again and again
                self._on_failed(error)
            self.failures[choice.name] = reason(error)
            raise _cannot_load(choice) from None
        self.failures.pop(choice.name, None)
        self.descriptions.setdefault(choice.name, Description(preparer, features))

    async def take(self, name: str) -> Loaded:
        """Waits until the model of that name is loaded; to be given back with `give_back`.

        Raises:
            BadRequestError: there is no such model, it cannot be loaded, or the server is ending.
        """
        choice = self.find(name)
        if self._stopping:
            raise _ending()
        if self.loaded is None or self.loaded.choice is not choice or self._change or self._others_turn(self.loaded):
            return await self._wait(choice)
        self._stay()
        self.loaded.uses += 1
        return self.loaded

    def give_back(self, loaded: Loaded) -> None:
        loaded.uses -= 1
        self._go_on()

    def release(self, name: str) -> None:
        """Unloads the model of that name, if it is loaded or being loaded, as soon as it is loaded and nothing uses it;
        the model of several ranks stays.

        Raises:
            BadRequestError: there is no such model.
        """
        choice = self.find(name)
        if choice is self.loading or self.loaded is not None and choice is self.loaded.choice:
            self._released = choice
            self._go_on()

    def recall(self, name: str) -> None:
        """Takes an earlier `release` back. Raises as that."""
        if self.find(name) is self._released:
            self._released = None

    @contextmanager
    def watched(self) -> Iterator[Watch]:
        """A context manager for the time in which a page is open."""
        self.watch.watchers += 1
        if self.loaded is not None:
            self.loaded.worker.wake()
        try:
            yield self.watch
        finally:
            self.watch.watchers -= 1

    def begin_stop(self) -> None:
        """Begins to end all work; waiting requests are told that they are cancelled."""
        self._stopping = True
        if self._worker is not None:
            self._worker.begin_stop()
        self._fail(self._waiting, _ending)

    def stop(self, seconds: float) -> bool:
        """Ends all work, from any thread after the event loop has ended; returns whether it ended in time."""
        if self._worker is not None:
            self._worker.begin_stop()
        return self._thread.stop(seconds)

    async def _wait(self, choice: ModelChoice) -> Loaded:
        waiting = _Waiting(choice, self._loop.create_future())
        self._waiting.append(waiting)
        self._go_on()
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled() and waiting.turn.exception() is None:
                self.give_back(waiting.turn.result())
            raise
        finally:
            with suppress(ValueError):
                self._waiting.remove(waiting)

    def _others_turn(self, loaded: Loaded) -> bool:
        """Whether a request for another model has waited long enough."""
        since = next((one.since for one in self._waiting if one.choice is not loaded.choice), None)
        return since is not None and time.monotonic() - since >= max(GROUP_SECONDS, loaded.seconds)

    def _go_on(self) -> None:
        """Lets requests for the loaded model begin, or begins to load the model with the oldest waiting request."""
        self._stay()
        if self._change or self._stopping:
            return
        loaded = self.loaded
        if self._waiting and loaded is not None and self._waiting[0].choice is loaded.choice:
            self._let_begin(loaded)
        elif self._waiting and (loaded is None or not loaded.uses):
            self._begin_change(self._waiting[0].choice)
        elif loaded is not None and not loaded.uses:
            is_released = self._released is loaded.choice and loaded.engine.lead is None
            seconds = 0.0 if is_released else self._idle_seconds
            if seconds is not None:
                self._idle = self._loop.call_later(seconds, self._begin_change, None)

    def _stay(self) -> None:
        """Cancels the unloading of an idle model."""
        if self._idle is not None:
            self._idle.cancel()

    def _let_begin(self, loaded: Loaded) -> None:
        """Lets all requests that wait for the loaded model continue."""
        for one in [one for one in self._waiting if one.choice is loaded.choice]:
            self._waiting.remove(one)
            if not one.turn.done():
                loaded.uses += 1
                one.turn.set_result(loaded)
        self._go_on()

    def _begin_change(self, choice: ModelChoice | None) -> None:
        self._change = self._loop.create_task(self._changed(choice))

    async def _changed(self, choice: ModelChoice | None) -> None:
        """Unloads the loaded model, and then loads `choice`, if there is one."""
        self.loaded = self._released = None
        if self._worker is not None:
            self._worker.begin_stop()
            await self._ended.wait()
            self._worker = None
            self.watch.forget(self.totals)
        if choice is not None:
            self.loading = choice
            self.loaded = await self._load(choice)
            self.loading = None
            if self._stopping:
                return
            if self.loaded is not None:
                self.has_loaded = True
                self.failures.pop(choice.name, None)
                self._on_loaded(self.loaded)
            else:
                error = self.error
                assert error is not None
                self.failures[choice.name] = reason(error)
                self._fail([one for one in self._waiting if one.choice is choice], lambda: _cannot_load(choice))
                self._on_failed(error)
        self._change = None
        self._go_on()

    async def _load(self, choice: ModelChoice) -> Loaded | None:
        """The loaded model; None: it could not be loaded, as `error` says, or the server is ending."""
        began = time.monotonic()
        begun, on_ready = self._signal()
        self._ended, on_end = self._signal()
        known, made = self.descriptions.get(choice.name), list[Description]()
        makes = choice.load, choice.make_sessions, choice.make_admission
        shared = self._decode_share, self.totals, self.watch
        worker = Worker(
            *makes, *shared, on_ready, on_end, lambda engine: made.append(choice.describe_loaded(engine, known))
        )
        self._worker = worker
        self._thread.run(worker.main)
        await begun.wait()
        self.error, engine = worker.error, worker.engine
        if engine is None or self._stopping:
            return None
        self.descriptions[choice.name] = made[0]
        return Loaded(choice, worker, made[0].preparer, time.monotonic() - began, choice.foretell(engine))

    def _signal(self) -> tuple[asyncio.Event, Callable[[], None]]:
        """An event and a function that sets it from any thread."""
        event = asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(event.set)

        return event, tell

    def _fail(self, waiting: Sequence[_Waiting], error: Callable[[], BadRequestError]) -> None:
        for one in list(waiting):
            self._waiting.remove(one)
            if not one.turn.done():
                one.turn.set_exception(error())


def reason(error: BaseException) -> str:
    """Why a model cannot be loaded, for clients: of a path only the last part."""
    if not isinstance(error, MoefluxError):
        return f"the server has a fault ({type(error).__name__})"
    return _PATH.sub("", " ".join(str(error).split()))


def _ending() -> BadRequestError:
    return BadRequestError(CANCELLED.message, None, CANCELLED.status, CANCELLED.code)


def _cannot_load(choice: ModelChoice) -> BadRequestError:
    """The error for the client; /v1/models and the log say more."""
    message = f"the model {choice.name} cannot be loaded; look at the server's log"
    return BadRequestError(message, "model", 500, "server_error")

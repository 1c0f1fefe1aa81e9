"""The data that the page shows while the model runs: where experts are, and the rates. The thread that runs the model
takes a picture, and only while a page is open.

`ExpertMap` has what the page shows of the experts: where each is, what was requested, and for whom. It observes a
loader.
"""

import base64
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..experts.source import ExpertLoader
from ..experts.stats import LoaderStats
from ..files import JsonDict
from ..formats.record import Key
from ..opening.engine import Engine
from ..planning.machine import used_memory
from .running import Running, Totals

HIT, MISSED = 3, 4  # beside the loader's ON_DISK, IN_MEMORY and ARRIVING


class ExpertMap:
    """A `RequestObserver` of `experts` from now until `end`; everything is called by the thread that runs the model.

    Args:
        asking: gives numbers from 1 to 255 of the texts whose rows are computed, in order, or of the only text.
    """

    def __init__(self, experts: ExpertLoader, asking: Callable[[], Sequence[int]] = tuple):
        self._experts, self._asking = experts, asking
        self._asked: dict[Key, int] = {}  # since the last `states`
        self._askers: dict[Key, int] = {}  # the last asker of each expert
        experts.observer = self

    def end(self) -> None:
        """The loader tells nobody any more."""
        self._experts.observer = None

    def requested(self, layer: int, ids: np.ndarray, keys: Sequence[Key], ready: Sequence[bool]) -> None:
        self._asked.update((key, HIT if there else MISSED) for key, there in zip(keys, ready, strict=True))
        asking = self._asking()
        if len(asking) == 1:
            self._askers.update(dict.fromkeys(keys, asking[0]))
        elif ids.ndim == 2 and len(ids) == len(asking):
            rows = zip(asking, ids.tolist(), strict=True)
            self._askers.update(((layer, expert), asker) for asker, row in rows for expert in row)

    def states(self) -> np.ndarray:
        """uint8 [layers that have experts, experts]: ON_DISK, IN_MEMORY, ARRIVING, or, if it was requested since the
        last call, HIT or MISSED.
        """
        states = self._by_place([*self._experts.places(), *self._asked.items()])
        self._asked = {}
        return states

    def last_askers(self) -> np.ndarray:
        """uint8 [layers that have experts, experts]: which text requested an expert last; 0: none."""
        return self._by_place(self._askers.items())

    def _by_place(self, values: Iterable[tuple[Key, int]]) -> np.ndarray:
        """uint8 [layers with routed experts, experts] with these values, and 0 elsewhere, without value experts."""
        layout = self._experts.layout
        rows = {layer: row for row, layer in enumerate(layout.moe_layers)}
        filled = np.zeros((len(rows), layout.num_experts), np.uint8)
        for (layer, expert), value in values:
            if layer in rows:
                filled[rows[layer], expert] = value
        return filled


EVERY = 0.5  # seconds between pictures
CONVERSATIONS = 255  # conversations that have numbers of their own


@dataclass(frozen=True)
class Counts:
    """The counts at one moment."""

    experts: LoaderStats = field(default_factory=LoaderStats)
    requests: Totals = field(default_factory=Totals)

    def rates_since(self, before: "Counts") -> dict[str, float]:
        """Rates of tokens and bytes, divided by the seconds of their own work, so that pauses do not count."""
        experts, now, then = self.experts.since(before.experts), self.requests, before.requests
        computed, generated = now.computed_tokens - then.computed_tokens, now.generated_tokens - then.generated_tokens
        return {
            "hit_rate": experts.hit_rate,
            "gb_per_second": experts.gb_per_second,
            "prompt_tokens_per_second": _rate(computed, now.prompt_seconds - then.prompt_seconds),
            "tokens_per_second": _rate(generated, now.answer_seconds - then.answer_seconds),
        }


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


class Watch:
    """Attributes:
    latest: the last picture, None before the first.
    asking: the numbers of those for whom experts are requested, in the order of their rows.
    """

    def __init__(self) -> None:
        self.latest: JsonDict | None = None
        self.watchers = 0
        self._taken = 0.0
        self._map: ExpertMap | None = None  # while somebody watches
        self.asking: Sequence[int] = ()
        self._before = self._request = Counts()
        self._numbers: dict[str, int] = {}

    @property
    def patience(self) -> float | None:
        """Seconds until a picture is due if nothing happens; None if none is due."""
        return EVERY if self.watchers else None

    def begin_request(self, engine: Engine, totals: Totals) -> None:
        """Rates of the request are counted from here on, until the next one begins."""
        self._request = _counts(engine, totals)

    def forget(self, totals: Totals) -> None:
        """Forgets the unloaded model."""
        self.latest, self._map = None, None
        self._before = self._request = Counts(requests=replace(totals))

    def number(self, one: Running) -> int:
        """The number of the job's conversation, or of its client if it names none: from 1 to `CONVERSATIONS`, then from
        1 again.
        """
        name = one.job.prepared.request.session or one.job.client
        if name not in self._numbers and len(self._numbers) == CONVERSATIONS:
            self._numbers.clear()
        return self._numbers.setdefault(name, len(self._numbers) + 1)

    def compute(self, computed: Sequence[Running]) -> None:
        """Experts are requested for these from now on, in the order of their rows."""
        self.asking = [self.number(one) for one in computed]

    def look(self, engine: Engine, running: Sequence[Running], queue: int, totals: Totals) -> None:
        """Takes a picture of the running requests, if one is due."""
        now = time.perf_counter()
        if self.watchers and self._map is None:
            self._map = ExpertMap(engine.experts, lambda: self.asking)
            self._before, self._taken = _counts(engine, totals), now
        elif not self.watchers and self._map is not None:
            self._map.end()
            self._map = None
        if self._map is None or now - self._taken < EVERY:
            return
        self.latest = self._picture(engine, self._map, running, queue, _counts(engine, totals))
        self._taken = now

    def _picture(
        self, engine: Engine, experts: ExpertMap, running: Sequence[Running], queue: int, counts: Counts
    ) -> JsonDict:
        before, self._before = self._before, counts
        layout = engine.experts.layout
        return {
            "model": engine.path.name,
            "busy": bool(running),
            "queue": queue,
            "context": engine.plan.context,
            "layers": [int(layer) for layer in layout.moe_layers],
            "experts": layout.num_experts,
            "map": base64.b64encode(experts.states().tobytes()).decode(),
            "askers": base64.b64encode(experts.last_askers().tobytes()).decode(),
            **counts.rates_since(before),
            "request": counts.rates_since(self._request),
            "memory": {
                "used": used_memory(),
                "planned": engine.plan.total,
                "pool": engine.experts.pool_bytes,
                "host": engine.experts.host_bytes,
                "given_back": engine.experts.stats.given_back,
            },
            "drafts": _drafts(engine),
            "lanes": [{"number": self.number(one), **_lane(one)} for one in running],
        }


def _lane(one: Running) -> JsonDict:
    """The data of a running request: the client's name of the conversation, its prompt, its answer."""
    done, total = one.progress
    return {
        "name": one.job.prepared.request.session,
        "prompt": {"done": done, "total": total or len(one.job.prepared.tokens)} if one.in_prompt else None,
        "tokens": one.tokens,
        "tokens_per_second": _rate(one.tokens - 1, one.seconds[1]),
    }


def _drafts(engine: Engine) -> JsonDict | None:
    """Counts of drafts since the model was loaded; None if it has no drafts."""
    made = engine.model.drafting
    return {"kind": made.kind, "checked": made.checked, "taken": made.taken} if made.most else None


def _counts(engine: Engine, totals: Totals) -> Counts:
    return Counts(replace(engine.experts.stats), replace(totals))

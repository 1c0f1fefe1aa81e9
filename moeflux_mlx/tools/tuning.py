"""Finds the tiles with which each kernel is fastest on this GPU, at the shapes of one model.

One layer of each kind is made with random weights and given a few tokens. Every launch that asks for a tile is recorded
with its inputs and repeated with other tiles: `search` goes from the built-in tile to neighbours that are faster and
correct. Its clock is an argument, so `search` itself needs no GPU. Compiling takes nearly all of the time, and on CUDA
MLX compiles one kernel after the other. So several processes search, and take turns on the GPU.
"""

import functools
import multiprocessing
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..engine.machine import machine_figures
from ..engine.random_weights import Shapes, fill_randomly, random_records, randomise
from ..experts.routing import Report, Routing, ignore_report
from ..formats.record import ExpertLayout, Record
from ..kinds import Mixer, streams_before
from ..layers import Linear
from ..mixers.registry import USUAL, make_caches
from ..model.layer import DecoderLayer
from ..model.tokens import Tokens
from ..ops import backend
from ..ops.dequantize import dequantized_records
from ..ops.expert_rows import expert_rows, refusal, starts_of, units_refusal
from ..ops.experts import Shared, chosen_gate_up, expert_ffn
from ..ops.grouped import GroupedRows, dense_from
from ..ops.launch import Input, Launch, Reason
from ..ops.records import Records
from ..ops.route import Choice
from ..ops.streams import spread
from ..ops.tiles import MAX_TOKENS, TILES, Tile, Tiles, spot_of, using
from ..quant import Quant
from ..spec import ModelArgs
from .trial import Bench, Sample, others

WORTH = 1.02  # a tile replaces another one if it is faster by this factor
FIRST_ROUNDS, LAST_ROUNDS = 5, 15  # alternating measurements: of a candidate, and of the best tile
ROWS = tuple(2 ** (i // 3) for i in range(28))  # of each expert in a prompt: 1 to 512, three experts with each number
TOKENS = (1, 512, MAX_TOKENS // 4)  # tokens of each pass: a single one, a prompt's, and a few
PROCESSES, PROCESS_BYTES = 6, 2 << 30  # the most processes that compile at once; the GPU memory for each

Seconds = Callable[[Tile], float]


# ---- the search


def search(
    start: Tile, around: Callable[[Tile], Iterable[Tile]], is_right: Callable[[Tile], bool], seconds: Seconds
) -> tuple[Tile, float]:
    """Follows ever faster neighbours to the best tile; returns it and how many times as fast as `start` it is.

    Args:
        start: the built-in tile, which is returned with 1.0 unless another is at least `WORTH` times as fast.
        around: returns the neighbours of a tile.
        is_right: whether a tile gives right values; other tiles are not measured.
        seconds: makes one measurement; it is called for two tiles in turns.
    """
    best, seen, moved = start, {start}, True
    while moved:
        moved = False
        for tile in around(best):
            if tile in seen:
                continue
            seen.add(tile)
            if is_right(tile) and ratio(best, tile, seconds, FIRST_ROUNDS) >= WORTH:
                best, moved = tile, True
                break
    gain = ratio(start, best, seconds, LAST_ROUNDS) if best != start else 1.0
    return (best, gain) if gain >= WORTH else (start, 1.0)


def ratio(one: Tile, other: Tile, seconds: Seconds, rounds: int) -> float:
    """How many times as fast `other` is: the median of alternating pairs."""
    return statistics.median(seconds(one) / seconds(other) for _ in range(rounds))


# ---- what a model launches


class Listening(Tiles):
    """Uses the built-in tiles; records the first launch of each spot in `samples` when it is called, and returns noise
    as its outputs.

    Attributes:
        samples: by spot.
        asked: the kernels and shapes for which the last `planned` function asked for a tile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[str, Sample] = {}
        self.asked: list[tuple[str, str]] = []

    def tile(self, target: str, kernel: str, shape: str) -> Tile:
        self.asked.append((kernel, shape))
        return super().tile(target, kernel, shape)

    def plan(self, operation: str, make: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        self.asked.clear()
        made, asked = make(*given), tuple(self.asked)
        if not asked or made is None or isinstance(made, Reason):
            return made
        if not isinstance(made, tuple):
            return self._recording(made, lambda: make(*given), asked)
        return tuple(
            self._recording(launch, functools.partial(lambda i: make(*given)[i], i), asked)
            for i, launch in enumerate(made)
        )

    def _recording(
        self, launch: Launch, make: Callable[[], Launch], asked: Sequence[tuple[str, str]]
    ) -> Callable[..., Any]:
        """Makes the launch. If it depends on a tile, it records its inputs when called, and is not compiled."""
        own = [(kernel, shape) for kernel, shape in asked if _depends(make, launch, kernel, shape)]

        def call(*inputs: Input) -> list[mx.array]:
            for kernel, shape in own:
                self.samples.setdefault(spot_of(kernel, shape), Sample(kernel, make, inputs))
            return [_noise(shape, dtype) for shape, dtype in launch.outputs]

        return call if own else launch


def _noise(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Random numbers like activations; indices are 0, which is valid for any array."""
    return mx.random.normal(shape).astype(dtype) if mx.issubdtype(dtype, mx.floating) else mx.zeros(shape, dtype)


def _depends(make: Callable[[], Launch], launch: Launch, kernel: str, shape: str) -> bool:
    """Whether another tile changes the launch; of several launches that are made together, some have no tile."""
    return any(True for _ in others(make, launch, spot_of(kernel, shape), kernel, TILES[launch.target][kernel]))


@dataclass(frozen=True)
class PromptExperts:
    """A layer's experts with the rows of a prompt, called like a launch: some experts have few rows and some many.

    Args:
        target: the backend.
        record: the geometry of the experts.
        dense: the number of rows from which an expert is dequantised.
        on_units: whether `expert_rows` multiplies all of them instead.
    """

    target: str
    record: Record
    dense: int
    on_units: bool

    def __call__(self, x: mx.array, blob: mx.array) -> list[mx.array]:
        """The experts' outputs for the rows x [sum of `ROWS`, hidden_size]; blob [len(ROWS), words] are records."""
        experts = np.arange(len(ROWS))
        rows = GroupedRows(
            x, np.repeat(experts, ROWS)[:, None], np.array(ROWS), [experts], self.record, on_units=self.on_units
        )
        rows.multiply(0, experts, Records(blob, self.record))
        return [rows.outputs()]


def _prompt_sample(record: Record, dtype: mx.Dtype) -> dict[str, Sample]:
    """The spot of an expert's products in prompts, if they ask for a tile and matrix units do not multiply."""
    if not refusal(dtype, record):
        return {}
    target, blob = backend.name(), random_records(record, len(ROWS)).blob
    listening = Listening()
    with using(listening):
        dense_from(target, record)
    x = mx.random.normal((sum(ROWS), record.hidden_size)).astype(dtype)

    def make() -> PromptExperts:
        on_units = not refusal(dtype, record)
        return PromptExperts(target, record, 0 if on_units else dense_from(target, record), on_units)

    return {spot_of(kernel, shape): Sample(kernel, cast(Any, make), (x, blob)) for kernel, shape in listening.asked}


class TrialExperts:
    """Routed experts with random weights for one layer, as many as a token uses, so that every token uses all of
    them.
    """

    def __init__(self, record: Record, count: int):
        self.count = count
        self.records = random_records(record, count)

    def __call__(self, routing: Routing, x: Any, residual: Any, shared: Any, report: Report = ignore_report) -> Any:
        slots = mx.array(np.tile(np.arange(self.count, dtype=np.uint32), (len(x), 1)))
        if len(x) <= MAX_TOKENS:
            out = expert_ffn(x, slots, self.records, mx.random.uniform(shape=slots.shape), residual, shared)
            if routing.choice is not None:
                self._choose(routing.choice, x, shared)
            return out
        all_slots = slots[0] + 0
        if refusal(x.dtype, self.records.record):
            dequantized_records(self.records, all_slots, x.dtype)
        if not units_refusal(backend.name(), x.dtype, self.records.record):
            starts = mx.array(starts_of(np.full(self.count, len(x))))
            expert_rows(x, starts, mx.tile(mx.arange(len(x), dtype=mx.int32), self.count), all_slots, self.records)
        return residual

    def _choose(self, choice: Choice, x: mx.array, shared: Any) -> None:
        """Launches the kernel that chooses among all experts; these logits choose the first ones, which exist."""
        falling = mx.zeros(choice.logits.shape) - mx.arange(choice.logits.shape[1], dtype=mx.float32)
        choice = replace(choice, logits=falling, bias=None if choice.bias is None else mx.zeros(choice.bias.shape))
        record = self.records.record
        joined = shared if isinstance(shared, Shared) and shared.joins(record, self.count) else None
        chosen_gate_up(x, choice, self.records, joined, choice.rule.experts)

    def expect(self, layer: int, tokens: int) -> None:
        pass

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return False


def samples(shapes: Shapes) -> dict[str, Sample]:
    """Every spot of the model's layers and head with its launch, those of a single token first; then the experts'
    products in prompts.
    """
    listening = Listening()
    for run in passes(shapes):
        with using(listening):
            run()
    for record in dict.fromkeys(shapes.layout.records.values()):
        listening.samples |= _prompt_sample(record, shapes.dtype)
    return listening.samples


def passes(shapes: Shapes) -> Iterator[Callable[[], object]]:
    """Passes a token, a prompt and a few tokens through one layer of each kind and the head; nothing is evaluated."""
    parts = [*_layers(shapes), _head(shapes)]
    for tokens in TOKENS:
        for part in parts:
            x = mx.random.normal((1, tokens, shapes.args.hidden_size)).astype(shapes.dtype)
            yield functools.partial(part, x)


def _layers(shapes: Shapes) -> Iterator[Callable[[mx.array], object]]:
    """One layer of each kind, with empty caches."""
    args, records = shapes.args, shapes.layout.records
    kinds = dict[Any, int]()
    for i, mixer in enumerate(args.mixers):
        kinds.setdefault((mixer, records.get(i)), i)
    for i in kinds.values():
        experts = TrialExperts(records[i], args.num_experts_per_tok) if i in records else None
        layer: Any = DecoderLayer(args, i, cast(Any, experts), USUAL)
        randomise(layer, f"model.layers.{i}.", shapes)
        yield functools.partial(_try_layer, layer, args.mixers[i], streams_before(args.connections, i))


def _try_layer(layer: Any, mixer: Mixer, streams: int, x: mx.array) -> object:
    return layer(spread(x, streams), make_caches(mixer), None, Tokens(mx.zeros(x.shape[:2], mx.uint32)))


def _head(shapes: Shapes) -> Callable[[mx.array], object]:
    """The last matrix, which gets only single tokens and a few."""
    matrix = Linear(shapes.args.hidden_size, shapes.args.vocab_size)
    fill_randomly(matrix, shapes.quants.get(shapes.args.last_matrix), shapes.dtype)
    return lambda x: matrix(x[:, :MAX_TOKENS])


# ---- all of it


@dataclass(frozen=True)
class Result:
    """The result for one spot: the built-in tile, the best one, their ratio, and the time of the best one."""

    spot: str
    code: Tile
    best: Tile
    gain: float
    seconds: float


def tune(
    spots: Iterable[str], launches: Mapping[str, Sample], bench: Callable[[str, Sample], Any]
) -> Generator[Result, None, None]:
    """Searches `spots` in turn, each with its sample of `launches`."""
    for spot in spots:
        sample = launches[spot]
        code, trial = TILES[backend.name()][sample.kernel], bench(spot, sample)
        best, gain = search(code, trial.around, trial.is_right, trial.seconds)
        yield Result(spot, code, best, gain, trial.seconds(best))
        sample.inputs = ()


def kept(results: Iterable[Result]) -> Mapping[str, Tile]:
    """The tiles that differ from the built-in ones, by spot."""
    return {one.spot: one.best for one in results if one.best != one.code}


def crew(shapes: Shapes, spots: Sequence[str], seconds: float) -> Generator[Result, None, None]:
    """Searches `spots` with several processes and yields the results as they come; after `seconds` no further search
    begins.
    """
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")  # MLX does not survive a fork
    most = 1 if backend.name() == "metal" else min(PROCESSES, (os.cpu_count() or 2) // 2)
    count = max(1, min(most, machine_figures().memory // PROCESS_BYTES))
    shared = shapes.args, shapes.layout, shapes.quants, str(shapes.dtype).rpartition(".")[2], context.Lock()
    waiting, running = deque(spots), set[Future[Result]]()
    with ProcessPoolExecutor(count, mp_context=context, initializer=begin_work, initargs=shared) as pool:
        while True:
            while waiting and len(running) < count and time.monotonic() < end:
                running.add(pool.submit(search_spot, waiting.popleft()))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


work: dict[str, Any] = {}  # globals of a process of the crew


def begin_work(
    args: ModelArgs, layout: ExpertLayout, quants: Mapping[str, Quant | None], dtype: str, turn: Any
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starting process ends this one
    work.update(launches=samples(Shapes(args, layout, quants, getattr(mx, dtype))), turn=turn)


def search_spot(spot: str) -> Result:
    """Searches one spot, in a process that `begin_work` has prepared."""
    return next(tune([spot], work["launches"], functools.partial(Bench, turn=work["turn"])))

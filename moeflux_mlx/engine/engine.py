"""A model and all that belongs to it, put together in one place: `Engine`, and the public `load` and `load_model`."""

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx

from ..errors import RequestError
from ..experts.mapped import MappedExperts
from ..experts.ranks import RankedExperts
from ..experts.resident import Progress, ResidentExperts
from ..experts.routed import RoutedExperts
from ..experts.source import ExpertLoader, IoMode
from ..experts.streamed import StreamedExperts
from ..files import user_path
from ..formats.in_place import InPlaceExperts
from ..formats.packed import PackedExperts
from ..formats.pieces import ExpertFiles
from ..formats.record import ExpertLayout
from ..model.decoder import Model
from ..model.tensors import resident_bytes, split_latent
from ..model.weights import fill
from ..ops.limits import within_limits
from ..ops.tiles import Tiles
from ..process import claim_process
from ..spec import ModelArgs
from ..state.fingerprint import Fingerprint
from ..text.tokenizer import TokenizerWrapper, load_tokenizer
from .breath import Breath
from .budget import MemoryPlan, longest_context, plan_memory
from .demand import Demand, demand_of
from .expert_io import from_environment
from .lead import Lead, LeadSession
from .locate import resolve
from .machine import activation_bits, checked_dtype, machine_figures
from .needs import least_slots
from .pool_sizes import best_pool
from .pressure import PoolLimit, sources
from .ranks import Ranks, io_mode, meet
from .running_text import CHECKPOINT_BYTES
from .session import Session
from .tiles import choose
from .weights import Weights, open_weights
from .wired import wire

PREFETCH = {"auto": "lookahead", "previous": "previous", "off": "off"}
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Engine:
    """A loaded model, the source of its experts, the plan of its memory, its tokenizer, and where it came from.

    With `lead`, other ranks take every step of its sessions.

    Nothing of it changes after loading.
    """

    weights: Weights
    model: Model
    experts: ExpertLoader
    plan: MemoryPlan
    lead: Lead | None = None

    @property
    def path(self) -> Path:
        """The directory of the model."""
        return self.weights.path

    @cached_property
    def tokenizer(self) -> TokenizerWrapper:
        """Read when it is first asked for.

        Raises:
            TokenizerError: the tokenizer files cannot be used.
        """
        return load_tokenizer(self.path)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What saved states of this model depend on.

        Raises:
            ModelFileError: a file cannot be read any more.
        """
        return self.weights.fingerprint(self.model.activation_dtype, self.model.cpu_activations)

    def session(self, **options: Any) -> Session:
        """A new text; `options` as for `Session`. States kept on its way take a quarter of what the plan left alone."""
        settings = {"checkpoint_bytes": min(CHECKPOINT_BYTES, self.plan.headroom // 4), **options}
        if self.lead is not None:
            return LeadSession(self.lead, self.model, self.tokenizer, **settings)
        return Session(self.model, self.tokenizer, **settings)


@within_limits()
def open_engine(
    path_or_hf_repo: str | Path | None = None,
    *,
    dtype: mx.Dtype | None = None,
    cpu_activations: int | str = "auto",
    expert_io: str = "auto",
    expert_cache_bytes: int | None = None,
    prefetch: str = "auto",
    context: int | None = None,
    span: int | None = None,
    prefill_step_size: int | None = None,
    revision: str | None = None,
    shards_in: Sequence[str | Path] = (),
    tiles: str | Path = "auto",
    pool_share: float | None = None,
    least_context: int = 0,
    progress: Progress | None = None,
    memory_bytes: int | None = None,
    ranks: Ranks | None = None,
) -> Engine:
    """Loads a model; arguments and errors are those of `load`."""
    claim_process()
    if prefetch not in PREFETCH:
        raise RequestError(f"prefetch {prefetch!r} is not one of {', '.join(PREFETCH)}")
    folders = [user_path(folder) for folder in shards_in]
    path = resolve(path_or_hf_repo, revision, folders)
    weights, mode = open_weights(path, folders), from_environment(expert_io)
    weights.check_mode(mode)
    if ranks is None:
        weights.check_held(None)
    else:
        mode = io_mode(mode, weights)
    activations, bits = checked_dtype(dtype), activation_bits(cpu_activations, dtype)
    args, dtype, chosen = weights.args, activations, choose(tiles)
    demand = demand_of(
        args,
        resident_bytes(weights.shapes, dtype),
        dtype,
        context=context,
        span=span,
        prefill_step_size=prefill_step_size,
        expert_io=mode,
        expert_cache_bytes=expert_cache_bytes,
        in_place=not weights.can_be_mapped,
    )
    if expert_cache_bytes is None:
        demand = replace(demand, best_pool=best_pool(path, weights.experts.layout.total_bytes))
    figures = machine_figures(memory_bytes)

    def planned(layout: ExpertLayout, wanted: Demand) -> MemoryPlan:
        if wanted.context is None and pool_share is not None:
            longest = longest_context(args, layout, figures, wanted, pool_share, least_context)
            wanted = replace(wanted, context=longest)
        return plan_memory(args, layout, figures, wanted)

    if ranks is None:
        plan = planned(weights.experts.layout, demand)
        return _loaded(
            weights, plan, dtype, bits, chosen, lambda source: RoutedExperts(source, PREFETCH[prefetch]), progress
        )
    party, plan = meet(ranks, weights, dtype, bits, demand, planned, chosen)
    with party.loading(weights.experts.layout.total_bytes):
        return _loaded(
            weights, plan, dtype, bits, party.tiles, lambda source: party.experts(source, PREFETCH[prefetch]), progress
        )


def _loaded(
    weights: Weights,
    plan: MemoryPlan,
    dtype: mx.Dtype,
    bits: int,
    tiles: Tiles,
    computing: Callable[[ExpertLoader], RoutedExperts | RankedExperts],
    progress: Progress | None,
) -> Engine:
    """The model as planned; `computing` makes of its source who computes routed experts."""
    args = weights.args
    experts = open_experts(weights.experts, args, plan, progress)
    try:
        model = Model(args, computing(experts), split_latent(weights.shapes), plan.sizes, tiles, bits)
        fill(model, weights.read(), args.quantization, dtype)
    except BaseException:
        experts.close()  # a model that compiles its steps and its experts refer to each other
        raise
    return Engine(weights, model, experts, plan)


def open_experts(
    files: ExpertFiles, args: ModelArgs, plan: MemoryPlan, progress: Progress | None = None
) -> ExpertLoader:
    """The source that `plan` asks for. On Metal its share of wired memory is asked for first: adopted memory counts."""
    release = _wire(plan)
    try:
        experts: ExpertLoader
        if plan.mode is IoMode.MMAP:
            assert isinstance(files, PackedExperts)  # others were refused
            experts = MappedExperts(files, plan.decision)
        elif plan.mode is IoMode.RESIDENT:
            whole = files.check_scales if isinstance(files, InPlaceExperts) else None
            experts = ResidentExperts(files, plan.decision, check=whole, progress=progress)
        else:
            limit = PoolLimit(sources(plan.figures), plan.most)
            experts = StreamedExperts(
                files,
                plan.decision,
                cache_bytes=plan.pool,
                most_bytes=plan.most,
                allowance=Breath(args, files.layout, plan, limit),
                limit=limit,
                least_slots=least_slots(args),
                buffer_bytes=plan.figures.buffer,
                check=files.check_record if isinstance(files, InPlaceExperts) else None,
            )
    except BaseException:
        release()
        raise
    forgotten = weakref.finalize(experts, release)
    forgotten.atexit = False  # MLX goes first
    experts.at_close(forgotten)
    return experts


def _wire(plan: MemoryPlan) -> Callable[[], None]:
    """Gives the model its share of what MLX keeps wired; what is returned takes it back."""
    if plan.wired is None or plan.figures.working_set is None:
        return lambda: None
    return wire(plan.wired, plan.figures.working_set)


def _opened_like(make: Callable[P, Engine]) -> "Callable[[Callable[[Engine], R]], Callable[P, R]]":
    """Gives a function of an engine the parameters of `make`, which are so written once."""

    def decorate(use: Callable[[Engine], R]) -> Callable[P, R]:
        @functools.wraps(use)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return use(make(*args, **kwargs))

        signature = inspect.signature(make).replace(return_annotation=inspect.signature(use).return_annotation)
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {**make.__annotations__, "return": use.__annotations__["return"]}
        return call

    return decorate


@_opened_like(open_engine)
def load(engine: Engine) -> tuple[Model, TokenizerWrapper]:
    """Loads a model and its tokenizer; it prints nothing.

    A model may be used by several threads, each with caches of its own. If its experts are mapped, calls run side
    by side; if they are read into a pool, calls take turns (a span of a prompt is one call), and once a second
    thread has called, what a call returns is evaluated before the next one begins. A cache can go on in another
    thread once its arrays are evaluated: `mx.eval([layer.state for layer in cache])`. On a GPU that holds every
    expert each thread compiles its own step, so a thread that stays is better than one for each request. A process
    that is forked afterwards cannot use the model, nor load another; start processes with multiprocessing's
    "spawn".

    Args:
        path_or_hf_repo: a directory made by `convert`, or a checkpoint that MLX quantised; a Hugging Face repo id
            that holds a packed model; or None for the demo model that ships with the package.
        dtype: of activations and caches; None means bfloat16 on a GPU and float32 on CPU.
        cpu_activations: bits to which the CPU's products with quantised weights round activations, in each group of
            weights: 8, 16, 24 (as exact as float32), or "auto": 24 where `dtype` is given, else 8. Where MLX
            computes it has no effect.
        expert_io: "mmap", "pread" (read as they are wanted), "resident" (read once, all of them), or "auto": what the
            environment variable MOEFLUX_EXPERT_IO says, else what fits. A checkpoint cannot be mapped.
        expert_cache_bytes: memory for streamed experts in pread mode; None takes what is left of RAM,
            or less where `moeflux tune` found that less is as fast.
        memory_bytes: that all of the process may take: weights, caches, experts and Python; None: what the machine has,
            less some for others. Files that are mapped count only for the choice to map them.
        prefetch: "auto" (read ahead what the next layer's router is predicted to choose), "previous" (what the layer
            used for the previous token) or "off"; only when reading (pread), and never a different result.
        context: positions for which memory is planned; None means 8192, or the model's own limit if less, or what
            there is room for. Longer texts work as long as there is memory.
        span: prompt tokens that go through the model together, so that each expert is read once for all of them; None
            means as many as there is room for, in steps from 512 to 32768.
        prefill_step_size: of a span, the tokens that attention or a recurrent mixer handles at once, at most; None
            means 4096, or what there is room for; on a Mac it is less where the GPU would take too long. It does not
            bound a span.
        revision: of the Hugging Face repo.
        shards_in: directories, on other drives perhaps, in which safetensors files of a checkpoint lie that are not in
            its own; drives are read together.
        tiles: how a GPU's kernels cut their matrices: "code" (as they are in the code), a file that `moeflux tune`
            wrote, or "auto": what the environment variable MOEFLUX_TILES says, else what `moeflux tune` found on this
            GPU. Other tiles may change the last bits of a result.
        pool_share: without `context`, memory is planned for the longest one that leaves the pool of experts this share
            of what it would have otherwise.
        least_context: that context is at least this long, whatever it takes from the experts.
        progress: called with the bytes read so far and in all, while resident experts are read.
        ranks: this process is one of several, which all load the model and then make the same calls.

    Raises:
        ModelFileError: a file is missing or wrong. ConfigError: a value is not implemented.
        NotPackedError: a checkpoint that needs converting; the message holds the command.
        TokenizerError: the tokenizer files cannot be used. RequestError: it does not fit in memory, or there is no such
            file of tiles.
        ExpertIOError: this process was forked from one that had loaded a model. DeviceError: memory is at an end.
    """
    return engine.model, engine.tokenizer


@_opened_like(open_engine)
def load_model(engine: Engine) -> Model:
    """`load` without a tokenizer; `model.experts` is the `ExpertLoader`."""
    return engine.model

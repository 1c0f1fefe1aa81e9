"""Loads a model with everything that it needs: `Engine`, and the public `load` and `load_model`."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from ..driving.session import CHECKPOINT_BYTES, Session, SessionOptions
from ..errors import warn
from ..experts.keep_warm import keep_warm_of
from ..experts.routed import RoutedExperts
from ..experts.routing import RoutedExpertsCall
from ..experts.source import ExpertLoader, IoMode
from ..experts.streamed import StreamedExperts
from ..experts.tables import open_readers
from ..experts.whole import MappedExperts, ReadProgress, ResidentExperts
from ..foreign import LOADING, with_parameters_of
from ..formats.packed import ExpertFiles, InPlaceExperts, PackedExperts
from ..kept.measured import choose_tiles
from ..kept.warm_start import begin_warm_start
from ..mixers.registry import stored_forms
from ..model.decoder import Model
from ..model.tables import Tables
from ..model.tensors import resident_bytes
from ..model.weights import fill
from ..ops.limits import within_limits
from ..ops.tiles import CODE, Tiles
from ..packing.in_place import GgufExperts
from ..packing.located import Located
from ..planning.budget import Planner
from ..planning.machine import activation_bits, checked_dtype, from_environment, machine_figures
from ..planning.memory_plan import MemoryPlan, keeping, least_slots
from ..planning.pressure import PACE, PACE_OF_METAL, Breath, PoolLimit, host_sources, sources
from ..planning.settings import allow_open_files, configure_mlx
from ..planning.wired import wire, wire_lasting
from ..process import claim_process
from ..spec import ModelArgs
from ..state.prompt_file import Fingerprint
from ..text.tokenizer import TokenizerWrapper
from ..vision.vision import NoVision, VisionFiles
from .heads import ChosenDrafts, choose_drafts, load_head
from .kernel_cache import compiling
from .load_settings import PREFETCH, Agreed, Company, Leading, LoadSettings
from .random_weights import Shapes
from .weights import ModelWeights, open_weights, with_best_pool

if TYPE_CHECKING:
    from typing_extensions import Unpack

NO_IMAGES = "images are off on several ranks; start one"
Computing = Callable[[ExpertLoader], RoutedExpertsCall]


@dataclass(frozen=True)
class Engine:
    """A loaded model with the source of its experts, its memory plan, its tokenizer and its directory.

    `drafts` says in one line where drafts come from, unless they are off. With `lead`, other processes repeat every
    step of its sessions. An engine does not change after loading.
    """

    weights: ModelWeights
    model: Model
    experts: ExpertLoader
    plan: MemoryPlan
    drafts: str
    lead: Leading | None = None

    @property
    def path(self) -> Path:
        """The directory of the model."""
        return self.weights.path

    @property
    def tokenizer(self) -> TokenizerWrapper:
        """The tokenizer, read at its first use.

        Raises:
            TokenizerError: the tokenizer files cannot be used.
        """
        return self.weights.located.tokenizer

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint that saved states of this model must match.

        Raises:
            ModelFileError: a file can no longer be read.
        """
        plain = self.weights.fingerprint(self.model.activation_dtype, self.model.cpu_activations)
        return plain.keeping(self.model.args.kv_bits)

    def session(self, **options: "Unpack[SessionOptions]") -> Session:
        """Starts a new text; `options` as for `Session`. By default, its kept states take at most a quarter of the
        headroom of the plan.
        """
        settings: SessionOptions = {"checkpoint_bytes": min(CHECKPOINT_BYTES, self.plan.headroom // 4), **options}
        if self.lead is not None:
            return self.lead.session(self.model, self.tokenizer, **settings)
        return Session(self.model, self.tokenizer, **settings)


@within_limits()
def open_with(settings: LoadSettings, located: Located | None = None) -> Engine:
    """Loads a model; errors are those of `load`. `located`: where it is, if the caller has looked already."""
    claim_process()
    configure_mlx()
    allow_open_files()
    ranks = settings.ranks
    weights = open_weights(located or settings.locate(), settings.without_correction_bias)
    settings = replace(settings, expert_io=_checked_mode(settings.expert_io, weights, ranks))
    dtype, bits = checked_dtype(settings.dtype), activation_bits(settings.trial.cpu_activations, settings.dtype)
    args = keeping(weights.args, settings.kv_bits, settings.dtype)
    images = weights.vision(settings.vision) if ranks is None else NoVision(NO_IMAGES)
    planner = _planner(settings, weights, args, dtype, images)
    if ranks is None:
        setup = _alone(choose_drafts(settings.draft, weights, planner, dtype), settings)
    else:
        agreed = ranks.meet(weights, planner, dtype, bits)
        setup = _with_others(agreed, args, settings, planner.layout.total_bytes)
    with setup.loading:
        engine = _loaded(weights, setup, dtype, bits, settings.progress)
        return _seeing(engine, images, dtype, settings.image_tokens)


def _checked_mode(expert_io: str, weights: ModelWeights, ranks: Company | None) -> str:
    """How experts are read, as the option, the environment or the other ranks say. The directory must allow it and hold
    the experts of this process.
    """
    mode = from_environment(expert_io)
    weights.check_mode(mode)
    if ranks is not None:
        return ranks.io_mode(mode, weights)
    return mode


def _planner(
    settings: LoadSettings, weights: ModelWeights, args: ModelArgs, dtype: mx.Dtype, images: VisionFiles | NoVision
) -> Planner:
    """Plans the memory of this machine for the model."""
    resident = resident_bytes(weights.shapes, dtype)
    demand = settings.demand(args, resident, dtype, in_place=not weights.can_be_mapped, vision=images)
    figures = machine_figures(settings.memory_bytes)
    best = with_best_pool(demand, weights)
    return Planner(args, weights.experts.layout, figures, best, settings.trial.pool_share, settings.trial.least_context)


@dataclass(frozen=True)
class Setup:
    """What a process decides by itself if it is alone, and together with the others if there are several.

    Attributes:
        drafts: where drafts come from, with the memory plan.
        tiles: of the kernels.
        computing: makes the object that computes routed experts from their source.
        warm_start: the mode of `begin_warm_start`.
        loading: is entered while the model is loaded.
    """

    drafts: ChosenDrafts
    tiles: Tiles
    computing: Computing
    warm_start: str
    loading: AbstractContextManager[None]


def _alone(drafts: ChosenDrafts, settings: LoadSettings) -> Setup:
    prefetch = PREFETCH[settings.prefetch]
    warmth = settings.trial.keep_warm
    computing = lambda source: RoutedExperts(source, prefetch, keep_warm_of(warmth, source))  # noqa: E731
    return Setup(drafts, choose_tiles(settings.trial.tiles), computing, settings.warm_start, nullcontext())


def _with_others(agreed: Agreed, args: ModelArgs, settings: LoadSettings, nbytes: int) -> Setup:
    """As all ranks have agreed, with the built-in tiles; drafts, `keep_warm` and warm starts are off. `nbytes`: of all
    experts.
    """
    drafts, prefetch = ChosenDrafts(args, agreed.plan, "off", None, ""), PREFETCH[settings.prefetch]
    computing = lambda source: agreed.experts(source, prefetch)  # noqa: E731
    return Setup(drafts, CODE, computing, "off", agreed.loading(nbytes))


def _seeing(engine: Engine, files: VisionFiles | NoVision, dtype: mx.Dtype, rows: int) -> Engine:
    """The engine with its image encoder, complete, and wired on Metal. If that is impossible, the engine is closed."""
    try:
        engine.model.vision = files if isinstance(files, NoVision) else files.load(dtype, rows)
        wire_loaded(engine.experts, engine.plan)
    except BaseException:
        engine.experts.close()
        raise
    return engine


def _loaded(weights: ModelWeights, setup: Setup, dtype: mx.Dtype, bits: int, progress: ReadProgress | None) -> Engine:
    """Loads the model as planned."""
    drafts, tiles = setup.drafts, setup.tiles
    args, plan = drafts.args, drafts.plan
    if plan.enlarged:
        warn(plan.enlarged)
    with compiling(Shapes.of(args, weights.experts.layout, weights.shapes, dtype), tiles, drafts.drafting.most > 0):
        experts = open_experts(weights.experts, args, plan, progress)
        try:
            shape = stored_forms(weights.shapes), plan.sizes, tiles, bits, drafts.drafting
            model = Model(args, setup.computing(experts), *shape, _opened_tables(weights, args, experts))
            fill(model, weights.read(), args.quantization, dtype)
            if drafts.head is not None:
                load_head(drafts.head, model, dtype)
            begin_warm_start(setup.warm_start, weights.path, experts)
        except BaseException:
            experts.close()  # a model that compiles its steps and its experts refer to each other
            raise
    return Engine(weights, model, experts, plan, drafts.reason)


def _opened_tables(weights: ModelWeights, args: ModelArgs, experts: ExpertLoader) -> Tables | None:
    """The reader of n-gram rows, which is closed together with `experts`."""
    readers = open_readers(weights.tables)
    for reader in readers.values():
        experts.at_close(reader.close)
    return Tables(args.ngrams, readers) if readers else None


@with_parameters_of(LoadSettings, LOADING)
def open_engine(settings: LoadSettings) -> Engine:
    """Loads a model; arguments and errors are those of `load`."""
    return open_with(settings)


@with_parameters_of(LoadSettings, LOADING)
def load(settings: LoadSettings) -> tuple[Model, TokenizerWrapper]:
    """Loads a model and its tokenizer. Prints nothing.

    Several threads may use a model, each with its own caches. If its experts are mapped, calls run in parallel. If they
    are read into a pool, calls take turns (a span of a prompt is one call); once a second thread has called, the result
    of each call is evaluated before the next one begins. A cache can continue in another thread after its arrays have
    been evaluated: `mx.eval([layer.state for layer in cache])`. On a GPU that holds every expert each thread compiles
    its own step, so use one long-lived thread instead of one per request. A process that is forked after loading can
    neither use the model nor load another; start processes with multiprocessing's "spawn".

    Args:
        path_or_hf_repo: a directory made by `convert`, or a checkpoint that MLX quantised; a GGUF file, or a
            directory with one; a Hugging Face repo id that holds a packed model; or None for the demo model that
            ships with the package.
        dtype: of activations and caches; None means bfloat16 on a GPU and float32 on CPU.
        kv_bits: number of bits in which caches keep keys and values: 8 (rounded once, in groups of 64 along the head,
            and about half as large), 16 (unchanged, in `dtype`), or "auto": 8 in families in which a token adds 128 KiB
            or more, unless `dtype` is float32. Latents and recurrent states are kept unchanged.
        expert_io: "mmap", "pread" (read on demand), "resident" (all read once, at loading), or "auto": the environment
            variable MOEFLUX_EXPERT_IO, else what fits. A checkpoint cannot be mapped.
        expert_cache_bytes: memory for streamed experts in pread mode; None takes the RAM that is left, or less if
            `moeflux tune` found that less is as fast. Less than the smallest pool is a warning, and that one is used.
        beside: bytes that something else in this process needs beside the model.
        memory_bytes: limit of the whole process: weights, caches, experts and Python; None: the machine's memory, less
            a reserve for other programs. Mapped files count only in the decision whether to map.
        prefetch: "auto" (read ahead the predicted choice of the next layer's router) or "off". It matters only with
            pread and never changes a result.
        warm_start: "auto" (the environment variable MOEFLUX_WARM_START, else on) or "off": whether the experts that
            earlier sessions used most are read into the free memory of a pool while nobody else wants the drive, and
            whether this session's are noted for later ones. It changes no result, and is off on several ranks.
        context: positions for which memory is planned; None means 8192, or less if the model's limit or the memory is
            smaller. Longer texts work as long as there is memory.
        prefill_step_size: the most tokens of a span that attention or a recurrent mixer handles at once; None means
            4096, or what there is room for, and on a Mac less if the GPU would take too long. It does not limit the
            span.
        revision: of the Hugging Face repo.
        shards_in: further directories, perhaps on other drives, with files of a checkpoint or of a split GGUF. Drives
            are read in parallel.
        tokenizer: a directory or repo id with the tokenizer files for a GGUF; None: those beside it, or else made from
            its metadata.
        without_correction_bias: whether a checkpoint that lacks the biases by which routers correct their choice, such
            as mlx-lm's conversions of ERNIE 4.5, is loaded all the same. Its tokens then go to other experts than the
            model was trained with.
        progress: called with the bytes read so far and in all, while resident experts are read.
        draft: the source of drafts, which are proposed tokens that a step checks: "off", "lookup" (what followed an
            earlier occurrence of the text's ending), "head" (the model's own draft head), a directory or GGUF that
            holds a head for it, or "auto": its head if the pool of experts keeps nine tenths of its bytes, else
            "lookup". Drafts change the speed, never the tokens. They are off on several ranks.
        vision: whether to load an image encoder if the checkpoint has one and the extra `vision` is installed.
        image_tokens: the most tokens of an image; larger images are made smaller. The memory plan includes the encoding
            of such an image.
        wired: what MLX keeps resident for a Mac's GPU: "pool" (what lasts: weights and experts), "all" (also caches and
            temporaries, with which some versions of macOS have restarted), or "off" (nothing, which is slow if experts
            are streamed).
        ranks: this process's place among several that all load the model and then make the same calls.
        set: further settings by name, which measurements need: those of `TrialSettings` in opening/load_settings.py.

    Raises:
        ModelFileError: a file is missing or wrong. ConfigError: a value is not implemented.
        NotPackedError: a checkpoint that needs converting; the message holds the command.
        TokenizerError: the tokenizer files cannot be used. RequestError: the model does not fit in memory, or `set` has
            a name or a value that does not exist.
        ExpertIOError: this process was forked from one that had loaded a model. DeviceError: memory is exhausted.
    """
    engine = open_with(settings)
    return engine.model, engine.tokenizer


@with_parameters_of(LoadSettings, LOADING)
def load_model(settings: LoadSettings) -> Model:
    """`load` without a tokenizer; `model.experts` is the `ExpertLoader`."""
    return open_with(settings).model


def open_experts(
    files: ExpertFiles, args: ModelArgs, plan: MemoryPlan, progress: ReadProgress | None = None
) -> ExpertLoader:
    """Opens the source that `plan` requires. If all that the GPU reads is to be wired, the limit is raised first."""
    figures, wired = plan.figures, plan.demand.wired
    release = wire(plan.wired or 0, figures.working_set or 0) if wired == "all" and figures.working_set else _nothing
    try:
        experts: ExpertLoader
        if plan.mode is IoMode.MMAP:
            assert isinstance(files, PackedExperts)  # other tables were refused
            experts = MappedExperts(files, plan.decision)
        elif plan.mode is IoMode.RESIDENT:
            whole = files.check_scales if isinstance(files, InPlaceExperts) else None
            blocks = files.arrange_all if isinstance(files, GgufExperts) else None
            experts = ResidentExperts(files, plan.decision, check=whole, arrange=blocks, progress=progress)
        else:
            pace = PACE if plan.figures.working_set is None else PACE_OF_METAL
            limit = PoolLimit(sources(plan.figures), plan.most, pace=pace)
            host_limit = PoolLimit(host_sources(), plan.host) if plan.host else None
            breath = Breath(args, files.layout, plan, limit)
            experts = StreamedExperts(
                files,
                plan.decision,
                cache_bytes=plan.pool,
                most_bytes=plan.most,
                allowance=breath,
                prompt_check=breath.check_prompt,
                limit=limit,
                host_bytes=plan.host,
                host_limit=host_limit,
                least_slots=least_slots(args),
                buffer_bytes=plan.figures.buffer,
                check=files.check_record if isinstance(files, InPlaceExperts) else None,
                arrange=files.arrange if isinstance(files, GgufExperts) else None,
            )
    except BaseException:
        release()
        raise
    _at_end(experts, release)
    return experts


def wire_loaded(experts: ExpertLoader, plan: MemoryPlan) -> None:
    """Wires a model that is loaded, with its whole pool, if what lasts is to be wired on Metal.

    Raises:
        ExpertIOError: Metal refuses memory without which the pool is too small.
    """
    if plan.demand.wired == "pool" and plan.figures.working_set is not None:
        experts.take_memory()
        _at_end(experts, wire_lasting(plan.figures.working_set))


def _at_end(experts: ExpertLoader, release: Callable[[], None]) -> None:
    """Calls `release` when the experts are closed or forgotten."""
    forgotten = weakref.finalize(experts, release)
    forgotten.atexit = False  # MLX's arrays are freed first
    experts.at_close(forgotten)


def _nothing() -> None:
    """Nothing was wired."""

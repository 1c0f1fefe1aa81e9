"""Loads a model with everything that it needs: `Engine`, and the public `load` and `load_model`."""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx

from ..errors import MoefluxWarning, RequestError
from ..experts.resident import Progress
from ..experts.routed import RoutedExperts
from ..experts.routing import RoutedExpertsCall
from ..experts.source import ExpertLoader
from ..experts.tables import open_readers
from ..files import user_path
from ..formats.record import ExpertLayout
from ..mixers.registry import stored_forms
from ..model.decoder import Model
from ..model.tables import Tables
from ..model.tensors import resident_bytes
from ..model.weights import fill
from ..ops.limits import within_limits
from ..ops.tiles import Tiles
from ..process import claim_process
from ..spec import ModelArgs
from ..state.fingerprint import Fingerprint
from ..text.tokenizer import TokenizerWrapper, load_tokenizer
from ..vision.pixels import IMAGE_ROWS
from ..vision.vision import NoVision, VisionFiles, checked_rows
from .budget import MemoryPlan, longest_context, plan_memory
from .company import Agreed, Company, Leading
from .demand import Demand, demand_of
from .expert_io import from_environment
from .expert_source import open_experts
from .heads import Drafts, choose_drafts, load_head
from .keep_warm import MODES, KeepWarm, keep_warm_of
from .kernel_cache import compiling
from .keywords import LOADING, with_signature
from .kv_bits import keeping
from .locate import resolve
from .machine import Figures, activation_bits, checked_dtype, machine_figures
from .random_weights import Shapes
from .running_text import CHECKPOINT_BYTES
from .session import Session
from .settings import allow_open_files, configure_early
from .tiles import choose
from .warm_start import MODES as WARM_START
from .warm_start import begin_warm_start
from .weights import Weights, open_weights, with_best_pool

PREFETCH = {"auto": "lookahead", "previous": "previous", "off": "off"}
# The stack level of the caller of `load` in a function that `open_engine` calls: between are `open_engine`,
# `within_limits`, and the two functions around `load`.
CALLER = 6
Computing = Callable[[ExpertLoader, KeepWarm | None], RoutedExpertsCall]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Engine:
    """A loaded model with the source of its experts, its memory plan, its tokenizer and its directory.

    `drafts` says in one line where drafts come from, unless they are off. `keep_warm` launches while experts are read,
    if anything does. With `lead`, other processes repeat every step of its sessions. An engine does not change after
    loading.
    """

    weights: Weights
    model: Model
    experts: ExpertLoader
    plan: MemoryPlan
    drafts: str
    keep_warm: KeepWarm | None = None
    lead: Leading | None = None

    @property
    def path(self) -> Path:
        """The directory of the model."""
        return self.weights.path

    @cached_property
    def tokenizer(self) -> TokenizerWrapper:
        """The tokenizer, read at its first use.

        Raises:
            TokenizerError: the tokenizer files cannot be used.
        """
        return load_tokenizer(self.path)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint that saved states of this model must match.

        Raises:
            ModelFileError: a file can no longer be read.
        """
        plain = self.weights.fingerprint(self.model.activation_dtype, self.model.cpu_activations)
        return plain.keeping(self.model.args.kv_bits)

    def session(self, **options: Any) -> Session:
        """Starts a new text; `options` as for `Session`. By default, its kept states take at most a quarter of the
        headroom of the plan.
        """
        settings = {"checkpoint_bytes": min(CHECKPOINT_BYTES, self.plan.headroom // 4), **options}
        if self.lead is not None:
            return self.lead.session(self.model, self.tokenizer, **settings)
        return Session(self.model, self.tokenizer, **settings)


@within_limits()
def open_engine(
    path_or_hf_repo: str | Path | None = None,
    *,
    dtype: mx.Dtype | None = None,
    cpu_activations: int | str = "auto",
    kv_bits: int | str = "auto",
    expert_io: str = "auto",
    expert_cache_bytes: int | None = None,
    prefetch: str = "auto",
    keep_warm: str = "auto",
    warm_start: str = "auto",
    context: int | None = None,
    span: int | None = None,
    prefill_step_size: int | None = None,
    revision: str | None = None,
    shards_in: Sequence[str | Path] = (),
    tokenizer: str | Path | None = None,
    tiles: str | Path = "auto",
    pool_share: float | None = None,
    least_context: int = 0,
    progress: Progress | None = None,
    memory_bytes: int | None = None,
    draft: str | Path = "off",
    vision: bool = True,
    image_tokens: int = IMAGE_ROWS,
    ranks: Company | None = None,
) -> Engine:
    """Loads a model; arguments and errors are those of `load`."""
    claim_process()
    configure_early(CALLER)
    allow_open_files()
    reading, *modes = _checked_modes(prefetch, keep_warm, warm_start)
    folders = [user_path(folder) for folder in shards_in]
    weights = open_weights(resolve(path_or_hf_repo, revision, folders, tokenizer), folders)
    mode = _checked_mode(expert_io, weights, ranks)
    activations, bits = checked_dtype(dtype), activation_bits(cpu_activations, dtype)
    args, dtype, chosen = keeping(weights.args, kv_bits, dtype), activations, choose(tiles)
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
    images = weights.vision(vision) if ranks is None else NoVision("images are off on several ranks; start one")
    demand = with_best_pool(demand.with_vision(images, dtype, checked_rows(image_tokens)), weights)
    planned = partial(_planned, machine_figures(memory_bytes), pool_share, least_context)
    layout = weights.experts.layout
    if ranks is None:
        alone = lambda args, wanted: planned(args, layout, wanted)  # noqa: E731
        setup = _alone(choose_drafts(draft, weights, args, demand, dtype, alone), chosen, reading, *modes)
    else:
        agreed = ranks.meet(weights, args, dtype, bits, demand, partial(planned, args), chosen)
        setup = _with_others(agreed, args, reading, layout.total_bytes)
    with setup.loading:
        engine = _loaded(weights, setup, dtype, bits, progress)
        return _seeing(engine, images, dtype, image_tokens)


def _checked_modes(prefetch: str, keep_warm: str, warm_start: str) -> tuple[str, str, str]:
    """The modes that the options name, as `Lookahead`, `keep_warm_of` and `begin_warm_start` have them.

    Raises:
        RequestError: an option is none of its names.
    """
    if prefetch not in PREFETCH:
        raise RequestError(f"prefetch {prefetch!r} is not one of {', '.join(PREFETCH)}")
    if keep_warm not in MODES:
        raise RequestError(f"keep_warm {keep_warm!r} is not one of {', '.join(MODES)}")
    if warm_start not in WARM_START:
        raise RequestError(f"warm_start {warm_start!r} is not one of {', '.join(WARM_START)}")
    return PREFETCH[prefetch], keep_warm, warm_start


def _checked_mode(expert_io: str, weights: Weights, ranks: Company | None) -> str:
    """How experts are read, as the option, the environment or the other ranks say. The directory must allow it and hold
    the experts of this process.
    """
    mode = from_environment(expert_io)
    weights.check_mode(mode)
    if ranks is not None:
        return ranks.io_mode(mode, weights)
    weights.check_held(None)
    return mode


def _planned(
    figures: Figures,
    pool_share: float | None,
    least_context: int,
    args: ModelArgs,
    layout: ExpertLayout,
    wanted: Demand,
) -> MemoryPlan:
    """The memory plan, for the longest context that leaves the pool its share if no context is wanted."""
    if wanted.context is None and pool_share is not None:
        longest = longest_context(args, layout, figures, wanted, pool_share, least_context)
        wanted = replace(wanted, context=longest)
    return plan_memory(args, layout, figures, wanted)


@dataclass(frozen=True)
class Setup:
    """What a process decides by itself if it is alone, and together with the others if there are several.

    Attributes:
        drafts: where drafts come from, with the memory plan.
        tiles: of the kernels.
        computing: makes the object that computes routed experts from their source.
        warmth, warm_start: the modes of `keep_warm` and of `begin_warm_start`.
        loading: is entered while the model is loaded.
    """

    drafts: Drafts
    tiles: Tiles
    computing: Computing
    warmth: str
    warm_start: str
    loading: AbstractContextManager[None]


def _alone(drafts: Drafts, tiles: Tiles, prefetch: str, warmth: str, warm_start: str) -> Setup:
    computing = lambda source, warm: RoutedExperts(source, prefetch, warm)  # noqa: E731
    return Setup(drafts, tiles, computing, warmth, warm_start, nullcontext())


def _with_others(agreed: Agreed, args: ModelArgs, prefetch: str, nbytes: int) -> Setup:
    """As all ranks have agreed; drafts, `keep_warm` and warm starts are off. `nbytes`: of all experts."""
    drafts = Drafts(args, agreed.plan, "off", None, "")
    return Setup(
        drafts, agreed.tiles, lambda source, _: agreed.experts(source, prefetch), "off", "off", agreed.loading(nbytes)
    )


def _seeing(engine: Engine, files: VisionFiles | NoVision, dtype: mx.Dtype, rows: int) -> Engine:
    """The engine with its image encoder. If the encoder cannot be used, the engine is closed."""
    try:
        engine.model.vision = files if isinstance(files, NoVision) else files.load(dtype, rows)
    except BaseException:
        engine.experts.close()
        raise
    return engine


def _loaded(weights: Weights, setup: Setup, dtype: mx.Dtype, bits: int, progress: Progress | None) -> Engine:
    """Loads the model as planned."""
    drafts, tiles = setup.drafts, setup.tiles
    args, plan = drafts.args, drafts.plan
    if plan.enlarged:
        warnings.warn(plan.enlarged, MoefluxWarning, stacklevel=CALLER)
    with compiling(Shapes.of(args, weights.experts.layout, weights.shapes, dtype), tiles, drafts.drafting.most > 0):
        experts = open_experts(weights.experts, args, plan, progress)
        try:
            shape = stored_forms(weights.shapes), plan.sizes, tiles, bits, drafts.drafting
            warm = keep_warm_of(setup.warmth, weights.path, experts)
            model = Model(args, setup.computing(experts, warm), *shape, _opened_tables(weights, args, experts))
            fill(model, weights.read(), args.quantization, dtype)
            if drafts.head is not None:
                load_head(drafts.head, model, dtype)
            begin_warm_start(setup.warm_start, weights.path, experts)
        except BaseException:
            experts.close()  # a model that compiles its steps and its experts refer to each other
            raise
    return Engine(weights, model, experts, plan, drafts.reason, warm)


def _opened_tables(weights: Weights, args: ModelArgs, experts: ExpertLoader) -> Tables | None:
    """The reader of n-gram rows, which is closed together with `experts`."""
    readers = open_readers(weights.tables)
    for reader in readers.values():
        experts.at_close(reader.close)
    return Tables(args.ngrams, readers) if readers else None


def _opened_like(make: Callable[P, Engine]) -> "Callable[[Callable[[Engine], R]], Callable[P, R]]":
    """Decorates a function of an engine with the parameters of `make`, so that they are written only once."""

    def decorate(use: Callable[[Engine], R]) -> Callable[P, R]:
        @functools.wraps(use)
        def open_and_use(*args: P.args, **kwargs: P.kwargs) -> R:
            return use(make(*args, **kwargs))

        signature = inspect.signature(make).replace(return_annotation=inspect.signature(use).return_annotation)
        return with_signature(open_and_use, signature, LOADING)

    return decorate


@_opened_like(open_engine)
def load(engine: Engine) -> tuple[Model, TokenizerWrapper]:
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
        cpu_activations: number of bits to which the CPU's products with quantised weights round activations, per group
            of weights: 8, 16, 24 (as exact as float32), or "auto": 24 if `dtype` is given, else 8. It has no effect
            where MLX computes.
        kv_bits: number of bits in which caches keep keys and values: 8 (rounded once, in groups of 64 along the head,
            and about half as large), 16 (unchanged, in `dtype`), or "auto": 8 in families in which a token adds 128 KiB
            or more, unless `dtype` is float32. Latents and recurrent states are kept unchanged.
        expert_io: "mmap", "pread" (read on demand), "resident" (all read once, at loading), or "auto": the environment
            variable MOEFLUX_EXPERT_IO, else what fits. A checkpoint cannot be mapped.
        expert_cache_bytes: memory for streamed experts in pread mode; None takes the RAM that is left, or less if
            `moeflux tune` found that less is as fast. Less than the smallest pool is a warning, and that one is used.
        memory_bytes: limit of the whole process: weights, caches, experts and Python; None: the machine's memory, less
            a reserve for other programs. Mapped files count only in the decision whether to map.
        prefetch: "auto" (read ahead the predicted choice of the next layer's router), "previous" (read ahead what the
            layer used for the previous token) or "off". It matters only with pread and never changes a result.
        keep_warm: whether tiny launches keep a GPU's clock up while a token waits for experts that are read: "on" (on
            any GPU), "off", or "auto": on a Mac that does not run on battery, if the first 256 tokens, measured by
            turns with and without, or an earlier start's, were faster. It changes no result, and is off on several
            ranks.
        warm_start: "auto" (the environment variable MOEFLUX_WARM_START, else on) or "off": whether the experts that
            earlier sessions used most are read into the free memory of a pool while nobody else wants the drive, and
            whether this session's are noted for later ones. It changes no result, and is off on several ranks.
        context: positions for which memory is planned; None means 8192, or less if the model's limit or the memory is
            smaller. Longer texts work as long as there is memory.
        span: number of prompt tokens that go through the model together, so that each expert is read once for all of
            them; None means as many as there is room for, from 512 to 32768.
        prefill_step_size: the most tokens of a span that attention or a recurrent mixer handles at once; None means
            4096, or what there is room for, and on a Mac less if the GPU would take too long. It does not limit the
            span.
        revision: of the Hugging Face repo.
        shards_in: further directories, perhaps on other drives, with safetensors files of a checkpoint. Drives are read
            in parallel.
        tokenizer: a directory or repo id with the tokenizer files for a GGUF; None: those beside it, or else made from
            its metadata.
        tiles: how a GPU's kernels cut their matrices: "code" (the built-in tiles), a file that `moeflux tune` wrote, or
            "auto": the environment variable MOEFLUX_TILES, else what `moeflux tune` found on this GPU. Other tiles may
            change the last bits of a result.
        pool_share: if `context` is None, memory is planned for the longest context that leaves the pool of experts this
            share of its size at the default context.
        least_context: a lower bound for that context, even if experts then get less memory.
        progress: called with the bytes read so far and in all, while resident experts are read.
        draft: the source of drafts, which are proposed tokens that a step checks: "off", "lookup" (what followed an
            earlier occurrence of the text's ending), "head" (the model's own draft head), a directory that holds a head
            for it, or "auto": its head if the pool of experts keeps nine tenths of its bytes, else "lookup". Drafts
            change the speed, never the tokens. They are off on several ranks.
        vision: whether to load an image encoder if the checkpoint has one and the extra `vision` is installed.
        image_tokens: the most tokens of an image; larger images are made smaller. The memory plan includes the encoding
            of such an image.
        ranks: this process's place among several that all load the model and then make the same calls.

    Raises:
        ModelFileError: a file is missing or wrong. ConfigError: a value is not implemented.
        NotPackedError: a checkpoint that needs converting; the message holds the command.
        TokenizerError: the tokenizer files cannot be used. RequestError: the model does not fit in memory, or the file
            of tiles does not exist.
        ExpertIOError: this process was forked from one that had loaded a model. DeviceError: memory is exhausted.
    """
    return engine.model, engine.tokenizer


@_opened_like(open_engine)
def load_model(engine: Engine) -> Model:
    """`load` without a tokenizer; `model.experts` is the `ExpertLoader`."""
    return engine.model

"""How a model is loaded: all arguments of the public `load` in one value, with the settings that only trials need;
where its directory is; and the interfaces of the other processes that run it with this one, which know nothing of the
transport.

A directory is found for the demo model, a path as users write it, or a repository, which is downloaded. It has a packed
model, or a checkpoint that can be used in place. Anything else is refused with the command that packs it, before any
weight is downloaded.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import mlx.core as mx

from ..driving.session import Session, SessionOptions
from ..errors import ModelFileError, MoefluxError, RequestError, did_you_mean
from ..experts.keep_warm import MODES as KEEP_WARM
from ..experts.routing import RoutedExpertsCall
from ..experts.source import ExpertLoader
from ..experts.tables import KEPT_BYTES
from ..files import directory, user_path
from ..formats.checkpoint import has_weights
from ..kept.measured import TILE_MODES
from ..kept.warm_start import MODES as WARM_START
from ..model.decoder import Model
from ..model.tensors import layer_values
from ..ops import backend
from ..ops.attend_span import WIDEST, span_refusal
from ..ops.backend import computes_natively
from ..ops.expert_rows import refusal
from ..ops.linear import dequantises
from ..packing.gguf_folder import describe, tokenizer_folder
from ..packing.located import Located, not_packed_error, unfinished_error
from ..planning.budget import Planner
from ..planning.memory_plan import Demand, MemoryPlan
from ..planning.wired import MODES as WIRED
from ..spec import ModelArgs, variants
from ..text.tokenizer import TokenizerWrapper
from ..vision.pixels import IMAGE_ROWS
from ..vision.vision import NoVision, VisionFiles, checked_rows
from .remote import fetch, is_remote
from .weights import ModelWeights

if TYPE_CHECKING:
    from typing_extensions import Unpack


def locate(
    model: str | Path | None,
    revision: str | None = None,
    shards_in: Sequence[str | Path] = (),
    tokenizer: str | Path | None = None,
) -> Located:
    """The directory of a model, downloading it if need be; of a GGUF the one that describes it.

    Args:
        model: a path, a repository, or None for the demo model.
        shards_in: other directories in which a checkpoint's safetensors files, or a GGUF's, may lie.
        tokenizer: a directory or repository with the files of a GGUF's tokenizer.
    """
    path = directory("demo") if model is None else user_path(model)
    if not path.exists():
        if not is_remote(model):
            is_known = path.name.lower() in variants()
            known = "; moeflux models shows the repository of this known model" if is_known else ""
            raise ModelFileError(
                f"{path} does not exist{known}; give the directory of a model, packed or as mlx-lm wrote it, a GGUF "
                "file, or a repo id org/name, such as moeflux models lists"
            )
        path = fetch(str(model), revision)
    located = Located(path, tuple(user_path(folder) for folder in shards_in))
    if not located.is_packed and (folder := describe(path, tokenizer_folder(tokenizer), located.shards_in)) is not None:
        return replace(located, path=folder)
    if tokenizer is not None:
        raise RequestError(f"--tokenizer is for GGUF files, and {path} is none; leave it out")
    _check_runs(located)
    return located


def _check_runs(located: Located) -> None:
    """Raises MoefluxError: a directory that has a config.json cannot be run."""
    path = located.path
    if not path.is_dir():
        raise ModelFileError(f"{path} is not a directory, nor a GGUF file")
    if located.is_unfinished:
        raise unfinished_error(path)
    if located.is_packed or (path / "config.json").exists() and located.runs:
        return
    for folder in (path, path / "mlx"):  # the second name is moeflux's
        if (folder / "config.json").exists():
            raise _not_a_model(path, folder)


def _not_a_model(path: Path, folder: Path) -> MoefluxError:
    """The error for a directory that has a config.json but cannot be run."""
    if has_weights(path):
        return not_packed_error(str(path), folder)
    return ModelFileError(f"{path} has a config.json and no weights (*.safetensors); download the rest of it")


class Agreed(Protocol):
    """What the processes agreed on before loading a model, and the memory plan of this one."""

    @property
    def plan(self) -> MemoryPlan: ...

    def experts(self, source: ExpertLoader, prefetch: str) -> RoutedExpertsCall:
        """The object that computes routed experts in place of `RoutedExperts`."""

    def loading(self, nbytes: int) -> AbstractContextManager[None]:
        """A context manager in which a model of `nbytes` is loaded; at its end it waits for the other processes."""


class Company(Protocol):
    """All processes that run the model, including this one."""

    def io_mode(self, asked: str, weights: ModelWeights) -> str:
        """The I/O mode of this process if the user asked for `asked`."""

    def meet(
        self,
        weights: ModelWeights,
        planner: Planner,
        dtype: mx.Dtype,
        bits: int,
    ) -> Agreed:
        """Plans memory for this process's experts, from the planner for all, and checks that all processes agree."""


class Leading(Protocol):
    """The leading process, which makes the others repeat every step of its sessions."""

    def session(self, model: Model, tokenizer: TokenizerWrapper, **options: "Unpack[SessionOptions]") -> Session:
        """Starts a new text; `options` as for `Session`."""


PREFETCH = {"auto": "lookahead", "off": "off"}
MODES = {"prefetch": PREFETCH, "keep_warm": KEEP_WARM, "warm_start": WARM_START, "tiles": TILE_MODES, "wired": WIRED}
COUNTS = ("context", "span", "prefill_step_size", "expert_cache_bytes")


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """What `load(set={NAME: VALUE})` and `--set NAME=VALUE` change. The defaults are right for use; others are for
    measurements.

    Args:
        cpu_activations: number of bits to which the CPU's products with quantised weights round activations, per group
            of weights: 8, 16, 24 (as exact as float32), or "auto": 24 if `dtype` is given, else 8. It has no effect
            where MLX computes.
        host_bytes: on an NVIDIA GPU, the most memory of the computer in which experts stay after they were copied to
            the GPU, so that they are not read again; None: what is free at loading, less a reserve.
        keep_warm: whether tiny launches keep an Apple GPU's clock up while a token waits for experts that are read:
            "on" or "off". It changes no result, and is off on several ranks.
        span: number of prompt tokens that go through the model together, so that each expert is read once for all of
            them; None means as many as there is room for, from 512 to 32768.
        tiles: how a GPU's kernels cut their matrices: "code" (the built-in tiles) or "auto": what `moeflux tune` found
            on this GPU. Other tiles may change the last bits of a result.
        pool_share: if `context` is None, memory is planned for the longest context that leaves the pool of experts this
            share of its size at the default context.
        least_context: a lower bound for that context, even if experts then get less memory.

    Raises:
        RequestError: a value is not possible.
    """

    cpu_activations: int | str = "auto"
    host_bytes: int | None = None
    keep_warm: str = "off"
    span: int | None = None
    tiles: str = "auto"
    pool_share: float | None = None
    least_context: int = 0

    def __post_init__(self) -> None:
        _check(self)
        if self.host_bytes is not None and (not isinstance(self.host_bytes, int) or self.host_bytes < 0):
            raise RequestError(f"host_bytes is {self.host_bytes!r}; it must be 0, a positive integer, or None for all")


def _check(settings: object) -> None:
    """Raises RequestError: a mode is not one of its names, or a number of tokens or bytes is not positive."""
    for name, value in vars(settings).items():
        if value not in (modes := MODES.get(name, [value])):
            raise RequestError(f"{name} {value!r} is not one of {', '.join(modes)}")
        if name in COUNTS and value is not None and (not isinstance(value, int) or value < 1):
            raise RequestError(f"{name} is {value!r}; it must be a positive integer; leave it out for the best value")


TRIALS = tuple(one.name for one in fields(TrialSettings))


@dataclass(frozen=True)
class LoadSettings:
    """The arguments of `load`, which explains them.

    Raises:
        RequestError: a mode is not one of its names, or a number of tokens or bytes is not a positive integer.
    """

    path_or_hf_repo: str | Path | None = None
    _: KW_ONLY
    dtype: mx.Dtype | None = None
    kv_bits: int | str = "auto"
    expert_io: str = "auto"
    expert_cache_bytes: int | None = None
    prefetch: str = "auto"
    warm_start: str = "auto"
    context: int | None = None
    prefill_step_size: int | None = None
    revision: str | None = None
    shards_in: Sequence[str | Path] = ()
    tokenizer: str | Path | None = None
    without_correction_bias: bool = False
    progress: Callable[[int, int], object] | None = None
    memory_bytes: int | None = None
    beside: int = 0
    draft: str | Path = "off"
    vision: bool = True
    image_tokens: int = IMAGE_ROWS
    ranks: Company | None = None
    wired: str = "pool"
    set: Mapping[str, int | float | str] | None = None
    trial: TrialSettings = field(init=False)

    def __post_init__(self) -> None:
        _check(self)
        for name in self.set or ():
            if name not in TRIALS:
                meant = did_you_mean(name, TRIALS) or f"; it takes {', '.join(TRIALS)}"
                raise RequestError(f"there is no setting {name!r} to set{meant}")
        object.__setattr__(self, "trial", TrialSettings(**cast(Any, self.set or {})))

    def locate(self) -> Located:
        """Where the model is."""
        return locate(self.path_or_hf_repo, self.revision, self.shards_in, self.tokenizer)

    def demand(
        self,
        args: ModelArgs,
        resident: int,
        dtype: mx.Dtype,
        *,
        in_place: bool = False,
        vision: VisionFiles | NoVision | None = None,
    ) -> Demand:
        """What a model with these settings demands of the memory.

        Args:
            args: the model's, with the caches of the settings.
            resident: bytes of its resident tensors.
            dtype: of its activations.
            in_place: whether its experts cannot be mapped.
            vision: its image encoder, or why there is none; None if it has no files.

        Raises:
            RequestError: the context is longer than the model's, or `image_tokens` is not possible.
        """
        limit = args.max_position_embeddings
        if self.context is not None and self.context > limit:
            raise RequestError(f"context is {self.context} and the model takes {limit} tokens; give at most {limit}")
        demand = Demand(
            resident=resident + self.beside + len(args.ngrams) * KEPT_BYTES,
            beside=self.beside,
            context=self.context,
            itemsize=dtype.size,
            span=self.trial.span,
            prefill_step_size=self.prefill_step_size,
            native=computes_natively(dtype, args.widths),
            on_units=not refusal(dtype),
            fused=not span_refusal(backend.name(), (WIDEST, WIDEST), dtype, False),
            dense=dtype.size * layer_values(args) if args.quantization and dequantises() else 0,
            expert_io=self.expert_io,
            expert_cache_bytes=self.expert_cache_bytes,
            host_bytes=self.trial.host_bytes,
            in_place=in_place,
            wired=self.wired,
        )
        return demand if vision is None else demand.with_vision(vision, dtype, checked_rows(self.image_tokens))

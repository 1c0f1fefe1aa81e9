"""Joins configuration, resident weights, packed experts and tokenizer into something that can run.

The only place that knows all of them.
"""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from ..errors import ModelFileError, RequestError
from ..experts.routed import RoutedExperts
from ..experts.source import ExpertLoader
from ..files import user_path
from ..formats.hub import fetch_packed, looks_like_repo
from ..formats.packed import FOLDER, PackedExperts
from ..model.compiled import DecodeStep
from ..model.decoder import Model
from ..model.weights import fill, read_resident, resident_bytes
from ..ops import kernels, native
from ..packing.suggest import not_packed_error, unfinished_error
from ..packing.writer import STATE
from ..process import claim_process
from ..resources import directory
from ..spec import ModelArgs
from .budget import DEFAULT_CONTEXT, PREFILL_STEP_SIZE, Demand, MemoryPlan, least_slots, plan_memory
from .io_mode import Figures, from_environment
from .ram import usable_ram_bytes
from .wired import wire

if TYPE_CHECKING:
    from ..text.tokenizer import TokenizerWrapper


PREFETCH = {"auto": "lookahead", "previous": "previous", "off": "off"}


def load(
    path_or_hf_repo: str | Path | None = None,
    *,
    dtype: mx.Dtype | None = None,
    expert_io: str = "auto",
    expert_cache_bytes: int | None = None,
    prefetch: str = "auto",
    context: int | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    revision: str | None = None,
) -> tuple[Model, "TokenizerWrapper"]:
    """Loads a packed model and its tokenizer.

    A model may be used by several threads, each with caches of its own. If its experts are mapped, calls run side by
    side; if they are read into a pool, calls take turns, and once a second thread has called, what a call returns is
    evaluated before the next one begins. A cache can go on in another thread once its arrays are evaluated:
    `mx.eval([layer.state for layer in cache])`. On a GPU that holds every expert each thread compiles its own step, so
    a thread that stays is better than one for each request. A process that is forked afterwards cannot use the model,
    nor load another; start processes with multiprocessing's "spawn".

    Args:
        path_or_hf_repo: a directory made by `convert`, a Hugging Face repo id that holds one, or None
            for the demo model that ships with the package.
        dtype: of activations and caches; None means bfloat16 on a GPU and float32 on CPU.
        expert_io: "mmap", "pread", or "auto": what the environment variable MOEFLUX_EXPERT_IO says, else what fits.
        expert_cache_bytes: memory for streamed experts in pread mode; None takes what is left of RAM.
        prefetch: "auto" (read ahead what the next layer's router foresees), "previous" (what the layer
            used for the previous token) or "off"; only when reading (pread), and never a different result.
        context: positions for which memory is planned; None means 8192, or the model's own limit if less.
            Longer texts work as long as there is memory.
        prefill_step_size: prompt tokens that are to run at once, for which memory is planned.
        revision: of the Hugging Face repo.

    Raises:
        ModelFileError: a file is missing or wrong. ConfigError: a value is not implemented.
        NotPackedError: a checkpoint that needs converting; the message holds the command.
        TokenizerError: the tokenizer files cannot be used. RequestError: it does not fit in memory.
        ExpertIOError: this process was forked from one that had loaded a model.
    """
    from ..text.tokenizer import load_tokenizer

    path = resolve(path_or_hf_repo, revision)
    model = load_model(
        path,
        dtype=dtype,
        expert_io=expert_io,
        expert_cache_bytes=expert_cache_bytes,
        prefetch=prefetch,
        context=context,
        prefill_step_size=prefill_step_size,
    )
    return model, load_tokenizer(path)


def load_model(
    path_or_hf_repo: str | Path | None = None,
    *,
    dtype: mx.Dtype | None = None,
    expert_io: str = "auto",
    expert_cache_bytes: int | None = None,
    prefetch: str = "auto",
    context: int | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    revision: str | None = None,
) -> Model:
    """`load` without a tokenizer; `model.experts` is the `ExpertLoader`."""
    claim_process()
    if prefetch not in PREFETCH:
        raise RequestError(f"prefetch {prefetch!r} is not one of {', '.join(PREFETCH)}")
    path = resolve(path_or_hf_repo, revision)
    args = ModelArgs.from_file(path)
    packed = PackedExperts.open(path, args)
    tensors = read_resident(path)
    dtype = dtype or default_dtype()
    plan = plan_memory(
        args,
        packed.layout,
        machine_figures(),
        Demand(
            resident=resident_bytes(tensors, dtype),
            context=context if context is not None else default_context(args),
            itemsize=dtype.size,
            prefill_step_size=prefill_step_size,
            in_place=computes_in_place(dtype),
            expert_io=from_environment(expert_io),
            expert_cache_bytes=expert_cache_bytes,
        ),
    )
    loader = open_experts(packed, args, plan)
    model = Model(args, RoutedExperts(loader, PREFETCH[prefetch]), split_latent(tensors))
    model.experts, model.plan = loader, plan
    fill(model, tensors, args.quantization, dtype)
    if loader.is_resident:
        model.decode_step = DecodeStep(model)
        loader.at_close(model.decode_step.forget)
    return model


def open_experts(packed: PackedExperts, args: ModelArgs, plan: MemoryPlan) -> ExpertLoader:
    """The loader that `plan` asks for. On Metal its share of wired memory is asked for first: adopted memory counts."""
    release = _wire(plan)
    try:
        loader = ExpertLoader(
            packed,
            mode=plan.mode,
            cache_bytes=plan.pool,
            least_slots=least_slots(args),
            buffer_bytes=plan.figures.buffer,
        )
    except BaseException:
        release()
        raise
    forgotten = weakref.finalize(loader, release)
    forgotten.atexit = False  # MLX goes first
    loader.at_close(forgotten)
    loader.decision = plan.decision
    return loader


def _wire(plan: MemoryPlan) -> Callable[[], None]:
    """Gives the model its share of what MLX keeps wired; what is returned takes it back."""
    if plan.wired is None or plan.figures.working_set is None:
        return lambda: None
    return wire(plan.wired, plan.figures.working_set)


def machine_figures() -> Figures:
    """Of the default device: RAM and, for Metal, its limits; on an NVIDIA GPU its own free memory."""
    if not kernels.has_kernels():
        return Figures(usable_ram_bytes())
    info = mx.device_info()
    if kernels.backend() == "cuda":
        return Figures(int(info["free_memory"]), name="free GPU memory", copies=True)
    working_set, buffer = int(info["max_recommended_working_set_size"]), int(info["max_buffer_length"])
    return Figures(usable_ram_bytes(), working_set, buffer)


def computes_in_place(dtype: mx.Dtype) -> bool:
    """Whether the native CPU kernels, which read packed blocks where they are, run activations of `dtype`."""
    return dtype == mx.float32 and not kernels.has_kernels() and native.available()


def default_context(args: ModelArgs) -> int:
    return min(DEFAULT_CONTEXT, args.max_position_embeddings)


def split_latent(tensors: dict[str, mx.array]) -> bool:
    """Whether MLA's up-projection comes as a pair of tensors."""
    return any(name.endswith(".embed_q.weight") for name in tensors)


def default_dtype() -> mx.Dtype:
    """bfloat16 on a GPU; float32 on CPU, where MLX's bfloat16 arithmetic is several times slower."""
    return mx.bfloat16 if kernels.has_kernels() else mx.float32


def resolve(path_or_hf_repo: str | Path | None, revision: str | None = None) -> Path:
    """The local directory of a packed model, downloading it if need be."""
    if path_or_hf_repo is None:
        return directory("demo")
    path = user_path(path_or_hf_repo)
    if not path.exists():
        if isinstance(path_or_hf_repo, str) and looks_like_repo(path_or_hf_repo):
            return fetch_packed(path_or_hf_repo, revision)
        raise ModelFileError(
            f"{path} does not exist; give a directory made by moeflux_mlx.convert or a repo id org/name"
        )
    if not path.is_dir():
        raise ModelFileError(f"{path} is not a directory")
    if not (path / FOLDER / "layout.json").exists():
        if (path / STATE).exists():
            raise unfinished_error(path)
        for folder in (path, path / "mlx"):  # the second is moeflux's
            if (folder / "config.json").exists():
                raise not_packed_error(str(path), folder)
    return path

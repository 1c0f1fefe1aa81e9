"""How a model is loaded: all arguments of the public `load` in one value."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import mlx.core as mx

from ..errors import RequestError
from ..experts.tables import KEPT_BYTES
from ..model.tensors import layer_values
from ..ops.backend import computes_natively
from ..ops.expert_rows import refusal
from ..ops.linear import dequantises
from ..spec import ModelArgs
from ..vision.pixels import IMAGE_ROWS
from ..vision.vision import NoVision, VisionFiles, checked_rows
from .company import Company
from .demand import Demand
from .keep_warm import MODES as KEEP_WARM
from .warm_start import MODES as WARM_START
from .wired import MODES as WIRED

PREFETCH = {"auto": "lookahead", "off": "off"}
COUNTS = ("context", "span", "prefill_step_size", "expert_cache_bytes")


@dataclass(frozen=True)
class LoadSettings:
    """The arguments of `load`, which explains them.

    Raises:
        RequestError: a mode is not one of its names, or a number of tokens or bytes is not a positive integer.
    """

    path_or_hf_repo: str | Path | None = None
    _: KW_ONLY
    dtype: mx.Dtype | None = None
    cpu_activations: int | str = "auto"
    kv_bits: int | str = "auto"
    expert_io: str = "auto"
    expert_cache_bytes: int | None = None
    host_bytes: int | None = None
    prefetch: str = "auto"
    keep_warm: str = "auto"
    warm_start: str = "auto"
    context: int | None = None
    span: int | None = None
    prefill_step_size: int | None = None
    revision: str | None = None
    shards_in: Sequence[str | Path] = ()
    tokenizer: str | Path | None = None
    without_correction_bias: bool = False
    tiles: str | Path = "auto"
    pool_share: float | None = None
    least_context: int = 0
    progress: Callable[[int, int], object] | None = None
    memory_bytes: int | None = None
    draft: str | Path = "off"
    vision: bool = True
    image_tokens: int = IMAGE_ROWS
    ranks: Company | None = None
    wired: str = "pool"

    def __post_init__(self) -> None:
        named = ("prefetch", PREFETCH), ("keep_warm", KEEP_WARM), ("warm_start", WARM_START), ("wired", WIRED)
        for name, modes in named:
            if (mode := getattr(self, name)) not in modes:
                raise RequestError(f"{name} {mode!r} is not one of {', '.join(modes)}")
        for name in COUNTS:
            count = getattr(self, name)
            if count is not None and (not isinstance(count, int) or count < 1):
                raise RequestError(
                    f"{name} is {count!r}; it must be a positive integer; leave it out for the best value"
                )
        if self.host_bytes is not None and (not isinstance(self.host_bytes, int) or self.host_bytes < 0):
            raise RequestError(f"host_bytes is {self.host_bytes!r}; it must be 0, a positive integer, or None for all")

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
            resident=resident + len(args.ngrams) * KEPT_BYTES,
            context=self.context,
            itemsize=dtype.size,
            span=self.span,
            prefill_step_size=self.prefill_step_size,
            native=computes_natively(dtype, args.widths),
            on_units=not refusal(dtype),
            dense=dtype.size * layer_values(args) if args.quantization and dequantises() else 0,
            expert_io=self.expert_io,
            expert_cache_bytes=self.expert_cache_bytes,
            host_bytes=self.host_bytes,
            in_place=in_place,
            wired=self.wired,
        )
        return demand if vision is None else demand.with_vision(vision, dtype, checked_rows(self.image_tokens))

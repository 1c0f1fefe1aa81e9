"""Where each component of a routed expert lies inside its packed block. The only owner of byte offsets.

A block is gate (weight, scales, biases), up (the same), down (the same), without gaps, as flash-moe and
moeflux write it. Weights are 4-bit codes, eight to a little-endian uint32, lowest nibble first; scales
and biases are bfloat16, one for each group of 64 inputs; w = scale * code + bias.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import ModelFileError
from ..spec import ModelArgs

FORMAT_VERSION = 1
GROUP_SIZE, BITS = 64, 4
LOAD_BYTES = 16  # kernels read a record in pieces of this size, so that is where one may begin
STRIDE_ALIGNMENT = 16384  # Apple Silicon's page: what adoption without copy and direct I/O both need
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PARTS = ("weight", "scales", "biases")


@dataclass(frozen=True)
class Component:
    """One tensor of the block; `offset` and `size` in bytes from the block's start."""

    name: str
    offset: int
    size: int
    dtype: str  # "U32" or "BF16"
    shape: tuple[int, int]


@dataclass(frozen=True)
class ExpertLayout:
    """Geometry of `packed_experts/`: blocks of `expert_size` bytes, one every `expert_stride` bytes."""

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_layers: int
    moe_layers: tuple[int, ...]
    expert_stride: int

    @classmethod
    def from_args(cls, args: ModelArgs) -> "ExpertLayout":
        size = _expert_size(args.hidden_size, args.moe_intermediate_size)
        return cls(
            hidden_size=args.hidden_size,
            moe_intermediate_size=args.moe_intermediate_size,
            num_experts=args.num_experts,
            num_layers=args.num_hidden_layers,
            moe_layers=args.moe_layers,
            expert_stride=math.ceil(size / STRIDE_ALIGNMENT) * STRIDE_ALIGNMENT,
        )

    @cached_property
    def expert_size(self) -> int:
        return _expert_size(self.hidden_size, self.moe_intermediate_size)

    @property
    def words(self) -> int:
        """uint32 words from one block to the next."""
        return self.expert_stride // 4

    @property
    def layer_bytes(self) -> int:
        return self.num_experts * self.expert_stride

    @property
    def total_bytes(self) -> int:
        return len(self.moe_layers) * self.layer_bytes

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """The nine tensors, in file order."""
        H, I = self.hidden_size, self.moe_intermediate_size
        found, offset = [], 0
        for name, (rows, cols) in zip(PROJECTIONS, ((I, H), (I, H), (H, I)), strict=True):
            for part in PARTS:
                shape = (rows, cols * BITS // 32) if part == "weight" else (rows, cols // GROUP_SIZE)
                dtype, width = ("U32", 4) if part == "weight" else ("BF16", 2)
                size = shape[0] * shape[1] * width
                found.append(Component(f"{name}.{part}", offset, size, dtype, shape))
                offset += size
        return tuple(found)

    def experts_within(self, nbytes: int, at_most: int) -> int:
        """How many packed experts fit `nbytes`: at least one, and no more than `at_most`."""
        return max(1, min(nbytes // self.expert_stride, at_most))

    def next_moe_layer(self, layer: int) -> int | None:
        """The first MoE layer after `layer`."""
        return next((i for i in self.moe_layers if i > layer), None)

    def file_name(self, layer: int) -> str:
        return f"layer_{layer:02d}.bin"

    def to_json(self) -> dict[str, Any]:
        """The contents of `layout.json`: moeflux's keys, then ours."""
        return {
            "expert_size": self.expert_size,
            "num_layers": self.num_layers,
            "num_experts": self.num_experts,
            "components": [
                {"name": c.name, "offset": c.offset, "size": c.size, "dtype": c.dtype, "shape": list(c.shape)}
                for c in self.components
            ],
            "moe_layers": list(self.moe_layers),
            "expert_stride": self.expert_stride,
            "format_version": FORMAT_VERSION,
            "group_size": GROUP_SIZE,
            "bits": BITS,
        }

    def check_json(self, found: Mapping[str, Any], where: object) -> "ExpertLayout":
        """This layout with the stride that `found` (a layout.json) states, once everything else agrees.

        Files of flash-moe and moeflux lack our keys: no stride means blocks back to back.

        Raises:
            ModelFileError: any value contradicts the model's configuration.
        """
        version = found.get("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ModelFileError(f"{where}: format_version {version!r} is not {FORMAT_VERSION}")
        stride = found.get("expert_stride", self.expert_size)
        if type(stride) is not int or stride < self.expert_size or stride % LOAD_BYTES:
            raise ModelFileError(
                f"{where}: expert_stride {stride!r} does not hold {self.expert_size}-byte experts "
                f"at multiples of {LOAD_BYTES}"
            )
        checked = ExpertLayout(
            self.hidden_size,
            self.moe_intermediate_size,
            self.num_experts,
            self.num_layers,
            self.moe_layers,
            stride,
        )
        for key, wanted in checked.to_json().items():
            value = found.get(key, wanted if key not in ("expert_size", "num_experts", "components") else None)
            if key == "components":
                value = _same_components(value, wanted)
            if value != wanted:
                raise ModelFileError(f"{where}: {key} is {value!r}; the model's config.json gives {wanted!r}")
        return checked


def _same_components(value: Any, wanted: list[dict[str, Any]]) -> Any:
    """`value` with only the keys that are compared, so that extra ones in another tool's file do no harm."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        return value
    return [{key: one.get(key) for key in wanted[0]} for one in value]


def _expert_size(hidden_size: int, moe_intermediate_size: int) -> int:
    weights = 3 * hidden_size * moe_intermediate_size
    return weights * BITS // 8 + 2 * 2 * weights // GROUP_SIZE

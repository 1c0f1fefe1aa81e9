"""Image encoders: mlx-vlm's modules, filled with a checkpoint's tensors. Only the files of one encoder of mlx-vlm are
executed, under another module name: importing the whole package would take seconds and hundreds of megabytes of other
packages.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import ConfigError, ModelFileError
from ..files import JsonObject
from ..formats.checkpoint import Tensor
from ..installation import install_command
from ..model.images import ImageRows

ALIAS = "_moeflux_mlx_vlm"
PREFIXES = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "mm_projector.")
SCORES_COPIES = 2  # copies of scores in attention without a fused kernel


@dataclass(frozen=True)
class EncoderKind:
    """How a family's images are read.

    Args:
        module: of mlx-vlm's models, whose encoder it is.
        processor: the kind of its `Processor`.
        token: the config's fields that may name the token of an image's rows.
        fields: of `vision_config`, as (the module's name, the checkpoint's).
        renames: of tensors, as (theirs, the module's).
        make: the module, of its files, a filled-in config and `vision_config`.
    """

    module: str
    processor: str = "area"
    token: str = "image_token_id"
    fields: tuple[tuple[str, str], ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    make: Callable[[Any, Any, JsonObject], nn.Module] = lambda files, config, _: files.vision.VisionModel(config)


class Projected(nn.Module):
    """Kimi-K2.5's encoder and projector: norm, then two layers over four patches (its model code)."""

    def __init__(self, tower: nn.Module, width: int, out: int, eps: float):
        super().__init__()
        self.tower = tower
        self.pre_norm = nn.LayerNorm(width, eps=eps)
        self.proj = [nn.Linear(4 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, out)]

    def __call__(self, patches: mx.array, grid: mx.array) -> mx.array:
        merged = self.tower(patches.transpose(0, 2, 3, 1), grid_thw=grid[:, 1:])[0]
        x = self.pre_norm(merged).reshape(len(merged), -1)
        for layer in self.proj:
            x = layer(x)
        return x


def _kimi(files: Any, config: Any, vision: JsonObject) -> nn.Module:
    files.vision.bicubic_interpolate = resampled
    tower, width = files.vision.VisionModel(config), config.hidden_size
    for block in tower.blocks:
        block.mlp.activation_fn = nn.GELU(approx="tanh")  # as published; mlx-vlm's is the exact one
    return Projected(tower, width, vision.get("text_hidden_size", 7168), vision.get("projector_ln_eps", 1e-5))


def bicubic(table: mx.array, places: mx.array) -> mx.array:
    """Values of `table` [1, H, W, C] at `places` [1, N, 1, 2], (x, y) from -1 to 1 across its cells: [1, N, 1, C].

    It uses Keys' cubic convolution with a = -0.75; beyond its edges the table is extended by its border values, as in
    torch's `grid_sample` with "bicubic" and "border". It replaces mlx-vlm's function, which is bilinear and uses zeros
    there.
    """
    _, height, width, colours = table.shape
    ends = mx.array([width, height])
    at = ((places[0, :, 0] + 1) * ends - 1) / 2  # [N, 2]
    first = mx.floor(at)
    weights = _cubic_weights(at - first)  # [N, 2, 4]
    cells = mx.clip(first[..., None].astype(mx.int32) + mx.arange(-1, 3), 0, ends[:, None] - 1)
    index = cells[:, 1, :, None] * width + cells[:, 0, None, :]  # [N, 4, 4]
    values = table.reshape(-1, colours)[index]
    both = weights[:, 1, :, None] * weights[:, 0, None, :]
    return (values * both[..., None]).sum(axis=(1, 2))[None, :, None]


def resampled(table: mx.array, size: Sequence[int]) -> mx.array:
    """`table` [1, C, H, W] in another size, as torch's `interpolate` with "bicubic" has it: [1, C, *size]. mlx-vlm's
    takes zeros beyond the edge."""
    down, across = ((mx.arange(length) + 0.5) / length * 2 - 1 for length in size)
    places = mx.stack(list(mx.meshgrid(across, down)), axis=-1).reshape(1, -1, 1, 2)
    values = bicubic(table.transpose(0, 2, 3, 1), places)
    return values.reshape(1, *size, -1).transpose(0, 3, 1, 2)


def _cubic_weights(t: mx.array, a: float = -0.75) -> mx.array:
    """The weights [..., 4] of the four cells around a place, which is `t` behind the second."""
    far, near = (lambda d: ((a * d - 5 * a) * d + 8 * a) * d - 4 * a), (lambda d: ((a + 2) * d - a - 3) * d * d + 1)
    return mx.stack([far(t + 1), near(t), near(1 - t), far(2 - t)], axis=-1)


def _glm(files: Any, config: Any, vision: JsonObject) -> nn.Module:
    files.vision.grid_sample = bicubic
    return files.vision.VisionModel(config)


QWEN = EncoderKind("qwen3_vl")
KINDS = {
    "qwen3_vl_moe": QWEN,
    "qwen3_5_moe": QWEN,
    "glm4v_moe": EncoderKind("glm4v_moe", processor="area of two", make=_glm),
    "kimi_k25": EncoderKind(
        "kimi_k25",
        processor="padded",
        token="media_placeholder_token_id|image_token_id",
        fields=(
            *(("hidden_size", "vt_hidden_size"), ("embed_dim", "vt_hidden_size"), ("depth", "vt_num_hidden_layers")),
            *(("num_heads", "vt_num_attention_heads"), ("intermediate_size", "vt_intermediate_size")),
        ),
        renames=(("encoder.", ""), (".wqkv.", ".attn.wqkv."), (".wo.", ".attn.wo.")),
        make=_kimi,
    ),
}


class Encoder:
    """Makes rows of embeddings of patches.

    Args:
        kind: of the family.
        vision: the config's `vision_config`.
        tensors: the encoder's tensors, by names without prefix.
        quantization: as config.json has it, for matrices that MLX quantised.
        dtype: the dtype of computation.

    Raises:
        ConfigError: a value is not usable. ModelFileError: a tensor is missing or has another shape.
    """

    def __init__(
        self,
        kind: EncoderKind,
        vision: JsonObject,
        tensors: Mapping[str, Tensor],
        quantization: JsonObject,
        dtype: mx.Dtype,
    ):
        self.module, self.dtype = make_module(kind, vision), dtype
        self._fill(kind, tensors, quantization)

    def __call__(self, patches: np.ndarray, grid: tuple[int, int]) -> ImageRows:
        """Rows of an image of `grid` patches, rows by columns; computed when this returns."""
        made = self.module(mx.array(patches).astype(self.dtype), mx.array([[1, *grid]]))
        embeddings, deep = made if isinstance(made, tuple) else (made, [])
        mx.eval(embeddings, deep)
        return ImageRows(embeddings, deep)

    def _fill(self, kind: EncoderKind, tensors: Mapping[str, Tensor], quantization: JsonObject) -> None:
        named = {_renamed(kind, name): tensor for name, tensor in tensors.items()}
        for name, shape in parameter_shapes(self.module).items():
            plain = name.removeprefix("tower.")
            if plain not in named:
                raise ModelFileError(f"the image encoder's {name} is missing; convert the checkpoint again")
            value = _value(plain, named, quantization)
            if value.shape != shape and value.ndim > 3:
                value = mx.moveaxis(value, 1, -1)  # of a convolution: colours last
            if value.shape != shape:
                raise ModelFileError(f"the image encoder's {name} is {value.shape}, expected {shape}")
            self.module.load_weights([(name, mx.contiguous(value.astype(self.dtype)))], strict=False)
            mx.eval(self.module.parameters())


def make_module(kind: EncoderKind, vision: JsonObject) -> nn.Module:
    """The encoder's module with no weights yet.

    Raises:
        ConfigError: a value is not usable, or mlx-vlm is not installed.
    """
    files = _files(kind.module)
    values = {**vision, **{ours: vision[theirs] for ours, theirs in kind.fields if theirs in vision}}
    try:
        config = files.config.VisionConfig.from_dict(values)
        config.model_type = "moonvit" if kind.module == "kimi_k25" else kind.module
        return kind.make(files, config, vision)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(f"vision_config is not usable: {error}") from None


def parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of its tensors by name; no tensor is made."""
    from mlx.utils import tree_flatten

    return {name: value.shape for name, value in dict(tree_flatten(module.parameters())).items()}


def is_installed() -> bool:
    """Whether the extra is there."""
    return all(importlib.util.find_spec(name) is not None for name in ("mlx_vlm", "PIL"))


def not_installed() -> str:
    """The message about the missing extra, with its remedy."""
    return f"images need the extra vision: {install_command('vision')}"


def plain_name(name: str) -> str | None:
    """The name of an encoder's tensor in a checkpoint without its prefix; None for any other tensor."""
    name = name.removeprefix("model.")
    prefix = next((one for one in PREFIXES if name.startswith(one)), None)
    return None if prefix is None else name.removeprefix(prefix)


@dataclass(frozen=True)
class _Files:
    config: Any
    vision: Any


def _files(module: str) -> _Files:
    spec = importlib.util.find_spec("mlx_vlm") if is_installed() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(not_installed())
    root = Path(next(iter(spec.submodule_search_locations)))
    for name, folder in (("", root), (".models", root / "models"), (f".models.{module}", root / "models" / module)):
        if ALIAS + name not in sys.modules:
            package = types.ModuleType(ALIAS + name)
            package.__path__ = [str(folder)]
            sys.modules[ALIAS + name] = package
    parts = (importlib.import_module(f"{ALIAS}.models.{module}.{part}") for part in ("config", "vision"))
    return _Files(*parts)


def _renamed(kind: EncoderKind, name: str) -> str:
    for theirs, ours in kind.renames:
        if ours not in name or not ours:
            name = name.replace(theirs, ours)
    return name


def _value(name: str, named: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> mx.array:
    """A tensor in floats; matrices that MLX quantised in groups have scales and biases beside them."""
    stem, value = name.removesuffix(".weight"), named[name].read()
    if f"{stem}.scales" not in named:
        return value
    scales, biases = (named[f"{stem}.{part}"].read() for part in ("scales", "biases"))
    group = quantization.get("group_size", 64)
    bits = 32 * value.shape[-1] // (scales.shape[-1] * group)
    return mx.dequantize(value, scales, biases, group_size=group, bits=bits)

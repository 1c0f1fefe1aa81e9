"""What a checkpoint's config.json states about quantisation: MLX's own, or a method of Hugging Face's.

An unknown method is refused in one line that names it, before any tensor is read.
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError, ModelFileError
from ..families.names import Renames, renamed
from ..files import JsonObject
from ..formats.checkpoint import Tensor
from ..quant import AFFINE_GROUPS, SUPPORTED, Quant, Quantization, entries

NONE: Mapping[str, Tensor] = {}
METHODS = "floats, fp8 blocks, mxfp4, mxfp8, ModelOpt's NVFP4, compressed-tensors int4 and small floats, AWQ int4"
SUFFIXES = (".qweight", ".weight_packed", "_blocks", ".weight_scale", ".weight_scale_2", ".scales")  # ends of names


class SourceFormat:
    """Attributes:
    mlx: some matrices are stored as MLX's quantised codes, and what is not is so on purpose.
    method: of Hugging Face's; empty: none.
    stated: how quantised matrices are stored, of every kind; None: not said.
    block: rows and columns that share one scale of an fp8 checkpoint.
    """

    def __init__(self, config: JsonObject, tensors: Mapping[str, Tensor] = NONE, renames: Renames = ()):
        """Args:
            config: of the checkpoint.
            tensors: by name, as far as they are known, so that a message can name one.
            renames: the family's; `of` takes module paths of the model.

        Raises:
            ConfigError: a quantisation that is not known.
        """
        hub = _object(config, "quantization_config") or _object(_object(config, "text_config"), "quantization_config")
        quants = entries(config)
        if not quants and hub and "quant_method" not in hub:
            quants = entries({"quantization": hub})
        # A rename may end in the dot that follows a module's path in a tensor's name.
        quants = {renamed(f"{path}.", renames)[:-1]: quant for path, quant in quants.items()}
        self.mlx = bool(quants)
        self.method, self.block = "", (128, 128)
        self.stated: Quantization | None = None
        if self.mlx:
            default = quants.pop("", None)
            self.stated = None if default is None else Quantization(default, quants)
        elif hub.get("quant_method") is not None:
            self._read_method(hub, tensors)

    def _read_method(self, hub: JsonObject, tensors: Mapping[str, Tensor]) -> None:
        method = hub["quant_method"]
        try:
            if method == "fp8":
                self.block = _fp8(hub)
            elif isinstance(method, str) and method in READERS:
                form = READERS[method](hub)
                self.stated = None if form is None else Quantization(form)
            else:
                raise _OtherForm("unknown here")
        except _OtherForm as other:
            raise ConfigError(_refusal(method, str(other), tensors)) from None
        self.method = method

    def of(self, path: str) -> Quant | None:
        """The stated form of a module's matrix; None if it is not stated."""
        return None if self.stated is None else self.stated.of(path)

    def check(self, path: str, quant: Quant, tensor: Tensor) -> None:
        """Raises ModelFileError if shapes and config.json contradict each other about a matrix."""
        if self.stated is not None and self.stated.names(path) and self.of(path) != quant:
            raise ModelFileError(
                f"{tensor.file}: tensor {tensor.name} is stored with {quant}; config.json says {self.of(path)}"
            )


class _OtherForm(Exception):
    """A form that is not read; the text says what is special about it."""


def _refusal(method: object, special: str, tensors: Mapping[str, Tensor]) -> str:
    """One line that begins with the method, a tensor in it, and what was found."""
    name = next((name for name in sorted(tensors) if name.endswith(SUFFIXES)), "")
    example = f"tensor {name} is {tensors[name].dtype} {list(tensors[name].shape)}, " if name else ""
    return (
        f"quant_method {reprlib.repr(method)} cannot be converted: {example}{special}; "
        f"supported: {METHODS}, MLX's {SUPPORTED}"
    )


def _object(config: JsonObject, name: str) -> JsonObject:
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config field {name!r} is {reprlib.repr(value)}; expected an object")
    return value or {}


def _fp8(hub: JsonObject) -> tuple[int, int]:
    block = hub.get("weight_block_size") or [128, 128]
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ConfigError(f"quantization_config field 'weight_block_size' is {block!r}; expected two sizes")
    return block[0], block[1]


def _compressed(hub: JsonObject) -> Quant:
    """compressed-tensors: small floats, or symmetric 4-bit integers in groups, eight to an int32."""
    stated = hub.get("format")
    if isinstance(stated, str) and stated in COMPRESSED:
        return COMPRESSED[stated]
    if stated != "pack-quantized":
        raise _OtherForm(f"format {reprlib.repr(stated)}")
    return _pack_quantized(hub)


def _modelopt(hub: JsonObject) -> Quant | None:
    """NVIDIA's Model Optimizer; None: tensors tell which of its forms each matrix has."""
    stated = hub.get("quant_algo")
    if not isinstance(stated, str) or stated not in MODELOPT:
        raise _OtherForm(f"quant_algo {reprlib.repr(stated)}")
    return MODELOPT[stated]


def _pack_quantized(hub: JsonObject) -> Quant:
    stated = hub.get("config_groups")
    groups = list(stated.values()) if isinstance(stated, Mapping) else []
    weights = [one.get("weights") for one in groups if isinstance(one, Mapping)]
    if len(groups) != 1 or len(weights) != 1 or not isinstance(weights[0], Mapping):
        raise _OtherForm("not exactly one group in config_groups")
    wanted = {"num_bits": 4, "symmetric": True, "type": "int", "strategy": "group", "actorder": None}
    return _one_form(weights[0], wanted)


def _awq(hub: JsonObject) -> Quant:
    """AutoAWQ's gemm form: 4-bit codes with a zero point in each group."""
    version = hub.get("version", "gemm")
    fields = {**hub, "version": version.lower() if isinstance(version, str) else version}
    fields["bits"] = hub.get("bits", hub.get("w_bit"))
    fields["group_size"] = hub.get("group_size", hub.get("q_group_size"))
    return _one_form(fields, {"bits": 4, "version": "gemm", "zero_point": True})


def _one_form(fields: Mapping[str, Any], wanted: Mapping[str, Any]) -> Quant:
    """Raises _OtherForm: a field has another value than the form that is read."""
    for key, value in wanted.items():
        if fields.get(key, value) != value:
            raise _OtherForm(f"{key} {reprlib.repr(fields.get(key))}")
    if fields.get("group_size") not in AFFINE_GROUPS:
        raise _OtherForm(f"group_size {reprlib.repr(fields.get('group_size'))}")
    return Quant(4, fields["group_size"])


MXFP4, MXFP8, NVFP4 = Quant(4, 32, "mxfp4"), Quant(8, 32, "mxfp8"), Quant(4, 16, "nvfp4", has_global_scale=True)
COMPRESSED = {"nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": MXFP4, "mxfp8-quantized": MXFP8}
MODELOPT = {"NVFP4": NVFP4, "W4A16_NVFP4": NVFP4, "MXFP8": MXFP8, "FP8": None, "MIXED_PRECISION": None}
READERS: dict[str, Callable[[JsonObject], Quant | None]] = {
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "awq": _awq,
    "mxfp4": lambda hub: MXFP4,
    "mxfp8": lambda hub: MXFP8,
}

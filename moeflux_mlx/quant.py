"""How the codes of a matrix are stored: one type, one reading of every spelling in `config.json`.

Every known form can be computed; `ops/forms.py` says which forms the kernels read.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from .errors import ConfigError, ModelFileError
from .files import JsonDict, JsonObject

AFFINE_GROUPS, AFFINE_BITS = (32, 64, 128), (1, 2, 3, 4, 5, 6, 8)
INTEGER, E2M1, E4M3, TABLE = "integer", "e2m1", "e4m3", "table"  # types of codes
FLOAT, FLOAT16, E8M0 = "float", "float16", "e8m0"  # types of scales, besides E4M3 and those of GGUF's forms
SUPER = 256  # weights of a row that share what the scales of their groups are multiplied by
NAN = {E8M0: 0xFF, E4M3: 0x7F}  # the bits that are all set in the NaN of an 8-bit scale


@dataclass(frozen=True)
class Mode:
    """One of the ways to quantise, MLX's or GGUF's: what codes and scales are, and the sizes where none are given.

    Args:
        zero: what is subtracted from a code.
        nested: bytes that have the scales of SUPER weights; 0: each group has a scale of its own.
        header: float16 values that these bytes begin with.
        supers: float16 values of SUPER weights beside these bytes, or of a group if it is its scale.
        grid: entries of the table that codes name, and values of an entry, if a matrix has its own.
    """

    group_size: int
    bits: int
    codes: str
    scale: str
    has_biases: bool = False
    zero: int = 0
    nested: int = 0
    header: int = 0
    supers: int = 0
    grid: tuple[int, int] | None = None


MLX_MODES = {
    "affine": Mode(64, 4, INTEGER, FLOAT, has_biases=True),
    "mxfp4": Mode(32, 4, E2M1, E8M0),
    "nvfp4": Mode(16, 4, E2M1, E4M3),
    "mxfp8": Mode(32, 8, E4M3, E8M0),
}
GGUF_MODES = {
    "q4_0": Mode(32, 4, INTEGER, "q4_0", zero=8, supers=1),
    "q4_1": Mode(32, 4, INTEGER, FLOAT16, has_biases=True, supers=1),
    "q5_0": Mode(32, 5, INTEGER, "q5_0", zero=16, supers=1),
    "q5_1": Mode(32, 5, INTEGER, FLOAT16, has_biases=True, supers=1),
    "q8_0": Mode(32, 8, INTEGER, "q8_0", zero=128, supers=1),
    "q2_k": Mode(16, 2, INTEGER, "q2_k", nested=16, supers=2),
    "q3_k": Mode(16, 3, INTEGER, "q3_k", zero=4, nested=12, supers=1),
    "q4_k": Mode(32, 4, INTEGER, "q4_k", nested=16, header=2),
    "q5_k": Mode(32, 5, INTEGER, "q4_k", nested=16, header=2),
    "q6_k": Mode(16, 6, INTEGER, "q6_k", zero=32, nested=16, supers=1),
    "iq4_nl": Mode(32, 4, TABLE, "iq4_nl", supers=1),
    "iq4_xs": Mode(32, 4, TABLE, "iq4_xs", nested=8, header=1),
    "iq3_xxs": Mode(32, 3, TABLE, "iq3_xxs", nested=2, header=1, grid=(256, 4)),
    "iq3_s": Mode(32, 3, TABLE, "iq3_s", nested=14, header=1, grid=(512, 4)),
    "iq2_xxs": Mode(32, 2, TABLE, "iq2_xxs", nested=2, header=1, grid=(256, 8)),
    "iq2_xs": Mode(16, 2, TABLE, "iq2_xs", nested=10, header=1, grid=(512, 8)),
    "iq2_s": Mode(16, 2, TABLE, "iq2_s", nested=18, header=1, grid=(1024, 8)),
    "iq1_s": Mode(32, 1, TABLE, "iq1_s", nested=18, header=1, grid=(2048, 8)),
    "iq1_m": Mode(16, 1, TABLE, "iq1_m", nested=24, header=1, grid=(2048, 8)),
    "tq1_0": Mode(32, 1, TABLE, "tq1_0", nested=22, header=1),
    "tq2_0": Mode(32, 2, TABLE, "tq2_0", nested=2, header=1),
}
MODES = MLX_MODES | GGUF_MODES
# What llama.cpp's converter takes where rows are no multiple of a form's super-blocks (`tensor_type_fallback`).
FALLBACKS = {
    **{"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "tq1_0": "q4_0"},
    **{"tq2_0": "q4_0", **{mode: "iq4_nl" for mode in GGUF_MODES if mode.startswith("iq") and mode != "iq4_nl"}},
}


@dataclass(frozen=True)
class Quant:
    """Codes of `bits` bits; groups of `group_size` along the input axis share their scales.

    A row of codes is one stream of bits in little-endian uint32 words, first code in the lowest bits. In mode "affine"
    (MLX's `mx.quantize`) a group has a scale and a bias, and a weight is scale * code + bias. In mode "mxfp4" a code is
    a float of 4 bits, E2M1, and a group has a scale of 8 bits, E8M0, which stands for 2 ** (scale - 127). In mode
    "mxfp8" a code is a float of 8 bits, E4M3. In mode "nvfp4" codes are E2M1 and scales E4M3, and a float32 for the
    whole matrix, the global scale, may multiply all of them, divided by GLOBAL_UNIT as in MLX.

    The other modes are GGUF's types (`dequantize_row_*` of llama.cpp's ggml-quants.c). Integer codes are in the order
    of MLX's, and bytes of scales are the file's own. In "q4_0", "q5_0" and "q8_0" the part `supers` has a float16 d for
    each group, and a weight is d * (code - zero). "q4_1" and "q5_1" also have a float16 m of each group in `minima`,
    and a weight is d * code + m. In the K types a group has integers S and, but for "q3_k" and "q6_k", M, in the part
    `scales`, and 256 weights have d and m in `supers`, or for "q4_k" and "q5_k" in the first 4 of the 16 bytes of
    `scales`. A weight is (d * (S - scale_zero)) * (code - zero) - m * M, in float32 and this order; scale_zero
    is 32 for "q3_k" and 0 for the others. The codes of "iq" and "tq" modes name values in a table
    (`ops/table_values.py`), which most of them have as the part `grid`; `bits` are those of a weight in the part
    `weight`, and others are in `scales`.
    """

    bits: int
    group_size: int
    mode: str = "affine"
    has_global_scale: bool = False

    def __str__(self) -> str:
        factor = ", global_scale" if self.has_global_scale else ""
        return f"{self.bits} bits, group_size {self.group_size}, mode {self.mode}{factor}"

    @cached_property
    def codes(self) -> str:
        """The type of codes: INTEGER, a small float, E2M1 or E4M3, or TABLE."""
        return MODES[self.mode].codes

    @cached_property
    def scale(self) -> str:
        """The type of a group's scale: FLOAT, 8 bits, E8M0 or E4M3, or that of a mode of GGUF."""
        return MODES[self.mode].scale

    @cached_property
    def is_of_mlx(self) -> bool:
        """Whether MLX's operations take its parts."""
        return self.mode in MLX_MODES

    @cached_property
    def zero(self) -> int:
        """What is subtracted from a code, where a group has no bias."""
        return MODES[self.mode].zero

    @cached_property
    def has_supers(self) -> bool:
        """Whether the part `supers` is one of its parts."""
        return MODES[self.mode].supers > 0

    @cached_property
    def is_nested(self) -> bool:
        """Whether the scales of groups are integers, in bytes for SUPER weights."""
        return MODES[self.mode].nested > 0

    @cached_property
    def grid(self) -> tuple[int, int] | None:
        """The shape of its table, if it is one of its parts."""
        return MODES[self.mode].grid

    @cached_property
    def multiple(self) -> int:
        """What the number of columns is a multiple of."""
        return SUPER if self.is_nested else self.group_size

    def fitted(self, columns: int) -> "Quant":
        """This form, or what replaces it for rows of a number of columns that it cannot have."""
        if columns % self.multiple == 0 or self.mode not in FALLBACKS:
            return self
        return of_mode(FALLBACKS[self.mode])

    @cached_property
    def has_biases(self) -> bool:
        """Whether a group has a bias besides its scale."""
        return MODES[self.mode].has_biases

    @cached_property
    def is_known(self) -> bool:
        """Whether this is a form of MLX or of GGUF; all of these can be computed, for resident matrices and experts."""
        mode = MODES.get(self.mode)
        if mode is None or self.has_global_scale and mode.scale != E4M3:
            return False
        if self.mode == "affine":
            return self.group_size in AFFINE_GROUPS and self.bits in AFFINE_BITS
        return (mode.group_size, mode.bits) == (self.group_size, self.bits)

    def of_groups(self, floating: str) -> str:
        """The dtype of scales and biases as files name it, where float ones are `floating`."""
        return floating if self.scale == FLOAT else "U8"

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors that hold a matrix."""
        if self.has_biases:
            return (PARTS[0], SUPERS, MINIMA) if self.has_supers else PARTS
        if self.has_supers:
            return (PARTS[0], *(PARTS[1:2] if self.is_nested else ()), SUPERS)
        return *PARTS[:2], *((GLOBAL_SCALE,) if self.has_global_scale else (GRID,) if self.grid else ())

    def of_part(self, part: str, columns: int, floating: str) -> tuple[int, str]:
        """The number of values in a part for a row of `columns` columns, and their dtype as files name it, with float
        scales of dtype `floating`. A resident matrix repeats its global scale for each row. A grid is not a row's.
        """
        mode = MODES[self.mode]
        if part == PARTS[0]:
            return self.words(columns), "U32"
        if part in (SUPERS, MINIMA):
            return columns // self.multiple * mode.supers, "F16"
        if self.is_nested:
            return columns // SUPER * mode.nested, "U8"
        return (1, "F32") if part == GLOBAL_SCALE else (self.groups(columns), self.of_groups(floating))

    def shape_of(self, part: str, rows: Sequence[int], columns: int, floating: str) -> tuple[tuple[int, ...], str]:
        """The shape of a part of a matrix [*rows, columns], and its dtype as in `of_part`."""
        values, dtype = self.of_part(part, columns, floating)
        return self.grid if part == GRID and self.grid else (*rows, values), dtype

    def fewest(self, columns: int) -> int:
        """The number of values of a row in the part that has the fewest."""
        return min(self.of_part(part, columns, FLOAT)[0] for part in self.parts if part != GRID)

    def words(self, columns: int) -> int:
        """uint32 words of one row's codes."""
        return columns * self.bits // 32

    def groups(self, columns: int) -> int:
        """Groups of one row."""
        return columns // self.group_size

    def entry(self) -> JsonDict:
        """The entry for this form in `config.json`."""
        stated = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        return {**stated, GLOBAL_SCALE: True} if self.has_global_scale else stated


OF_GROUPS = ("scales", "biases")
PARTS = ("weight", *OF_GROUPS)  # names of a stored matrix's tensors
SUPERS, MINIMA = "supers", "minima"  # float16 values of GGUF's types, whatever dtype other scales have
GRID = "grid"  # the table that the codes of a matrix name, uint8
GLOBAL_SCALE = "global_scale"  # the factor of all scales of a matrix, times GLOBAL_UNIT
GLOBAL_UNIT = 448 * 6  # the largest E4M3 times the largest E2M1: MLX's global scale is the largest weight
DEFAULT = Quant(4, 64)  # MLX's own
EXPERTS = Quant(4, 64)  # default form of routed experts that come as floats
SUPPORTED = "affine 1, 2, 3, 4, 5, 6, 8 bits in groups of 32, 64, 128, mxfp4, mxfp8 and nvfp4"
OUTER = ("language_model.", "model.")  # prefixes of module paths that only some files have


def of_mode(mode: str) -> Quant:
    """The form of a mode in its usual sizes."""
    return Quant(MODES[mode].bits, MODES[mode].group_size, mode)


def fitting(columns: int) -> list[str]:
    """The modes in which rows can have so many columns."""
    return [mode for mode in MODES if columns % of_mode(mode).multiple == 0]


def plain(path: str) -> str:
    """A module's path in the one spelling that is compared: without what stands before its own name."""
    while path.startswith(OUTER):
        path = path.partition(".")[2]
    return path


@dataclass(frozen=True)
class Quantization:
    """How matrices are stored; `overrides` by module path in any spelling, None for "not quantised"."""

    default: Quant = DEFAULT
    overrides: Mapping[str, Quant | None] = field(default_factory=dict)

    @cached_property
    def _plain(self) -> dict[str, Quant | None]:
        return {plain(path): quant for path, quant in self.overrides.items()}

    def of(self, path: str) -> Quant | None:
        return self._plain.get(plain(path), self.default)

    def names(self, path: str) -> bool:
        """Whether it says something of this module by itself."""
        return plain(path) in self._plain


def of_shapes(path: str, columns: int, words: int, groups: int, stated: Quant | None) -> Quant:
    """The form of a module's matrix, determined from its shapes; config.json must agree.

    Args:
        path: of the module.
        columns: of the matrix.
        words, groups: of a row, as the tensors have them: uint32 words of codes, and scales.
        stated: by config.json; None: not quantised.

    Raises:
        ModelFileError: shapes and config.json contradict each other.
    """
    bits, group_size = 32 * words // max(columns, 1), columns // max(groups, 1)
    quant = replace(stated or DEFAULT, bits=bits, group_size=group_size)
    if quant != stated or quant.words(columns) != words or quant.groups(columns) != groups:
        raise ModelFileError(
            f"tensor {path}.weight has {quant} by its shapes, {words} words and {groups} scales for {columns} columns; "
            f"config.json says {stated or 'not quantised'}"
        )
    return quant


def parse(path: str, entry: JsonObject) -> Quant:
    """Reads `entry`, MLX's `quantization` or one module's part of it, as mlx-lm does.

    A missing or null `group_size` or `bits` means the mode's default, and a missing mode means affine, whatever the
    rest of the file has.

    Raises:
        ConfigError: a value is unknown; `path` says whose.
    """
    mode = "affine" if entry.get("mode") is None else entry["mode"]
    defaults = MODES.get(mode) if isinstance(mode, str) else None
    group_size, bits = (
        getattr(defaults, name, None) if entry.get(name) is None else entry[name] for name in ("group_size", "bits")
    )
    factor = False if entry.get(GLOBAL_SCALE) is None else entry[GLOBAL_SCALE]
    if isinstance(mode, str) and type(group_size) is int and type(bits) is int and type(factor) is bool:
        quant = Quant(bits, group_size, mode, factor)
        if quant.is_known:
            return quant
    stated = f"{reprlib.repr(bits)} bits, group_size {reprlib.repr(group_size)}, mode {reprlib.repr(mode)}"
    scaled = "" if factor is False else f", global_scale {reprlib.repr(factor)}"
    raise ConfigError(
        f"quantization of {path}: {stated}{scaled} is not known; supported: {SUPPORTED}, and GGUF's "
        f"{', '.join(GGUF_MODES)}"
    )


def entries(config: JsonObject, name: str = "quantization") -> dict[str, Quant | None]:
    """The forms by module path, with the default under ""; empty if the field is missing or null.

    Raises:
        ConfigError: the field is no object, or a value in it is unknown.
    """
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config field {name!r} is {reprlib.repr(value)}; expected an object")
    quants: dict[str, Quant | None] = {"": parse("the model", value)}
    for path, entry in value.items():
        if isinstance(entry, Mapping):
            quants[path] = parse(path, entry)
        elif entry is False:
            quants[path] = None
    return quants


def of_packed(config: JsonObject) -> Quantization | None:
    """The quantisation that a model's config states; None if it states none.

    Raises:
        ConfigError: as `entries`, or two spellings of one path that differ.
    """
    quants = entries(config)
    default = quants.pop("", None)
    seen: dict[str, Quant | None] = {}
    for path, one in quants.items():
        if seen.setdefault(plain(path), one) != one:
            raise ConfigError(f"quantization of {path} is {one}, and {seen[plain(path)]} under another spelling")
    return None if default is None else Quantization(default, quants)


def unquantized(config: JsonObject) -> JsonDict:
    """The config without what it says of how tensors are stored."""
    return {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}

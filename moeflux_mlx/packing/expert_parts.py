"""Finds the tensors of a module path in a checkpoint and makes a `Matrix` of them, all shapes and dtypes checked; and
each expert's matrices: one by one, stacked, or with gate and up fused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from ..errors import ModelFileError
from ..families.registry import FAMILIES
from ..formats.checkpoint import FLOATS, Tensor
from ..formats.record import BIAS, PROJECTIONS, projections_of, set_path
from ..ops.forms import DTYPES
from ..quant import FLOAT, GLOBAL_SCALE, GRID, MLX_MODES, Quant
from ..spec import ModelArgs
from .foreign import find_foreign
from .ggml import tables
from .gguf_tensors import check_experts_type, find_blocks
from .matrix import Matrix, MatrixOfColumns, Rounding, TransposedMatrix, finite, shaped, taken, typed
from .small_floats import find_small_floats
from .source_format import SourceFormat


def find_matrix(
    tensors: Mapping[str, Tensor],
    path: str,
    shape: tuple[int, ...],
    form: SourceFormat,
    suffix: str = ".weight",
    shards: int = 1,
) -> Matrix:
    """The matrix of a module path, its shapes and dtypes checked.

    Args:
        shape: the logical shape that the model needs.
        suffix: of the weight's name; Qwen3.5's fused experts have none.
        shards: parts of a fused matrix, each with fp8 blocks of its own.

    Raises:
        ModelFileError: a tensor is missing, or has another shape or dtype than the model needs.
    """
    name = path + suffix
    found = find_blocks(tensors, name, shape) or find_small_floats(tensors, path, name, shape, form.block, shards)
    if found is None and name not in tensors:
        found = find_foreign(tensors, path, shape, form)
    if found is not None:
        return found
    weight = taken(tensors, name)
    inverse = tensors.get(f"{name}_scale_inv") or tensors.get(f"{path}.weight_scale")
    if f"{path}.scales" in tensors:
        return _quantized_matrix(tensors, path, weight, shape, form)
    if inverse is not None:
        return _fp8_matrix(weight, inverse, shape, form, shards)
    typed(weight, FLOATS)
    if len(shape) == 2 and len(weight.shape) == 3 and weight.shape[0] * weight.shape[2] == shape[1]:
        shaped(weight, (weight.shape[0], shape[0], weight.shape[2]))
        return MatrixOfColumns(shape, weight)
    shaped(weight, shape)
    return Matrix(shape, weight)


def _fp8_matrix(weight: Tensor, scale: Tensor, shape: tuple[int, ...], form: SourceFormat, shards: int) -> Matrix:
    """Codes that a scale multiplies: one for each block, or (of shape [] or [1], in a stack [E, 1, 1]) for a matrix."""
    shaped(typed(weight, ("F8_E4M3",)), shape)
    block, lead = form.block, shape[:-2]
    if scale.shape in (lead, (*lead, 1, 1) if lead else (1,)):
        block, scale = (shape[-2], shape[-1]), replace(scale, shape=(*lead, 1, 1))
    shaped(scale, (*lead, shards * math.ceil(shape[-2] / shards / block[0]), math.ceil(shape[-1] / block[1])))
    return Matrix(shape, weight, inverse=typed(scale, FLOATS), block=block, shards=shards)


def find_transposed(weight: Tensor, shape: tuple[int, ...]) -> Matrix:
    """Floats that are stored as [..., columns, rows]; `shape` is [..., rows, columns].

    Raises:
        ModelFileError: they have another shape or dtype.
    """
    shaped(typed(weight, FLOATS), (*shape[:-2], shape[-1], shape[-2]))
    return TransposedMatrix(shape, weight)


def _quantized_matrix(
    tensors: Mapping[str, Tensor], path: str, weight: Tensor, shape: tuple[int, ...], form: SourceFormat
) -> Matrix:
    scales = tensors[f"{path}.scales"]
    typed(weight, ("U32",))
    biases, cols = tensors.get(f"{path}.biases"), shape[-1]
    groups, words = (one.shape[-1] if one.shape else 0 for one in (scales, weight))
    name = _mode_of(scales, 32 * words // cols, cols // max(groups, 1))
    mode = MLX_MODES[name]
    if (biases is not None) != mode.has_biases:
        raise ModelFileError(f"tensor {path}.biases {'is missing' if biases is None else f'does not go with {name}'}")
    for tensor in (scales, biases):
        if tensor is not None:
            shaped(tensor, (*shape[:-1], scales.shape[-1] if scales.shape else 0))
            typed(tensor, FLOATS if mode.scale == FLOAT else ("U8",))
    global_scale = tensors.get(f"{path}.{GLOBAL_SCALE}")
    quant = Quant(32 * words // cols, cols // max(groups, 1), name, global_scale is not None)
    if global_scale is not None:
        shaped(typed(global_scale, ("F32",)), shape[:-2])
    form.check(path, quant, weight)
    if weight.bits not in (None, quant.bits):
        raise ModelFileError(f"tensor {weight.name} is stored with {quant}; its manifest says {weight.bits} bits")
    if not quant.is_known or groups * quant.group_size != cols:
        raise ModelFileError(
            f"tensor {weight.name} with shape {list(weight.shape)} and {groups} scales for {cols} columns"
        )
    shaped(weight, (*shape[:-1], quant.words(cols)))
    return Matrix(shape, weight, scales, biases, quant, global_scale)


def _mode_of(scales: Tensor, bits: int, group_size: int) -> str:
    """The mode by its stored parts: only affine has float scales; the others have one width and one group."""
    others = (name for name, mode in MLX_MODES.items() if mode.scale != FLOAT)
    is_small = typed(scales, (*FLOATS, "U8")).dtype == "U8"
    found = (name for name in others if (MLX_MODES[name].bits, MLX_MODES[name].group_size) == (bits, group_size))
    return next(found, "mxfp4") if is_small else "affine"


@dataclass(frozen=True)
class ExpertPart:
    """One projection of one expert: every `step`-th row from `start` to `stop` of a matrix, and its bias. `ones` are
    factors of all experts' products, which must be 1."""

    matrix: Matrix
    start: int
    stop: int
    step: int = 1
    bias: Tensor | None = None
    ones: Tensor | None = None

    @property
    def in_place(self) -> "ExpertPart":
        """The rows that lie in its place of a record whose rows of gate and up alternate: a half of all, one after
        another; itself, where rows are apart."""
        half = self.stop // self.step
        return (
            self
            if self.step == 1
            else ExpertPart(self.matrix, self.start * half, (self.start + 1) * half, 1, self.bias)
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that it is made from."""
        return (*self.matrix.tensors, *(one for one in (self.bias, self.ones) if one is not None))

    @property
    def by_field(self) -> dict[str, Tensor]:
        """The tensors of stored codes, by the part of the field that each becomes."""
        assert self.matrix.quant is not None
        return dict(zip((*self.matrix.quant.parts, BIAS), replace(self, ones=None).tensors, strict=False))

    def check(self) -> None:
        """Raises ModelFileError: a factor is not 1."""
        if self.ones is not None and not (self.ones.read() == 1).all().item():
            raise _unread(self.ones)

    def values(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array | None]:
        """The matrix in floats [rows, columns], dequantised if it is stored in codes, and its bias [rows] if it has
        one.

        Raises:
            ModelFileError: a file cannot be read, or a value is not finite.
        """
        rows = self.matrix.values(self.start, self.stop)[:: self.step].astype(dtype)
        if self.bias is None:
            return rows, None
        return rows, finite(self.bias, self.bias.read()).astype(dtype)[self.start : self.stop : self.step]

    def arrays(self, path: str, quant: Quant, rounding: Rounding, dtype: str = "BF16") -> dict[str, mx.array]:
        """The arrays by part: in the form `quant`, unchanged if they are stored so, else as `rounding` makes them for
        the module path, with the biases of products, if any. `dtype` is that of floating scales and biases.
        """
        self.check()
        kept, rows = DTYPES[dtype], slice(self.start, self.stop, self.step)
        if self.matrix.quant != quant:
            codes = *rounding.codes(path, self.matrix, quant, rows, kept), *tables(quant)
        else:
            stored = self.matrix.rows(self.start, self.stop).codes()
            named = zip(quant.parts, stored, strict=True)
            weight, *of_groups = (part if name == GRID else part[:: self.step] for name, part in named)
            codes = weight, *(part.astype(kept) if quant.scale == FLOAT else part for part in of_groups)
        bias = () if self.bias is None else (finite(self.bias, self.bias.read()).astype(kept)[rows],)
        return dict(zip((*quant.parts, BIAS), (*codes, *bias), strict=False))


class FusedExperts:
    """`experts.gate_up_proj` [E, 2I, H], and `experts.down_proj` [E, H, I]; what they add ends with `_bias`.

    Gate's rows come before up's, or alternate with them in a family with `interleaved_experts`. Floats may be
    transposed, [E, H, 2I] and [E, I, H]: as Qwen3-VL and gpt-oss were published. Both shapes together tell it.
    `of_mlx`: they are called `switch_mlp`, their names end with `.weight`, and gate's rows come first, as mlx-vlm
    writes Hy4.
    """

    def __init__(
        self, args: ModelArgs, tensors: Mapping[str, Tensor], stem: str, form: SourceFormat, of_mlx: bool = False
    ):
        E, H, self.width = args.num_experts, args.expert_size, args.moe_intermediate_size
        shapes = {"gate_up_proj": (2 * self.width, H), "down_proj": (H, self.width)}
        self.interleaved = FAMILIES[args.model_type].interleaved_experts and not of_mlx
        stem += "switch_mlp." if of_mlx else "experts."
        weight, bias = (".weight", ".bias") if of_mlx else ("", "_bias")
        floats = {name: tensors[path] for name in shapes if (path := f"{stem}{name}") in tensors}
        transposed = all(name in floats and floats[name].shape == (E, c, r) for name, (r, c) in shapes.items())

        def find(name: str) -> tuple[Matrix, Tensor | None]:
            path, shape = f"{stem}{name}", (E, *shapes[name])
            matrix = (
                find_transposed(floats[name], shape) if transposed else find_matrix(tensors, path, shape, form, weight)
            )
            return check_experts_type(matrix), _find_bias(args.experts.biases, tensors, f"{path}{bias}", shape[:2])

        self.gate_up, self.gate_up_bias = find("gate_up_proj")
        self.down, self.down_bias = find("down_proj")

    @property
    def biases(self) -> list[Tensor]:
        return [bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None]

    def matrices(self) -> Sequence[list[Matrix]]:
        return [self.gate_up], [self.gate_up], [self.down]

    def parts(self, expert: int) -> list[ExpertPart]:
        rows, both = self.width, 2 * self.width
        gate, up = ((0, both, 2), (1, both, 2)) if self.interleaved else ((0, rows, 1), (rows, both, 1))
        matrix, bias = self.gate_up[expert], _entry(self.gate_up_bias, expert)
        return [
            ExpertPart(matrix, *gate, bias),
            ExpertPart(matrix, *up, bias),
            _whole(self.down[expert], _entry(self.down_bias, expert)),
        ]


class ExpertShapes(NamedTuple):
    """What a record set has: so many experts, their matrices by name, and whether each has a bias."""

    experts: int
    matrices: tuple[tuple[str, tuple[int, int]], ...]
    has_biases: bool

    @classmethod
    def of(cls, args: ModelArgs, number: int) -> "ExpertShapes":
        """Of the set `number`. The names begin with a dot; those of value experts are empty."""
        if number >= args.num_hidden_layers and (values := args.matrix_experts) is not None:
            return cls(values.router.experts, (("", (values.rows, args.hidden_size)),), False)
        H, I, names = args.expert_size, args.moe_intermediate_size, projections_of(args.experts.matrices)
        matrices = tuple((f".{name}", (H, I) if name == PROJECTIONS[-1] else (I, H)) for name in names)
        return cls(args.num_experts, matrices, args.experts.biases)


class StackedExperts:
    """MLX's `switch_mlp.{gate,up,down}_proj`, each [E, rows, cols]; gpt-oss has them as `experts`. Beside Inkling's,
    mlx-vlm has the second scales of published nvfp4 as factors of products, and ones if it was published otherwise.
    Value experts are one stack, whose name is `stem`.

    Raises ModelFileError: there are such factors of nvfp4.
    """

    def __init__(self, shapes: ExpertShapes, tensors: Mapping[str, Tensor], stem: str, form: SourceFormat):
        E = shapes.experts
        self.stacks = [
            check_experts_type(find_matrix(tensors, stem + name, (E, *shape), form)) for name, shape in shapes.matrices
        ]
        self._ones = [_factors(tensors, stem, *one) for one in zip(self.stacks, FACTORS, strict=False)]
        self.stacked_biases = [
            _find_bias(shapes.has_biases, tensors, f"{stem}{name}.bias", (E, shape[0]))
            for name, shape in shapes.matrices
        ]

    @property
    def biases(self) -> list[Tensor]:
        return [bias for bias in self.stacked_biases if bias is not None]

    def matrices(self) -> Sequence[list[Matrix]]:
        return [[stack] for stack in self.stacks]

    def parts(self, expert: int) -> list[ExpertPart]:
        parts = zip(self.stacks, self.stacked_biases, self._ones, strict=True)
        return [replace(_whole(stack[expert], _entry(bias, expert)), ones=ones) for stack, bias, ones in parts]


FACTORS = ("gate_scale", "", "out_scale")  # beside a layer's stacks


def _factors(tensors: Mapping[str, Tensor], stem: str, stack: Matrix, name: str) -> Tensor | None:
    factors = tensors.get(f"{stem}.{name}")
    if factors is not None and stack.quant is not None and stack.quant.mode == "nvfp4":
        raise _unread(factors)  # before a download
    return factors


def _unread(factors: Tensor) -> ModelFileError:
    return ModelFileError(
        f"tensor {factors.name} has factors of nvfp4 experts, which are not read; download the published checkpoint"
    )


class SingleExperts:
    """`experts.E.{gate,up,down}_proj`, each [rows, cols], or value experts, `stem.E`."""

    def __init__(self, shapes: ExpertShapes, tensors: Mapping[str, Tensor], stem: str, form: SourceFormat):
        self.shapes, self.tensors, self.stem, self.form = shapes, tensors, stem, form

    def matrices(self) -> Sequence[list[Matrix]]:
        experts = [[part.matrix for part in self.parts(expert)] for expert in range(self.shapes.experts)]
        return [list(of_all) for of_all in zip(*experts, strict=True)]

    @property
    def biases(self) -> list[Tensor]:
        parts = (part for expert in range(self.shapes.experts) for part in self.parts(expert))
        return [part.bias for part in parts if part.bias is not None]

    def parts(self, expert: int) -> list[ExpertPart]:
        paths = ((f"{self.stem}.{expert}{name}", shape) for name, shape in self.shapes.matrices)
        return [
            _whole(
                find_matrix(self.tensors, path, shape, self.form),
                _find_bias(self.shapes.has_biases, self.tensors, f"{path}.bias", shape[:1]),
            )
            for path, shape in paths
        ]


def _whole(matrix: Matrix, bias: Tensor | None) -> ExpertPart:
    return ExpertPart(matrix, 0, matrix.shape[0], bias=bias)


def _entry(stack: Tensor | None, index: int) -> Tensor | None:
    return None if stack is None else stack[index]


def _find_bias(is_there: bool, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor | None:
    """The biases of products, if the experts have them.

    Raises:
        ModelFileError: it is missing, or has another shape or dtype.
    """
    if not is_there:
        return None
    bias = taken(tensors, name)
    shaped(typed(bias, FLOATS), shape)
    return bias


# The routed experts of one layer. `biases` are what all experts' products add, as it is stored; `matrices` everything
# that is stored for gate, if there is one, up and down: a stack of all experts, or one of each. `parts` are gate, if
# there is one, up and down of one expert.
CheckpointExperts = FusedExperts | StackedExperts | SingleExperts


def find_experts(args: ModelArgs, tensors: Mapping[str, Tensor], number: int, form: SourceFormat) -> CheckpointExperts:
    """Finds the experts of a record set in any of the three forms.

    Raises:
        ModelFileError: a stacked tensor is missing or misshapen; for single ones `matrices` raises it. Or a stack is in
            mxfp4 blocks, and the family does not say in which order they have the rows of gate and up.
    """
    given = ExpertShapes.of(args, number), tensors
    if number >= args.num_hidden_layers:
        stem = set_path(args, number, "").rstrip(".")
        return (StackedExperts if f"{stem}.weight" in tensors else SingleExperts)(*given, stem, form)
    stem = f"model.layers.{number}.mlp."
    if f"{stem}experts.gate_up_proj_blocks" in tensors and not FAMILIES[args.model_type].interleaved_experts:
        raise ModelFileError(
            f"tensor {stem}experts.gate_up_proj_blocks cannot be converted: in which order mxfp4 blocks have the rows "
            f"of gate and up is known of gpt-oss only, not of {args.model_type}"
        )
    if any(f"{stem}experts.gate_up_proj{end}" in tensors for end in ("", "_blocks")):
        return FusedExperts(args, tensors, stem, form)
    if f"{stem}switch_mlp.gate_up_proj.weight" in tensors:
        return FusedExperts(args, tensors, stem, form, of_mlx=True)
    for stack in ("switch_mlp", "experts"):
        if f"{stem}{stack}.{PROJECTIONS[-1]}.weight" in tensors:
            return StackedExperts(*given, f"{stem}{stack}", form)
    return SingleExperts(*given, f"{stem}experts", form)

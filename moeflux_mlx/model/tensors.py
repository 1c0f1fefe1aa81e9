"""The plan of resident tensors, all that do not belong to a routed expert: what a model needs, how a conversion stores
it, and its form in memory. Conversion, memory plans and loading use it.
"""

import re
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from ..layers import Convolution, Weight
from ..mixers.registry import KEPT_FLOAT32 as OF_MIXERS
from ..mixers.registry import USUAL
from ..ops import backend
from ..ops.forms import DTYPES
from ..quant import DEFAULT, GLOBAL_SCALE, MINIMA, OF_GROUPS, SUPERS, Quant
from ..spec import ModelArgs
from .decoder import Model
from .head import DraftHead
from .moe import MoE
from .residual import WeighedParts
from .streams import Connection, MessageQueries, NormedBlockSum

# By names alone: sizes in memory are known of files without a model.
KEPT_FLOAT32 = {GLOBAL_SCALE, *OF_MIXERS, *MoE.kept_float32, *Connection.kept_float32, *WeighedParts.kept_float32}
KEPT_FLOAT32 |= {*NormedBlockSum.kept_float32, *MessageQueries.kept_float32}
EMBEDDING = ".embed_tokens"
ROUTERS = (".mlp.gate", ".mlp.shared_expert_gate", ".self_attn.value_experts.gate")
ROUTER = Quant(8, 64)  # the form of routers, unless a recipe has another
CORRECTION = ".e_score_correction_bias"  # of a router's scores, by which it chooses
TABLE = ".tid2eid"  # the experts of each token id: integers
# A few rows, by which scores of positions are summed, and keys of blocks are.
INDEX_WEIGHTS = (".indexer.weights_proj", ".indexer.wgate")

TensorShapes = dict[str, tuple[int, ...]]


class Needed(NamedTuple):
    """The shapes of a model's matrices by module path, and of its other tensors by name. `convolutions`: the names of
    those that are weights of convolutions.
    """

    matrices: TensorShapes
    plain: TensorShapes
    convolutions: frozenset[str]


def needed(args: ModelArgs, forms: frozenset[str] = USUAL, kind: type[Model] | type[DraftHead] = Model) -> Needed:
    """The tensors of a model, or of a draft head."""
    model = kind(args, None, forms)
    matrices = {path: module.shape for path, module in model.named_modules() if isinstance(module, Weight)}
    names = {name: tuple(value.shape) for name, value in dict(tree_flatten(model.parameters())).items()}
    plain = {name: shape for name, shape in names.items() if not is_of_matrix(name, matrices)}
    convolutions = (path for path, module in model.named_modules() if isinstance(module, Convolution))
    return Needed(matrices, plain, frozenset(f"{path}.weight" for path in convolutions))


def layer_of(path: str) -> int | None:
    """The number of the layer that a module path belongs to; None: it belongs to none."""
    found = re.match(r"model\.layers\.(\d+)\.", path)
    return int(found[1]) if found else None


def layer_values(args: ModelArgs) -> int:
    """The most values of the matrices of one layer, without routed experts."""
    counts = Counter[int | None]()
    for path, shape in needed(args).matrices.items():
        counts[layer_of(path)] += prod(shape)
    return max(count for layer, count in counts.items() if layer is not None)


def is_of_matrix(name: str, matrices: Container[str]) -> bool:
    """Whether a tensor is part of how a matrix is stored; the bias that a linear layer adds is not."""
    path, _, leaf = name.rpartition(".")
    return path in matrices and leaf != "bias"


def stored_as(args: ModelArgs, path: str, columns: int, quant: Quant = DEFAULT, router: Quant = ROUTER) -> Quant | None:
    """The form in which a conversion stores a matrix that comes as floats: `router` for routers, `quant` for other
    linear layers; None: floats.
    """
    is_router = path.endswith(ROUTERS)
    wanted = (router if is_router else quant).fitted(columns)
    has_bias = any(args.experts_of(i).router.correction_bias for i in args.moe_layers)
    is_exact = path.endswith(INDEX_WEIGHTS) or (is_router and has_bias)
    if is_exact or columns % wanted.multiple:
        return None
    return wanted


def kept_dtype(name: str, tensor: mx.array, dtype: mx.Dtype) -> mx.Dtype:
    """The dtype of a tensor in memory in a model whose activations have `dtype`.

    Scales, biases, norms and dense matrices become `dtype`; the router, an indexer's weights of heads and the decay
    parameters float32.
    """
    path, _, leaf = name.rpartition(".")
    if leaf in (SUPERS, MINIMA) or tensor.dtype in (mx.uint32, mx.uint8):
        return tensor.dtype
    kept = mx.float32 if leaf in KEPT_FLOAT32 or path.endswith((*ROUTERS, *INDEX_WEIGHTS)) else dtype
    # The CPU reads less when scales and biases stay bfloat16, and computes in float32 all the same.
    on_cpu = kept == mx.float32 and not backend.has_kernels()
    narrow = leaf in OF_GROUPS and not path.endswith(EMBEDDING) and tensor.dtype == mx.bfloat16
    return mx.bfloat16 if on_cpu and narrow else kept


def resident_bytes(tensors: Mapping[str, mx.array], dtype: mx.Dtype) -> int:
    """Bytes of `tensors`, by name, as they are kept; reads nothing."""
    return sum(tensor.size * kept_dtype(name, tensor, dtype).size for name, tensor in tensors.items())


def token_bytes(args: ModelArgs, tensors: Mapping[str, mx.array], dtype: mx.Dtype) -> int:
    """Bytes of `tensors`, by name, that each token reads as they are kept: all but an embedding that is no output head,
    of which a token reads a row; those of a layer whenever it passes the layer.
    """
    read = {name: one for name, one in tensors.items() if args.is_tied or EMBEDDING not in name}
    layers = ((layer_of(name), {name: one}) for name, one in read.items())
    return sum(resident_bytes(own, dtype) * (1 if layer is None else args.passes_of(layer)) for layer, own in layers)


def variant_bytes(
    args: ModelArgs, dtype: mx.Dtype, form_of: Callable[[str], Quant | None] | None = None, of_token: bool = False
) -> int:
    """`resident_bytes` of a model without files, as a conversion would store it, or `token_bytes`.

    Args:
        form_of: the form of each matrix that comes as floats, by its module path; None: the default forms everywhere.
            Then equal layers are counted, not built one by one.
        of_token: whether only the bytes that a token reads count.
    """
    counts = Counter(args.layers)
    if form_of is None:
        args = replace(args, layers=tuple(counts))
    matrices, plain, _ = needed(args)
    tensors = {name: mx.zeros(shape) for name, shape in plain.items()}  # lazy: only their shapes are looked at
    for path, (*rows, columns) in matrices.items():
        quant = form_of(path) if form_of else ROUTER if path.endswith(ROUTERS) else DEFAULT
        stored = None if quant is None else stored_as(args, path, columns, quant, quant)
        if stored is None:
            tensors[f"{path}.weight"] = mx.zeros((*rows, columns))
            continue
        for part in stored.parts:
            shape, kind = stored.shape_of(part, rows, columns, "BF16")
            tensors[f"{path}.{part}"] = mx.zeros(shape, DTYPES[kind])
    each = enumerate(args.layers if form_of is None else ())
    times: dict[int | None, int] = {i: counts[layer] for i, layer in each}
    kept = partial(token_bytes, args) if of_token else resident_bytes
    return sum(kept({name: tensor}, dtype) * times.get(layer_of(name), 1) for name, tensor in tensors.items())

"""The experts of a few tokens, read directly from packed records by slot, and their weighted sum.

There are two kernels: gate and up, and down with the weighted sum. They also compute the shared expert if it is stored
like the routed ones. Sums are float32, except that CUDA sums 64 columns in integers. The result of a token does not
depend on the slots of its experts, nor on other contents of the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..formats.record import Field, Projection, Record
from ..kinds import FORMS, SILU, Activation, Router
from . import backend, native
from .backend import AnyArray, Array, view
from .combine import RowNorm, combine_types, combined, moe_combine_ops
from .elementwise import activate, weighted
from .forms import DTYPES, Form, form_of, matmul_float32
from .launch import (
    LEAST_ELEMENTS,
    MOST_THREADS,
    NO_KERNELS,
    ArrayPiece,
    Input,
    Kernel,
    Launch,
    Reason,
    Shape,
    Template,
    ceildiv,
    require,
)
from .linear import check_activations, linear, pays, row_by_row
from .matrix import Weights, inputs_of
from .records import (
    ONE_ARRAY,
    RecordArrays,
    Records,
    biases_of,
    check_blob,
    is_read,
    places_of,
    unread_reason,
    words_of,
)
from .route import Choice, beside, choice_template, host_copy_of, route
from .tiles import MAX_TOKENS, TILES, down_lanes, lanes_of, planned, tile_of

PLANES_BYTES = 46 * 1024  # bytes of CUDA's 48 KiB for planes of x
# The most experts of a token, without the shared one: a threadgroup of the down projection has a sum for each expert
# and row.
MAX_SLOTS = 32
MOST_SIMDGROUPS = 16  # simdgroups of the second kernel: an H200 lacks the registers for 32 with a clipped activation


@dataclass(frozen=True)
class Shared:
    """The expert that every token uses.

    Args:
        layer: computes it with separate products: from x [T, H] and a scale [T, 1] or None, whose sigmoid multiplies
            if it is `squashed`, the output [T, H], plus `residual` [T, H] or None.
        gate_up: gate's rows and then up's, [2 I, H], if there is a gate and they are stored alike; else None.
        down: [H, I].
        gates: [T, O] float32, the last column is each token's scale before the sigmoid; None: no scale.
        activation: the function that joins gate and up.
    """

    layer: Callable[..., Any]
    gate_up: Weights | None
    down: Weights
    gates: AnyArray = None
    activation: Activation = SILU

    def rows(self, x: Array, residual: Array | None = None) -> Array:
        """The output [T, H] in x's dtype, plus `residual` [T, H]."""
        scale = None if self.gates is None else self.gates[:, -1:]
        act = self._act(x)
        if act is None:
            output: Array = self.layer(x, scale, residual=residual, squashed=True)
            return output
        return linear(weighted(act, scale, squashed=True), self.down, residual=residual)

    def _act(self, x: AnyArray) -> AnyArray:
        """The activation of gate x and up x, [T, I], in one launch; None if MLX multiplies."""
        up, down = self.gate_up, self.down.quant
        if up is None or up.quant is None or down is None or not pays(x, up):
            return None
        stored = next((name for name, dtype in DTYPES.items() if dtype == up.second.dtype), "")
        quants, width = (up.quant, up.quant, down), up.shape[0] // 2
        record = Record.make(up.shape[1], width, quants, dtype=stored, activation=self.activation)
        launch = _own_launch(x, record, self.activation)
        own = inputs_of(up)
        return None if isinstance(launch, Reason) else launch(x, own[0], own[0], *own)[0].reshape(len(x), -1)

    def joins(self, record: Record, top_k: int) -> bool:
        """Whether the kernels compute it together with `top_k` such records."""
        if self.gate_up is None or not backend.has_kernels() or top_k > MAX_SLOTS or not is_read(record):
            return False
        if self.activation.form != record.activation.form or record.down.bias is not None or record.interleaved:
            return False
        pairs = (self.gate_up, record.gate, 2), (self.down, record.down, 1)
        return all(
            w.quant is not None
            and not w.quant.has_global_scale
            and Form(w.quant, w.second.dtype) == form_of(part)
            and w.shape == (times * part.rows, part.columns)
            for w, part, times in pairs
        )


def chosen_ffn(
    x: mx.array,
    choice: Choice,
    records: Records,
    residual: mx.array,
    shared: mx.array | Shared | None,
    experts: int | None = None,
    host_copy: list[mx.array] | None = None,
) -> mx.array:
    """`expert_ffn` with all experts of a layer, whose records are in order; the first kernel chooses.

    `experts`: the number of all experts, if it is known that the choice is among the first ones, whose records these
    are; None: as many as there are records. `host_copy`: gets the arrays of one token's ids that the host should read
    (`route.read_ids`); None: it reads none.
    """
    if isinstance(shared, Shared) and not shared.joins(records.record, choice.rule.top_k):
        shared = shared.rows(x)
    joined = shared if isinstance(shared, Shared) else None
    number = len(records.blob) if experts is None else experts
    made = chosen_gate_up(x, choice, records, joined, number, host_copy is not None)
    if isinstance(made, Reason):
        ids, weights = route(choice.logits, choice.rule, choice.bias, choice.scales)
        if host_copy is not None:
            host_copy.append(ids)
        return expert_ffn(x, records.slots_of(ids), records, weights, residual, shared)
    act, chosen, *copies = made
    if host_copy is not None:
        host_copy += copies
    top_k = choice.rule.top_k
    used = Used(ArrayPiece(chosen, 0, mx.uint32), ArrayPiece(chosen, 4 * top_k, mx.float32), (len(x), top_k), 2 * top_k)
    out = _down_combine_kernel(act, used, records, residual, shared)
    assert out is not None
    return out


def chosen_gate_up(
    x: mx.array, choice: Choice, records: Records, shared: Shared | None, experts: int, copies: bool = False
) -> list[mx.array] | Reason:
    """`expert_gate_up` with the experts that its kernel chooses, and their ids and the bits of their weights [T, 2, K]
    uint32; if the records have a table, their slots in place of ids. `copies`: then the ids of one token, for the host.

    `experts` is the number of records, which must be all experts of the rule, unless the choice is known to be among
    the first ones.
    """
    memory, blob, arrays = records.inputs()
    shapes = x.shape, (experts, blob[1]), choice.logits.shape
    rule = choice.rule, choice.bias is not None
    launch = plan_choice(backend.name(), *shapes, x.dtype, records.record, *rule, _joined(shared), arrays, copies)
    if isinstance(launch, Reason):
        return launch
    table = [] if records.slots is None else [records.slots]
    return launch(x, *memory, *table, choice.logits, *beside(choice), *_first_of(shared, memory[0]))


def expert_ffn(
    x: Array,
    slots: Array,
    records: Records,
    weights: Array,
    residual: Array,
    shared: "Array | Shared | None",
    norm: RowNorm | None = None,
) -> Array:
    """residual + sum_k weights[:, k] * norm(expert(slots[:, k])(x)) + shared, for the rows of a step on MLX's side.

    Args:
        x: [T, H], as for `expert_gate_up`.
        slots: [T, K] integers, rows of the records.
        weights: [T, K] float32.
        residual: [..., H], T rows; the result has the same shape.
        shared: the shared expert, or its output [T, H]; None: there is none.
        norm: None: no norm.
    """
    records, slots = of_kinds(x, records, slots)
    if isinstance(shared, Shared) and (norm is not None or not shared.joins(records.record, slots.shape[1])):
        shared = shared.rows(x)
    act = expert_gate_up(x, slots, records, shared if isinstance(shared, Shared) else None)
    return expert_down_combine(act, slots, records, weights, residual, shared, norm=norm)


def of_kinds(x: Array, records: Records, slots: AnyArray) -> tuple[Records, AnyArray]:
    """Records and their slots as operations on x take them."""
    if isinstance(slots, np.ndarray) and not backend.computes_at_once(x):
        return handed_over(records, slots)
    return records, slots


def handed_over(records: Records, slots: np.ndarray) -> tuple[Records, mx.array]:
    """Converts both to MLX arrays."""
    records, slots = records.for_mlx(slots)
    return records, _as_array(slots.astype(np.uint32).tobytes(), slots.shape)


@lru_cache(32)
def _as_array(slots: bytes, shape: Shape) -> mx.array:
    """A uint32 array that is made once: if records are copied, every token has the same slots."""
    return mx.array(np.frombuffer(slots, np.uint32).reshape(shape))


def shared_rows(x: AnyArray, shared: Shared, record: Record, top_k: int) -> AnyArray:
    """The shared expert's output that `expert_ffn` with `top_k` such records adds last, [T, H], with the same bits."""
    if not shared.joins(record, top_k):
        return shared.rows(x)
    (tokens, hidden), own = x.shape, _first_of(shared, None)
    target, blob, none = backend.name(), _words(record), (tokens, 0)
    first = _own_launch(x, record, shared.activation)
    assert not isinstance(first, Reason)
    act = first(x, own[0], own[0], *own)[0]
    dtypes, width = (x.dtype, mx.float32, None), record.moe_intermediate_size
    columns = 0 if shared.gates is None else shared.gates.shape[1]
    last = plan_down(target, (tokens, 1, width), x.shape, blob, none, dtypes, record, True, columns)
    assert not isinstance(last, Reason)
    zeros = mx.zeros((tokens, hidden), mx.float32)
    return last(act, own[0], own[0], zeros, zeros, zeros, *_last_of(shared, zeros))[0]


def _own_launch(x: mx.array, record: Record, activation: Activation) -> Launch | Reason:
    """Gate and up of a shared expert alone. No record is read, but the kernel needs the description of one."""
    return plan_gate_up(backend.name(), x.shape, x.dtype, _words(record), (len(x), 0), record, activation)


def _words(record: Record) -> Shape:
    """The shape of a blob with room for the record."""
    return 1, ceildiv(record.size, 16) * 4


def _joined(shared: Any) -> Activation | None:
    """The activation of the shared expert if the kernels compute it, else None."""
    return shared.activation if isinstance(shared, Shared) else None


def _first_of(shared: Any, other: Any) -> list[AnyArray]:
    """The first kernel's inputs for the shared expert; `other` in their place if there is none."""
    return inputs_of(shared.gate_up) if isinstance(shared, Shared) and shared.gate_up is not None else [other] * 3


def _last_of(shared: Any, other: mx.array) -> list[AnyArray]:
    """The second kernel's inputs for the shared expert; `other` in place of missing ones."""
    if not isinstance(shared, Shared):
        return [other] * 4
    return [*inputs_of(shared.down), other if shared.gates is None else shared.gates]


def expert_gate_up(x: Array, slots: Array, records: Records, shared: Shared | None = None, alone: bool = True) -> Array:
    """The activation of gate x and up x, for every slot of every token.

    Args:
        x: [T, H] float32, bfloat16 or float16; on MLX's side up to 16 tokens, each at a multiple of 16 bytes.
        slots: [T, K], rows of the records: int32 or uint32, kernels take up to 32 of a token; beside numpy int32.
        records: whose gate and up are [I, H].
        shared: one that `joins` them, or None.
        alone: beside numpy, whether rows have the bits of a step's, else those of a prompt's.

    Returns:
        [T, K, I] in x's dtype; with a shared expert [T, K + 1, I], its row last.

    Raises:
        RequestError: a shape or dtype the kernels do not take.
    """
    if isinstance(x, np.ndarray):
        if not native_refusal(records.record):
            return native.expert_gate_up(x, records.blob, slots, records.record, alone=alone)
        copies, index = records.for_mlx(np.asarray(slots))
        return view(_gate_up_ops(mx.array(x), mx.array(index), copies))
    memory, blob, arrays = records.inputs(len(x))
    shapes = blob, slots.shape
    launch = plan_gate_up(backend.name(), x.shape, x.dtype, *shapes, records.record, _joined(shared), arrays)
    if isinstance(launch, Reason):
        return _gate_up_ops(x, slots, records)
    return launch(x, *memory, slots, *_first_of(shared, memory[0]))[0]


def expert_down_combine(
    act: Array,
    slots: Array,
    records: Records,
    weights: Array,
    residual: Array,
    shared: "Array | Shared | None" = None,
    alone: bool = True,
    norm: RowNorm | None = None,
) -> Array:
    """residual + sum_k weights[k] * norm(down_k act[k] + its bias) + shared, k ascending, rounded once.

    Args:
        act: as `expert_gate_up` returns it.
        slots, records: as there.
        weights: [T, K] float32.
        residual: [..., H], T rows, the stream before the experts.
        shared: the shared expert's output [T, H], the shared expert that `act` has a row of, or None.
        alone: as there.
        norm: None: no norm; with one `shared` is no shared expert.

    Returns:
        residual's shape and dtype.

    Raises:
        RequestError: a shape or dtype the kernels do not take.
    """
    if norm is not None:
        rows, rest = each_down(act, slots, records, alone), residual.reshape(len(weights), -1)
        places = backend.arange(len(rows), backend.library_of(rows)).reshape(weights.shape)
        return combined(rows, places, weights, rest, shared, norm).reshape(residual.shape)
    if isinstance(act, np.ndarray):
        assert not isinstance(shared, Shared)
        if not native_refusal(records.record):
            rows = residual.reshape(-1, residual.shape[-1])
            given = act, records.blob, slots, records.record, weights, rows, shared
            sums = native.expert_down_combine(*given, alone=alone)
            return sums.reshape(residual.shape)
        copies, index = records.for_mlx(np.asarray(slots))
        other = None if shared is None else mx.array(shared)
        inputs = mx.array(weights), mx.array(residual), other
        return view(_down_combine_ops(mx.array(act), mx.array(index), copies, *inputs))
    weights = weights.astype(mx.float32)
    out = _down_combine_kernel(act, Used(slots, weights, slots.shape, slots.shape[1]), records, residual, shared)
    if out is None:
        assert not isinstance(shared, Shared)
        return _down_combine_ops(act, slots, records, weights, residual, shared)
    return out


def each_down(act: Array, slots: Array, records: Records, alone: bool) -> Array:
    """down_k act[k] + its bias for each expert of each token, float32 [T * K, H]."""
    act, slots, parts = act.reshape(slots.size, 1, -1), slots.reshape(-1, 1), list[Array]()
    for start in range(0, len(act), MAX_TOKENS):
        some = slice(start, start + MAX_TOKENS)
        shapes = (len(act[some]), 1), (len(act[some]), records.record.hidden_size)
        ones, zeros = (
            backend.of_kind(backend.constant(x, shape), act) for x, shape in zip((1.0, 0.0), shapes, strict=True)
        )
        parts.append(expert_down_combine(act[some], slots[some], records, ones, zeros, alone=alone))
    return parts[0] if len(parts) == 1 else backend.library_of(act).concatenate(parts)


class Used(NamedTuple):
    """The slots [T, K] = `shape` of the tokens and their weights, as kernel inputs. `row`: distance between two tokens
    in values.
    """

    slots: Input
    weights: Input
    shape: Shape
    row: int


def _down_combine_kernel(
    act: mx.array, used: Used, records: Records, residual: mx.array, shared: "mx.array | Shared | None"
) -> mx.array | None:
    """`expert_down_combine` by the kernel; None where it does not run."""
    joined = isinstance(shared, Shared)
    rows = residual if shared is None or isinstance(shared, Shared) else shared  # an input cannot be left out
    columns = shared.gates.shape[1] if isinstance(shared, Shared) and shared.gates is not None else 0
    dtypes = act.dtype, residual.dtype, None if rows is residual else rows.dtype
    memory, blob, arrays = records.inputs(len(act))
    shapes = act.shape, residual.shape, blob, used.shape
    launch = plan_down(backend.name(), *shapes, dtypes, records.record, joined, columns, arrays, used.row)
    if isinstance(launch, Reason):
        return None
    inputs = act, *memory, used.slots, used.weights, residual, rows
    return launch(*inputs, *_last_of(shared, memory[0]))[0]


@planned("experts")
def native_refusal(record: Record) -> Reason | None:
    """Why the native kernels do not read such records."""
    return None if is_read(record) else unread_reason(record)


def _check_slots(blob: Shape, slots: Shape, tokens: int, record: Record, least: int = 1) -> None:
    check_blob(blob, record)
    good = len(slots) == 2 and slots[0] == tokens and least <= slots[1]
    require(good, f"slots are {slots}; expected [{tokens}, K], K from 1")


def _no_launch(target: str, record: Record, top_k: int) -> Reason | None:
    """Why no kernel computes this number of experts per token."""
    if target == "ops":
        return NO_KERNELS
    if top_k > MAX_SLOTS:
        return Reason(f"a token has {top_k} experts, more than {MAX_SLOTS}")
    return None if is_read(record) else unread_reason(record)


@planned("experts", everywhere=True)
def plan_gate_up(
    target: str,
    x: Shape,
    dtype: mx.Dtype,
    blob: Shape,
    slots: Shape,
    record: Record,
    joined: Activation | None = None,
    arrays: RecordArrays = ONE_ARRAY,
) -> Launch | Reason:
    _check_slots(blob, slots, x[0], record, least=0 if joined else 1)
    kernel = Kernel("expert_gate_up", f"x {arrays.names} slots codes scales biases", "act")
    return _first_launch(target, kernel, x, dtype, blob, record, slots[1], joined, arrays)


@planned("experts", everywhere=True)
def plan_choice(
    target: str,
    x: Shape,
    blob: Shape,
    logits: Shape,
    dtype: mx.Dtype,
    record: Record,
    rule: Router,
    has_bias: bool,
    joined: Activation | None,
    arrays: RecordArrays = ONE_ARRAY,
    copies: bool = False,
) -> Launch | Reason:
    _check_slots(blob, (logits[0], rule.top_k), x[0], record)
    require(blob[0] == rule.experts, f"blob is {blob}; expected the records of {rule.experts} experts")
    host_copy = host_copy_of(rule) if copies else []
    names = f"act chosen host_copy*{len(host_copy)}" if copies else "act chosen"
    table = "slots " if arrays.is_tabled else ""
    kernel = Kernel("expert_choice", f"x {arrays.names} {table}logits bias scale codes scales biases", names)
    launch = _first_launch(target, kernel, x, dtype, blob, record, rule.top_k, joined, arrays)
    if isinstance(launch, Reason):
        return launch
    words = max(logits[0] * 2 * rule.top_k, LEAST_ELEMENTS)
    outputs = [*launch.outputs, ((words,), mx.uint32), *host_copy]
    template = launch.template | choice_template(rule, logits[1], has_bias) | {"TABLED": int(arrays.is_tabled)}
    template |= ({} if copies else {"host_copy": 0}) | ({} if table else {"slots": 0})
    return replace(launch, template=template, outputs=outputs)


def _first_launch(
    target: str,
    kernel: Kernel,
    x: Shape,
    dtype: mx.Dtype,
    blob: Shape,
    record: Record,
    top_k: int,
    joined: Activation | None,
    arrays: RecordArrays = ONE_ARRAY,
) -> Launch | Reason:
    """The launch of gate and up for a number of slots; `joined`: also of a shared expert with that activation."""
    check_activations("x", x, dtype)
    (tokens, hidden), has_shared = x, joined is not None
    inner, each = record.moe_intermediate_size, top_k + has_shared
    require(hidden == record.hidden_size, f"x is {x}; the records' experts take {record.hidden_size} columns")
    reason = _no_launch(target, record, top_k)
    if reason is not None:
        return reason
    form = form_of(record.gate).for_experts(target, dtype)
    if form.room(hidden) > PLANES_BYTES - form.near:
        form = form_of(record.gate)
    tile = tile_of(target, _tile_name("expert_gate_up", form))
    lanes = lanes_of(form.chunks(hidden), tile.lanes)
    has_own = kernel.name == "expert_choice" and kernel.name in TILES[target]
    cut = tile_of(target, kernel.name) if has_own else tile  # rows and simdgroups, which change no bit
    template = {"X": dtype, "H": hidden, "I": inner, "K": top_k, "SHARED": int(has_shared)}
    template |= {"WORDS": blob[1], "ROW_BITS": arrays.row_bits}
    template |= places_of("GATE", record.gate) | places_of("UP", record.up) | form.record_template
    template |= {"R": cut.rows, "L": lanes, "SG": cut.simdgroups, "AHEAD": form.ahead(tile.ahead)}
    routed, own = record.activation, joined or record.activation
    template |= {"ACTIVATION": FORMS.index(routed.form), "LIMIT": float(routed.limit or 0)}
    template |= {"SHARED_LIMIT": float(own.limit or 0), "GATE_LIMIT": float(routed.gate_limit or 0)}
    template |= {"INTERLEAVED": int(record.interleaved), **biases_of(GATE=record.gate, UP=record.up)}
    groups = (ceildiv(inner * lanes, cut.rows * 32 * cut.simdgroups), tokens * each)
    outputs = [((tokens, each, inner), dtype)]
    return Launch(target, replace(kernel, form=form.header_of(tile)), template, groups, 32 * cut.simdgroups, outputs)


def _tile_name(kernel: str, form: Form) -> str:
    """The name of its tile."""
    kind = "grids" if form.near and kernel == "expert_gate_up" else "planes"
    return f"{kernel}_{kind}" if form.planes else kernel


def _columns(form: Form, each: int, columns: int, lanes: int) -> int:
    """Columns that `each` simdgroups lay out at once, as many as fit in memory. The lane of a chunk, and so the bits,
    do not depend on it.
    """
    step, room = lanes * form.chunk, (PLANES_BYTES - form.near) // each
    return columns if form.room(columns) <= room else max(1, room // form.room(step)) * step


@planned("experts", everywhere=True)
def plan_down(
    target: str,
    act: Shape,
    residual: Shape,
    blob: Shape,
    slots: Shape,
    dtypes: tuple[mx.Dtype, mx.Dtype, mx.Dtype | None],
    record: Record,
    joined: bool = False,
    gates: int = 0,
    arrays: RecordArrays = ONE_ARRAY,
    row: int = 0,
) -> Launch | Reason:
    check_activations("act", act, dtypes[0], axes=3)
    check_activations("residual", (prod(residual[:-1]), residual[-1]), dtypes[1])
    tokens, each, inner = act
    hidden, top_k = residual[-1], each - joined
    fits = (hidden, inner) == (record.hidden_size, record.moe_intermediate_size)
    require(
        fits, f"act is {act}, residual {residual}; the records' down is {record.down.rows} by {record.down.columns}"
    )
    _check_slots(blob, slots, tokens, record, least=0 if joined else 1)
    require(slots[1] == top_k, f"act is {act} but slots are {slots}; both hold [T, K]")
    reason = _no_launch(target, record, top_k)
    if reason is not None:
        return reason
    form = form_of(record.down).for_experts(target, dtypes[0])
    tile = tile_of(target, _tile_name("expert_down_combine", form))
    lanes = down_lanes(tile, hidden, form.chunks(inner))
    template: Template = {"H": hidden, "I": inner, "K": top_k, "WORDS": blob[1], "ROW_BITS": arrays.row_bits}
    template |= places_of("DOWN", record.down) | combine_types(dtypes) | form.record_template
    template |= {"R": tile.rows, "L": lanes, "AHEAD": form.ahead(tile.ahead)}
    template |= {"JOINED": int(joined), "GATED": int(gates > 0), "STRIDE": gates, "ROW": row or top_k}
    template |= {"TABLED": int(arrays.is_tabled)}
    template |= biases_of(DOWN=record.down)
    most = min(MOST_THREADS[target] // 32, MOST_SIMDGROUPS)
    if form.planes:
        most = min(most, max(1, (PLANES_BYTES - form.near) // form.room(lanes * form.chunk)))
    template["SG"] = simdgroups = ceildiv(each, ceildiv(each, most))  # as few as take no more turns, so none is idle
    template["SPAN"] = _columns(form, simdgroups, inner, lanes)
    groups = (ceildiv(hidden * lanes, tile.rows * 32), tokens)
    names = f"act {arrays.names} slots weights h_mid shared codes scales biases gates"
    kernel = Kernel("expert_down_combine", names, "out", form.header_of(tile))
    return Launch(target, kernel, template, groups, 32 * simdgroups, [(residual, dtypes[1])])


def _multiply(x: mx.array, slots: mx.array, records: Records, projection: Projection) -> mx.array:
    """[P, columns] x, each row times its own record's matrix, plus its bias: float32 [P, rows]."""
    pairs = len(x)
    start, stop = projection.fields[0].words.start, projection.fields[-1].words.stop
    words = words_of(records, slots.reshape(-1), slice(start, stop))

    def values(field: Field) -> mx.array:
        part = words[:, field.words.start - start : field.words.stop - start]
        return part.view(DTYPES[field.dtype]).reshape(pairs, *field.beside)

    product = matmul_float32(x[:, None], projection.quant, *map(values, projection.codes))[:, 0]
    return product if projection.bias is None else product + values(projection.bias).astype(mx.float32)


def activated(first: mx.array, second: mx.array, record: Record) -> mx.array:
    """Joins the products [..., I] with the matrices in the places of gate and up."""
    if record.interleaved:
        both = mx.concatenate([first, second], axis=-1)
        first, second = both[..., ::2], both[..., 1::2]
    return activate(first, second, record.activation)


def _gate_up_ops(x: mx.array, slots: mx.array, records: Records) -> mx.array:
    def run(x: mx.array, slots: mx.array) -> mx.array:
        each = mx.repeat(x, slots.shape[1], axis=0)
        made = [_multiply(each, slots, records, part) for part in records.record.firsts]
        return activated(made[0], made[-1], records.record).astype(x.dtype).reshape(*slots.shape, -1)

    return row_by_row(run, x, slots)


def _down_combine_ops(
    act: mx.array,
    slots: mx.array,
    records: Records,
    weights: mx.array,
    residual: mx.array,
    shared: mx.array | None,
) -> mx.array:
    def run(act: mx.array, slots: mx.array) -> mx.array:
        rows = _multiply(act.reshape(-1, act.shape[-1]), slots, records, records.record.down)
        return rows.reshape(*slots.shape, -1)

    rows = residual.reshape(-1, residual.shape[-1])
    return moe_combine_ops(row_by_row(run, act, slots), weights, rows, shared).reshape(residual.shape)

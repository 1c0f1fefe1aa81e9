"""Lists the kernels that each kind of layer of a model runs, and why other kernels do not run.

One mixer, feed-forward part and head of each kind is made with zeros and called with a few tokens, while stand-ins
receive the launches. Nothing is computed, so the backend may be one that this machine lacks. This module knows no
files.
"""

from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kinds import BlockSums, Connections, Mixer, NGrams, WeighedSum, streams_before
from ..layers import BranchConvolution, GatedNorm, Linear, RMSNorm, Weight, norm_of
from ..mixers.registry import make_caches, module_of, stored_forms
from ..model.feed_forward import feed_forward_of
from ..model.ngrams import NGramLayer
from ..model.residual import WeighedParts
from ..model.streams import MIXERS, MLP, MessageGates, MessageQueries, connection
from ..ops import backend
from ..ops.attend_span import takes_span
from ..ops.backend import Array, EitherArray
from ..ops.forms import DTYPES
from ..ops.kernel_files import Program
from ..ops.launch import LEAST_ELEMENTS, NO_KERNELS, InputPlace, Kernel, Reason
from ..ops.rows import StepRows
from ..ops.seen import Chosen
from ..ops.stand_ins import standing_in
from ..ops.streams import spread
from ..ops.tiles import CODE, MAX_TOKENS, Tile, Tiles, using
from ..quant import FLOAT, Quant
from ..spec import ModelArgs
from ..state.snapshot import MAX_LENGTH
from .random_weights import Shapes, randomise
from .some_experts import values_of_zeros, ways_of_experts

R = TypeVar("R")
TOKENS, TURN = (1, 4, 512), 127  # one, a few, and many; a short turn
LONG = 1 << 15  # positions
Compute = Callable[[Any, Any], object]  # takes activations and a function that makes caches


@dataclass(frozen=True)
class PartLaunches:
    """What a part of a model runs for a number of tokens.

    Args:
        part: its name.
        layers: the layers that have this part in the same stored forms; none for lm_head.
        tokens: number of tokens at once.
        runs: kernels and native forms, with the number of calls of each; everything else is MLX's own operations.
        refused: operations for which a kernel or native form exists but does not run, with the reason.
        programs: the input of the GPU's compiler for them.
        is_special: whether another step has the part as it usually runs, and this one has what differs: later in a
            text, in a short turn, or with experts that are queued ahead.
    """

    part: str
    layers: Sequence[int]
    tokens: int
    runs: Counter[str]
    refused: dict[str, Reason]
    programs: Sequence[Program]
    is_special: bool


def launches_of(
    shapes: Shapes,
    target: str,
    tiles: Tiles = CODE,
    tokens: Sequence[int] = TOKENS,
    sequences: Sequence[int] = (),
    rows: Sequence[int] = (),
) -> Generator[PartLaunches, None, None]:
    """Lists what each kind of mixer and feed-forward part, and lm_head, run on the backend `target` with these tiles.
    `sequences`: numbers of sequences for which a step with one token of each is listed too. `rows`: the same for steps
    of several tokens of one sequence, which check drafts.
    """
    cases = [(count, make_caches) for count in tokens] + [(count, partial(_caches, count)) for count in sequences]
    cases += [(count, partial(_rows, count)) for count in rows]
    with standing_in(backend=target):
        missing = backend.native_refusal(shapes.dtype, shapes.args.widths) or NO_KERNELS
        for part, layers, run, only in _parts(shapes):
            for count, caches in [(count, make_caches) for count in only] or cases:
                noted = Noted(tiles, missing)
                with noted.listening():
                    run(_activations(shapes, count), caches)
                yield PartLaunches(part, layers, count, noted.asked_for(), noted.refused, noted.programs, bool(only))


class Noted(Tiles):
    """Makes the same choices as `tiles`, and records launches, calls and the choosers' reasons while it listens.
    `missing`: the reason why native forms do not run on a backend without kernels.
    """

    def __init__(self, tiles: Tiles, missing: Reason) -> None:
        super().__init__()
        self._tiles, self._missing = tiles, missing
        self.programs: list[Program] = []
        self.runs, self.refused = Counter[str](), dict[str, Reason]()

    def listening(self) -> ExitStack:
        """A context manager in which kernels and native forms compute nothing."""
        stack = ExitStack()
        stack.enter_context(using(self))
        stack.enter_context(standing_in(build=self.kernel, extension=Extension(self.runs)))
        stack.enter_context(np.errstate(all="ignore"))  # the values are arbitrary, because nothing is computed
        return stack

    def tile(self, target: str, kernel: str) -> Tile:
        return self._tiles.tile(target, kernel)

    def plan(self, operation: str, make: Callable[..., R], given: tuple[object, ...]) -> R:
        made = super().plan(operation, make, given)
        if isinstance(made, Reason):
            self.refused[operation] = self._missing if made is NO_KERNELS else made
        return made

    def asked_for(self) -> Counter[str]:
        """What runs. A router's choice that the experts' kernel repeats is not counted, because it is never
        evaluated.
        """
        if any(name.startswith("expert_choice") for name in self.runs):
            return Counter({name: count for name, count in self.runs.items() if not name.startswith("topk")})
        return self.runs

    def kernel(
        self, kernel: Kernel, target: str, constants: str, threads: int, places: tuple[InputPlace, ...]
    ) -> Callable[..., list[mx.array]]:
        """What runs in place of a kernel: it counts the launch, notes the program and returns zeros."""
        name = f"{kernel.name}[{kernel.form}]" if kernel.form else kernel.name

        def call(*, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: object) -> list[mx.array]:
            self.runs[name] += 1
            text = kernel.text(target, constants, threads, places)
            few = [array.size < LEAST_ELEMENTS for array in inputs] if target == "metal" else ()
            self.programs.append(Program(text, [array.dtype for array in inputs], output_dtypes, few, threads))
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return call


class Extension:
    """Stands in for the native kernels: counts calls by name and does not touch their outputs."""

    def __init__(self, runs: Counter[str]):
        self._runs = runs

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: self._runs.update([f"native {name}"])


# ---- the parts of a model


def _activations(shapes: Shapes, tokens: int) -> EitherArray:
    size = 1, tokens, shapes.args.hidden_size
    if backend.computes_natively(shapes.dtype, shapes.args.widths):
        return np.zeros(size, np.float32)
    return mx.zeros(size, shapes.dtype)


def _parts(shapes: Shapes) -> Iterator[tuple[str, Sequence[int], Compute, Sequence[int]]]:
    """Name, layers and call of each kind of part, and if it is special (`PartLaunches.is_special`) the only numbers of
    tokens that the call takes.
    """
    args, records = shapes.args, shapes.layout.records
    norm = RMSNorm(args.hidden_size, args.rms_norm_eps)
    norm.weight = norm.weight.astype(shapes.dtype)
    has_own = args.connections is not None and args.connections.has_own_norm
    residual = args.layers[0].residual
    before = None if has_own or residual.norms_apart or residual.weighed else norm
    forms = stored_forms(shapes.quants)
    for (mixer, *_), layers in _kinds([(layer.mixer, _forms(shapes, i, False)) for i, layer in enumerate(args.layers)]):
        module = module_of(mixer, args.hidden_size, args.rms_norm_eps, forms)
        _fill(module, f"model.layers.{layers[0]}.{mixer.module_name}.", shapes)
        if mixer.experts is not None:
            module.set_experts(values_of_zeros(shapes.layout, args.matrix_set(layers[0])))
        mix = partial(_mix, args, mixer, module, norm if residual.weighed else before)
        yield mixer.title, layers, mix, ()
        special: list[tuple[str, int, Sequence[int]]] = [(*moment, (1,)) for moment in mixer.moments(MAX_LENGTH)]
        if mixer.span_heads and takes_span(mixer.span_heads[1:], shapes.dtype, TURN, False):
            special += [("short turn", 0, (TURN,)), ("short turn behind a long text", LONG, (TURN,))]
        for moment, length, only in special:
            yield f"{mixer.title}, {moment}", layers, _late(mix, shapes.dtype, length), only
    if residual.gate_rank:
        yield from _gated_norms(shapes)
    elif residual.norm_groups > 1:
        made = norm_of(residual, args.hidden_size, args.rms_norm_eps)
        _fill(made, "model.norm.", shapes)
        yield "norms of parts", range(args.num_hidden_layers), partial(_of_rows, made), ()
    if residual.weighed is not None:
        yield "weighed sums", range(args.num_hidden_layers), _weighed(shapes, residual.weighed), ()
    if residual.convolved:
        yield "convolutions of outputs", range(args.num_hidden_layers), _convolved(shapes), ()
    if args.connections is not None:
        counts = [streams_before(args.connections, i) for i in range(args.num_hidden_layers + 1)]
        for _, layers in _kinds(list(zip(counts, counts[1:], (one.inputs for one in args.mixers), strict=False))):
            yield "streams", layers, _between(shapes, args.connections, layers[0]), ()
        yield "streams, after the last layer", (), _behind(shapes, args.connections), ()
        again = [i for i, layer in enumerate(args.layers) if layer.passes > 1]
        if again:
            assert isinstance(args.connections, BlockSums) and args.connections.messages is not None
            yield "messages", again, _messages(shapes, args.connections, again[0]), ()
    for layer, part in args.ngrams.items():
        yield "n-grams", [layer], _of_ngrams(shapes, layer, part), ()
    parts = [(layer.feed_forward, records.get(i), _forms(shapes, i, True)) for i, layer in enumerate(args.layers)]
    for (part, record, *_), layers in _kinds(parts):
        if part is None:
            continue
        for title, experts, is_special in ways_of_experts(part, record, args):
            module = feed_forward_of(args, layers[0], cast(Any, experts))
            _fill(module, f"model.layers.{layers[0]}.mlp.", shapes)
            yield title, layers, partial(_forward, module, before), (1,) if is_special else ()
    head = Linear(args.hidden_size, args.vocab_size)
    fill_with_zeros(head, shapes.quants.get(args.last_matrix), shapes.dtype)
    last = slice(-1, None)  # of a prompt
    yield "lm_head", (), lambda x, _: head(norm(x[:, last] if x.shape[1] > MAX_TOKENS else x)), ()


def _gated_norms(shapes: Shapes) -> Iterator[tuple[str, Sequence[int], Compute, Sequence[int]]]:
    """As `_parts`, of the norms that have gates."""
    args = shapes.args
    layers_of = {"input_layernorm": range(args.num_hidden_layers), "post_attention_layernorm": args.moe_layers}
    for name, layers in layers_of.items():
        module: Any = GatedNorm(args.hidden_size, args.rms_norm_eps, args.layers[0].residual.gate_rank)
        _fill(module, f"model.layers.{layers[0]}.{name}.", shapes)
        yield f"gates of {name}", layers, partial(_of_rows, module), ()


def _convolved(shapes: Shapes) -> Compute:
    """The convolutions behind the parts of a layer."""
    mixer, adds = shapes.args.mixers[0], shapes.args.connections is None
    assert mixer.branches is not None
    made: Any = BranchConvolution(mixer.branches)
    _fill(made, "model.layers.0.attn_sconv.", shapes)

    def run(x: Array, caches: Any) -> None:
        made(x, caches(mixer)[-2], x + 0 if adds else None)  # another array: a launch takes each once
        made(x, caches(mixer)[-1])

    return run


def _messages(shapes: Shapes, rule: BlockSums, layer: int) -> Compute:
    """Messages between passes over a layer, and what lets them into the inputs of its parts."""
    args, messages = shapes.args, rule.messages
    assert messages is not None
    queries: Any = MessageQueries(rule, args.hidden_size, args.rms_norm_eps)
    gates: Any = MessageGates(args.hidden_size, messages.rank, args.rms_norm_eps)
    _fill(queries, "model.messages.", shapes)
    _fill(gates, f"model.layers.{layer}.controllers.", shapes)

    def run(x: Array, caches: Any) -> None:
        *of_mixer, of_mlp = queries.messages(layer, spread(x, rule.told))
        gates(MIXERS, [x] * 3, of_mixer)
        gates(MLP, [x], [of_mlp])

    return run


def _weighed(shapes: Shapes, rule: WeighedSum) -> Compute:
    """The sums of the stream and the output of a part, of a mixer and of experts."""
    sums: list[Any] = [WeighedParts(shapes.args.hidden_size, rule, has_scale) for has_scale in (False, True)]
    for made, name in zip(sums, ("mixer_sum", "output_sum"), strict=True):
        _fill(made, f"model.layers.0.{name}.", shapes)
    return lambda x, _: [made(x, x + 0) for made in sums]  # another array: a launch takes each once


def _of_rows(module: Any, x: Array, caches: Any) -> Any:
    return module(x)


def _caches(count: int, mixer: Any) -> list[StepRows]:
    """The caches of several sequences with one row each."""
    return [StepRows(caches) for caches in zip(*(make_caches(mixer) for _ in range(count)), strict=True)]


def _rows(count: int, mixer: Any) -> list[StepRows]:
    """The caches of a sequence with several rows."""
    return [StepRows([cache] * count) for cache in make_caches(mixer)]


def _mix(args: ModelArgs, mixer: Mixer, module: Any, norm: RMSNorm | None, x: Array, caches: Any) -> Any:
    """Calls a mixer on x [B, L, D]. With several streams it takes the rows of a step one by one and adds no
    residual, which with weighed sums or convolutions it does not either.
    """
    made = caches(mixer)
    rows = len(made[0].caches) if isinstance(made[0], StepRows) else 0
    if args.connections is None:
        residual = args.layers[0].residual
        mix = module.mixed if residual.weighed or residual.convolved else module
        return mix(x, norm, made, *_chosen(mixer, x, rows))
    if rows:
        return [_mix(args, mixer, module, norm, x[:, i : i + 1], make_caches) for i in range(rows)]
    inputs = backend.library_of(x).concatenate([x] * mixer.inputs, axis=-1)
    return module.mixed(inputs, norm, made, *_chosen(mixer, x))


def _late(mix: Compute, dtype: mx.Dtype, length: int) -> Compute:
    """`mix` with caches of `length` positions."""

    def filled(mixer: Any) -> Any:
        caches: Any = make_caches(mixer)
        for cache in caches:
            stored = (mx.zeros(shape) for shape in cache.stored_shapes(length))  # lazy, so that they take no memory
            cache.state = cache.restored(*stored, length, dtype)
        return caches

    return lambda x, caches: mix(x, filled)


def _chosen(mixer: Mixer, x: Array, rows: int = 0) -> list[Chosen]:
    """What earlier layers hand on for x [B, L, D], if the mixer uses it; of each row, if x has the rows of a step."""
    B, top, library = x.shape[0], mixer.handed_on, backend.library_of(x)
    if not top:
        return []
    if rows:
        return [Chosen(rows={i: _chosen(mixer, x[:, i : i + 1])[0] for i in range(rows)})]
    late = 1 if x.shape[1] == 1 else max(x.shape[1] - top, 0)  # a single token may stand behind a long text
    entries = (B, max(x.shape[1], top), mixer.borrowed)
    positions = library.zeros((B, late, top), library.int32)
    if not mixer.borrowed:
        return [Chosen(positions)]
    latents = library.zeros((*x.shape[:2], mixer.borrowed), x.dtype)
    return [Chosen(positions, library.zeros(entries, x.dtype), None, latents, latents)]


def _between(shapes: Shapes, rule: Connections, layer: int) -> Compute:
    """The computations between the streams and the parts of a layer, by kind."""
    args = shapes.args
    sizes, inputs = (args.hidden_size, args.rms_norm_eps, layer), args.mixers[layer].inputs
    before, behind = connection(rule, *sizes, inputs), connection(rule, *sizes)
    _fill(before, f"model.layers.{layer}.attn_hc.", shapes)
    _fill(behind, f"model.layers.{layer}.ffn_hc.", shapes)

    def run(x: Array, caches: Any) -> None:
        h = spread(x, streams_before(rule, layer)) + 0  # another array than the output x: a launch takes each once
        _, *mixing = before.gather(h)
        h, _, *mixing = behind.gather_behind(h, x, *mixing)
        behind.scatter(h, x, *mixing)

    return run


def _behind(shapes: Shapes, rule: Connections) -> Compute:
    """Joins the streams after the last layer."""
    made = connection(rule, shapes.args.hidden_size, shapes.args.rms_norm_eps, None)
    _fill(made, "model.hc_head.", shapes)
    return lambda x, _: made.last(spread(x, streams_before(rule, shapes.args.num_hidden_layers)))


def _of_ngrams(shapes: Shapes, layer: int, part: NGrams) -> Compute:
    """Adds n-grams to the streams, with rows of zeros."""
    args = shapes.args
    made, streams = NGramLayer(part, args.hidden_size, args.rms_norm_eps, layer), part.channels // args.hidden_size
    _fill(made, f"model.layers.{layer}.ple.", shapes)
    return lambda x, _: made(spread(x, streams), None, cast(Any, make_caches(args.mixers[layer])[-1]))


def _forward(module: Any, norm: RMSNorm | None, x: Array, _: Any) -> Array:
    """Calls a feed-forward part on x [B, L, D]; if a table chooses the experts, all tokens are 0."""
    if not module.reads_tokens:
        return module.forward(x, norm)
    return module.forward(x, norm, backend.of_kind(np.zeros(x.shape[:2], np.uint32), x))


def _kinds(parts: Sequence[Hashable]) -> Iterator[tuple[Any, list[int]]]:
    """Each kind with the layers that have it."""
    for kind in dict.fromkeys(parts):
        yield kind, [i for i, part in enumerate(parts) if part == kind]


def _forms(shapes: Shapes, layer: int, is_mlp: bool) -> frozenset[tuple[str, Quant | None]]:
    """The stored forms of the matrices of a layer's feed-forward part or mixer."""
    start = f"model.layers.{layer}."
    below = ((path.removeprefix(start), quant) for path, quant in shapes.quants.items() if path.startswith(start))
    return frozenset((path, quant) for path, quant in below if path.startswith("mlp.") == is_mlp)


def _fill(module: nn.Module, path: str, shapes: Shapes) -> None:
    randomise(module, path, shapes, fill_with_zeros)


def fill_with_zeros(matrix: Weight, quant: Quant | None, dtype: mx.Dtype) -> None:
    """A matrix of zeros in the form `quant`, or as values."""
    matrix.quant, matrix.filled = quant, True
    if quant is None:
        matrix.weight = mx.zeros(matrix.shape, dtype)
        return
    *rows, columns = matrix.shape
    for name in quant.parts:
        shape, kind = quant.shape_of(name, rows, columns, FLOAT)
        setattr(matrix, name, mx.zeros(shape, DTYPES.get(kind, dtype)))

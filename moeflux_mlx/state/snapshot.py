"""Snapshots: the state of a model's caches as bytes, if possible in MFLX, which moeflux and flash-moe read too.

Little-endian. A header of 32-bit words, then every layer in order:

    magic 0x4D464C58 | version | num_hidden_layers | full_attention_interval | num_key_value_heads
    | head_dim | bytes of one convolution state | bytes of one recurrent state
    | kv_lora_rank | qk_rope_head_dim (these two in version 2 only)

    full attention    i32 length, then float32 keys [length, kv_heads, head_dim] (normed, rotated),
                      then values of the same shape
    linear attention  float32 conv [kernel - 1, channels], oldest first, before the convolution; then the
                      recurrent state [value_heads, value_dim, key_dim]
    latent attention  i32 length, then float32 latents [length, kv_lora_rank] (normed), then rotated keys
                      [length, qk_rope_head_dim]; version 2 only

Version 2 is written, versions 1 and 2 are read. MFLX has one number and width of heads and one interval for all
layers. A model that it cannot express (attention with a window or an indexer, heads that differ by layer, layers in
another order) has a snapshot that only this package reads: the layers are the same, behind a header of three words,

    magic 0x58544154 | version 1 | num_hidden_layers

and a layer with a window has its length like the others, but only the last min(length, window - 1) keys and values. A
layer with compressed entries has the newest positions' keys, with the inputs of unfinished entries, and all entries. A
layer with an indexer has the indexer's key after each rotated key, unless it reuses another layer's choice. If blocks
of positions are chosen, the index keys of the newest positions and the keys of all blocks follow. N-grams have the last
inputs of their convolution and the last tokens after the recurrent state. If keys and values are kept in 8 bits, the
magic is 0x38544154, and rows of bytes (`ops/kv_rows.py`) replace their floats. The reader must know everything that
such a header leaves out: prompt files have a fingerprint.

The position is the length of the attention layers. A snapshot does not identify its weights or its way of rotating.
moeflux rotates Cogito's keys by halves instead of by pairs, so snapshots of Cogito that moeflux wrote pass every check
and give wrong text; they must not be loaded. This module knows no files, tokens or fingerprints; `prompt_file` does.
"""

import io
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..caches.layer_cache import FLOAT_BYTES, LayerCache, State
from ..errors import (
    RequestError,
    SnapshotError,
)
from ..families.file_forms import mflx_of
from ..mixers.registry import by_layer, cache_numbers, make_caches
from ..ops.launch import Shape
from ..spec import ModelArgs

MAGIC = 0x4D464C58
VERSION = 2
OTHER_MAGIC, QUANTIZED_MAGIC, OTHER_VERSION = 0x58544154, 0x38544154, 1  # of states that MFLX cannot express
HEADER_WORDS = {MAGIC: {1: 8, 2: 10}, OTHER_MAGIC: {1: 3}, QUANTIZED_MAGIC: {1: 3}}
FIELDS = (
    "magic",
    "version",
    "num_hidden_layers",
    "full_attention_interval",
    "num_key_value_heads",
    "head_dim",
    "linear_conv_bytes",
    "linear_ssm_bytes",
    "kv_lora_rank",
    "qk_rope_head_dim",
)
HEAD = b"HEAD"
MAX_LENGTH = 1 << 20  # positions of one layer, fixed by the format's readers


class Reading(Protocol):
    """What a snapshot needs of a model's experts."""

    def drain(self) -> None: ...


class Stateful(Protocol):
    """The part of a model that snapshots need."""

    @property
    def args(self) -> ModelArgs: ...

    @property
    def experts(self) -> Reading | None: ...

    @property
    def activation_dtype(self) -> mx.Dtype: ...


def state_size(model: Stateful | ModelArgs, cache_or_length: Sequence[LayerCache] | int) -> int:
    """Bytes of `save_state`, for these caches or for a state of that many positions.

    Raises:
        SnapshotError: no layer has attention.
    """
    args = model if isinstance(model, ModelArgs) else model.args
    length = cache_or_length if isinstance(cache_or_length, int) else _length(args, cache_or_length)
    return 4 * len(_header(args)) + sum(_layer_bytes(make_caches(mixer), length) for mixer in args.visited)


def _layer_bytes(caches: Sequence[LayerCache], length: int) -> int:
    sizes = (one.stored_dtype.itemsize * math.prod(shape) for one in caches for shape in one.stored_shapes(length))
    return 4 * caches[0].counts + sum(sizes)


def save_state(model: Stateful, cache: Sequence[LayerCache]) -> bytes:
    """The state of `cache` (from `model.make_cache`, batch 1) as one snapshot, MFLX version 2 where that suffices.

    bfloat16 and float16 caches survive exactly: every value is written as float32.

    Raises:
        SnapshotError: the caches' contents cannot be expressed, or no layer has attention.
    """
    if any(layer.is_shifted for layer in cache):
        raise SnapshotError(
            "tokens have rotary positions that are not their places in the caches, as after an image, and a snapshot "
            "cannot say so; save the text with its tokens (PromptDirectory)"
        )
    whole = io.BytesIO()
    for part in state_parts(model, cache):
        whole.write(part)
    return whole.getvalue()


def state_parts(model: Stateful, cache: Sequence[LayerCache]) -> Iterator[memoryview]:
    """`save_state` piece by piece, one array of one layer at a time, so that a file needs no second copy; where rotary
    positions are further than places (`LayerCache.shifts`) is for the caller to keep."""
    args = model.args
    header, length = _header(args), _length(args, cache)
    _wait_for_all(model, cache)
    yield memoryview(struct.pack(f"<{len(header)}I", *header))
    for caches in by_layer(cache_numbers(args.visited), cache):
        yield from _layer_parts(caches, length)


def _layer_parts(caches: Sequence[LayerCache], length: int) -> Iterator[memoryview]:
    if caches[0].counts:
        yield memoryview(struct.pack("<i", length))
    arrays = (array for one in caches for array in one.stored())
    for dtype, shapes in _stored_arrays(caches, length):
        parts = [mx.zeros(shape) if array is None else array for shape, array in zip(shapes, arrays, strict=False)]
        array = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        if array.size:
            yield _bytes(array, dtype)


def _stored_arrays(caches: Sequence[LayerCache], length: int) -> list[tuple[np.dtype[Any], list[Shape]]]:
    """The dtype of each array that a snapshot has of a layer, and the shapes of the caches' arrays whose rows are one
    behind the other in it.
    """
    arrays = list[tuple[np.dtype[Any], list[Shape]]]()
    for one in caches:
        shapes = list(one.stored_shapes(length))
        if one.extends_rows:
            arrays[-1][1].extend(shapes)
        else:
            arrays += [(one.stored_dtype, [shape]) for shape in shapes]
    return arrays


def head_rows(cache: Sequence[LayerCache]) -> bytes:
    """The bytes after a snapshot that hold the caches of a draft head: `HEAD`, and a layer as in a snapshot."""
    mx.eval([array for one in cache for array in one.state[:-1] if array is not None])
    return b"".join([HEAD, *_layer_parts(cache, cache[0].offset)])


def load_head_rows(cache: Sequence[LayerCache], data: bytes, dtype: mx.Dtype) -> bool:
    """Replaces the state of a draft head's caches by what `head_rows` gave; whether `data` is that of such caches."""
    start = len(HEAD) + 4
    if not cache[0].counts or data[: len(HEAD)] != HEAD or len(data) < start:
        return False
    length = struct.unpack_from("<i", data, len(HEAD))[0]
    if not 0 <= length <= MAX_LENGTH or len(data) - len(HEAD) != _layer_bytes(cache, length):
        return False
    for one, state in zip(cache, _read([cache], memoryview(data), len(HEAD), length, dtype), strict=True):
        one.state = state
    return True


def load_state(model: Stateful, cache: Sequence[LayerCache], data: bytes | bytearray | memoryview) -> None:
    """Replaces the state of `cache` by a snapshot's; what follows the snapshot in `data` is ignored.

    Everything is checked, and every array made, before anything changes: after an error `cache` is as it was.
    Attention and convolution states become the model's activation dtype, recurrent states stay float32.

    Raises:
        SnapshotError: one of its subclasses says what is wrong with the bytes.
    """
    args = model.args
    _check_caches(args, cache)
    view = memoryview(data).cast("B")
    start, length = _checked(args, view)
    _wait_for_all(model, cache)
    states = _read(by_layer(cache_numbers(args.visited), cache), view, start, length, model.activation_dtype)
    mx.eval([array for state in states for array in state[:-1] if array is not None])
    for layer, state in zip(cache, states, strict=True):
        layer.state = state


def snapshot_length(model: Stateful, data: bytes | bytearray | memoryview) -> int:
    """The number of positions in a snapshot of this model, after all the checks of `load_state`.

    Raises:
        SnapshotError: one of its subclasses says what is wrong with the bytes.
    """
    return _checked(model.args, memoryview(data).cast("B"))[1]


def _header(args: ModelArgs) -> tuple[int, ...]:
    mflx = _mflx(args)
    if args.kv_bits is not None:
        return QUANTIZED_MAGIC, OTHER_VERSION, args.num_hidden_layers
    return mflx or (OTHER_MAGIC, OTHER_VERSION, args.num_hidden_layers)


def _mflx(args: ModelArgs) -> tuple[int, ...] | None:
    """The header of MFLX; None: it cannot express the layers. It needs n, where exactly the layers n - 1, 2n - 1, ...
    have full attention, all alike.
    """
    full = [i for i, mixer in enumerate(args.visited) if mixer.attention is not None]
    if not full:
        raise SnapshotError("no layer has attention, so nothing in a snapshot would tell its length")
    interval = full[0] + 1
    is_alike = len({tuple(one.stored_shapes(1) for one in make_caches(args.visited[i])) for i in full}) == 1
    is_regular = full == list(range(interval - 1, len(args.visited), interval))
    parts = [one for mixer in args.visited if (one := mflx_of(mixer)) is not None]
    if not (is_alike and is_regular and len(parts) == len(args.visited)):
        return None
    conv, state, *latent = (next(filter(None, values), 0) for values in zip(*parts, strict=True))
    states = FLOAT_BYTES * conv, FLOAT_BYTES * state
    heads = args.num_key_value_heads, args.head_dim
    return MAGIC, VERSION, args.num_hidden_layers, interval, *heads, *states, *latent


def _check_caches(args: ModelArgs, cache: Sequence[LayerCache]) -> None:
    if [one.part for one in cache] != [one.part for mixer in args.visited for one in make_caches(mixer)]:
        raise RequestError(
            f"{len(cache)} caches do not fit this {args.model_type} model of {args.num_hidden_layers} layers; "
            "use model.make_cache()"
        )


def _length(args: ModelArgs, cache: Sequence[LayerCache]) -> int:
    """The number of positions in the caches, which must have one batch row and agree."""
    _check_caches(args, cache)
    lengths = sorted({layer.offset for layer in cache})
    if len(lengths) > 1:
        raise SnapshotError(
            f"layers have absorbed {lengths[0]} to {lengths[-1]} tokens, as an interrupted call leaves them; "
            "go back to an earlier state"
        )
    rows = {array.shape[0] for layer in cache for array in layer.state[:-1] if array is not None}
    if rows - {1}:
        raise SnapshotError(f"the caches hold a batch of {max(rows)}; a snapshot holds one sequence")
    if lengths[0] > MAX_LENGTH:
        raise SnapshotError(f"{lengths[0]} positions are more than a snapshot can hold, {MAX_LENGTH}")
    return lengths[0]


def _wait_for_all(model: Stateful, cache: Sequence[LayerCache]) -> None:
    """Waits for reads and computations that are still under way."""
    assert model.experts is not None
    model.experts.drain()
    mx.eval([array for layer in cache for array in layer.state[:-1] if array is not None])
    mx.synchronize()


def _bytes(array: mx.array, dtype: np.dtype[Any]) -> memoryview:
    array = array if array.dtype == mx.uint8 else array.astype(mx.float32)
    values = np.ascontiguousarray(np.asarray(array), dtype=dtype)
    return values.reshape(-1).data.cast("B")


def _checked(args: ModelArgs, view: memoryview) -> tuple[int, int]:
    """Checks that a snapshot is complete and fits the model; returns where its layers begin, and its length."""
    start = _check_header(args, view)
    lengths = [length for _, length in _attention_lengths(args, view, start)]
    if len(set(lengths)) > 1:
        raise SnapshotError(f"layers of the snapshot have {min(lengths)} to {max(lengths)} positions; they must agree")
    return start, lengths[0]


def _check_header(args: ModelArgs, view: memoryview) -> int:
    """Checks the header and returns its length in bytes."""
    wanted = _header(args)
    versions = HEADER_WORDS[wanted[0]]
    if len(view) < 8:
        raise SnapshotError(f"a snapshot of {len(view)} bytes is shorter than any header")
    magic, version = struct.unpack_from("<2I", view)
    if magic != wanted[0]:
        raise SnapshotError(
            f"the snapshot begins with {magic:#010x} instead of {wanted[0]:#010x}; is it this model's, "
            "with the same --kv-bits?"
        )
    known = [one for one, words in versions.items() if not any(wanted[words:])]  # a shorter header leaves nothing out
    if version not in known:
        names = " and ".join(map(str, known))
        raise SnapshotError(f"the snapshot has version {version}; this model's snapshots have {names}")
    words = versions[version]
    if len(view) < 4 * words:
        raise SnapshotError(f"a snapshot of {len(view)} bytes is shorter than its header of {4 * words}")
    header = struct.unpack_from(f"<{words}I", view)
    for field, got, want in list(zip(FIELDS, header, wanted, strict=False))[2:]:
        if got != want:
            raise SnapshotError(f"the snapshot has {field} {got}; this model has {want}")
    return 4 * words


def _attention_lengths(args: ModelArgs, view: memoryview, offset: int) -> Iterator[tuple[int, int]]:
    """(layer, length) of each attention layer; walks the whole body, so that a short one is found."""
    for layer, mixer in enumerate(args.visited):
        caches, length = make_caches(mixer), 0
        if caches[0].counts:
            _check_room(view, layer, offset, 4)
            length = struct.unpack_from("<i", view, offset)[0]
            _check_length(layer, length)
        need = _layer_bytes(caches, length)
        _check_room(view, layer, offset, need)
        if caches[0].counts:
            yield layer, length
        offset += need


def _check_room(view: memoryview, layer: int, offset: int, need: int) -> None:
    if len(view) - offset < need:
        raise SnapshotError(
            f"the snapshot ends in layer {layer}, which needs {need} bytes and has {len(view) - offset}"
        )


def _check_length(layer: int, length: int) -> None:
    if length < 0:
        raise SnapshotError(f"layer {layer} of the snapshot has {length} positions")
    if length > MAX_LENGTH:
        raise SnapshotError(f"layer {layer} of the snapshot has {length} positions; the format allows {MAX_LENGTH}")


def _read(
    layers: Iterable[Sequence[LayerCache]], view: memoryview, offset: int, length: int, dtype: mx.Dtype
) -> list[State]:
    """New arrays for every cache of a checked snapshot."""
    states: list[State] = []
    for caches in layers:
        offset += 4 * caches[0].counts
        arrays = list[np.ndarray]()
        for stored, shapes in _stored_arrays(caches, length):
            widths = [shape[-1] for shape in shapes]
            shape = *shapes[0][:-1], sum(widths)
            array = np.frombuffer(view, stored, math.prod(shape), offset).reshape(shape)
            offset += array.nbytes
            arrays += np.split(array, np.cumsum(widths[:-1], dtype=int), axis=-1)
        left = iter(arrays)
        states += [one.restored(*islice(left, len(one.stored_shapes(length))), length, dtype) for one in caches]
    return states

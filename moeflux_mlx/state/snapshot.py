"""MFLX snapshots: the state of a model's caches as bytes that moeflux and flash-moe read too.

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

Version 2 is written, versions 1 and 2 are read. The position is the length of the attention layers: there is
no other. Nothing marks a snapshot's weights or its way of rotating: moeflux rotates Cogito's keys by halves
instead of by pairs, so snapshots of Cogito that moeflux wrote pass every check and give wrong text; they
must not be loaded. Nothing here knows about files, tokens or fingerprints; `prompt_file` does.
"""

import io
import struct
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from ..errors import (
    BadMagicError,
    BadVersionError,
    BufferTooSmallError,
    LengthOverflowError,
    NegativeLengthError,
    RequestError,
    ShapeMismatchError,
    SnapshotError,
    TruncatedError,
)
from ..model.decoder import Model
from ..spec import FULL, LINEAR, ModelArgs
from .cache import Cache, KVCache, LatentCache, RecurrentCache

MAGIC = 0x4D464C58
VERSION = 2
HEADER_WORDS = {1: 8, 2: 10}
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
MAX_LENGTH = 1 << 20  # positions of one layer, fixed by the format's readers
FLOAT = np.dtype("<f4")

# The two arrays of one layer's cache and the number of positions they have absorbed.
State = tuple[mx.array | None, mx.array | None, int]


def state_size(model: Model | ModelArgs, cache_or_length: Sequence[Cache] | int) -> int:
    """Bytes of `save_state`, for these caches or for a state of that many positions.

    Raises:
        SnapshotError: the model's layers cannot be expressed.
    """
    args = model if isinstance(model, ModelArgs) else model.args
    length = cache_or_length if isinstance(cache_or_length, int) else _length(args, cache_or_length)
    full = args.layer_types.count(FULL)
    linear = 4 * (_conv_width(args) + _recurrent_width(args))
    header = 4 * len(_header(args))
    return header + full * (4 + 4 * length * sum(_widths(args))) + args.layer_types.count(LINEAR) * linear


def save_state(model: Model, cache: Sequence[Cache]) -> bytes:
    """The state of `cache` (from `model.make_cache`, batch 1) as one MFLX version 2 snapshot.

    bfloat16 and float16 caches survive exactly: every value is written as float32.

    Raises:
        SnapshotError: the model's layers or the caches' contents cannot be expressed.
    """
    whole = io.BytesIO()
    for part in state_parts(model, cache):
        whole.write(part)
    return whole.getvalue()


def state_parts(model: Model, cache: Sequence[Cache]) -> Iterator[memoryview]:
    """`save_state` piece by piece, one array of one layer at a time, so that a file needs no second copy."""
    args = model.args
    header, length = _header(args), _length(args, cache)
    _settle(model, cache)
    yield memoryview(struct.pack(f"<{len(header)}I", *header))
    for layer in cache:
        arrays = layer.state[:2]
        if isinstance(layer, RecurrentCache):
            for array, width in zip(arrays, (_conv_width(args), _recurrent_width(args)), strict=True):
                yield _bytes(mx.zeros((width,)) if array is None else array[0])
            continue
        yield memoryview(struct.pack("<i", length))
        for array in arrays if length else ():
            assert array is not None
            yield _bytes(array[0, :, :length].swapaxes(0, 1))


def load_state(model: Model, cache: Sequence[Cache], data: bytes | bytearray | memoryview) -> None:
    """Replaces the state of `cache` by a snapshot's; what follows the snapshot in `data` is ignored.

    Everything is checked, and every array made, before anything changes: after an error `cache` is as it was.
    Attention and convolution states become the model's activation dtype, recurrent states stay float32.

    Raises:
        SnapshotError: one of its subclasses says what is wrong with the bytes.
    """
    args = model.args
    _check_caches(args, cache)
    view = memoryview(data).cast("B")
    version, length = _checked(args, view)
    _settle(model, cache)
    states = _read(args, view, 4 * HEADER_WORDS[version], length, activation_dtype(model))
    mx.eval([array for state in states for array in state[:2] if array is not None])
    for layer, state in zip(cache, states, strict=True):
        layer.state = state


def snapshot_length(model: Model, data: bytes | bytearray | memoryview) -> int:
    """The number of positions in a snapshot of this model, after all the checks of `load_state`.

    Raises:
        SnapshotError: one of its subclasses says what is wrong with the bytes.
    """
    return _checked(model.args, memoryview(data).cast("B"))[1]


def activation_dtype(model: Model) -> mx.Dtype:
    """The dtype that the model computes in and that its attention and convolution caches hold."""
    return model.model.norm.weight.dtype


def _header(args: ModelArgs) -> tuple[int, ...]:
    return (
        MAGIC,
        VERSION,
        args.num_hidden_layers,
        _interval(args),
        args.num_key_value_heads,
        args.head_dim,
        4 * _conv_width(args),
        4 * _recurrent_width(args),
        args.kv_lora_rank,
        args.qk_rope_head_dim,
    )


def _interval(args: ModelArgs) -> int:
    """n, where exactly the layers n - 1, 2n - 1, ... have full attention."""
    types = args.layer_types
    interval = types.index(FULL) + 1 if FULL in types else 0
    if not interval or any((kind == FULL) != ((i + 1) % interval == 0) for i, kind in enumerate(types)):
        full = [i for i, kind in enumerate(types) if kind == FULL]
        raise SnapshotError(
            f"full attention in layers {full} of {len(types)} is no regular interval, "
            "and a snapshot can express nothing else"
        )
    return interval


def _conv_width(args: ModelArgs) -> int:
    """Numbers in the convolution state of one linear layer."""
    return max(args.linear_conv_kernel_dim - 1, 0) * args.linear_conv_dim


def _recurrent_width(args: ModelArgs) -> int:
    return args.linear_num_value_heads * args.linear_value_head_dim * args.linear_key_head_dim


def _heads(args: ModelArgs) -> int:
    return 1 if args.kv_lora_rank else args.num_key_value_heads


def _widths(args: ModelArgs) -> tuple[int, int]:
    """Numbers that one position has in the first and in the second array of an attention layer."""
    if args.kv_lora_rank:
        return args.kv_lora_rank, args.qk_rope_head_dim
    return (args.num_key_value_heads * args.head_dim,) * 2


def _check_caches(args: ModelArgs, cache: Sequence[Cache]) -> None:
    full = LatentCache if args.kv_lora_rank else KVCache
    wanted = [RecurrentCache if kind == LINEAR else full for kind in args.layer_types]
    if [type(layer) for layer in cache] != wanted:
        raise RequestError(
            f"{len(cache)} caches do not fit this {args.model_type} model of {len(wanted)} layers; "
            "use model.make_cache()"
        )


def _length(args: ModelArgs, cache: Sequence[Cache]) -> int:
    """The number of positions in the caches, which must have one batch row and agree."""
    _check_caches(args, cache)
    lengths = sorted({layer.offset for layer in cache})
    if len(lengths) > 1:
        raise SnapshotError(
            f"layers have absorbed {lengths[0]} to {lengths[-1]} tokens, as an interrupted call leaves them; "
            "go back to an earlier state"
        )
    rows = {array.shape[0] for layer in cache for array in layer.state[:2] if array is not None}
    if rows - {1}:
        raise SnapshotError(f"the caches hold a batch of {max(rows)}; a snapshot holds one sequence")
    if lengths[0] > MAX_LENGTH:
        raise SnapshotError(f"{lengths[0]} positions are more than a snapshot can hold, {MAX_LENGTH}")
    return lengths[0]


def _settle(model: Model, cache: Sequence[Cache]) -> None:
    """Waits for reads and computations that are still under way."""
    model.experts.drain()
    mx.eval([array for layer in cache for array in layer.state[:2] if array is not None])
    mx.synchronize()


def _bytes(array: mx.array) -> memoryview:
    values = np.ascontiguousarray(np.asarray(array.astype(mx.float32)), dtype=FLOAT)
    return values.reshape(-1).data.cast("B")


def _checked(args: ModelArgs, view: memoryview) -> tuple[int, int]:
    """(version, length) of a snapshot that is known to be complete and to fit the model."""
    version = _check_header(args, view)
    lengths = [length for _, length in _attention_lengths(args, view, 4 * HEADER_WORDS[version])]
    if len(set(lengths)) > 1:
        raise ShapeMismatchError(
            f"layers of the snapshot have {min(lengths)} to {max(lengths)} positions; they must agree",
            "length",
        )
    return version, lengths[0]


def _check_header(args: ModelArgs, view: memoryview) -> int:
    wanted = _header(args)
    if len(view) < 8:
        raise BufferTooSmallError(f"a snapshot of {len(view)} bytes is shorter than any header")
    magic, version = struct.unpack_from("<2I", view)
    if magic != MAGIC:
        raise BadMagicError(f"the snapshot begins with {magic:#010x} instead of {MAGIC:#010x}; is it MFLX?")
    if version not in HEADER_WORDS or (version == 1 and args.kv_lora_rank):
        known = "2" if args.kv_lora_rank else "1 and 2"
        raise BadVersionError(f"the snapshot has version {version}; this model's snapshots have {known}")
    words = HEADER_WORDS[version]
    if len(view) < 4 * words:
        raise BufferTooSmallError(f"a snapshot of {len(view)} bytes is shorter than its header of {4 * words}")
    found = struct.unpack_from(f"<{words}I", view)
    for field, got, want in list(zip(FIELDS, found, wanted, strict=False))[2:]:
        if got != want:
            raise ShapeMismatchError(f"the snapshot has {field} {got}; this model has {want}", field)
    return version


def _attention_lengths(args: ModelArgs, view: memoryview, offset: int) -> Iterator[tuple[int, int]]:
    """(layer, length) of each attention layer; walks the whole body, so that a short one is found."""
    linear = 4 * (_conv_width(args) + _recurrent_width(args))
    for layer, kind in enumerate(args.layer_types):
        need = linear if kind == LINEAR else 4
        _check_room(view, layer, offset, need)
        if kind == FULL:
            length = struct.unpack_from("<i", view, offset)[0]
            _check_length(layer, length)
            need += 4 * length * sum(_widths(args))
            _check_room(view, layer, offset, need)
            yield layer, length
        offset += need


def _check_room(view: memoryview, layer: int, offset: int, need: int) -> None:
    if len(view) - offset < need:
        raise TruncatedError(
            f"the snapshot ends in layer {layer}, which needs {need} bytes and has {len(view) - offset}",
            layer,
        )


def _check_length(layer: int, length: int) -> None:
    if length < 0:
        raise NegativeLengthError(f"layer {layer} of the snapshot has {length} positions", layer)
    if length > MAX_LENGTH:
        raise LengthOverflowError(
            f"layer {layer} of the snapshot has {length} positions; the format allows {MAX_LENGTH}", layer
        )


def _read(args: ModelArgs, view: memoryview, offset: int, length: int, dtype: mx.Dtype) -> list[State]:
    """New arrays for every layer of a checked snapshot."""
    states: list[State] = []
    for kind in args.layer_types:
        if kind == LINEAR:
            conv = _floats(view, offset, (1, args.linear_conv_kernel_dim - 1, args.linear_conv_dim))
            offset += 4 * _conv_width(args)
            heads = (args.linear_num_value_heads, args.linear_value_head_dim, args.linear_key_head_dim)
            recurrent = _floats(view, offset, (1, *heads))
            offset += 4 * _recurrent_width(args)
            states.append((mx.array(conv).astype(dtype), mx.array(recurrent), length))
            continue
        offset += 4
        pair: list[mx.array | None] = []
        for width in _widths(args):
            flat = _floats(view, offset, (length, _heads(args), width // _heads(args)))
            pair.append(_padded(flat, dtype) if length else None)
            offset += 4 * length * width
        states.append((pair[0], pair[1], length))
    return states


def _floats(view: memoryview, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(view, FLOAT, int(np.prod(shape)), offset).reshape(shape)


def _padded(flat: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """[length, heads, width] as a cache keeps it: [1, heads, capacity, width], capacity in whole steps."""
    length, step = len(flat), KVCache.step
    rows = mx.array(flat).astype(dtype).swapaxes(0, 1)[None]
    return mx.pad(rows, [(0, 0), (0, 0), (0, -length % step), (0, 0)])

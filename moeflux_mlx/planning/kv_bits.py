"""The number of bits in which a model's caches keep keys and values, and the bytes that they take."""

from collections.abc import Iterator

import mlx.core as mx

from ..errors import RequestError
from ..mixers.registry import make_caches
from ..ops.kv_rows import BITS
from ..spec import ModelArgs
from .machine import in_gb
from .needs import state_bytes

KV_BITS = ("auto", "8", "16")
# If a token adds at least this many bytes of keys and values in 16 bits, 8 bits are the default: 64,000 tokens would
# take 8 GB. This concerns families with full attention in most of 46 or more layers.
LARGE_TOKEN = 128 << 10
LONG = 1 << 20  # number of positions, longer than any window


def keeping(args: ModelArgs, asked: int | str, dtype: mx.Dtype | None) -> ModelArgs:
    """The model's arguments with the chosen number of bits for keys and values.

    Args:
        asked: 8, 16 (as they are, in the dtype of activations) or "auto", as a number or in digits.
        dtype: the dtype that the user gave, or None.

    Raises:
        RequestError: `asked` is none of them, or 8 where no layer keeps keys and values.
    """
    if str(asked) not in KV_BITS:
        raise RequestError(f"kv_bits {asked!r} is not one of {', '.join(KV_BITS)}")
    if str(asked) == "auto":
        is_exact = dtype is not None and dtype == mx.float32
        return args if is_exact or token_bytes(args) < LARGE_TOKEN else args.with_kv_bits(BITS)
    if str(asked) == "16":
        return args
    if not args.rounds_keys:
        raise RequestError(
            f"kv_bits 8 is for keys and values, and this {args.model_type} model keeps latents or states, which are "
            "small, or keys of which an indexer chooses; leave it out"
        )
    return args.with_kv_bits(BITS)


def token_bytes(args: ModelArgs) -> int:
    """Bytes of keys and values in 16 bits that a token adds to a long text."""
    mixers = (mixer for mixer in args.with_kv_bits(None).visited if mixer.rounds_keys)
    caches = (cache for mixer in mixers for cache in make_caches(mixer))
    return sum((cache.bytes_for(2 * LONG, 2) - cache.bytes_for(LONG, 2)) // LONG for cache in caches)


def state_lines(args: ModelArgs, context: int, itemsize: int) -> Iterator[str]:
    """Lines that say how much one text's state takes with keys and values in 8 bits and unchanged; none if there are no
    keys and values.
    """
    if not args.rounds_keys:
        return
    small, large = (in_gb(state_bytes(args.with_kv_bits(bits), context, itemsize), 3) for bits in (BITS, None))
    bits = 8 * itemsize
    chosen = BITS if args.kv_bits else bits
    yield f"with keys and values in {BITS} bits the state takes {small}, in {bits} {large}: {chosen} are planned"

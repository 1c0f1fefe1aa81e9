"""How fast this machine reads weights and gets through a layer, as `moeflux doctor` measured it.

The rates are stored in a file of `kept_rows`, for each device and version of MLX. Where nothing was measured, typical
values stand for a layer's seconds.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import mlx.core as mx

from ..ops import backend, native
from .kept_rows import Row, file_of, keep_row, read_rows
from .tiles import gpu_name, mlx_version

FILE = "rates.json"
# Seconds of a layer beside its bytes, of one with streamed experts, and of a token beside its layers, by backend: an
# H200, two cores of an EPYC, and on a Mac public figures of launches and waits (opening/reach.py), which say nothing of
# tokens.
TYPICAL = {"cuda": (5e-5, 1.2e-4, 5e-4), "metal": (3e-5, 3.3e-4, 0.0), "cpu": (5e-4, 6e-4, 5e-4)}

UNLIMITED = 1e18  # a rate that takes no time


@dataclass(frozen=True)
class Rates:
    """A machine's rates.

    Args:
        products: bytes of weights per second in the products of one token.
        disk: bytes per second read from the disk.
        layer: seconds of a layer beside its bytes, for launches and the host.
        streamed_layer: the same where experts are read into a pool, and nothing is missing.
        token: seconds of a token beside those of its layers.
        attention: multiply-adds per second of one token's attention.
    """

    products: float
    disk: float
    layer: float
    streamed_layer: float
    token: float = 0.0
    attention: float = UNLIMITED


def kept_rates() -> Rates | None:
    """The measured rates; None: there are none for this device."""
    key = _key()
    for row in read_rows(file_of(FILE)):
        values = {name: row.get(name) for name in Rates.__dataclass_fields__}
        if row.items() >= key.items() and all(isinstance(value, float) and value >= 0 for value in values.values()):
            return Rates(**values)  # type: ignore[arg-type]  # they are floats
    return None


def rates_with(products: float, disk: float) -> Rates:
    """The measured rates of layers, or typical ones, beside these rates of weights and disk."""
    kept = kept_rates()
    if kept is not None:
        return replace(kept, products=products, disk=disk)
    return Rates(products, disk, *TYPICAL["cpu" if not backend.has_kernels() else backend.name()])


def keep_rates(rates: Rates) -> None:
    with suppress(OSError):  # the next doctor measures again
        keep_row(file_of(FILE), {**_key(), **asdict(rates)}, "device")


def _key() -> Row:
    threads = f"CPU, {native.threads() if native.available() else 1} threads"
    return {"device": gpu_name() if mx.default_device() == mx.gpu else threads, "mlx": mlx_version()}

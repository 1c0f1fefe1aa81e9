"""Compares the ranks' settings before they load a model: it must be the same one, used in the same way.

Every rank gets all settings, so a difference raises the same error everywhere. Chips and versions of MLX may differ;
then all ranks use rank 0's choice of experts.
"""

import importlib.metadata
import platform
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import mlx.core as mx
import numpy as np

from ..errors import RankError
from ..ops import backend, native
from ..state.fingerprint import Fingerprint
from .group import FAILED, FINE, Exchange
from .owners import MOST_SHARE

HELLO, SETTINGS = 5, 6  # kinds of messages
PROTOCOL = 2
REMEDIES = {
    "package": "install the same moeflux-mlx everywhere",
    "model": "give all ranks a copy of the same model directory",
    "dtype": "give all ranks the same --dtype",
    "rounding": "give all ranks the same --set cpu_activations=BITS",
    "kv_bits": "give all ranks the same --kv-bits",
    "context": "give all ranks the same --context",
}
MAY_DIFFER = {"mlx": "MLX versions", "chip": "chips"}


@dataclass(frozen=True)
class Settings:
    """The settings of a rank.

    Args:
        package, mlx, chip, model, dtype: digests of names and versions.
        rounding: number of bits to which the CPU's products round activations.
        kv_bits: number of bits of cached keys and values; 0: unchanged.
        context: number of positions for which memory is planned.
        span, block: the largest sizes for which this rank has room.
        shares_routing: whether the user requested rank 0's choice of experts.
        slots: number of slots of a pool into which this rank can read any expert; 0: it has only its own experts.
    """

    package: int
    mlx: int
    chip: int
    model: int
    dtype: int
    rounding: int
    kv_bits: int
    context: int
    span: int
    block: int
    shares_routing: int
    slots: int


NAMES = [field.name for field in fields(Settings)]


@dataclass(frozen=True)
class Agreement:
    """The agreed settings: the smallest span and block, a message to print once, and the slots of all pools if every
    rank can read every expert.
    """

    span: int
    block: int
    shares_routing: bool
    note: str
    slots: tuple[int, ...] = ()


def digest(text: str) -> int:
    """32 bits of a name."""
    return zlib.crc32(text.encode())


def digests(model: Fingerprint, dtype: mx.Dtype) -> dict[str, int]:
    """The settings that are names and versions."""
    return {
        "package": digest(_package()),
        "mlx": digest(importlib.metadata.version("mlx")),
        "chip": digest(_chip()),
        "model": digest(model.model + model.tokenizer),
        "dtype": digest(str(dtype)),
    }


def _package() -> str:
    try:
        return importlib.metadata.version("moeflux-mlx")
    except importlib.metadata.PackageNotFoundError:  # run from a source directory
        return ""


def _chip() -> str:
    """What determines the last bits: the GPU, or the CPU's instruction set."""
    if backend.has_kernels():
        return str(mx.device_info()["device_name"])
    return f"{platform.machine()} {native.instruction_paths()[:1]}"


def greet(exchange: Exchange, share: int) -> tuple[int, ...]:
    """Exchanges the ranks' shares in the first message.

    Raises:
        RankError: a share is invalid, or a rank has another version.
    """
    hello = exchange(HELLO, np.array([PROTOCOL, len(NAMES), share], np.uint32)).words
    for rank, theirs in enumerate(hello.tolist()):
        if theirs[:2] != hello[0, :2].tolist():
            raise RankError(f"rank {rank} speaks protocol {theirs[0]}, rank 0 {hello[0, 0]}; {REMEDIES['package']}")
        if not 1 <= theirs[2] <= MOST_SHARE:
            raise RankError(f"rank {rank} asks for a share of {theirs[2]}; it must be from 1 to {MOST_SHARE}")
    return tuple(hello[:, 2].tolist())


def agree(exchange: Exchange, own: Settings | None) -> Agreement:
    """Compares the settings of all ranks; None means that this rank has failed, and tells the others.

    Raises:
        RankError: settings differ that must be equal; every rank gets the same message.
    """
    words = np.array([0 if own is None else getattr(own, name) for name in NAMES], np.uint32)
    gathered = exchange(SETTINGS, words, flag=FINE if own else FAILED)
    if (failed := gathered.first(FAILED)) is not None:
        raise RankError(f"rank {failed} cannot take part; its own message says why")
    settings = [Settings(*row) for row in gathered.words.tolist()]
    _check(settings)
    unlike = [name for name in MAY_DIFFER if len({getattr(one, name) for one in settings}) > 1]
    differing = " and ".join(MAY_DIFFER[name] for name in unlike)
    note = f"note: the ranks have different {differing}; all use rank 0's choice of experts" if unlike else ""
    return Agreement(
        min(one.span for one in settings),
        min(one.block for one in settings),
        bool(unlike) or any(one.shares_routing for one in settings),
        note,
        tuple(one.slots for one in settings) if all(one.slots for one in settings) else (),
    )


def _check(settings: Sequence[Settings]) -> None:
    for rank, one in enumerate(settings):
        for name, remedy in REMEDIES.items():
            theirs, first = getattr(one, name), getattr(settings[0], name)
            if theirs != first:
                figures = f" ({theirs}, and rank 0 {first})" if name == "context" else ""
                raise RankError(f"rank {rank} has another {name} than rank 0{figures}; {remedy}")

"""Keeps which experts a model's steps use most, and fills the pool with these when the model is loaded again.

    {"version": 1, "found": [{"model": DIRECTORY, "experts": BYTES, "shape": [LAYERS, EXPERTS], "steps": STEPS,
                              "rates": BASE64}, ...]}

There is one entry for each directory of a model, the last one used at the end. `rates` are little-endian uint16: the
share of steps that used each expert, times 65535. Steps count half as much after every `HALF_LIFE` steps. The file is
replaced as a whole, and entries at its beginning go when it exceeds `MOST_BYTES`.
"""

import base64
import os
import weakref
from binascii import Error as Base64Error
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..experts.source import ExpertLoader
from ..experts.streamed import StreamedExperts
from ..experts.warming import Usage
from .measured import Row, change_rows, file_of, read_rows

MODES = ("auto", "off")
VARIABLE = "MOEFLUX_WARM_START"
HALF_LIFE = 4096  # steps
MOST_BYTES = 2 << 20  # an entry of 60 layers with 384 experts has 61 KB
ONE = 0xFFFF


@dataclass(frozen=True)
class KeptUsage:
    """The share of steps that used each expert, float64 [layers that have experts, experts], and the number of steps,
    older ones counting less.
    """

    rates: np.ndarray
    steps: float

    @classmethod
    def of_row(cls, row: Row) -> "KeptUsage | None":
        """None: it is damaged."""
        with suppress(KeyError, TypeError, ValueError, OverflowError, Base64Error):
            rates = np.frombuffer(base64.b64decode(row["rates"], validate=True), "<u2").reshape(row["shape"]) / ONE
            steps = float(row["steps"])
            return cls(rates, steps) if rates.ndim == 2 and 0 < steps < 1e18 else None
        return None

    def after(self, usage: Usage) -> "KeptUsage":
        """Including a session's steps."""
        earlier = self.steps * 0.5 ** (usage.steps / HALF_LIFE)
        steps = earlier + usage.steps
        return KeptUsage((self.rates * earlier + usage.counts) / steps, steps)

    def row(self) -> Row:
        rates = np.round(self.rates.clip(0, 1) * ONE).astype("<u2")
        return {"shape": rates.shape, "steps": self.steps, "rates": base64.b64encode(rates.tobytes()).decode()}


def usage_file() -> Path:
    return file_of("used_experts.json")


def begin_warm_start(mode: str, model: Path, source: ExpertLoader) -> None:
    """Fills the free memory of a pool with the experts that earlier sessions used most, and keeps what this one uses
    when the source is closed or the process ends. Does nothing for experts that are not streamed.

    Args:
        mode: of `MODES`; "auto": as the environment variable MOEFLUX_WARM_START says, else on.
        model: the directory of the model.
    """
    wanted = mode == "auto" and os.environ.get(VARIABLE) != "off"
    if not wanted or not isinstance(source, StreamedExperts):
        return
    key: Row = {"model": str(model.resolve()), "experts": source.layout.total_bytes}
    keeping = weakref.finalize(source, keep, key, source.usage, os.getpid())
    source.at_close(keeping)
    with suppress(OSError):
        if (kept := kept_of(key, source.usage.counts.shape)) is not None:
            source.warm(kept.rates)


def kept_of(key: Row, shape: tuple[int, ...]) -> KeptUsage | None:
    """What earlier sessions of the model have used; None: nothing, or the file is damaged."""
    rows = (row for row in read_rows(usage_file()) if row.items() >= key.items())
    kept = next(filter(None, map(KeptUsage.of_row, rows)), None)
    return kept if kept is not None and kept.rates.shape == shape else None


def keep(key: Row, usage: Usage, process: int) -> None:
    """Adds a session to the file; if that is impossible, the next session does without it."""
    if not usage.steps or os.getpid() != process:
        return

    def change(rows: list[Row]) -> list[Row]:
        before = kept_of(key, usage.counts.shape) or KeptUsage(np.zeros_like(usage.counts), 0.0)
        rows = [row for row in rows if row.get("model") != key["model"]]
        rows.append({**key, **before.after(usage).row()})
        while len(rows) > 1 and sum(len(str(row)) for row in rows) > MOST_BYTES:
            del rows[0]
        return rows

    with suppress(OSError):
        change_rows(usage_file(), change)

"""Guesses which experts the next token or layer will want, and learns where guessing pays.

Two predictors: the experts that the layer used for the previous token, and the next layer's router
applied to this layer's hidden state. Published recall on real models is 25-43 % for the first and
53-89 % for the second (flash-moe, moeflux, slotstream, WASTE, BigMoeOnEdge; README), so the second is the
default. A guess changes when bytes are read, never which bytes are used. It knows ids, not bytes.
"""

from dataclasses import dataclass, field

import numpy as np

WARMUP = 32  # judged guesses before a layer may be switched off
LEAST_USEFUL = 0.5  # share of guessed reads that must be used: a wasted read delays a needed one by as much
MEMORY = 0.95  # weight of the past in the running share
RETRY = 512  # guesses that a layer sits out before it is tried again


@dataclass
class LayerRecord:
    """How well guessing works for one layer: `useful` is a running share of prefetched experts used."""

    previous: np.ndarray | None = None
    useful: float = 1.0
    judged: int = 0
    sat_out: int = 0


@dataclass
class Predictor:
    """Per-layer predictions and their record.

    Args:
        depth: how many of the most confident candidates to take.
        confidence: a candidate must have this share of the top candidate's probability.
    """

    depth: int
    confidence: float = 0.3
    layers: dict[int, LayerRecord] = field(default_factory=dict)

    def record(self, layer: int) -> LayerRecord:
        return self.layers.setdefault(layer, LayerRecord())

    def observe(self, layer: int, ids: np.ndarray) -> None:
        """The experts that `layer` really used for this token."""
        self.record(layer).previous = np.unique(ids)

    def previous(self, layer: int) -> np.ndarray:
        """Experts of the previous token; empty at first."""
        found = self.record(layer).previous
        return np.empty(0, np.int64) if found is None else found

    def confident(self, ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Of candidates [T, N] sorted by score, those near enough to the best, at most `depth` a row."""
        keep = scores[:, : self.depth] >= self.confidence * scores[:, :1]
        return np.unique(ids[:, : self.depth][keep])

    def pays(self, layer: int) -> bool:
        """Whether to guess for this layer; a layer that was switched off is tried again after a while."""
        record = self.record(layer)
        if record.judged < WARMUP or record.useful >= LEAST_USEFUL:
            return True
        record.sat_out += 1
        if record.sat_out >= RETRY:
            self.layers[layer] = LayerRecord(previous=record.previous)
        return False

    def judge(self, layer: int, used: int, wasted: int) -> None:
        """Of the experts read ahead for `layer`, how many its next token used."""
        record = self.record(layer)
        for value in [1.0] * used + [0.0] * wasted:
            record.useful = MEMORY * record.useful + (1 - MEMORY) * value
            record.judged += 1

    def reset(self) -> None:
        self.layers.clear()

"""Reads records before they are requested: predicts the next experts, and learns when prediction is worthwhile.

The predictor is the next layer's router applied to this layer's hidden state. Its published recall on real models is
53-89 % (flash-moe, moeflux, slotstream, WASTE, BigMoeOnEdge). A prediction changes when bytes are read, never which
bytes are used. This module knows ids, not bytes.
"""

import statistics
import time
from dataclasses import dataclass, field

import numpy as np

from ..ops.tiles import MAX_TOKENS
from .routing import Routing
from .source import ExpertLoader, Owned, all_of

WARMUP = 8  # guesses to judge before a layer may be switched off: about those of one token
LEAST_USEFUL = 0.5  # least share of guessed reads that must be used; a wasted read delays a needed one by its own time
MEMORY = 0.95  # weight of the past in the running share
RETRY = 512  # guesses that a switched-off layer skips before it is tried again
TURN = 4  # tokens in a row with, then without reading ahead during a trial
TURNS = 6
VERDICT = 384  # tokens for which a verdict holds; during a trial at most half of the tokens are slower


@dataclass
class LayerGuesses:
    """How well guessing works for one layer: `useful` is the running share of prefetched experts that were used."""

    useful: float = 0.7  # typical of real models, so that a layer where guesses fail soon drops below LEAST_USEFUL
    judged: int = 0
    skipped: int = 0


@dataclass
class Predictor:
    """Predictions per layer, and how often they were right.

    Args:
        confidence: a predicted expert needs at least this share of the weight of the token's heaviest expert.
    """

    confidence: float = 0.3
    layers: dict[int, LayerGuesses] = field(default_factory=dict)

    def record(self, layer: int) -> LayerGuesses:
        return self.layers.setdefault(layer, LayerGuesses())

    def confident(self, ids: np.ndarray, weights: np.ndarray) -> list[int]:
        """The predicted experts [T, K] whose weight is close enough to the heaviest of their row, each once, the
        closest first.
        """
        shares = weights / weights.max(axis=1, keepdims=True)
        by_share = sorted(zip(shares.ravel().tolist(), ids.ravel().tolist(), strict=True), key=lambda one: -one[0])
        return list(dict.fromkeys(expert for share, expert in by_share if share >= self.confidence))

    def pays(self, layer: int) -> bool:
        """Whether to guess for this layer. A layer that was switched off is tried again later."""
        record = self.record(layer)
        if record.judged < WARMUP or record.useful >= LEAST_USEFUL:
            return True
        record.skipped += 1
        if record.skipped >= RETRY:
            self.layers[layer] = LayerGuesses()
        return False

    def judge(self, layer: int, ahead: list[int], ids: np.ndarray) -> None:
        """Compares the experts read `ahead` for `layer` with those that its token used."""
        if not ahead:
            return
        record = self.record(layer)
        used = set(ids.reshape(-1).tolist())
        for expert in ahead:
            record.useful = MEMORY * record.useful + (1 - MEMORY) * (expert in used)
            record.judged += 1


class Trial:
    """Measures whether reading ahead makes tokens faster on this machine, drive and text.

    A busy drive or processor makes even good guesses a loss. A trial alternates turns of a few tokens with and without
    reading ahead. The smaller median time wins and holds until the next trial; in a tie nothing is read ahead.
    """

    def __init__(self) -> None:
        self.ahead = True
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._left = 0  # remaining tokens for which the verdict holds

    def token(self, seconds: float) -> None:
        """Records the time of one more token."""
        if self._left:
            self._left -= 1
            return
        self._times[self.ahead].append(seconds)
        done = len(self._times[True]) + len(self._times[False])
        if done < TURN * TURNS:
            self.ahead = done // TURN % 2 == 0
            return
        self.ahead = statistics.median(self._times[True]) < statistics.median(self._times[False])
        self._left = VERDICT
        self._times = {True: [], False: []}


class Lookahead:
    """The policy of one model: what to read ahead when a layer has requested its experts, and what to evict first.

    Args:
        source: serves the experts.
        prefetch: "lookahead" reads ahead the predicted choice of the next layer's router, "off" nothing.
        owned: selects the experts that the source serves.
    """

    def __init__(self, source: ExpertLoader, prefetch: str, owned: Owned = all_of):
        self.source, self.layout, self._owned = source, source.layout, owned
        self.prefetch = prefetch if source.reads_ahead else "off"
        self.predictor, self.trial = Predictor(), Trial()
        self._started = 0.0
        self._ahead: dict[int, list[int]] = {}  # experts read ahead for a layer, to be judged when it runs

    def wants_guess(self, layer: int, tokens: int) -> bool:
        """Whether a prediction of the experts of `layer` would be used now."""
        if self.prefetch != "lookahead" or tokens > MAX_TOKENS or self.source.holds(layer):
            return False
        return self.trial.ahead and self.predictor.pays(layer)

    def requested(self, routing: Routing, ids: np.ndarray) -> None:
        """To be called when a layer has requested its experts `ids` [T, K]; reads ahead for the next layer."""
        guess = routing.guess
        if self.source.reads_ahead:
            self._judge(routing.layer, np.array(list(dict.fromkeys(ids.T.ravel().tolist()))))
        if guess is not None:
            wanted = self.predictor.confident(np.array(guess.ids), np.array(guess.weights))
            self._read_ahead(guess.layer, wanted)

    def skipped(self, layer: int) -> None:
        """To be called when a token has used the experts of `layer` without a request: neither the time of this token
        nor what an earlier one read ahead for the layer is judged.
        """
        self._started = 0.0
        self._ahead.pop(layer, None)

    def _judge(self, layer: int, ids: np.ndarray) -> None:
        """Learns from the records read ahead for `layer`, and demotes those not worth keeping.

        `ids`: the experts that the rows of a step use, each once, first choices first. If the pool is smaller than the
        experts of a step, each layer keeps only its share: otherwise every record would be evicted just before its
        layer runs again.
        """
        self._time_token(layer)
        ahead = self._ahead.pop(layer, [])
        self.predictor.judge(layer, ahead, ids)
        self.source.give_way(layer, [expert for expert in ahead if expert not in ids])
        guesses = 0 if self.prefetch == "off" else len(ids)
        share = self.source.slots_per_layer(spare=guesses)
        if share < len(ids):
            self.source.give_way(layer, ids[share:].tolist())

    def _time_token(self, layer: int) -> None:
        """Gives the trial the time of a token from its first layer's request to its last layer's."""
        if layer == self.layout.moe_layers[0]:
            self._started = time.perf_counter()
        elif layer == self.layout.moe_layers[-1] and self.prefetch != "off" and self._started:
            self.trial.token(time.perf_counter() - self._started)
            self._started = 0.0

    def _read_ahead(self, layer: int, ids: list[int]) -> None:
        keys = [(layer, expert) for expert in self._owned(layer, ids)]
        self._ahead[layer] = [expert for _, expert in self.source.hint(keys)]

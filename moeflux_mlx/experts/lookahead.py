"""Reads records before they are requested: predicts the next experts, and learns where and when prediction pays.

There are two predictors: the experts that the layer used for the previous token, and the next layer's router applied to
this layer's hidden state. Published recall on real models is 25-43 % for the first and 53-89 % for the second
(flash-moe, moeflux, slotstream, WASTE, BigMoeOnEdge), so the second is the default. A guess changes when bytes are
read, never which bytes are used. This module knows ids, not bytes.
"""

import statistics
import time
from dataclasses import dataclass, field

import numpy as np

from ..ops.tiles import MAX_TOKENS
from .routing import Routing
from .source import ExpertLoader, Owned, all_of

WARMUP = 8  # judged guesses before a layer may be switched off: about one token's
LEAST_USEFUL = 0.5  # share of guessed reads that must be used: a wasted read delays a needed one by as much
MEMORY = 0.95  # weight of the past in the running share
RETRY = 512  # guesses that a layer sits out before it is tried again
TURN = 4  # tokens in a row with, then without reading ahead while a trial lasts
TURNS = 6
VERDICT = 384  # tokens that a verdict holds: a trial costs at most half of its tokens' loss


@dataclass
class LayerGuesses:
    """How well guessing works for one layer: `useful` is a running share of prefetched experts used."""

    previous: np.ndarray | None = None
    useful: float = 0.7  # what real models give, so that a layer where guesses fail is soon below LEAST_USEFUL
    judged: int = 0
    skipped: int = 0


@dataclass
class Predictor:
    """Per-layer predictions and their record.

    Args:
        confidence: a predicted expert must have this share of the weight of the token's first one.
    """

    confidence: float = 0.3
    layers: dict[int, LayerGuesses] = field(default_factory=dict)

    def record(self, layer: int) -> LayerGuesses:
        return self.layers.setdefault(layer, LayerGuesses())

    def observe(self, layer: int, ids: np.ndarray) -> None:
        """The experts [T, K] that `layer` really used."""
        self.record(layer).previous = np.unique(ids)

    def previous(self, layer: int) -> list[int]:
        """Experts of the previous token; none at first."""
        previous = self.record(layer).previous
        return [] if previous is None else previous.tolist()

    def confident(self, ids: np.ndarray, weights: np.ndarray) -> list[int]:
        """Of predicted experts [T, K] and their weights, those near enough to the heaviest of a row, each once; first
        those that are nearest."""
        shares = weights / weights.max(axis=1, keepdims=True)
        by_share = sorted(zip(shares.ravel().tolist(), ids.ravel().tolist(), strict=True), key=lambda one: -one[0])
        return list(dict.fromkeys(expert for share, expert in by_share if share >= self.confidence))

    def pays(self, layer: int) -> bool:
        """Whether to guess for this layer; a layer that was switched off is tried again after a while."""
        record = self.record(layer)
        if record.judged < WARMUP or record.useful >= LEAST_USEFUL:
            return True
        record.skipped += 1
        if record.skipped >= RETRY:
            self.layers[layer] = LayerGuesses(previous=record.previous)
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
    """Whether reading ahead makes tokens faster on this machine, drive and text: tried, not predicted.

    A busy drive or processor makes even good guesses a loss. Turns of a few tokens with and without reading
    ahead alternate; the smaller median time wins and stays until the next trial. Without a clear winner
    nothing is read ahead.
    """

    def __init__(self) -> None:
        self.ahead = True
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._left = 0  # tokens for which the verdict still holds

    def token(self, seconds: float) -> None:
        """One more token took so long."""
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
    """The policy of one model: what to read ahead when a layer has asked for its experts, and what to give up.

    Args:
        source: serves the experts.
        prefetch: "lookahead" reads ahead what the next layer's router is predicted to choose, "previous" what the next
            layer used for the previous token, "off" nothing.
        owned: which experts the source serves.
    """

    def __init__(self, source: ExpertLoader, prefetch: str, owned: Owned = all_of):
        self.source, self.layout, self._owned = source, source.layout, owned
        self.prefetch = prefetch if source.reads_ahead else "off"
        self.predictor, self.trial = Predictor(), Trial()
        self._started = 0.0
        self._ahead: dict[int, list[int]] = {}  # experts read ahead for a layer, to be judged when it runs

    def wants_guess(self, layer: int, tokens: int) -> bool:
        """Whether predicting the experts of `layer` would be of use now."""
        if self.prefetch != "lookahead" or tokens > MAX_TOKENS or self.source.holds(layer):
            return False
        return self.trial.ahead and self.predictor.pays(layer)

    def requested(self, routing: Routing, ids: np.ndarray) -> None:
        """A layer has asked for its experts `ids` [T, K]: now for the next one's."""
        guess = routing.guess
        if self.source.reads_ahead:
            self._judge(routing.layer, np.array(list(dict.fromkeys(ids.T.ravel().tolist()))))
        if guess is not None:
            wanted = self.predictor.confident(np.array(guess.ids), np.array(guess.weights))
            self._read_ahead(guess.layer, wanted)
        elif self.prefetch == "previous":
            self._read_previous(routing.layer, ids)

    def _judge(self, layer: int, ids: np.ndarray) -> None:
        """Learns from what was read ahead for `layer`, and makes room where it is not worth keeping.

        `ids`: what the rows of a step use, each expert once, every row's first choices first. In a pool smaller than
        what a step uses each layer keeps its share only: least-recently-used order alone would evict every record just
        before its layer comes round again.
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
        """Tells the trial how long a token took from its first layer's request to its last layer's."""
        if layer == self.layout.moe_layers[0]:
            self._started = time.perf_counter()
        elif layer == self.layout.moe_layers[-1] and self.prefetch != "off":
            self.trial.token(time.perf_counter() - self._started)

    def _read_previous(self, layer: int, ids: np.ndarray) -> None:
        """Reads ahead what the next layer used for the previous token."""
        self.predictor.observe(layer, ids)
        following = self.layout.next_moe_layer(layer)
        if following is not None and self.trial.ahead and self.predictor.pays(following):
            self._read_ahead(following, self.predictor.previous(following))

    def _read_ahead(self, layer: int, ids: list[int]) -> None:
        keys = [(layer, expert) for expert in self._owned(layer, ids)]
        self._ahead[layer] = [expert for _, expert in self.source.hint(keys)]

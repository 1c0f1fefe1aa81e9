"""A draft head: one layer that proposes the token after the next one from hidden states that the model has computed.

It knows no text. Every proposal is checked, so the head's bits only decide how many proposals are accepted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..caches.layer_cache import LayerCache
from ..experts.routing import RoutedExpertsCall, finished
from ..families.registry import FAMILIES
from ..layers import Caches, Linear, RMSNorm
from ..mixers.registry import USUAL, make_caches
from ..ops import backend
from ..ops.backend import AnyArray, Array, EitherArray
from ..ops.seen import Chosen
from ..ops.tiles import MAX_TOKENS
from ..spec import ModelArgs
from .compiled import DecodeStep
from .layer import DecoderLayer
from .span import Span
from .step import MAX_OF_SEQUENCE


@dataclass(frozen=True)
class SharedParts:
    """The parts that a head shares with its model.

    Args:
        embed: ids [1, n] -> hidden states [1, n, hidden_size].
        logits: of normed hidden states [1, n, hidden_size].
        computing: the settings of the model's kernels.
    """

    embed: Callable[[mx.array], Any]
    logits: Callable[[Any], Any]
    computing: Callable[[], AbstractContextManager[None]]


class _Layers(nn.Module):
    """The part that checkpoints of models call `model`."""

    def __init__(self, args: ModelArgs, experts: RoutedExpertsCall | None, forms: frozenset[str]):
        super().__init__()
        self.layers = [DecoderLayer(args, 0, experts, forms)]
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps)


class DraftHead(nn.Module):
    """norm(layer(fc([enorm(e); hnorm(h)]))): of the model's hidden states h of positions and the embeddings e of the
    tokens after them, what the model's lm_head makes the tokens after those of (DeepSeek-V3, arXiv:2412.19437, 2.2).

    Args:
        args: those of a model of one layer, the head's (`ModelArgs.head`).
        experts: computes its routed experts; None if only the shapes are needed.
        forms: as for `Model`.
    """

    def __init__(self, args: ModelArgs, experts: RoutedExpertsCall | None, forms: frozenset[str] = USUAL):
        super().__init__()
        self.args = args
        self.enorm, self.hnorm = (RMSNorm(args.hidden_size, args.rms_norm_eps) for _ in range(2))
        self.fc = Linear(2 * args.hidden_size, args.hidden_size)
        self.model = _Layers(args, experts, forms)
        self._shared: SharedParts | None = None
        self._experts = experts
        self._steps: list[DecodeStep] = []  # for a few rows on a GPU with the experts: without and with a draft
        if experts is not None and experts.source.is_resident:
            self._steps = [DecodeStep(self._row), DecodeStep(self._drafting_row)]
            for step in self._steps:
                experts.source.at_close(step.forget)

    @property
    def takes_normed(self) -> bool:
        """Whether h are the hidden states after the model's last norm; otherwise those before it."""
        names = FAMILIES[self.args.model_type].head
        return names is None or names.takes_normed

    def bind(self, shared: SharedParts) -> None:
        """Connects the head with the model that has `shared`."""
        self._shared = shared

    def close(self) -> None:
        """Frees its experts' memory."""
        if self._experts is not None:
            self._experts.source.close()

    def make_cache(self) -> list[LayerCache]:
        """The empty caches of its layer."""
        return list(make_caches(self.args.mixers[0]))

    def absorb(
        self, hidden: Sequence[EitherArray], tokens: Sequence[int], cache: Sequence[LayerCache], draft: bool = False
    ) -> tuple[EitherArray, mx.array | None]:
        """Takes hidden states, in parts [1, ., hidden_size], with the tokens after them.

        Returns:
            The output for the last position, [1, 1, hidden_size], and the token [1, 1] drafted from it, if `draft`.
        """
        ids = mx.array(list(tokens), mx.uint32)[None]
        with self._computing() as shared:
            if self._steps and len(tokens) <= MAX_OF_SEQUENCE and self._steps[0].takes(ids, [cache] * len(tokens)):
                return self._in_a_step(hidden, ids, cache, draft)
            x = self._joined(shared.embed(ids), hidden)
            out = backend.contiguous(self._normed(x, cache)[:, -1:])
        return out, self.next(out) if draft else None

    def _in_a_step(
        self, hidden: Sequence[EitherArray], ids: mx.array, cache: Sequence[LayerCache], draft: bool
    ) -> tuple[EitherArray, mx.array | None]:
        """`absorb` by a compiled step."""
        states = mx.concatenate([backend.leave(part) for part in hidden], axis=1)
        out, *token = self._steps[draft](ids, [cache] * ids.shape[1], states)
        return out[:, -1:], token[0] if token else None

    def next(self, out: EitherArray) -> mx.array:
        """The most likely token [1, 1] after `out`, a result of `absorb` or `follow`."""
        with self._computing() as shared:
            return mx.argmax(backend.leave(shared.logits(out)), axis=-1)

    def follow(self, out: AnyArray, token: mx.array, cache: Sequence[LayerCache]) -> tuple[EitherArray, mx.array]:
        """Uses `out` as the hidden state before the drafted `token` [1, 1]; returns the output and the next token."""
        with self._computing() as shared:
            if self._steps and self._steps[1].takes(token, [cache]):
                out, token = self._steps[1](token, [cache], out)
                return out, token
            out = self._normed(self._joined(shared.embed(token), [out]), cache)
        return out, self.next(out)

    def _row(self, token: mx.array, caches: Sequence[Any], hidden: mx.array) -> list[mx.array]:
        """The function that is compiled."""
        assert self._shared is not None
        return [self._normed(self._joined(self._shared.embed(token), [hidden]), caches)]

    def _drafting_row(self, token: mx.array, caches: Sequence[Any], hidden: mx.array) -> list[mx.array]:
        """The function that is compiled, including the token after the last row."""
        assert self._shared is not None
        out = self._row(token, caches, hidden)[0]
        return [out, mx.argmax(self._shared.logits(out[:, -1:]), axis=-1)]

    @contextmanager
    def _computing(self) -> Iterator[SharedParts]:
        assert self._shared is not None, "the head is bound to no model"
        with self._shared.computing():
            yield self._shared

    def _joined(self, embedded: Array, hidden: Sequence[EitherArray]) -> Array:
        """[1, n, hidden_size] for the layer."""
        library = backend.library_of(embedded)
        h = library.concatenate([backend.of_kind(part, embedded) for part in hidden], axis=1).astype(embedded.dtype)
        return self.fc(library.concatenate([self.enorm(embedded), self.hnorm(h)], axis=-1))

    def _normed(self, x: Array, cache: Caches) -> Array:
        """The layer's normed output for x [1, n, hidden_size]."""
        layer, count = self.model.layers[0], x.shape[1]
        if count <= MAX_TOKENS:
            return self.model.norm(layer(x, cache, Chosen()))
        span = Span(mx.zeros((1, count), mx.uint32), cache[0].offset, count)
        return self.model.norm(finished(layer.pass_span(x, cache, span)))

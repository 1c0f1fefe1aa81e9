"""The state of a session: a model's caches, the tokens that they have absorbed, and the states to rewind to.

`sync` continues from the longest prefix of a new prompt that is in memory or in a prompt store, and computes only the
rest; `step` absorbs further tokens; `rewind` goes back.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import mlx.core as mx

from ..caches.layer_cache import Arrays, LayerCache
from ..errors import DeviceError, PromptCacheError, SnapshotError
from ..mixers.registry import untrimmable_bytes
from ..model.decoder import Model
from ..model.span import Span
from ..model.step import SequenceRows, Step
from ..state.prompt_store import PromptStore, restore_prefix
from ..state.rewind import RewindPoints
from ..text.boundaries import shared_length
from .head_drafts import head_drafts
from .prefill import Prefill
from .prompt import Prompt, checked_prompt

CHECKPOINT_BYTES = 1 << 30
CHECKPOINT_EVERY = 1024  # tokens between kept states, in addition to those at the ends of prompts


class Stopped(Exception):
    """Raised by a caller's progress callback to leave a prompt half computed."""


@dataclass
class Reuse:
    """Where the tokens of the last prompt came from; `out_of_reach` counts computed tokens that also begin a saved
    prompt, whose state belongs to a longer text and cannot be cut.
    """

    prompt: int = 0
    memory: int = 0
    disk: int = 0
    out_of_reach: int = 0

    @property
    def computed(self) -> int:
        return self.prompt - self.memory - self.disk


@dataclass
class Half:
    """A span that was left between two layers, and its tokens."""

    span: Span
    tokens: list[int]


class TextOptions(TypedDict, total=False):
    """The keywords of `RunningText`."""

    store: PromptStore | None
    checkpoint_bytes: int
    checkpoint_every: int
    prefill_step_size: int | None
    span: int | None


class RunningText:
    """A text in progress.

    Args:
        store: searched before a prompt is computed; gets the state afterwards.
        checkpoint_bytes: limit of the states kept in memory (recurrent models only).
        checkpoint_every: tokens between kept states.
        prefill_step_size: the most tokens of a prompt that a mixer handles at once; None means the planned number.
        span: the most tokens of a prompt that go through the model together; None means the planned number.

    Attributes:
        tokens: the tokens that the caches have absorbed, with an image's keys for its rows.
        reuse: where the tokens of the last prompt came from.
        drafts: the state of the draft head for this text, or None.
        save_error: the error of saving the last prompt in the store, or None.
        to_store: the lengths of which the store gets the text after the answer, with the states that cannot be cut.
        half: the span in which the last prompt was stopped, or None.
    """

    def __init__(
        self,
        model: Model,
        *,
        store: PromptStore | None = None,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
        checkpoint_every: int = CHECKPOINT_EVERY,
        prefill_step_size: int | None = None,
        span: int | None = None,
    ):
        self.model, self.store = model, store
        self.checkpoint_every = checkpoint_every
        self.prefill_step_size, self.span = prefill_step_size, span
        self.cache = model.make_cache()
        self.points = RewindPoints(self.cache, checkpoint_bytes)
        self.drafts = head_drafts(model)
        self.tokens: list[int] = []
        self.reuse = Reuse()
        self.save_error: PromptCacheError | SnapshotError | None = None
        self.to_store: list[tuple[int, dict[int, Arrays]]] = []
        self.half: Half | None = None
        self._step: Step | None = None  # the last step, until the next operation
        self._answering = False  # whether an answer is being decoded

    def sync(
        self,
        prompt: Sequence[int],
        *,
        boundaries: Sequence[int] = (),
        prompt_progress_callback: Callable[[int, int], object] | None = None,
    ) -> mx.array:
        """Brings the caches to `prompt` and returns the logits [1, vocab_size] after its last token.

        After an exception the text can still be used. After `Stopped`, a prompt that begins with the same tokens
        continues in the middle of the span where it stopped; after a DeviceError the text is empty.

        Args:
            boundaries: lengths of the prompt's prefixes that later prompts are likely to share; the state at each is
                kept and given to the store. If there are none, the state of all tokens but the last is kept.
            prompt_progress_callback: called with (work done in tokens, number of tokens), reused tokens included; the
                first is always less. It may raise `Stopped`.

        Raises:
            RequestError: an empty prompt, or a token outside the vocabulary.
            PromptCacheError: the store is one file and cannot be used.
            ExpertIOError, DeviceError: as calling the model does.
        """
        prompt = checked_prompt(prompt, self.model)
        try:
            return self._sync(prompt, boundaries, prompt_progress_callback or _ignore_progress)
        except BaseException as error:
            self._recover(error)
            raise
        finally:
            self._save_states(prompt)

    def _recover(self, error: BaseException) -> None:
        """Makes the session usable again after `error`."""
        self._agree_again(keep_half=isinstance(error, Stopped))
        if isinstance(error, DeviceError):
            self._go_back(0)  # MLX may regard arrays as computed that the GPU never wrote

    def _agree_again(self, keep_half: bool) -> None:
        """After an exception, makes caches and tokens consistent again.

        An interrupted answer may leave layers that differ by a token; an interrupted prompt leaves whole spans and one
        that is half done.
        """
        if not keep_half:
            self._drop_half()
        apart = any(layer.offset != len(self.tokens) for layer in self.cache)
        if self._answering or (apart and self.half is None):
            self._go_back(len(self.tokens))

    def step(self, tokens: Sequence[int]) -> mx.array:
        """Absorbs the next tokens, at most `model.step.MAX_OF_SEQUENCE`, and returns the logits [n, vocab_size] after
        each.

        Until the next operation, `rewind` can return to each of them exactly.

        Raises:
            RequestError, ExpertIOError, DeviceError: as `Model.step`; the state after an error is as for `sync`.
        """
        self._drop_half()
        self._answering, self._step = False, None
        try:
            step = self.model.step([SequenceRows(self.cache, tokens)])
            self.tokens += [int(token) for token in tokens]
            self._keep_if_due()
        except BaseException as error:
            self._recover(error)
            raise
        self._step = step
        return step.logits

    def rewind(self, length: int) -> int:
        """Rewinds to the first `length` tokens, or to the nearest state before; returns the length reached."""
        self._drop_half()
        if length >= len(self.tokens):
            return len(self.tokens)
        if self._step is None or length < self._step.start(0):
            return self._go_back(length)
        del self.tokens[length:]
        self.points.drop_after(length)
        self._step.rewind(0, length - self._step.start(0))
        return length

    def keep(self) -> None:
        """Keeps the current state, so that another text can branch off here."""
        self.points.keep(len(self.tokens))

    def _go_back(self, length: int) -> int:
        self._step = None
        del self.tokens[self.points.nearest(length) :]  # first, so that an interrupted rewind is repeated in full
        return self.points.rewind(length)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, the kept states, those of the last step, a half-done span, and a draft head's state."""
        half = self.half.span.nbytes if self.half is not None else 0
        step = self._step.nbytes if self._step is not None else 0
        drafts = self.drafts.nbytes if self.drafts is not None else 0
        return sum(layer.nbytes for layer in self.cache) + self.points.nbytes + step + half + drafts

    def known(self, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` are already computed; a half-done span counts in proportion to its layers."""
        half = self.half
        if half is not None and list(prompt[: len(self.tokens) + half.span.length]) == self.tokens + half.tokens:
            return len(self.tokens) + half.span.length * half.span.layer // len(self.model.layers)
        shared = shared_length(self.tokens, prompt[:-1])
        return shared if shared == len(self.tokens) else self.points.nearest(shared)

    def _sync(self, prompt: Prompt, boundaries: Sequence[int], report: Callable[[int, int], object]) -> mx.array:
        """As `sync`, but after an exception the layers' caches may differ in length."""
        ends = sorted({n for n in boundaries if 0 < n < len(prompt)}) or [len(prompt) - 1]
        if self.points.can_trim:  # the other states can be cut from the last one
            ends = ends[-1:]
        self.save_error, self.to_store = None, []
        prefill = self._prefill(prompt, ends)
        start = len(self.tokens)
        try:
            return prefill.run(lambda done, total: report(start + done, len(prompt)))
        finally:
            self._absorbed(prompt, prefill, ends)

    def _prefill(self, prompt: Prompt, ends: list[int]) -> Prefill:
        """Brings the caches to the known prefix of `prompt` and returns the `Prefill` of the rest."""
        self._answering, self._step = False, None
        half = self._taken_up(prompt, ends)
        if half is None:
            self._drop_half()
            if any(layer.offset != len(self.tokens) for layer in self.cache):  # an earlier rewind was interrupted
                self._go_back(len(self.tokens))
            self._reuse(prompt)
        else:
            self.reuse = Reuse(len(prompt), len(self.tokens), 0)
        start, self.half = len(self.tokens), None
        if self.drafts is not None:
            self.drafts.begin(prompt)
        keep = self._worth_keeping(len(prompt), ends)
        self.points.set_apart(len(keep) * self._state_bytes())
        return Prefill(
            self.model,
            self.cache,
            prompt.tokens[start:],
            span=self.span,
            block=self.prefill_step_size,
            keep=[position - start for position in keep],
            half=half,
            drafts=self.drafts,
            images=prompt.images,
        )

    def _taken_up(self, prompt: list[int], ends: list[int]) -> Span | None:
        """The half-done span, if `prompt` begins with it and it keeps the states that `ends` require; else None."""
        if self.half is None:
            return None
        start, known = len(self.tokens), self.tokens + self.half.tokens
        wanted = {n - start for n in self._worth_keeping(len(prompt), ends) if n in ends and n <= len(known)}
        span = self.half.span
        return span if prompt[: len(known)] == known and wanted <= set(span.keep) else None

    def _worth_keeping(self, end: int, ends: list[int]) -> list[int]:
        """The positions at which states are kept while a prompt is absorbed up to `end`; those of `ends` come first."""
        start = len(self.tokens)
        keep = self.points.choose(start, end, ends, self.checkpoint_every, self._state_bytes())
        if self.store is not None and not self.points.can_trim:
            keep = sorted({*keep, *(n for n in ends if n > start)})
        return keep

    def _state_bytes(self) -> int:
        """Bytes of one state of the layers that cannot be cut."""
        return untrimmable_bytes(self.model.args.mixer_counts, self.model.activation_dtype.size)

    def _drop_half(self) -> None:
        if self.half is not None:
            self.half.span.drop(self.cache)
            self.half = None
            self.points.set_apart(0)

    def _reuse(self, prompt: list[int]) -> None:
        """Brings the caches to the longest known prefix of `prompt` that leaves a token to compute."""
        before, shared = self.tokens, shared_length(self.tokens, prompt[:-1])
        known = shared if shared == len(before) else self.points.nearest(shared)
        restored = saved = 0
        if self.store is not None:
            self.tokens = []  # if restoring is interrupted, the caches' contents are undefined
            try:
                restored, saved, behind = restore_prefix(self.model, self.cache, prompt, self.store, known)
            except PromptCacheError:
                self.tokens = before
                raise
        if restored:
            self.points.drop_after(shared)
            self.tokens = prompt[:restored]
            self.points.keep(restored)
            if self.drafts is not None:
                self.drafts.restore(behind, self.tokens)
        else:
            self.tokens = before
            if known < len(before):
                self._go_back(known)
        self.reuse = Reuse(len(prompt), 0 if restored else known, restored, max(saved - max(restored, known), 0))

    def _absorbed(self, prompt: list[int], prefill: Prefill, ends: list[int]) -> None:
        """Records which part of `prompt` `prefill` has computed."""
        start = len(self.tokens)
        self.tokens = prompt[: start + prefill.done]
        half, self.half = prefill.half, None
        if half is not None:
            at = len(self.tokens)
            self.half = Half(half, prompt[at : at + half.length])
        self.points.set_apart(half.nbytes if half is not None else 0)
        kept = {start + n: states for n, states in prefill.kept.items()}
        for position, states in sorted(kept.items()):
            self.points.add(position, states)
        prefill.kept.clear()
        if half is not None and half.nbytes > self.points.max_bytes:
            self._drop_half()
        if self.store is not None:
            self.to_store = [(end, kept.get(end, {})) for end in ends if start < end <= len(self.tokens)]

    def _append(self, token: int, keep: bool) -> None:
        """Records that the caches have absorbed a token of an answer. `keep`: they hold no draft, so the state may be
        kept.
        """
        self.tokens.append(token)
        if keep:
            self._keep_if_due()

    def _keep_if_due(self) -> None:
        reached = self.cache[0].offset  # includes a token that is computed ahead
        if reached >= self._due:
            self.points.keep(reached)

    @property
    def _due(self) -> int:
        """The position from which the next state is kept."""
        return max(self.points.positions, default=0) + self.checkpoint_every

    def _draft_limit(self) -> int:
        """The position beyond which no draft is absorbed, so that states are kept at the same positions as without
        drafts.
        """
        return sys.maxsize if self.points.can_trim or self._due < self.cache[0].offset else self._due

    def _save_states(self, prompt: list[int]) -> None:
        """Gives the kept states to the store. An error is noted instead of raised, because the answer matters more."""
        for end, states in self.to_store:
            caches = [_cut(layer, end, states.get(i)) for i, layer in enumerate(self.cache)]
            if any(layer.offset != end for layer in caches):
                continue  # an error rewound further, or the state was not kept
            try:
                assert self.store is not None
                behind = self.drafts.saved(end) if self.drafts is not None else b""
                self.store.save(self.model, caches, prompt[:end], behind)
            except (PromptCacheError, SnapshotError) as error:
                self.save_error = error
        self.to_store = []


def _cut(layer: LayerCache, length: int, kept: Arrays | None) -> LayerCache:
    """A copy of the cache as it was at `length`: from `kept`, or by cutting."""
    cut = layer.copy()
    if kept is not None or (layer.is_trimmable() and layer.offset > length):
        cut.go_back(length, kept)
    return cut


def _ignore_progress(done: int, total: int) -> None:
    """A progress callback that does nothing."""

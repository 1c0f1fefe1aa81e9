"""A session: one running text that answers prompts, one token at a time.

It has a model's caches, the tokens that they have absorbed, and the states to rewind to. A prompt goes on from its
longest prefix that is in memory or in a prompt store, and only the rest is computed. `respond` answers a prompt;
`answer` makes an answer for a `Loop`, in which several take turns. Messages and templates are the caller's concern.
"""

import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import mlx.core as mx

from ..caches.layer_cache import Arrays, LayerCache
from ..errors import DeviceError, PromptCacheError, SnapshotError
from ..experts.stats import Asked
from ..files import JsonDict
from ..mixers.registry import untrimmable_bytes
from ..model.decoder import Model
from ..model.span import Span
from ..ops.limits import within_limits
from ..state.prompt_file import Fingerprint, PromptHeader, load_prompt, save_prompt
from ..state.prompt_store import PromptStore, restore_prefix
from ..state.rewind import RewindPoints, after
from ..text.boundaries import shared_length
from ..text.tokenizer import TokenizerWrapper
from .decoding import Decoding
from .drafts import head_drafts
from .generation import GenerationResponse, Responder, Responses, SamplerOptions, check_max_tokens, respond
from .loop import Progress, Text, absorb_prompt
from .prefill import Prefill
from .prompt import Prompt, checked_prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack

CHECKPOINT_BYTES = 1 << 30
CHECKPOINT_EVERY = 1024  # tokens between kept states, in addition to those at the ends of prompts


class SessionOptions(TypedDict, total=False):
    """The keywords of `Session`."""

    store: PromptStore | None
    checkpoint_bytes: int
    checkpoint_every: int
    prefill_step_size: int | None
    span: int | None


class AnswerOptions(SamplerOptions, total=False):
    """The keywords of `Session.answer` that say how tokens are chosen, and how many."""

    max_tokens: int


class ResponseOptions(AnswerOptions, total=False):
    """The keywords of `Session.answer`."""

    boundaries: Sequence[int]


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


class Session:
    """A text in progress, and its answers.

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
        half: the span in which the last prompt was left, or None.
        first_token_seconds: seconds from the call of `respond` to the first token of the last answer.
        prompt_bytes: bytes of experts that were read for it until then.
        last: the newest response of `respond`; None before the first one.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: TokenizerWrapper,
        *,
        store: PromptStore | None = None,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
        checkpoint_every: int = CHECKPOINT_EVERY,
        prefill_step_size: int | None = None,
        span: int | None = None,
    ):
        self.model, self.tokenizer, self.store = model, tokenizer, store
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
        self.first_token_seconds, self.prompt_bytes = 0.0, 0
        self.last: GenerationResponse | None = None
        self._answering = False  # whether an answer is being decoded
        self._computing: Prefill | None = None  # the rest of a prompt

    def answer(
        self,
        prompt: Sequence[int],
        *,
        boundaries: Sequence[int] = (),
        max_tokens: int = 256,
        **choice: "Unpack[SamplerOptions]",
    ) -> "Answer":
        """Makes an answer to `prompt`, the token ids of the whole text so far; nothing is computed yet. Until it is
        over, the session must not be used otherwise.

        Args:
            boundaries: lengths of the prompt's prefixes that later prompts are likely to share; the state at each, or
                for those that are near behind the known text the state at its end, is kept and given to the store. If
                there are none, the state of all tokens but the last is kept.
            max_tokens: limit of the answer; -1: only an end-of-text token ends it.
            choice: `sampler` and `logits_processors`, as `generate_step`.

        Raises:
            RequestError: an empty prompt, a token outside the vocabulary, or a count out of range.
        """
        check_max_tokens(max_tokens)
        return Answer(self, checked_prompt(prompt, self.model), boundaries, max_tokens, choice)

    def respond(
        self,
        prompt: Sequence[int],
        prompt_progress_callback: Progress | None = None,
        **options: "Unpack[ResponseOptions]",
    ) -> Responses:
        """Yields the responses of an answer; `options` as for `answer`.

        After the iterator is closed or an exception is raised, the session can go on: a prompt that was left begins
        again in the middle of a span if it begins with the same tokens. After a DeviceError the text is empty.

        Args:
            prompt_progress_callback: called with (work done in tokens, number of tokens), reused tokens included, and
                with two equal numbers at the end. It may raise an exception to leave the prompt.

        Raises:
            RequestError: as `answer`.
            ModelFileError, ExpertIOError, DeviceError: as `generate_step`.
        """
        text, read = self.answer(prompt, **options), self._bytes_read()
        responder, callback = Responder(self.model, self.tokenizer, len(text.prompt)), prompt_progress_callback
        self.last = None

        def report(done: int, total: int) -> None:
            responder.computed = self.reuse.computed
            if callback is not None:
                callback(done, total)

        with closing(respond(text, responder, report)) as responses:
            for response in responses:
                if self.last is None:
                    self.first_token_seconds = responder.first_token_seconds
                    self.prompt_bytes = self._bytes_read() - read
                self.last = response
                yield response

    def _bytes_read(self) -> int:
        return 0 if self.model.experts is None else self.model.experts.stats.bytes_read

    def rewind(self, length: int) -> int:
        """Rewinds to the first `length` tokens, or to the nearest state before; returns the length reached."""
        self._drop_half()
        return self._go_back(length) if length < len(self.tokens) else len(self.tokens)

    def keep(self) -> None:
        """Keeps the current state, so that another text can branch off here."""
        self.points.keep(len(self.tokens))

    def fork(self, length: int) -> "Session":
        """Returns another session with the first `length` tokens, or with those up to the last kept state before that.

        This session does not change; arrays are shared until one of the two writes to them.
        """
        whole = self.half is None and length >= len(self.tokens)
        reached = len(self.tokens) if whole else self.points.nearest(min(length, len(self.tokens)))
        other = self._blank(
            store=self.store,
            checkpoint_bytes=self.points.max_bytes,
            checkpoint_every=self.checkpoint_every,
            prefill_step_size=self.prefill_step_size,
            span=self.span,
        )
        kept = {} if whole else self.points.states_at(reached)
        for i, (new, old) in enumerate(zip(other.cache, self.cache, strict=True)):
            new.take_from(old, reached, old.kept() if whole else kept.get(i))
        mx.eval([layer.state for layer in other.cache])
        other.tokens = self.tokens[:reached]
        other.drafts = self.drafts and self.drafts.copy()
        for position in self.points.positions:
            if position <= reached:
                other.points.add(position, self.points.states_at(position), position in self.points.ends)
        return other

    def _blank(self, **options: "Unpack[SessionOptions]") -> "Session":
        """A new session of this kind."""
        return Session(self.model, self.tokenizer, **options)

    def save(self, path: Path, fingerprint: Fingerprint, extra: JsonDict) -> None:
        """Writes tokens, state and `extra` to a file. Raises PromptCacheError, SnapshotError."""
        self._drop_half()
        behind = self.drafts.saved(len(self.tokens)) if self.drafts is not None else b""
        save_prompt(path, self.model, self.cache, self.tokens, fingerprint, extra, behind)

    def load(self, path: Path, fingerprint: Fingerprint) -> PromptHeader:
        """Restores what `save` wrote; after an error the session is unchanged. Raises PromptCacheError."""
        self._drop_half()
        header = load_prompt(path, self.model, self.cache, fingerprint)
        self.points.drop_after(0)
        self.tokens = header.tokens.tolist()
        self.points.keep(len(self.tokens))
        if self.drafts is not None:
            self.drafts.restore(header.behind, self.tokens)
        return header

    def recover(self, error: BaseException) -> None:
        """Makes the session usable again after an error of its answer."""
        self.agree_again(keep_half=False)
        if isinstance(error, DeviceError):
            self._go_back(0)  # MLX may regard arrays as computed that the GPU never wrote

    def agree_again(self, keep_half: bool) -> None:
        """When an answer was left, makes caches and tokens consistent again.

        An interrupted answer may leave layers that differ by a token; an interrupted prompt leaves whole spans and one
        that is half done.
        """
        if not keep_half:
            self._drop_half()
        apart = any(layer.offset != len(self.tokens) for layer in self.cache)
        if self._answering or (apart and self.half is None):
            self._go_back(len(self.tokens))

    def _go_back(self, length: int) -> int:
        del self.tokens[self.points.nearest(length) :]  # first, so that an interrupted rewind is repeated in full
        return self.points.rewind(length)

    @property
    def absorbed(self) -> int:
        """How many tokens every cache has absorbed, also in a prompt: once it is paused, `tokens` are as many."""
        return len(self.tokens) + (self._computing.done if self._computing is not None else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, the kept states, a half-done span, and a draft head's state."""
        half = self.half.span.nbytes if self.half is not None else 0
        drafts = self.drafts.nbytes if self.drafts is not None else 0
        return sum(layer.nbytes for layer in self.cache) + self.points.nbytes + half + drafts

    def known(self, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` are already computed; a half-done span counts in proportion to its layers."""
        half = self.half
        if half is not None and list(prompt[: len(self.tokens) + half.span.length]) == self.tokens + half.tokens:
            return len(self.tokens) + half.span.length * half.span.layer // len(self.model.visits)
        shared = shared_length(self.tokens, prompt[:-1])
        return shared if shared == len(self.tokens) else self.points.nearest(shared)

    def absorb_prompt(self, prompt: Prompt, boundaries: Sequence[int]) -> Generator[int, None, mx.array]:
        """Brings the caches to `prompt`, in pieces as `loop.absorb_prompt` has them; returns the logits after its end.

        The work done includes reused tokens. After an exception the layers' caches may differ in length.
        """
        ends = sorted({n for n in boundaries if 0 < n < len(prompt)}) or [len(prompt) - 1]
        if self.points.can_trim:  # the other states can be cut from the last one
            ends = ends[-1:]
        self.save_error, self.to_store = None, []
        prefill = self._computing = self._prefill(prompt, ends)
        start = len(self.tokens)
        try:
            with closing(absorb_prompt(prefill)) as pieces:
                while True:
                    yield start + next(pieces)
        except StopIteration as end:
            return end.value
        finally:
            self._computing = None
            self._absorbed(prompt, prefill, ends)

    def _prefill(self, prompt: Prompt, ends: list[int]) -> Prefill:
        """Brings the caches to the known prefix of `prompt` and returns the `Prefill` of the rest."""
        self._answering = False
        half = self._taken_up(prompt, ends)
        if half is None:
            self._drop_half()
            if any(layer.offset != len(self.tokens) for layer in self.cache):  # an earlier rewind was interrupted
                self._go_back(len(self.tokens))
            self._reuse(prompt)
        else:
            self.reuse = Reuse(len(prompt), len(self.tokens), 0)
        if self.model.experts is not None:
            self.model.experts.check_prompt(self.reuse.computed)
        start, self.half = len(self.tokens), None
        if self.drafts is not None:
            self.drafts.begin(prompt)
        if half is None and self._needs(start, ends):
            with within_limits():
                self.points.keep(start)
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
        start = len(self.tokens)
        if self.half is None or (self._needs(start, ends) and start not in self.points.positions):
            return None
        known = self.tokens + self.half.tokens
        wanted = {n - start for n in self._worth_keeping(len(prompt), ends) if n in ends and n <= len(known)}
        span = self.half.span
        return span if prompt[: len(known)] == known and wanted <= set(span.keep) else None

    def _needs(self, start: int, ends: list[int]) -> bool:
        """Whether the state at the start of a prompt's rest stands for one of `ends`."""
        return not self.points.can_trim and any(start < end <= after(start) for end in ends)

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
            restored, saved, behind = restore_prefix(self.model, self.cache, prompt, self.store, known)
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
            self.points.add(position, states, position in ends)
        prefill.kept.clear()
        if half is not None and half.nbytes > self.points.max_bytes:
            self._drop_half()
        if self.store is not None:
            self.to_store = [(end, kept.get(end, {})) for end in ends if start < end <= len(self.tokens)]

    def begin_answer(self) -> None:
        """The first token of an answer was chosen."""
        self._answering = True

    def append(self, token: int, keep: bool) -> None:
        """Records that the caches have absorbed a token of an answer. `keep`: they hold no draft, so the state may be
        kept.
        """
        self.tokens.append(token)
        reached = self.cache[0].offset  # includes a token that is computed ahead
        if keep and reached >= self._due:
            self.points.keep(reached, is_end=False)

    @property
    def _due(self) -> int:
        """The position from which the next state is kept."""
        return max(self.points.positions, default=0) + self.checkpoint_every

    def draft_limit(self) -> int:
        """The position beyond which no draft is absorbed, so that states are kept at the same positions as without
        drafts.
        """
        return sys.maxsize if self.points.can_trim or self._due < self.cache[0].offset else self._due

    def save_states(self, prompt: list[int]) -> None:
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


class Answer(Text):
    """An answer of a session, for a `Loop`.

    Args:
        logits: [1, vocab_size] after the prompt, if the session has absorbed all of it.

    Attributes:
        session: absorbs the prompt, and each token when the next one has been computed.
        asked: the experts that its tokens requested, without the prompt's, if they are counted.
        keeps_end: whether to keep what other answers to the prompt begin from.
        prompt_end: the kept end of the prompt, once it is computed.
    """

    asked = Asked()
    keeps_end = False
    prompt_end: "PromptEnd | None" = None

    def __init__(
        self,
        session: Session,
        prompt: Prompt,
        boundaries: Sequence[int],
        max_tokens: int,
        choice: SamplerOptions,
        logits: mx.array | None = None,
    ):
        ends = session.tokenizer.eos_token_ids
        given = session.model, session.cache, prompt
        super().__init__(*given, max_tokens=max_tokens, is_end=lambda tokens: tokens[-1] in ends, **choice)
        self.session, self._boundaries, self._logits = session, boundaries, logits

    def prompt_pieces(self) -> Generator[int, None, mx.array]:
        if self._logits is not None:
            return _absorbed_before(len(self.prompt), self._logits)
        return self.session.absorb_prompt(self.prompt, self._boundaries)

    def decode(self, logits: mx.array) -> Decoding:
        session, given = self.session, (self.model, self.cache, self.prompt.tokens, logits)
        if self.keeps_end:
            self.prompt_end = PromptEnd(session.fork(len(self.prompt)), self.prompt, logits)
        return Decoding(*given, draft_limit=session.draft_limit, drafts=session.drafts, **self._options)

    def pause(self) -> None:
        if self._pieces is not None:
            super().pause()
            self.session.agree_again(keep_half=True)
            self.session.save_states(self.prompt)

    def follow(self) -> None:
        assert self.decoding is not None
        self.asked = self.decoding.asked
        if len(self.tokens) > 1:
            self.session.append(self.tokens[-2], keep=self.decoding.is_settled)
        else:
            self.session.begin_answer()

    def end(self, error: BaseException | None = None) -> None:
        """Ends it: the session then holds the prompt and all tokens but the last; after a DeviceError it is empty."""
        if self.is_over:
            return
        session = self.session
        try:
            super().end(error)
            session.points.drop_after(len(session.tokens))  # the last kept state may be one token further
        finally:
            if error is not None:
                session.recover(error)
            session.save_states(self.prompt)


@dataclass(frozen=True)
class PromptEnd:
    """The end of a prompt, from which several answers begin; each has the bits that it has alone.

    Args:
        session: has absorbed exactly the prompt, and answers nothing itself.
        logits: [1, vocab_size] after its last token.
    """

    session: Session
    prompt: Prompt
    logits: mx.array

    def answer(self, max_tokens: int, **choice: "Unpack[SamplerOptions]") -> Answer:
        """Makes an answer, in a session of its own; arguments as for `Session.answer`."""
        session = self.session.fork(len(self.prompt))
        session.reuse = Reuse(len(self.prompt), len(self.prompt))
        return Answer(session, self.prompt, (), max_tokens, choice, self.logits)


def _absorbed_before(tokens: int, logits: mx.array) -> Generator[int, None, mx.array]:
    """The pieces of a prompt of which nothing is left."""
    yield tokens
    return logits


def _cut(layer: LayerCache, length: int, kept: Arrays | None) -> LayerCache:
    """A copy of the cache as it was at `length`: from `kept`, or by cutting."""
    cut = layer.copy()
    if kept is not None or (layer.is_trimmable() and layer.offset > length):
        cut.go_back(length, kept)
    return cut

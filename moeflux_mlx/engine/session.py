"""One running text: a model, its caches, the tokens they have absorbed, and every way back.

`respond` continues from the longest prefix that a new prompt shares with what is known, in memory or in a
prompt store, and computes only the rest. Text, messages and templates are the caller's business.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from ..errors import PromptCacheError, SnapshotError
from ..model.decoder import Model
from ..state.cache import Cache
from ..state.fingerprint import Fingerprint
from ..state.prompt_file import PromptHeader, load_prompt, save_prompt
from ..state.prompt_store import PromptStore, restore_prefix
from ..state.rewind import RewindPoints
from ..text.boundaries import shared_length
from ..text.tokenizer import TokenizerWrapper
from .generation import PREFILL_STEP_SIZE, GenerationResponse, checked_prompt, prefill, stream_generate
from .sampling import LogitsProcessor

CHECKPOINT_BYTES = 1 << 30
CHECKPOINT_EVERY = 1024  # tokens between kept states, besides those at the ends of prompts


class Stopped(Exception):
    """Raised by a caller's progress callback, between chunks, to leave a prompt half computed."""


@dataclass
class Reuse:
    """Where the tokens of the last prompt came from; `out_of_reach` of the computed ones begin a saved prompt whose
    state is that of a longer text and cannot be cut."""

    prompt: int = 0
    memory: int = 0
    disk: int = 0
    out_of_reach: int = 0

    @property
    def computed(self) -> int:
        return self.prompt - self.memory - self.disk


class Session:
    """A text in progress.

    Args:
        store: looked at before computing a prompt, and given its state afterwards.
        checkpoint_bytes: limit of the states kept in memory (recurrent models only).
        checkpoint_every: tokens between kept states.
        prefill_step_size: tokens of a prompt that run at once.

    Attributes:
        tokens: what the caches have absorbed.
        reuse: how the last prompt was come by.
        first_token_seconds: from the call to the first token of the last response.
        last: the newest response, None until a prompt has had one.
        save_error: why the store did not take the last prompt, if it did not.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: TokenizerWrapper,
        *,
        store: PromptStore | None = None,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
        checkpoint_every: int = CHECKPOINT_EVERY,
        prefill_step_size: int = PREFILL_STEP_SIZE,
    ):
        self.model, self.tokenizer, self.store = model, tokenizer, store
        self.checkpoint_every = checkpoint_every
        self.prefill_step_size = prefill_step_size
        self.cache = model.make_cache()
        self.points = RewindPoints(self.cache, checkpoint_bytes)
        self.tokens: list[int] = []
        self.reuse = Reuse()
        self.first_token_seconds = 0.0
        self.last: GenerationResponse | None = None
        self.save_error: PromptCacheError | SnapshotError | None = None
        self._to_store: list[tuple[int, dict[int, Cache]]] = []  # lengths, and what cannot be cut to them later

    def respond(
        self,
        prompt: Sequence[int],
        *,
        boundaries: Sequence[int] = (),
        prompt_progress_callback: Callable[[int, int], Any] | None = None,
        **generation: Any,
    ) -> Iterator[GenerationResponse]:
        """Yields the responses of `stream_generate` to `prompt`, token ids of the whole text so far.

        Closing the iterator, an exception and `Stopped` leave a session that can go on.

        Args:
            boundaries: lengths of the prompt's prefixes that later prompts are likely to share; a state is
                kept at each and given to the store. Without any, that of all tokens but the last is.
            prompt_progress_callback: called with (tokens known, tokens in all).
            generation: as `stream_generate`.

        Raises:
            RequestError: an empty prompt, or a token outside the vocabulary. PromptCacheError: the store is one
                file and cannot be used.
        """
        prompt = cast(list[int], checked_prompt(prompt, self.model).tolist())
        ends = sorted({n for n in boundaries if 0 < n < len(prompt)}) or [len(prompt) - 1]
        if self.points.can_trim:  # the last state holds all the others
            ends = ends[-1:]
        report = prompt_progress_callback or (lambda done, total: None)
        self.last, self.save_error, self._to_store = None, None, []
        start = time.perf_counter()
        try:
            self._reuse(prompt)
            self._absorb(prompt, ends, report)
            for response in self._generate(prompt, report, generation):
                if response.generation_tokens == 1:
                    self.first_token_seconds = time.perf_counter() - start
                rate = self.reuse.computed / self.first_token_seconds
                self.last = replace(response, prompt_tokens=len(prompt), prompt_tps=rate)
                yield self.last
        except (Stopped, GeneratorExit):
            raise
        except BaseException:
            # Some layers may have seen a token that others have not.
            self._go_back(len(self.tokens))
            raise
        finally:
            self._save_states(prompt)

    def rewind(self, length: int) -> int:
        """Goes back to the first `length` tokens, or the nearest state before; returns the length reached."""
        return self._go_back(length) if length < len(self.tokens) else len(self.tokens)

    def _go_back(self, length: int) -> int:
        reached = self.points.rewind(length)
        del self.tokens[reached:]
        return reached

    def save(self, path: Path, fingerprint: Fingerprint, extra: dict[str, Any]) -> None:
        """Writes tokens, state and `extra` to a file. Raises PromptCacheError, SnapshotError."""
        save_prompt(path, self.model, self.cache, self.tokens, fingerprint, extra)

    def load(self, path: Path, fingerprint: Fingerprint) -> PromptHeader:
        """Becomes the session that `save` wrote; after an error it is as it was. Raises PromptCacheError."""
        header = load_prompt(path, self.model, self.cache, fingerprint)
        self.points.drop_after(0)
        self.tokens = header.tokens.tolist()
        self.points.keep(len(self.tokens))
        return header

    def _reuse(self, prompt: list[int]) -> None:
        """Brings the caches to the longest known prefix of `prompt` that leaves a token to compute."""
        shared = shared_length(self.tokens, prompt[:-1])
        known = shared if shared == len(self.tokens) else self.points.nearest(shared)
        found = saved = 0
        if self.store is not None:
            found, saved = restore_prefix(self.model, self.cache, prompt, self.store, known)
        if found:
            self.points.drop_after(shared)
            self.tokens = prompt[:found]
            self.points.keep(found)
        else:
            self.rewind(known)
        self.reuse = Reuse(len(prompt), 0 if found else known, found, max(saved - max(found, known), 0))

    def _absorb(self, prompt: list[int], ends: list[int], report: Callable[[int, int], Any]) -> None:
        """Computes up to each of `ends` in turn, and keeps the state there."""
        for end in ends:
            start = len(self.tokens)
            if start >= end:
                continue
            rest = mx.array(prompt[start:end], mx.uint32)

            def advanced(done: int, start: int = start) -> None:
                self._advanced(prompt[: start + done])
                report(start + done, len(prompt))

            prefill(self.model, rest, self.cache, self.prefill_step_size, advanced)
            self.points.keep(end)
            if self.store is not None:
                fixed = {i: copy.copy(layer) for i, layer in enumerate(self.cache) if not layer.is_trimmable()}
                self._to_store.append((end, fixed))

    def _generate(
        self, prompt: list[int], report: Callable[[int, int], Any], generation: dict[str, Any]
    ) -> Iterator[GenerationResponse]:
        start = len(self.tokens)
        processors = generation.pop("logits_processors", ())

        def advanced(done: int, total: int) -> None:
            self._advanced(prompt[: start + done])
            report(start + done, len(prompt))

        responses = stream_generate(
            self.model,
            self.tokenizer,
            prompt[start:],
            prompt_cache=self.cache,
            prefill_step_size=self.prefill_step_size,
            prompt_progress_callback=advanced,
            logits_processors=[_seeing_all(prompt[:start], process) for process in processors],
            **generation,
        )
        previous = None
        for response in responses:
            if previous is not None:  # absorbed now that its successor has been computed
                self.tokens.append(previous)
                self._keep_if_due()
            previous = response.token
            yield response

    def _advanced(self, tokens: list[int]) -> None:
        """Takes note that the caches have absorbed `tokens`."""
        self.tokens = tokens
        self._keep_if_due()

    def _keep_if_due(self) -> None:
        if len(self.tokens) - max(self.points.positions, default=0) >= self.checkpoint_every:
            self.points.keep(len(self.tokens))

    def _save_states(self, prompt: list[int]) -> None:
        """Gives the store what was kept for it. An answer is worth more than its cache: errors are noted."""
        for end, fixed in self._to_store:
            caches = [fixed.get(i) or _cut(layer, end) for i, layer in enumerate(self.cache)]
            if any(layer.offset != end for layer in caches):
                continue  # a failure went back further
            try:
                assert self.store is not None
                self.store.save(self.model, caches, prompt[:end])
            except (PromptCacheError, SnapshotError) as error:
                self.save_error = error
        self._to_store = []


def _cut(layer: Cache, length: int) -> Cache:
    """The cache as it was at `length`: the same arrays, as far as they had been filled."""
    cut = copy.copy(layer)
    cut.trim(layer.offset - length)
    return cut


def _seeing_all(before: list[int], process: LogitsProcessor) -> LogitsProcessor:
    """`process`, which looks at the tokens so far, shown those too that did not have to be computed."""
    prefix = mx.array(before, mx.uint32)
    return lambda tokens, logits: process(mx.concatenate([prefix, tokens]), logits)

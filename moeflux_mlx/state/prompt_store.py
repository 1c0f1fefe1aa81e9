"""Saved prompts on disk: finds the longest one that a new prompt begins with, so that only the rest is computed.

`PromptDirectory` keeps many, by use and within a limit of bytes. Any number of processes may share it: files appear
complete or not at all, a file in use survives its removal, and nothing else is shared. The entries of several models
share a directory; each model looks only at its own.

Attention caches can be cut, so a saved text can be used up to the point where the prompt differs; a recurrent state
cannot be cut, so there a saved text can be used only as a whole.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ..caches.layer_cache import LayerCache
from ..errors import PromptCacheError
from ..files import user_path
from ..text.boundaries import shared_length
from .prompt_file import TEMPORARY, VERSION, Fingerprint, load_prompt, prompt_file_size, read_prompt_header, save_prompt
from .rewind import RewindPoints
from .snapshot import Stateful

DEFAULT_MAX_BYTES = 10 << 30
SUFFIX = ".prompt"
OURS = f"-v{VERSION}{SUFFIX}"  # others share the directory and its limit
ABANDONED = 600  # seconds without a write after which a temporary file's writer must have died


class Candidate(NamedTuple):
    """A file, how many tokens its text shares with a prompt, and how many of these its state can restore."""

    usable: int
    shared: int
    path: Path


class Restored(NamedTuple):
    """The restored tokens, the most tokens that any saved text shares with the prompt, and the state of the draft
    head.
    """

    length: int
    shared: int
    behind: bytes = b""


class PromptStore(Protocol):
    """A store of prompts that `restore_prefix` searches."""

    fingerprint: Fingerprint

    def candidates(self, tokens: np.ndarray, can_trim: bool) -> "list[Candidate]":
        """Files that share a beginning with `tokens`, the most usable first."""

    def refuse(self, path: Path, error: PromptCacheError) -> None:
        """Handles a damaged candidate."""

    def save(self, model: Stateful, cache: Sequence[LayerCache], tokens: Sequence[int], behind: bytes = b"") -> None:
        """Keeps the state of `cache`, which has absorbed exactly `tokens`, and `behind` it what a draft head knows."""


def reuse_prefix(
    model: Stateful,
    cache: list[LayerCache],
    tokens: Sequence[int],
    store: PromptStore,
    *,
    longer_than: int = 0,
) -> int:
    """Restores into `cache` the longest saved prefix of `tokens` and returns its length.

    At least the last token is always left to compute, because its logits were not saved. Continue with
    `stream_generate(model, tokenizer, tokens[n:], prompt_cache=cache)`.

    Args:
        cache: from `make_prompt_cache(model)`; its state is replaced, or left alone when 0 is returned.
        longer_than: only restore what is longer than this.
    """
    return restore_prefix(model, cache, tokens, store, longer_than).length


def restore_prefix(
    model: Stateful, cache: list[LayerCache], tokens: Sequence[int], store: PromptStore, longer_than: int
) -> Restored:
    """As `reuse_prefix`, with all details of the result."""
    points = RewindPoints(cache, 0)
    candidates = store.candidates(np.asarray(tokens[:-1], np.uint32), points.can_trim)
    shared = max((one.shared for one in candidates), default=0)
    for length, _, path in candidates:
        if length <= longer_than:
            break
        try:
            header = load_prompt(path, model, cache, store.fingerprint)
        except PromptCacheError as error:
            store.refuse(path, error)
            continue
        if length < len(header.tokens):
            points.rewind(length)
        _touch(path)
        return Restored(length, shared, header.behind)
    return Restored(0, shared)


def _candidate(saved: np.ndarray, path: Path, tokens: np.ndarray, can_trim: bool) -> Candidate:
    shared = shared_length(saved, tokens)
    return Candidate(shared if can_trim or shared == len(saved) else 0, shared, path)


class PromptDirectory:
    """A store of many prompts; if it exceeds `max_bytes`, the least recently used ones are deleted.

    Raises:
        PromptCacheError: the directory cannot be made.
    """

    def __init__(self, path: str | Path, fingerprint: Fingerprint, max_bytes: int = DEFAULT_MAX_BYTES):
        self.path = user_path(path)
        self.fingerprint = fingerprint
        self.max_bytes = max_bytes
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = "it is a file" if self.path.exists() else error.strerror
            raise PromptCacheError(f"{self.path} cannot be made a directory: {why}; choose another") from error

    def candidates(self, tokens: np.ndarray, can_trim: bool) -> list[Candidate]:
        """Files that share a beginning with `tokens`, the most usable first."""
        candidates = (_candidate(saved, path, tokens, can_trim) for path, saved in self._entries())
        return sorted(candidates, key=lambda one: (-one.usable, one.path))

    def refuse(self, path: Path, error: PromptCacheError) -> None:
        """A damaged entry is removed, so that it is looked at only once; one that could not be read is left."""
        if not isinstance(error.__cause__, OSError):
            _remove(path)

    def save(self, model: Stateful, cache: Sequence[LayerCache], tokens: Sequence[int], behind: bytes = b"") -> None:
        """Keeps the state of `cache`, which has absorbed exactly `tokens`, and `behind` it what a draft head knows.

        Raises PromptCacheError: no room on the disk, or the state alone passes `max_bytes`."""
        size = prompt_file_size(model, tokens) + len(behind)
        if size > self.max_bytes:
            raise PromptCacheError(
                f"the state of {len(tokens)} tokens takes {size} bytes and the prompt cache may hold "
                f"{self.max_bytes}; allow it more"
            )
        wanted = np.asarray(tokens, np.uint32)
        digest = hashlib.blake2b(wanted.astype("<u4").tobytes(), digest_size=16).hexdigest()
        path = self.path / f"{self.fingerprint.key}-{digest}{OURS}"
        can_trim = RewindPoints(cache, 0).can_trim
        covering = path if path.exists() else self._covering(wanted) if can_trim else None
        if covering:
            _touch(covering)
            return
        save_prompt(path, model, cache, tokens, self.fingerprint, behind=behind)
        if can_trim:
            self._remove_covered(wanted)
        self._evict(path)

    def _entries(self) -> Iterator[tuple[Path, np.ndarray]]:
        """This model's files and the tokens they hold; damaged ones are removed on the way."""
        for path in sorted(self.path.glob(f"{self.fingerprint.key}-*{OURS}")):
            try:
                yield path, read_prompt_header(path).tokens
            except PromptCacheError as error:
                self.refuse(path, error)

    def _covering(self, tokens: np.ndarray) -> Path | None:
        """An entry whose text begins with `tokens`: cut, it serves as well."""
        return next((path for path, saved in self._entries() if shared_length(saved, tokens) == len(tokens)), None)

    def _remove_covered(self, tokens: np.ndarray) -> None:
        for path, saved in self._entries():
            if len(saved) < len(tokens) and shared_length(saved, tokens) == len(saved):
                _remove(path)

    def _evict(self, newest: Path) -> None:
        """Removes files, of any model, until the limit is kept: of two texts, the one of which a smaller share would be
        computed again, and of equal ones that which was not used for longer.
        """
        self._remove_abandoned()
        sizes = {path: stat for path in self.path.glob(f"*{SUFFIX}") if (stat := _stat(path))}
        total = sum(stat.st_size for stat in sizes.values())
        texts = {path: saved.tobytes() for path, saved in self._entries()} if total > self.max_bytes else {}
        latest = sorted(sizes.keys() - {newest}, key=lambda path: -sizes[path].st_mtime_ns)
        while total > self.max_bytes and latest:
            shares = _shares(texts)
            path = min(latest, key=lambda path: shares.get(path, 1.0) / (latest.index(path) + 1))
            _remove(path)
            latest.remove(path)
            total -= sizes[path].st_size
            texts.pop(path, None)

    def _remove_abandoned(self) -> None:
        for path in self.path.glob(f".*{TEMPORARY}"):
            stat = _stat(path)
            if stat and time.time() - stat.st_mtime > ABANDONED:
                _remove(path)


def _shares(texts: dict[Path, bytes]) -> dict[Path, float]:
    """For each text, the part of it behind the longest other one with which it begins."""
    shares: dict[Path, float] = {}
    line: list[bytes] = [b""]  # each begins with the one before
    for path, text in sorted(texts.items(), key=lambda item: item[1]):
        while not text.startswith(line[-1]):
            line.pop()
        shares[path] = 1 - len(line[-1]) / len(text)
        line.append(text)
    return shares


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _touch(path: Path) -> None:
    """Counts as a use, for the order of eviction. A directory that we may only read works without."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()

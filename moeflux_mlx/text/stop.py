"""Finds texts that end an answer while it streams; no part of them is output."""

from collections.abc import Sequence


class StopTexts:
    """Holds back text that could still become one of `texts`.

    Attributes:
        found: the one that ended the text; None so far.
    """

    def __init__(self, texts: Sequence[str]):
        self.texts = [text for text in texts if text]
        self.found: str | None = None
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that certainly comes before any of them; nothing once one is found."""
        if self.found is not None:
            return ""
        self._held += text
        at = {stop: self._held.find(stop) for stop in self.texts}
        present = [(place, -len(stop), stop) for stop, place in at.items() if place >= 0]
        if present:
            place, _, self.found = min(present)
            certain, self._held = self._held[:place], ""
            return certain
        cut = len(self._held) - max((_possible(self._held, stop) for stop in self.texts), default=0)
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def finish(self) -> str:
        """What was held back for the rest of a stop text that did not come."""
        held, self._held = self._held, ""
        return held


def _possible(text: str, stop: str) -> int:
    """The length of the end of `text` that could be the beginning of `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in sizes if text.endswith(stop[:n])), 0)

"""Tells a model's reasoning from its answer while both stream by.

Works on text, because some models spell the tags out of several tokens. A tag may be cut anywhere between
two pieces of text; what could still become one is held back.
"""

START, END = "<think>", "</think>"


class ThinkingSplitter:
    """Args:
    inside: the prompt has already opened the reasoning.
    """

    def __init__(self, inside: bool = False):
        self.inside = inside
        self._held = ""

    def feed(self, text: str) -> list[tuple[str, bool]]:
        """Pieces (text, whether it is reasoning) without the tags, of what is certain so far."""
        self._held += text
        pieces = []
        while (at := self._held.find(self._awaited)) >= 0:
            pieces.append((self._held[:at], self.inside))
            self._held = self._held[at + len(self._awaited) :]
            self.inside = not self.inside
        certain = len(self._held) - self._possible_tag()
        pieces.append((self._held[:certain], self.inside))
        self._held = self._held[certain:]
        return [piece for piece in pieces if piece[0]]

    def finish(self) -> list[tuple[str, bool]]:
        """What was held back for the rest of a tag."""
        held, self._held = self._held, ""
        return [(held, self.inside)] if held else []

    @property
    def _awaited(self) -> str:
        return END if self.inside else START

    def _possible_tag(self) -> int:
        """The length of the end of the text that could be the beginning of the awaited tag."""
        sizes = range(min(len(self._held), len(self._awaited) - 1), 0, -1)
        return next((n for n in sizes if self._awaited.startswith(self._held[-n:])), 0)


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends inside reasoning, so that the model goes on with it."""
    return prompt.rstrip().endswith(START)

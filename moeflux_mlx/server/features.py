"""What a request may ask of a model, so that a client can offer only what the model has."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import MoefluxError
from ..files import directory
from ..text.history import ASKED
from ..text.switches import efforts, switches
from ..vision.vision import NoVision
from .prepare import Preparer


@dataclass(frozen=True)
class Features:
    """What a request may ask of one model.

    Args:
        demo: whether it is the demo model, which only tells stories.
        images: whether messages may contain images.
        thinking: whether a request can switch the reasoning on and off.
        efforts: the words for `reasoning_effort` that make a difference.
    """

    demo: bool
    images: bool
    thinking: bool
    efforts: Sequence[str]


def features_of(preparer: Preparer) -> Features:
    """The features of the model whose requests it prepares."""
    words = efforts(preparer.tokenizer.chat_template or "")
    has_images = not isinstance(preparer.vision, NoVision)
    return Features(preparer.path == directory("demo"), has_images, _has_switch(preparer, words), words)


def _has_switch(preparer: Preparer, words: Sequence[str]) -> bool:
    """Whether the template can leave the reasoning out. If the prompt for none is that of a low effort, it cannot."""

    def prompt(thinking: bool | None, effort: str | None = None) -> str:
        wanted = switches(preparer.tokenizer.chat_template or "", thinking, effort)
        return preparer.history.text([ASKED], variables={**preparer.defaults.variables, **wanted})

    try:
        without = prompt(False)
        return without not in (prompt(True), *(prompt(None, word) for word in words))
    except MoefluxError:  # there is no template, or it needs more than a question
        return False

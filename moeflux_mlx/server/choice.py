"""A model that a server can load, what is known of it, and what it is once it is loaded.

`Features` are what a request may ask of it, so that a client can offer only what the model has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import MoefluxError
from ..files import directory
from ..opening.engine import Engine
from ..planning.forecast import Forecast
from ..text.history import ASKED
from ..text.switches import efforts, switches
from ..vision.vision import NoVision
from .admission import Admission
from .faults import report
from .prepare import Defaults, Preparer
from .sessions import Sessions
from .worker import Worker


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


@dataclass(frozen=True)
class ModelChoice:
    """A model that can be loaded.

    Args:
        name: the name that clients see.
        load: loads it, in the thread that will run it.
        make_sessions: makes the `Sessions` of the loaded engine.
        make_admission: makes the `Admission` of the loaded engine.
        defaults: makes the defaults of sampling and template, of the model's directory.
        describe: makes the model's `Preparer` from the files of tokenizer and configuration, in any thread; None: only
            the loaded model has them.
        context: the longest context that its configuration allows, if that is known.
        forecast: of the loaded engine's speed, if this machine was measured.
    """

    name: str
    load: Callable[[], Engine]
    make_sessions: Callable[[Engine], Sessions]
    make_admission: Callable[[Engine], Admission]
    defaults: Callable[[Path], Defaults]
    describe: Callable[[], Preparer] | None = None
    context: int | None = None
    forecast: Callable[[Engine], Forecast | None] = lambda engine: None

    def describe_loaded(self, engine: Engine, known: "Description | None") -> "Description":
        """The description by the loaded model. `known`: an earlier one."""
        model = engine.model
        files = engine.tokenizer, model.args.vocab_size, engine.plan.context, self.defaults(engine.path)
        vision = model.vision.reader if model.vision else None  # the encoder belongs to the loaded model
        preparer = Preparer(*files, vision, engine.path, known.preparer.answers if known else None)
        return Description(preparer, features_of(preparer))

    def foretell(self, engine: Engine) -> Forecast | None:
        """The forecast; no fault of it keeps the model from being used."""
        try:
            return self.forecast(engine)
        except Exception as error:
            report("no speed can be forecast", error)
            return None


@dataclass(frozen=True)
class Description:
    """What is known of a model, whether or not it is loaded.

    Args:
        preparer: prepares its requests, and holds nothing of the loaded model.
    """

    preparer: Preparer
    features: Features


@dataclass(eq=False)
class Loaded:
    """A model in memory, and how many requests use it.

    Args:
        seconds: how long loading took.
    """

    choice: ModelChoice
    worker: Worker
    preparer: Preparer
    seconds: float
    forecast: Forecast | None = None
    uses: int = 0

    @property
    def engine(self) -> Engine:
        engine = self.worker.engine
        assert engine is not None
        return engine

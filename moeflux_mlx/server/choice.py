"""A model that a server can load, what is known of it, and what it is once it is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..opening.engine import Engine
from ..planning.forecast import Forecast
from .admission import Admission
from .faults import report
from .features import Features, features_of
from .prepare import Defaults, Preparer
from .sessions import Sessions
from .worker import Worker


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
        engine = self.worker.state.engine
        assert engine is not None
        return engine

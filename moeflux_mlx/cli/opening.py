"""Opens what the options name: a model, and where prompts are kept."""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ..errors import RequestError
from ..experts.resident import ReadProgress
from ..experts.source import IoMode
from ..opening.engine import Engine, open_with
from ..opening.locate import locate
from ..opening.random_weights import Shapes
from ..opening.remote import Remote, is_remote
from ..opening.weights import open_weights
from ..ops.backend import computes_natively, has_kernels, name
from ..packing.located import Located
from ..planning.machine import default_dtype
from ..state.prompt_store import PromptDirectory
from .options import NOT_GIVEN, dtype_of, settings_of, written
from .terminal import ProgressLine, note

if TYPE_CHECKING:
    from typing_extensions import Unpack

DRAWING = ["--top-p", "--top-k", "--min-p", "--xtc-probability", "--seed"]
TEMPLATE_OPTIONS = ["--system-prompt", "--chat-template-config"]
STREAMING = ["--expert-cache-gb", "--prefetch", "--warm-start", "--set host_bytes", "--set keep_warm"]


class OtherSettings(TypedDict, total=False):
    """Fields of `LoadSettings` that a command sets itself."""

    progress: ReadProgress | None
    warm_start: str


def load_named(options: argparse.Namespace, located: Located, greeting: str | None = None) -> Engine:
    """Loads the model of the options with its tokenizer. `greeting`: prints what is loaded, and how experts are read
    only if the user chose it or asked for it.
    """
    start = time.perf_counter()
    with ProgressLine("loading", of_bytes=True) as progress:
        engine = open_optional(options, located, progress=progress.update)
        engine.tokenizer  # noqa: B018  (an error in its files is said before anything is computed)
    if greeting is not None:
        note(greeting)
    if greeting is None or options.verbose or engine.plan.demand.forced:
        note(engine.experts.decision)
    if engine.plan.shortened:
        note(engine.plan.shortened)
    if options.verbose:
        if engine.model.tiles.found:
            note(f"tiles: {len(engine.model.tiles.found)} that moeflux tune found on this GPU")
        note(engine.plan.prompts)
        if engine.drafts:
            note(engine.drafts)
        note(f"loaded in {time.perf_counter() - start:.2f} s")
    note_idle_options(options, engine.experts.mode)
    return engine


def open_optional(options: argparse.Namespace, located: Located, **others: "Unpack[OtherSettings]") -> Engine:
    """The model, as the options of `add_model_options` say, but for `others` of its `LoadSettings`.

    On rank 0 of several, the others follow it.
    """
    engine = open_with(replace(settings_of(options), **others), located)
    lead: Callable[[Engine], Engine] | None = getattr(options, "lead", None)
    return engine if lead is None else lead(engine)


def note_idle_options(options: argparse.Namespace, mode: IoMode) -> None:
    """Prints a line about the options that have no effect, for each reason."""
    given = {
        written(name) for name, value in vars(options).items() if value is not None and value != NOT_GIVEN.get(name)
    }
    given |= {f"--set {name}" for name, _ in options.set or ()}
    dtype = dtype_of(options) or default_dtype()
    is_local = options.model is None or Path(options.model).exists()
    if hasattr(options, "sessions"):  # a server, whose requests may have what makes these useful
        given -= {*DRAWING, "--xtc-threshold", "--repetition-context-size"}
    idle = {
        "at --temp 0": DRAWING if getattr(options, "temp", None) == 0 else [],
        "without --xtc-probability": [] if "--xtc-probability" in given else ["--xtc-threshold"],
        "without --repetition-penalty": [] if "--repetition-penalty" in given else ["--repetition-context-size"],
        "where experts are mapped": STREAMING if mode is IoMode.MMAP else [],
        "where experts are resident": STREAMING if mode is IoMode.RESIDENT else [],
        "without an NVIDIA GPU": ["--set host_bytes"] if mode is IoMode.PREAD and name() != "cuda" else [],
        "on several ranks": []
        if getattr(options, "ranks", None) is None
        else ["--draft", "--warm-start", "--set keep_warm"],
        "with --ignore-chat-template": TEMPLATE_OPTIONS if "--ignore-chat-template" in given else [],
        "without --prompt-cache-dir": [] if getattr(options, "prompt_cache_dir", None) else ["--prompt-cache-gb"],
        "with --no-vision": ["--image-tokens"] if "--no-vision" in given else [],
        "where MLX computes": [] if computes_natively(dtype) else ["--set cpu_activations"],
        "where no GPU computes": [] if has_kernels() else ["--set tiles"],
        "without an Apple GPU": [] if name() == "metal" else ["--wired", "--set keep_warm"],
        "where --model is a directory": ["--revision", "--yes"] if is_local else [],
    }
    for reason, options_of in idle.items():
        if names := [name for name in options_of if name in given]:
            note(f"note: {', '.join(names)} {'have' if len(names) > 1 else 'has'} no effect {reason}")


def check_store(options: argparse.Namespace) -> None:
    """Makes sure, before a model is loaded, that prompts can have the size of the options.

    Raises:
        RequestError: they cannot.
    """
    if not options.prompt_cache_gb > 0:
        raise RequestError(f"--prompt-cache-gb is {options.prompt_cache_gb}; it must be positive")


def open_store(options: argparse.Namespace, engine: Engine) -> PromptDirectory | None:
    """The store of prompts that the options, which `check_store` allows, select, or None.

    Raises:
        PromptCacheError: the place cannot be used.
    """
    if options.prompt_cache_dir is None:
        return None
    size = min(options.prompt_cache_gb * 1e9, 2.0**62)
    return PromptDirectory(options.prompt_cache_dir, engine.fingerprint, int(size))


def shapes_of(options: argparse.Namespace) -> Shapes:
    """The model's sizes, the layout of its experts and how its matrices are stored; no tensor is read."""
    dtype = default_dtype()
    if options.variant is not None:
        return Shapes.of_variant(options.variant, dtype)
    if is_remote(options.model) and isinstance(remote := Remote.look_up_or_cached(options.model), Remote):
        args, layout, tensors = remote.figures(without_correction_bias=True)
        return Shapes.of(args, layout, tensors, dtype)
    weights = open_weights(locate(options.model), without_correction_bias=True)
    return Shapes.of(weights.args, weights.experts.layout, weights.shapes, dtype)

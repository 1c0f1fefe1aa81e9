"""Opens what the options name: a model, with other ranks if there are several, and where prompts are kept. A repository
is downloaded: its size is shown, and a large download is asked about.

Of several processes that run a command together, rank 0 does what the command says, the others what rank 0 tells.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ..errors import ModelFileError, RequestError
from ..experts.source import IoMode
from ..experts.whole import ReadProgress
from ..files import user_path
from ..formats.hub import Repository, cached_snapshot
from ..model.tensors import resident_bytes
from ..opening.engine import Engine, open_with
from ..opening.load_settings import LoadSettings, locate
from ..opening.random_weights import Shapes
from ..opening.remote import Remote, is_remote
from ..opening.weights import open_weights
from ..ops.backend import computes_natively, has_kernels, name
from ..packing.located import Located
from ..planning.budget import plan_memory
from ..planning.machine import default_dtype, from_environment, machine_figures
from ..planning.memory_plan import keeping
from ..several.follow import Follower
from ..several.group import Exchange
from ..several.joining import end_process, join
from ..several.lead import Lead
from ..several.ranks import Ranks
from ..state.prompt_store import PromptDirectory
from .known_models import memory_lines
from .options import NOT_GIVEN, dtype_of, settings_of, written
from .terminal import ProgressLine, agree, end_at_once, note

if TYPE_CHECKING:
    from typing_extensions import Unpack

ASKED_FROM = 20_000_000_000  # bytes of a download
EMBEDDING_FILES = ["*.json", "*.safetensors"]  # in folders too


def local_model(options: argparse.Namespace) -> Located:
    """Where the model of the options is; a repository with missing files is downloaded first.

    Raises:
        ModelFileError: the model cannot be downloaded, or the disk is too small. RequestError: it does not fit in
            memory, or a large download was not confirmed.
    """
    settings = settings_of(options)
    if not is_remote(options.model):
        return settings.locate()
    path = downloaded(options.model, options.revision, options.yes, lambda remote: _memory_lines(remote, settings))
    return replace(settings, path_or_hf_repo=path).locate()


def pull(options: argparse.Namespace) -> int:
    """Downloads the repository of the options, whether or not it fits in memory, and prints its directory."""
    if not is_remote(options.model):
        raise RequestError(
            f"{options.model} is not a repository of the Hugging Face Hub; give org/name, or org/name:Q4_K_M of a "
            "GGUF; moeflux models lists some"
        )
    print(downloaded(options.model, options.revision, options.yes))
    note(f"moeflux chat --model {options.model} runs it")
    return 0


def downloaded(
    name: str, revision: str | None, yes: bool, lines: Callable[[Remote], list[str]] = lambda remote: []
) -> Path:
    """The directory of a repository, or its GGUF file. What is missing is downloaded: the size is shown first, with
    further `lines`, and unless the answer was given with `yes`, a large download must be confirmed.
    """
    remote = Remote.look_up_or_cached(name, revision)
    if isinstance(remote, Path):
        return remote
    if remote.missing:
        better = remote.quants.note(machine_figures().memory)
        note("\n".join([remote.disk, *([better] if better else []), *lines(remote)]))
        remote.check_space()
        if remote.missing > ASKED_FROM:
            agree(f"{remote.missing / 1e9:.1f} GB of {name} will be downloaded", yes)
    return remote.download(shown=remote.missing > 0)


def embedding_model(name: str, yes: bool) -> Path:
    """The directory of an embedding model; missing files of a repository are downloaded, as those of a model.

    Raises:
        ModelFileError: it cannot be downloaded. RequestError: a large download was not confirmed.
    """
    if not is_remote(name):
        return user_path(name)
    try:
        repository = Repository.look_up(name)
    except ModelFileError:
        if (cached := cached_snapshot(name, None, EMBEDDING_FILES)) is None:
            raise
        return cached
    if missing := repository.missing(EMBEDDING_FILES):
        note(f"the embedding model {name}: {missing / 1e9:.2f} GB to download")
        if missing > ASKED_FROM:
            agree(f"{missing / 1e9:.1f} GB of {name} will be downloaded", yes)
    return repository.snapshot(EMBEDDING_FILES, shown=missing > 0)


def _memory_lines(remote: Remote, settings: LoadSettings) -> list[str]:
    """The lines that `plan` prints about memory.

    Raises:
        RequestError: it does not fit.
    """
    settings = replace(settings, expert_io=from_environment(settings.expert_io))
    dtype = settings.dtype or default_dtype()
    args, layout, shapes = remote.figures(settings.without_correction_bias)
    args = keeping(args, settings.kv_bits, settings.dtype)
    demand = settings.demand(
        args,
        resident_bytes(shapes, dtype),
        dtype,
        in_place=remote.in_place,
        vision=remote.vision(args, settings.vision),
    )
    return memory_lines(plan_memory(args, layout, machine_figures(settings.memory_bytes), demand), layout)


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


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("several machines (docs/several-machines.md)").add_argument
    add(
        "--rank-share",
        type=int,
        metavar="N",
        help="this rank's part of the experts, relative to the other ranks; default: 1",
    )
    add(
        "--share-routing",
        action="store_true",
        default=None,
        help="all ranks use rank 0's choice of experts, for machines that differ",
    )
    add(
        "--rank-seconds",
        type=float,
        metavar="S",
        help="how long ranks wait for each other; default: a minute plus the time that a layer may take",
    )


def together(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """`run` on rank 0, or where this process is alone; the other ranks follow."""

    def call(options: argparse.Namespace) -> int:
        ranks = join_ranks(options)
        if ranks is None:
            return run(options)
        options.ranks = ranks
        if not ranks.leads:
            end_at_once()  # MLX drops an exception that comes up while it looks at an array
            engine = open_optional(options, local_model(options))
            return Follower(engine.model, engine.tokenizer, ranks.exchange, note).run()
        return _leading(run, options)

    return call


def join_ranks(options: argparse.Namespace) -> Ranks | None:
    """The ranks that the environment arranges; None: this process is alone.

    Raises:
        RequestError: an option or a variable is wrong. RankError: the others do not come.
    """
    if options.rank_seconds is not None and not 1 <= options.rank_seconds < 1e6:
        raise RequestError(f"--rank-seconds is {options.rank_seconds}; it must be from 1 to 1e6")
    group = join(os.environ)
    if group is None:
        for name in ("rank_share", "rank_seconds", "share_routing"):
            if getattr(options, name) is not None:
                raise RequestError(
                    f"{written(name)} is for one of several ranks; start all with mlx.launch, or set MLX_RANK"
                )
        return None
    share = 1 if options.rank_share is None else options.rank_share
    say = note if group.rank == 0 else lambda text: None
    return Ranks(Exchange(group), share, bool(options.share_routing), options.rank_seconds, say)


def _leading(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    leads: list[Lead] = []

    def lead(engine: Engine) -> Engine:
        leads.append(Lead(options.ranks.exchange, end_process))
        return replace(engine, lead=leads[-1])

    options.lead, code = lead, 1
    try:
        code = run(options)
        return code
    finally:
        for one in leads:
            one.quit(code)

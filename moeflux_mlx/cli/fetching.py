"""Downloads a repository given as a model: shows its size first, and asks before a large download."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..errors import ModelFileError, RequestError
from ..files import user_path
from ..formats.hub import Repository, cached_snapshot
from ..model.tensors import resident_bytes
from ..opening.load_settings import LoadSettings
from ..opening.remote import Remote, is_remote
from ..packing.located import Located
from ..planning.budget import plan_memory
from ..planning.expert_io import from_environment
from ..planning.kv_bits import keeping
from ..planning.machine import default_dtype, machine_figures
from .options import settings_of
from .planning import memory_lines
from .terminal import agree, note

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
    figures = machine_figures(settings.memory_bytes)
    return memory_lines(plan_memory(args, layout, figures, demand), layout)

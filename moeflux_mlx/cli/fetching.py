"""Downloads a repository given as a model: shows its memory plan first, and asks before a large download."""

import argparse
from dataclasses import replace
from pathlib import Path

from ..engine.budget import plan_memory
from ..engine.expert_io import from_environment
from ..engine.kv_bits import keeping
from ..engine.machine import default_dtype, machine_figures
from ..engine.remote import Remote, is_remote
from ..model.tensors import resident_bytes
from .options import settings_of
from .planning import memory_lines
from .terminal import agree, note

ASKED_FROM = 20_000_000_000  # bytes of a download


def local_model(options: argparse.Namespace) -> str | Path | None:
    """The model of the options; a repository with missing files is downloaded first, and the result is its directory.

    Raises:
        ModelFileError: the model cannot be downloaded, or the disk is too small. RequestError: it does not fit in
            memory, or a large download was not confirmed.
    """
    if not is_remote(options.model):
        return options.model
    remote = Remote.look_up_or_cached(options.model, options.revision)
    if isinstance(remote, Path):
        return remote
    if remote.missing:
        note("\n".join([remote.disk, *_memory_lines(remote, options)]))
        remote.check_space()
        if remote.missing > ASKED_FROM:
            agree(f"{remote.missing / 1e9:.1f} GB of {options.model} will be downloaded", options.yes)
    return remote.download(shown=remote.missing > 0)


def _memory_lines(remote: Remote, options: argparse.Namespace) -> list[str]:
    """The lines that `plan` prints about memory.

    Raises:
        RequestError: it does not fit.
    """
    settings = replace(settings_of(options, None), expert_io=from_environment(options.expert_io))
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

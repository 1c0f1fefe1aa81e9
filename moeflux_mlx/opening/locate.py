"""Finds the directory of a model: the demo model, a path as users write it, or a repository, which is downloaded.

The result is a packed model, or a checkpoint that can be used in place. Anything else is refused with the command that
packs it, before any weight is downloaded.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import ModelFileError, MoefluxError, RequestError
from ..files import directory, user_path
from ..formats.checkpoint import has_weights
from ..packing.gguf_folder import describe, tokenizer_folder
from ..packing.located import Located, not_packed_error, unfinished_error
from ..spec import variants
from .remote import fetch, is_remote


def locate(
    model: str | Path | None,
    revision: str | None = None,
    shards_in: Sequence[str | Path] = (),
    tokenizer: str | Path | None = None,
) -> Located:
    """The directory of a model, downloading it if need be; of a GGUF the one that describes it.

    Args:
        model: a path, a repository, or None for the demo model.
        shards_in: other directories in which a checkpoint's safetensors files, or a GGUF's, may lie.
        tokenizer: a directory or repository with the files of a GGUF's tokenizer.
    """
    path = directory("demo") if model is None else user_path(model)
    if not path.exists():
        if not is_remote(model):
            is_known = path.name.lower() in variants()
            known = "; moeflux models shows the repository of this known model" if is_known else ""
            raise ModelFileError(
                f"{path} does not exist{known}; give the directory of a model, packed or as mlx-lm wrote it, a GGUF "
                "file, or a repo id org/name, such as moeflux models lists"
            )
        path = fetch(str(model), revision)
    located = Located(path, tuple(user_path(folder) for folder in shards_in))
    if not located.is_packed and (folder := describe(path, tokenizer_folder(tokenizer), located.shards_in)) is not None:
        return replace(located, path=folder)
    if tokenizer is not None:
        raise RequestError(f"--tokenizer is for GGUF files, and {path} is none; leave it out")
    _check(located)
    return located


def _check(located: Located) -> None:
    """Raises MoefluxError: a directory that has a config.json cannot be run."""
    path = located.path
    if not path.is_dir():
        raise ModelFileError(f"{path} is not a directory, nor a GGUF file")
    if located.is_unfinished:
        raise unfinished_error(path)
    if located.is_packed or (path / "config.json").exists() and located.runs:
        return
    for folder in (path, path / "mlx"):  # the second name is moeflux's
        if (folder / "config.json").exists():
            raise _not_a_model(path, folder)


def _not_a_model(path: Path, folder: Path) -> MoefluxError:
    """The error for a directory that has a config.json but cannot be run."""
    if has_weights(path):
        return not_packed_error(str(path), folder)
    return ModelFileError(f"{path} has a config.json and no weights (*.safetensors); download the rest of it")

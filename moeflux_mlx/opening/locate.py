"""Finds the directory of a model: the demo model, a path as users write it, or a repository, which is downloaded.

The result is a packed model, or a checkpoint that can be used in place. Anything else is refused with the command that
packs it, before any weight is downloaded.
"""

from collections.abc import Sequence
from pathlib import Path

from ..errors import ModelFileError, MoefluxError, RequestError
from ..files import directory, user_path
from ..formats.checkpoint import has_weights
from ..formats.packed import FOLDER, LAYOUT, STATE
from ..packing.gguf_folder import described, tokenizer_folder
from ..packing.in_place import runs_in_place
from ..packing.suggest import not_packed_error, unfinished_error
from ..spec import variants
from .remote import fetch, is_remote


def resolve(
    path_or_hf_repo: str | Path | None,
    revision: str | None = None,
    shards_in: Sequence[Path] = (),
    tokenizer: str | Path | None = None,
) -> Path:
    """The local directory of a model, downloading it if need be; of a GGUF the one that describes it.

    Args:
        shards_in: as for `open_weights`.
        tokenizer: a directory or repository with the files of a GGUF's tokenizer.
    """
    if path_or_hf_repo is None:
        return directory("demo")
    path = user_path(path_or_hf_repo)
    if not path.exists():
        if is_remote(path_or_hf_repo):
            path = fetch(str(path_or_hf_repo), revision)
            return path if path.is_dir() else resolve(path, tokenizer=tokenizer)
        known = "; moeflux models shows the repository of this known model" if path.name.lower() in variants() else ""
        raise ModelFileError(
            f"{path} does not exist{known}; give the directory of a model, packed or as mlx-lm wrote it, a GGUF file, "
            "or a repo id org/name, such as moeflux models lists"
        )
    if not (path / FOLDER / LAYOUT).exists() and (folder := described(path, tokenizer_folder(tokenizer))) is not None:
        return folder
    if tokenizer is not None:
        raise RequestError(f"--tokenizer is for GGUF files, and {path} is none; leave it out")
    if not path.is_dir():
        raise ModelFileError(f"{path} is not a directory, nor a GGUF file")
    if not (path / FOLDER / LAYOUT).exists():
        if (path / STATE).exists():
            raise unfinished_error(path)
        if (path / "config.json").exists() and runs_in_place(path, shards_in):
            return path
        for folder in (path, path / "mlx"):  # the second name is moeflux's
            if (folder / "config.json").exists():
                raise _not_a_model(path, folder)
    return path


def _not_a_model(path: Path, folder: Path) -> MoefluxError:
    """The error for a directory that has a config.json but cannot be run."""
    if has_weights(path):
        return not_packed_error(str(path), folder)
    return ModelFileError(f"{path} has a config.json and no weights (*.safetensors); download the rest of it")

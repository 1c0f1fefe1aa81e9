"""Finds the directory of a model: the demo model, a path as users write it, or a repository, which is fetched.

That is a packed model, or here on the disk a checkpoint that runs as it lies. Anything else is refused with the command
that makes a packed model of it, before any weight is downloaded.
"""

from pathlib import Path

from ..errors import ModelFileError
from ..files import directory, user_path
from ..formats.hub import hub_errors, looks_like_repo
from ..formats.packed import FOLDER, LAYOUT
from ..packing.in_place import runs_in_place
from ..packing.suggest import not_packed_error, unfinished_error
from ..packing.writer import STATE


def resolve(path_or_hf_repo: str | Path | None, revision: str | None = None) -> Path:
    """The local directory of a model, downloading it if need be."""
    if path_or_hf_repo is None:
        return directory("demo")
    path = user_path(path_or_hf_repo)
    if not path.exists():
        if isinstance(path_or_hf_repo, str) and looks_like_repo(path_or_hf_repo):
            return fetch_packed(path_or_hf_repo, revision)
        raise ModelFileError(
            f"{path} does not exist; give a directory made by moeflux_mlx.convert or a repo id org/name"
        )
    if not path.is_dir():
        raise ModelFileError(f"{path} is not a directory")
    if not (path / FOLDER / LAYOUT).exists():
        if (path / STATE).exists():
            raise unfinished_error(path)
        if (path / "config.json").exists() and runs_in_place(path):
            return path
        for folder in (path, path / "mlx"):  # the second is moeflux's
            if (folder / "config.json").exists():
                raise not_packed_error(str(path), folder)
    return path


def fetch_packed(repo: str, revision: str | None = None) -> Path:
    """Downloads `repo` (with progress bars) and returns its local directory.

    Raises:
        NotPackedError: the repository holds no packed experts; nothing but its config was read.
        ModelFileError: there is no such repository, or it cannot be reached.
    """
    import huggingface_hub as hub

    with hub_errors(f"cannot fetch {repo} from the Hugging Face Hub"):
        if f"{FOLDER}/{LAYOUT}" not in hub.list_repo_files(repo, revision=revision):
            config = Path(hub.hf_hub_download(repo, "config.json", revision=revision))
            raise not_packed_error(repo, config.parent)
        return Path(hub.snapshot_download(repo, revision=revision))

"""Fetches packed models from the Hugging Face Hub, after looking at the file list.

A repository without packed experts is refused before any weight is downloaded.
"""

import re
from pathlib import Path

from .config import ModelArgs
from .errors import ModelFileError, NotPackedError
from .packed import FOLDER, not_packed_message


def looks_like_repo(name: str) -> bool:
    """True for `org/name`, False for anything that reads as a path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def fetch_packed(repo: str, revision: str | None = None) -> Path:
    """Downloads `repo` (with progress bars) and returns its local directory.

    Raises:
        NotPackedError: the repository holds no packed experts; nothing but its config was read.
        ModelFileError: there is no such repository, or it cannot be reached.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        if f"{FOLDER}/layout.json" not in hub.list_repo_files(repo, revision=revision):
            config = Path(hub.hf_hub_download(repo, "config.json", revision=revision))
            raise NotPackedError(not_packed_message(repo, ModelArgs.from_file(config.parent)))
        return Path(hub.snapshot_download(repo, revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"cannot fetch {repo} from the Hugging Face Hub: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

"""Fetches packed models from the Hugging Face Hub, after looking at the file list.

A repository without packed experts is refused before any weight is downloaded.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from .config import ModelArgs
from .errors import ModelFileError, MoefluxError, NotPackedError
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

    with hub_errors(f"cannot fetch {repo} from the Hugging Face Hub"):
        if f"{FOLDER}/layout.json" not in hub.list_repo_files(repo, revision=revision):
            config = Path(hub.hf_hub_download(repo, "config.json", revision=revision))
            raise NotPackedError(not_packed_message(repo, ModelArgs.from_file(config.parent)))
        return Path(hub.snapshot_download(repo, revision=revision))


@contextlib.contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Whatever the Hub's library raises becomes a ModelFileError of one line that begins with `what`.

    It raises errors of its own, of its HTTP client (which one depends on its version), and of the system.
    """
    try:
        yield
    except MoefluxError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelFileError(f"{what}: {reason}") from error

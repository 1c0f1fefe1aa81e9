"""Fetches packed models from the Hugging Face Hub, after looking at the file list.

A repository without packed experts is refused before any weight is downloaded.
"""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..errors import ModelFileError, MoefluxError, MoefluxWarning
from ..packing.suggest import not_packed_error
from .packed import FOLDER


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
            raise not_packed_error(repo, config.parent)
        return Path(hub.snapshot_download(repo, revision=revision))


@contextlib.contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Whatever the Hub's library raises becomes a ModelFileError of one line that begins with `what`.

    It raises errors of its own, of its HTTP client (which one depends on its version), and of the system. What it logs
    of its retries, two lines each, becomes one MoefluxWarning.
    """
    log, retries = logging.getLogger("huggingface_hub.utils._http"), _Retries()
    log.addFilter(retries)
    try:
        yield
    except MoefluxError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelFileError(f"{what}: {reason}") from error
    finally:
        log.removeFilter(retries)


class _Retries(logging.Filter):
    """Drops the log's lines on retries, and warns at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.warned = False

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "thrown while requesting" not in text and "[Retry " not in text:
            return True
        if not self.warned:
            self.warned = True
            warnings.warn(f"the Hugging Face Hub does not answer, trying again: {text}", MoefluxWarning, stacklevel=2)
        return False

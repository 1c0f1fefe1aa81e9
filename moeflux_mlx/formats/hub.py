"""What is the Hugging Face Hub's: names of repositories, and the errors of its library."""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator

from ..errors import ModelFileError, MoefluxError, MoefluxWarning


def looks_like_repo(name: str) -> bool:
    """True for `org/name`, False for anything that reads as a path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


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

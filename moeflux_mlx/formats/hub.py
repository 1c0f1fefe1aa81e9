"""Access to the Hugging Face Hub: repositories, downloads of their files, and the errors of its library."""

import contextlib
import fnmatch
import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelFileError, MoefluxError, warn
from .checkpoint import head_length

READ_BYTES = 1 << 22
RETRIES = ("thrown while requesting", "[Retry ", "Error while downloading from")  # in what the library logs


def looks_like_repo(name: str) -> bool:
    """True for `org/name`, False for anything that reads as a path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def quant_of(name: str) -> tuple[str, str | None]:
    """`org/name:QUANT` -> the repository, and which of its GGUF models is meant; None: that is not said."""
    repository, colon, quant = name.rpartition(":")
    return (repository, quant) if colon and looks_like_repo(repository) else (name, None)


@contextlib.contextmanager
def hub_errors(what: str, unreached: str | None = None) -> Iterator[None]:
    """A context manager that turns errors of the Hub's library into a ModelFileError of one line, which begins with
    `what`, or with `unreached` if the Hub did not answer.

    The library raises its own errors, those of its HTTP client (which depends on its version), and the system's. Its
    log lines about retries become one MoefluxWarning.
    """
    logs = [logging.getLogger(f"huggingface_hub.{name}") for name in ("utils._http", "file_download")]
    retries = _Retries()
    for log in logs:
        log.addFilter(retries)
    try:
        yield
    except MoefluxError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        answered = getattr(error, "response", None) is not None or isinstance(error, ValueError)
        raise ModelFileError(f"{what if answered else unreached or what}: {reason}") from error
    finally:
        for log in logs:
            log.removeFilter(retries)


class _Retries(logging.Filter):
    """Drops the log's lines on retries, and warns at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.warned = False

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not any(words in text for words in RETRIES):
            return True
        if not self.warned:
            self.warned = True
            warn(f"the Hugging Face Hub does not answer, trying again: {text.splitlines()[0]}")
        return False


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    from huggingface_hub import utils

    was = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if not was:
            utils.enable_progress_bars()


def cache_folder() -> Path:
    """The directory of the Hub's cache, which may not exist yet."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_snapshot(name: str, revision: str | None, patterns: list[str]) -> Path | None:
    """The folder of a repository in the Hub's cache, if it knows of no file matching `patterns` that is missing."""
    import huggingface_hub as hub

    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True))
    except (hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError):
        return None


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its length, and the digest that the Hub states of it."""

    name: str
    size: int
    digest: str

    def check(self, file: Path) -> str:
        """Why `file` is not this one; empty if it is. A large file has a SHA-256, a small one git's SHA-1."""
        size = file.stat().st_size
        if size != self.size:
            return f"it has {size} bytes; the Hub lists {self.size}"
        large = len(self.digest) == 64
        digest = hashlib.sha256() if large else hashlib.sha1(b"blob %d\0" % size)
        with open(file, "rb", buffering=0) as opened:
            while data := opened.read(READ_BYTES):
                digest.update(data)
        name = "SHA-256" if large else "git's SHA-1"
        return "" if digest.hexdigest() == self.digest else f"{name} is {digest.hexdigest()}, not {self.digest}"


@dataclass(frozen=True)
class Repository:
    """The files of a repository at one commit; nothing is downloaded until it is requested."""

    name: str
    revision: str | None
    commit: str
    files: Mapping[str, RemoteFile]

    @classmethod
    def look_up(cls, name: str, revision: str | None = None) -> "Repository":
        """Raises ModelFileError: there is no such repository, or it cannot be reached."""
        import huggingface_hub as hub

        here = f"{name} is no file or directory here"
        unreached = f"{here}, and the Hugging Face Hub cannot be reached"
        with hub_errors(f"{here} and cannot be found on the Hugging Face Hub", unreached):
            info = hub.HfApi().model_info(name, revision=revision, files_metadata=True)
            files = {
                one.rfilename: RemoteFile(
                    one.rfilename, one.size or 0, (one.lfs.sha256 if one.lfs else one.blob_id) or ""
                )
                for one in info.siblings or ()
            }
            return cls(name, revision, str(info.sha), files)

    def matching(self, patterns: Sequence[str]) -> list[RemoteFile]:
        return [file for name, file in self.files.items() if any(fnmatch.fnmatch(name, one) for one in patterns)]

    def snapshot(self, patterns: list[str] | None = None, shown: bool = False) -> Path:
        """Downloads missing files into the Hub's cache and returns their directory; shows progress bars if `shown`.

        Raises:
            ModelFileError: the Hub cannot be reached, or the disk is full.
        """
        import huggingface_hub as hub

        with hub_errors(f"{self.name} cannot be downloaded"), contextlib.nullcontext() if shown else _without_bars():
            for revision in (self.revision, self.commit):  # by name first, so that it is found by name later
                path = Path(hub.snapshot_download(self.name, revision=revision, allow_patterns=patterns))
                if path.name == self.commit:
                    break
            return path

    def missing(self, patterns: Sequence[str]) -> int:
        """Bytes of the files that match and are not in the Hub's cache."""
        import huggingface_hub as hub

        cached = {
            file.name: isinstance(hub.try_to_load_from_cache(self.name, file.name, revision=self.commit), str)
            for file in self.matching(patterns)
        }
        return sum(self.files[name].size for name, here in cached.items() if not here)

    def head(self, name: str) -> bytes:
        """The text of a safetensors file's header, by two requests for parts of it.

        Raises:
            ModelFileError: it is no such file, or cannot be reached.
        """
        size = self.files[name].size
        return self.part(name, 8, head_length(Path(name), size, self.part(name, 0, min(size, 8))))

    def part(self, name: str, start: int, length: int) -> bytes:
        """Bytes of a file, by one request.

        Raises:
            ModelFileError: the Hub cannot be reached, or the file ends before.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        with hub_errors(f"the header of {self.name}/{name} cannot be read"):
            url = hf_hub_url(self.name, name, revision=self.commit)
            headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + length - 1}"}
            response = get_session().get(url, headers=headers, timeout=60)
            hf_raise_for_status(response)
            data = bytes(response.content[:length])
        if len(data) != length:
            raise ModelFileError(f"{self.name}/{name} ends at byte {start + len(data)}; {start + length} are needed")
        return data

    def download(self, name: str, folder: Path, advance: Callable[[int], None]) -> Path:
        """One file into `folder`, outside the Hub's cache, checked; one that lies there is used if it is right.

        Raises:
            ModelFileError: the Hub cannot be reached, the disk is full, or the file is wrong twice in a row.
        """
        file, wrong = folder / name, ""
        for _ in range(2):
            shutil.rmtree(folder / ".cache", ignore_errors=True)  # what a killed download has left
            if not file.exists():
                self._download(name, folder, advance)
            wrong = self.files[name].check(file)
            if not wrong:
                return file
            file.unlink()
        raise ModelFileError(f"{self.name}/{name} was damaged twice: {wrong}; try again later")

    def _download(self, name: str, folder: Path, advance: Callable[[int], None]) -> None:
        import huggingface_hub as hub
        from huggingface_hub.utils import tqdm

        class Heard(tqdm):
            """An invisible progress bar that reports its growth."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**kwargs, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                advance(int(n or 0))
                return None

        with hub_errors(f"{self.name}/{name} cannot be downloaded"):
            hub.hf_hub_download(self.name, name, revision=self.commit, local_dir=folder, tqdm_class=Heard)

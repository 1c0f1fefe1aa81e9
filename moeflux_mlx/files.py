"""Files: paths as users write them, JSON, durable writes, and the data that ships with the package."""

import contextlib
import errno
import fcntl
import json
import math
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from .errors import ModelFileError, RequestError

# A value of JSON: None, a truth value, a number, a text, or a list or an object of such values. Who reads one looks at
# its type first.
JsonValue: TypeAlias = Any
JsonObject: TypeAlias = Mapping[str, JsonValue]  # which is only read
JsonDict: TypeAlias = dict[str, JsonValue]  # which is built

PACKAGE = Path(__file__).resolve().parent


def shown_gb(nbytes: float) -> str:
    """A number of bytes for a message, which is not 0.0 for a small one: "12.3 GB", "0.039 GB"."""
    return f"{nbytes / 1e9:{'.1f' if nbytes >= 1e8 else '.2g'}} GB"


def existing_parent(path: Path) -> Path:
    """The nearest folder on the way to `path` that is there, or `path` itself."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def user_path(value: str | Path) -> Path:
    """The path, with `~` for a home directory; nothing need be there.

    Raises:
        RequestError: no such user, or a name that no file here can have; an empty one, too, and what is no name.
    """
    if value == "":
        raise RequestError("a path is empty; give the name of a file or directory")
    try:
        path = Path(value).expanduser()
        if "\0" in str(path):
            raise ValueError("it holds a null character")
        path.exists()  # tells of names that are too long, and of folders that are not ours to look into
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{str(value)!r} cannot be used as a path: {reason}") from error
    return path


def that_ends(path: Path, pipes: bool = False) -> Path:
    """`path`, unless reading it might never end.

    Args:
        pipes: whether a pipe is allowed, whose writer ends it.

    Raises:
        OSError: it is missing, a device, or a pipe.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (pipes and stat.S_ISFIFO(mode))):
        raise OSError(errno.EINVAL, f"it is a device{'' if pipes else ', a pipe'} or a socket; give a regular file")
    return path


def read_text(name: str | Path) -> str:
    """The text of a file, or of a pipe. Raises RequestError: it cannot be read, or is not UTF-8."""
    path = user_path(name)
    try:
        return that_ends(path, pipes=True).read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8: byte {error.start} is invalid; give a text file") from None


def sync(descriptor: int) -> None:
    """`os.fsync`; on macOS it does not flush the drive's own cache, so F_FULLFSYNC is tried first."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # some file systems have no such thing
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Makes new file names in the folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        sync(folder)
    finally:
        os.close(folder)


def replace_file(path: Path, parts: Iterable[bytes | memoryview], ending: str = "", mode: int = 0o666) -> None:
    """Writes a file next to `path`, syncs it and renames it, so that it appears complete or not at all.

    Args:
        ending: of the name that it has until then.
        mode: who may do what with it, less the process's mask.

    Raises:
        OSError: the system refuses; nothing is left behind. Errors of `parts` are raised too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{ending}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            sync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> JsonDict:
    """Raises ModelFileError when the file is missing or is not a JSON object."""
    value = read_any_json(path)
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_any_json(path: Path) -> JsonValue:
    """Raises ModelFileError when the file is missing or is not JSON."""
    try:
        return json.loads(that_ends(path).read_text(encoding="utf-8"), object_hook=_untagged)
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(f"{path} cannot be read as JSON: {reason}") from None


def _untagged(value: JsonDict) -> JsonValue:
    """The float that {"__float__": "Infinity"} stands for, as transformers writes what JSON has no word for."""
    is_tagged = value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN")
    return float(value["__float__"]) if is_tagged else value


def tagged(value: object) -> JsonValue:
    """A value of `read_json` in a form that JSON can express."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: tagged(one) for key, one in value.items()}
    return [tagged(one) for one in value] if isinstance(value, list) else value


def kept_files() -> Path:
    """The directory of files kept for later starts, in the user's cache directory."""
    fallback = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return user_path(os.environ.get("XDG_CACHE_HOME") or fallback) / "moeflux"


def directory(name: str) -> Path:
    """The folder of data `name`: "metal" (kernel sources), "configs" or "demo".

    In a wheel they lie inside the package; in an editable install `metal/` and `configs/` lie beside it.
    """
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name

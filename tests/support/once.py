"""Folders that are made once per run of the tests, for all workers; outside tests once per process."""

import fcntl
import functools
import os
import tempfile
from pathlib import Path

FOLDER = "MOEFLUX_TINY_MODELS"  # a variable of the environment, which conftest.py sets


@functools.cache
def _of_this_process():
    return tempfile.TemporaryDirectory(prefix="moeflux-tiny-")


def made_once(name, make):
    """Returns the folder of this name, which `make(path)` writes in the first worker that needs it. It must not be
    changed."""
    path = Path(os.environ.get(FOLDER) or _of_this_process().name) / name
    with open(path.with_name(f"{name}.lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
        if not os.fstat(lock.fileno()).st_size:
            make(path)
            lock.write("made")
    return path

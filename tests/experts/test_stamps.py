"""Files that change while a model is loaded: what is noticed, and how often somebody looks."""

import os
import types

import pytest

from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts import files
from moeflux_mlx.experts.files import Stamps


@pytest.fixture
def opened(tmp_path):
    """Returns two files and their descriptors."""
    files = {}
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(b"weights")
        files[tmp_path / name] = os.open(tmp_path / name, os.O_RDONLY)
    yield files
    for file in files.values():
        os.close(file)


def of(files):
    made = Stamps()
    for path in files:
        made.add(path, path.stat())
    return made


def test_each_file_is_looked_at_once_a_second(opened, monkeypatch):
    clock, looks = [100.0], []
    monkeypatch.setattr(files, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    made = of(opened)
    monkeypatch.setattr(files, "os", types.SimpleNamespace(stat=lambda file: looks.append(file) or os.stat(file)))
    for _ in range(1000):
        clock[0] += 0.003
        made.look(opened)
    assert len(looks) == 2 * 2 and set(looks) == set(opened.values())


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("change", ["time", "length", "replaced", "removed"])
def test_what_is_noticed(opened, change, is_open, files_are_looked_at):
    files = opened if is_open else {path: path for path in opened}
    made, path = of(opened), list(opened)[1]
    made.look(files)
    before = path.stat()
    if change in ("time", "length"):
        path.write_bytes(b"weights"[change == "length" :])
        os.utime(path, ns=(0, before.st_mtime_ns + (change == "time")))
        for _ in range(2):
            with pytest.raises(ExpertIOError, match=f"^{path} was changed while in use; start again"):
                made.look(files)
        return
    if change == "replaced":
        path.with_name("new").write_bytes(b"others")
        os.replace(path.with_name("new"), path)
    else:
        path.unlink()
    made.look(files)


def test_a_path_that_is_opened_again_is_the_same_file(opened):
    made, path = of(opened), next(iter(opened))
    made.add(path, path.stat())
    path.unlink()
    path.write_bytes(b"weights")
    with pytest.raises(ExpertIOError, match="was changed while in use"):
        made.add(path, path.stat())

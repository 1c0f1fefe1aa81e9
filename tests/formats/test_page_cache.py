"""Files are read from the disk although the system has them in its cache. `MacCache` stands in for that of macOS: it
serves pages that were written, whatever F_NOCACHE says, until they are invalidated.
"""

import fcntl
import os
import re
from pathlib import Path

import pytest
from tiny_models import tiny_directory

from moeflux_mlx import plan
from moeflux_mlx.cli import diagnosis, known_models
from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.formats import page_cache
from moeflux_mlx.formats.page_cache import MS_INVALIDATE, MS_SYNC, drop_cached, drop_files


class MacCache:
    """Attributes:
    dropped: files that were invalidated with all their bytes.
    uncached: descriptors that have F_NOCACHE.
    """

    def __init__(self, monkeypatch):
        self.dropped, self.uncached = set(), set()
        monkeypatch.delattr(os, "posix_fadvise")
        monkeypatch.setattr(fcntl, "F_NOCACHE", 48, raising=False)
        monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, command, value: self.uncached.add(descriptor))
        monkeypatch.setattr(page_cache, "_msync", self.msync)

    def msync(self, address, length, flags):
        """Without MS_SYNC, dirty pages would be lost."""
        assert flags == MS_SYNC | MS_INVALIDATE
        path = self._mapped(address)
        if length == path.stat().st_size:
            self.dropped.add(path.resolve())

    def _mapped(self, address):
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, last = (int(one, 16) for one in re.match(r"(\w+)-(\w+)", line).groups())
            if first <= address < last:
                assert line.split()[1] == "r--s", "a private copy would be invalidated"
                return Path(line.split(maxsplit=5)[5])
        raise AssertionError("it is not mapped")

    def serves(self, path):
        return path.resolve() not in self.dropped


@pytest.fixture
def cache(monkeypatch):
    return MacCache(monkeypatch)


def test_the_disk_is_measured_not_the_cache(tmp_path, monkeypatch, cache):
    """Of the file that `doctor` writes, and of a user's own files."""
    served = []

    class Reader(ExpertReader):
        def __init__(self, files):
            served.extend(map(cache.serves, files.sizes))
            super().__init__(files)

    monkeypatch.setattr(known_models, "ExpertReader", Reader)
    monkeypatch.setattr(diagnosis, "MEASURED_FILE", 4 * diagnosis.EXPERT.stride)
    monkeypatch.setattr(known_models, "FASTEST_DISK", 1e15)
    assert diagnosis.disk_rate(tmp_path) > 0 and served == [False]


def test_a_file_is_dropped_as_a_whole(tmp_path, cache):
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        path.write_bytes(bytes(100_001))
    drop_files(paths)
    assert cache.dropped == {path.resolve() for path in paths}
    empty = tmp_path / "empty"
    empty.touch()
    with open(empty, "rb") as file:
        drop_cached(file.fileno())
        assert file.fileno() in cache.uncached
    with pytest.raises(FileNotFoundError):
        drop_files([tmp_path / "none"])


def test_dirty_pages_are_kept(tmp_path):
    """The real call, of this system."""
    path = tmp_path / "file"
    with open(path, "w+b", buffering=0) as file:
        file.write(b"x" * 50_000)
        page_cache._invalidate(file.fileno())
        assert os.pread(file.fileno(), 50_001, 0) == b"x" * 50_000


def test_a_rate_that_no_disk_has_is_called_the_caches(tmp_path, monkeypatch, capsys):
    assert known_models.plausible(19.9e9) == 19.9e9 and known_models.plausible(39e9, drives=2) == 39e9
    with pytest.raises(ExpertIOError, match=r"read at 20\.1 GB/s, from the cache and not from the disk"):
        known_models.plausible(20.1e9)
    monkeypatch.setattr(known_models, "FASTEST_DISK", 1.0)
    assert plan.main(["--model", str(tiny_directory("qwen3_moe")), "--measure-disk"]) == 1
    assert "from the cache" in capsys.readouterr().err

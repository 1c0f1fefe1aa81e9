"""The RAM gate and the expert loader: both modes give the file's bytes, and failures are typed."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packed import tiny_args

from moeflux_mlx.errors import ExpertIOError, RequestError
from moeflux_mlx.io_mode import IoMode, from_environment, select_io_mode
from moeflux_mlx.layout import ExpertLayout
from moeflux_mlx.loader import ExpertLoader
from moeflux_mlx.packed import PackedExperts

EXPERTS = 6


@given(total=st.integers(0, 2**60), ram=st.integers(1, 2**60))
def test_gate_is_exact_in_integers(total, ram):
    wanted = IoMode.MMAP if total <= 3 * ram // 4 else IoMode.PREAD
    assert select_io_mode(total, ram) is select_io_mode(total, ram, "auto") is wanted


def test_gate_at_the_edge():
    assert select_io_mode(3 * 2**58, 2**60) is IoMode.MMAP
    assert select_io_mode(3 * 2**58 + 1, 2**60) is IoMode.PREAD


def test_gate_override():
    assert select_io_mode(2**60, 1, "mmap") is IoMode.MMAP
    assert select_io_mode(0, 1, "pread") is IoMode.PREAD
    with pytest.raises(RequestError, match="'fast'"):
        select_io_mode(0, 1, "fast")


def test_environment_is_the_fallback(monkeypatch, capsys):
    monkeypatch.setenv("MOEFLUX_EXPERT_IO", "pread")
    assert from_environment("auto") == "pread"
    assert from_environment("mmap") == "mmap"
    monkeypatch.setenv("MOEFLUX_EXPERT_IO", "quick")
    assert from_environment("auto") == "auto"
    assert "MOEFLUX_EXPERT_IO='quick'" in capsys.readouterr().err


@pytest.fixture
def packed(tmp_path):
    layout = ExpertLayout.from_args(tiny_args(experts=EXPERTS))
    rng = np.random.default_rng(1)
    paths = {}
    for layer in layout.moe_layers:
        paths[layer] = tmp_path / layout.file_name(layer)
        paths[layer].write_bytes(rng.integers(0, 256, layout.layer_bytes, dtype=np.uint8).tobytes())
    return PackedExperts(layout, paths)


def records(packed, layer):
    return np.fromfile(packed.paths[layer], np.uint32).reshape(EXPERTS, -1)


@pytest.mark.parametrize("mode", IoMode)
def test_acquired_blocks_are_the_files_bytes(packed, mode):
    loader = ExpertLoader(packed, mode=mode, cache_bytes=1)

    @settings(max_examples=30, deadline=None)
    @given(layer=st.sampled_from([0, 1]), ids=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=8))
    def check(layer, ids):
        batch = loader.acquire(layer, np.array(ids, np.uint32)[None])
        assert batch.slots.shape == (1, len(ids))
        assert np.array_equal(np.array(batch.blob)[batch.slots[0]], records(packed, layer)[ids])

    check()
    loader.close()


def test_pool_counts_hits_and_evicts_the_oldest(packed):
    stride = packed.layout.expert_stride
    loader = ExpertLoader(packed, mode=IoMode.PREAD, cache_bytes=EXPERTS * stride)
    loader.acquire(0, np.arange(EXPERTS))
    loader.acquire(0, np.array([0]))  # expert 0 becomes the latest used, expert 1 the oldest
    loader.acquire(1, np.array([0]))
    assert (loader.stats.hits, loader.stats.misses) == (1, EXPERTS + 1)
    assert loader.stats.bytes_read == (EXPERTS + 1) * stride
    loader.acquire(0, np.array([0]))
    assert loader.stats.hits == 2
    loader.acquire(0, np.array([1]))
    assert loader.stats.misses == EXPERTS + 2
    loader.reset_stats()
    assert loader.stats.hits == loader.stats.misses == loader.stats.bytes_read == 0


def test_a_file_cut_short_while_open(packed):
    loader = ExpertLoader(packed, mode=IoMode.PREAD)
    os.truncate(packed.paths[0], packed.layout.expert_stride + 8)
    loader.acquire(0, np.array([0]))
    with pytest.raises(ExpertIOError, match="layer 0"):
        loader.acquire(0, np.array([1]))
    loader.acquire(1, np.array([1]))  # the loader still serves other experts
    with pytest.raises(ExpertIOError):
        loader.acquire(0, np.array([1]))  # and nothing half-read was kept


@pytest.mark.parametrize("mode", IoMode)
def test_a_closed_loader(packed, mode):
    loader = ExpertLoader(packed, mode=mode)
    loader.close()
    with pytest.raises(ExpertIOError, match="closed"):
        loader.acquire(0, np.array([0]))

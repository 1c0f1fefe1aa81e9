"""Files whose numbers do not agree with each other or with their tensors: one error, and no memory for them."""

import mmap
import struct
import tracemalloc

import gguf_models
import mlx.core as mx
import pytest
from grids import drawn
from test_gguf_families import LEAST, cache, type_of  # noqa: F401 (a fixture)

from moeflux_mlx.errors import MoefluxError
from moeflux_mlx.formats.gguf_file import open_gguf
from moeflux_mlx.opening.engine import load_model

pytest.importorskip("gguf")

UINT32 = 4  # the type of an integer in a header
VALUES = (0, 1, 3, 64, 2**31 - 1, 2**32 - 1)
FEW = 64  # numbers up to it cannot ask for much memory
BOUND = 1 << 26  # far more than a tiny model and its cache take, far less than what these numbers ask for


def integer_places(path, architecture):
    """Returns {key: where its value is in the file} of the architecture's integers."""
    data, places = path.read_bytes(), {}
    for key, value in open_gguf(path).metadata.items():
        head = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", UINT32)
        if key.startswith(f"{architecture}.") and type(value) is int and head in data:
            places[key] = data.index(head) + len(head)
    return places


def load_with(path, places, numbers):
    """Loads the file with other numbers at these keys, and restores it. Returns the error, if there is one."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        kept = {place: memory[place : place + 4] for place in places.values()}
        for key, number in numbers.items():
            memory[places[key] : places[key] + 4] = struct.pack("<I", number)
        try:
            load_model(path, dtype=mx.float32, **LEAST).experts.close()
        except MoefluxError as error:
            return error
        finally:
            for place, data in kept.items():
                memory[place : place + 4] = data
    return None


def check(path, places, numbers, traced=True):
    """Returns the error of loading with these numbers. If it is `traced`, loading takes three times as long."""
    mx.reset_peak_memory()
    if traced:
        tracemalloc.start()
    try:
        error = load_with(path, places, numbers)
        assert tracemalloc.get_traced_memory()[1] < BOUND, numbers
    finally:
        tracemalloc.stop()
    assert error is None or "\n" not in str(error), numbers
    assert mx.get_peak_memory() < BOUND, numbers
    return error


@pytest.mark.parametrize("family, part", drawn(gguf_models.ARCHITECTURES, range(20)))
def test_each_number_is_read_or_refused(tmp_path, family, part):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, family, type_of(family))
    places = integer_places(path, gguf_models.ARCHITECTURES[family])
    cases = [{key: value} for key in places for value in VALUES][part::20]
    errors = [check(path, places, case, traced=max(case.values()) > FEW) for case in cases]
    assert any(error is not None for error in errors)


@pytest.mark.parametrize(
    "family, numbers",
    [
        ("qwen3_5_moe", {"ssm.inner_size": 2**32 - 1}),
        ("qwen3_5_moe", {"ssm.inner_size": 2**31 - 64, "ssm.time_step_rank": 64}),
        ("qwen3_5_moe", {"ssm.time_step_rank": 3}),
        ("qwen3_5_moe", {"ssm.group_count": 0}),
        ("qwen3_5_moe", {"ssm.group_count": 3}),
        ("qwen3_5_moe", {"ssm.group_count": 64}),
        ("mixtral", {"attention.head_count": 2**31 - 1}),
        ("mixtral", {"attention.head_count_kv": 3}),
        ("granitemoehybrid", {"expert_shared_feed_forward_length": 2**31 - 1}),
    ],
)
def test_numbers_that_do_not_agree(tmp_path, family, numbers):
    """Of lists of heads and rows that are made to undo a change of layout, or to part a matrix."""
    path, architecture = tmp_path / "m.gguf", gguf_models.ARCHITECTURES[family]
    gguf_models.write_gguf(path, family, type_of(family))
    places = integer_places(path, architecture)
    assert check(path, places, {f"{architecture}.{key}": number for key, number in numbers.items()}) is not None

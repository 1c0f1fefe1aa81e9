"""What a process sets before it opens a model: MLX's variables, by chip, and the number of open files."""

import ctypes
import os
import resource
import subprocess
import sys
import warnings

import mlx.core as mx
import pytest
from safetensors_writer import write_model
from tiny_models import child_environment, tiny_directory

from moeflux_mlx import configure_mlx, load, load_model
from moeflux_mlx.cli.run import execute
from moeflux_mlx.errors import MoefluxWarning
from moeflux_mlx.planning import settings
from moeflux_mlx.planning.settings import (
    OPERATIONS,
    OWN,
    SHAPES_CHECK,
    WORDS,
    BufferLimits,
    gathered,
    set_variables,
    variables_for,
)

GIB = 1 << 30


@pytest.fixture
def unset(monkeypatch):
    """MLX's variables are not set, and what a test sets is taken back."""
    for name in (OPERATIONS, WORDS, SHAPES_CHECK):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def in_a_process(code, *arguments):
    """Returns what a new process prints that has none of the variables; `code` begins before any import."""
    environment = {
        name: value for name, value in child_environment().items() if not name.startswith(("MLX_MAX_", "MLX_ENABLE_"))
    }
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("chip", "gib", "operations", "words"),
    [
        ("Apple M1", 8, 300, 2_000),
        ("Apple M1 Max", 64, 300, 1_000_000),
        ("Apple M2 Ultra", 192, 300, 1_000_000),
        ("Apple M3 Pro", 18, 300, 1_000_000),
        ("Apple M4", 16, 300, 2_000),
        ("Apple M4", 24, 300, 1_000_000),
        ("Apple M4 Pro", 48, 300, 1_000_000),
        ("Apple M1 (Virtual)", 7, 300, 2_000),
        ("Apple M5", 16, None, 2_000),
        ("Apple M5 Max", 128, None, 1_000_000),
        ("Apple M14", 32, None, 1_000_000),
        ("", 32, None, 1_000_000),
        (None, 16, 130, 1_000_000),
    ],
)
def test_values_by_chip(chip, gib, operations, words):
    wanted = {WORDS: words} | ({} if operations is None else {OPERATIONS: operations})
    assert variables_for(chip, gib * GIB) == wanted | ({SHAPES_CHECK: 0} if chip is None else {})


def test_a_mac_s_chip_is_asked_of_the_system(monkeypatch):
    class Library:
        code = 0

        def sysctlbyname(self, name, place, size, *_):
            assert name == b"machdep.cpu.brand_string" and size._obj.value == len(place)
            place.value = b"Apple M3 Pro"
            return self.code

    assert settings.chip() is None or sys.platform == "darwin"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert settings.chip() == "Apple M3 Pro"
    Library.code = -1
    assert settings.chip() == ""


def test_what_the_user_has_set_stays(unset, monkeypatch):
    monkeypatch.setenv(WORDS, "7")
    assert set_variables() and not set_variables()
    assert os.environ[WORDS] == "7" and int(os.environ[OPERATIONS]) > 100
    assert gathered() == BufferLimits(int(os.environ[OPERATIONS]), 7)


def test_variables_that_are_not_set_count_as_mlx_has_them(unset, monkeypatch):
    monkeypatch.setenv(OPERATIONS, "many")
    assert gathered() == OWN


def test_a_command_sets_the_variables(unset):
    assert execute(lambda options: 0 if {OPERATIONS, WORDS} <= os.environ.keys() else 1, None, writes=False) == 0


def test_importing_changes_no_environment_and_loading_sets_it_before_mlx_reads_it():
    code = """
import os
before = dict(os.environ)
import moeflux_mlx, moeflux_mlx.generate, moeflux_mlx.chat, moeflux_mlx.plan
from moeflux_mlx import load, load_model
import mlx.core as mx
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
from moeflux_mlx.opening import engine, load_settings

class Reached(Exception):
    pass

def locate(*given):
    assert {"MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"} <= os.environ.keys()
    assert mx.get_peak_memory() == 0
    raise Reached

load_settings.locate = locate
for opening in (load, load_model, engine.open_engine):
    try:
        opening()
    except Reached:
        print("reached", end=" ")
    for name in ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"):
        del os.environ[name]
"""
    assert in_a_process(code) == "reached " * 3


@pytest.mark.parametrize("used", [False, True])
def test_a_call_that_comes_too_late_warns_once(used, unset, monkeypatch):
    kept = mx.zeros(8) + 1
    mx.eval(kept)
    if not mx.is_available(mx.gpu):
        monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    if not used:
        monkeypatch.setattr(mx, "get_peak_memory", lambda: 0)
        monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        configure_mlx()
        configure_mlx()
    assert [one.category for one in caught] == [MoefluxWarning] * used
    assert all("call moeflux_mlx.configure_mlx() before the first array" in str(one.message) for one in caught)


def test_the_warning_names_the_line_of_the_caller(unset, monkeypatch):
    mx.eval(mx.zeros(8) + 1)
    monkeypatch.setattr(settings, "_has_begun", lambda: True)
    path = tiny_directory("qwen3_moe")
    calls = (
        lambda: configure_mlx(),
        lambda: load(path),
        lambda: load_model(path),
    )
    for call in calls:
        for variable in (OPERATIONS, WORDS):
            monkeypatch.delenv(variable, raising=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        found = [(one.filename, one.lineno) for one in caught if "first array" in str(one.message)]
        assert found == [(__file__, call.__code__.co_firstlineno)]


def test_where_no_gpu_computes_no_call_is_too_late(unset, cpu_device):
    mx.eval(mx.zeros(8) + 1)
    configure_mlx()


# ---- open files

SHARDS = 90


def test_a_checkpoint_of_many_shards_opens_under_a_low_limit(tmp_path):
    """macOS allows 256 open files, and a checkpoint may have 163 shards. Here 8 more files may be opened than are open,
    and 18 shards have experts.
    """
    write_model(tmp_path, "qwen3_moe", count=SHARDS)
    assert len(list(tmp_path.glob("*.safetensors"))) == SHARDS
    code = """
import os, resource, sys
import mlx.core as mx
from moeflux_mlx import load_model
few = max(map(int, os.listdir("/dev/fd"))) + 8
resource.setrlimit(resource.RLIMIT_NOFILE, (few, 4096))
model = load_model(sys.argv[1], dtype=mx.float32, expert_io="pread")
mx.eval(model(mx.ones((1, 3), mx.int32)))
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert in_a_process(code, str(tmp_path)) == "(4096, 4096)\n"


def test_a_command_may_open_more_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))
from moeflux_mlx.cli.run import execute
sys.exit(execute(lambda options: print(*resource.getrlimit(resource.RLIMIT_NOFILE)) or 0, None))
"""
    assert in_a_process(code, "64", "200") == "200 200\n"
    if soft > 4096:
        assert in_a_process(code, str(soft), str(hard)) == f"{soft} {hard}\n"


@pytest.fixture
def limits_are(monkeypatch):
    """Returns a function that gives this process limits of open files, and what raises them."""

    def be(limits, raise_them):
        monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
        monkeypatch.setattr(resource, "setrlimit", raise_them)

    return be


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (256, resource.RLIM_INFINITY, 4096),
        (256, 10_240, 4096),
        (256, 1_000, 1_000),
        (4096, 10_240, None),
        (10_000, 10_240, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_only_rises(soft, hard, wanted, limits_are):
    asked = []
    limits_are((soft, hard), lambda kind, limits: asked.append(limits))
    settings.allow_open_files()
    assert asked == ([] if wanted is None else [(wanted, hard)])


@pytest.mark.parametrize("error", [ValueError, PermissionError])
def test_a_limit_that_must_not_rise_stays(error, limits_are):
    def refuse(kind, limits):
        raise error("current limit exceeds maximum limit")

    limits_are((256, 10_240), refuse)
    settings.allow_open_files()


@pytest.mark.parametrize(
    ("chip", "value", "is_refused"), [("Apple M2", "1", True), ("Apple M2", "0", False), (None, "1", False)]
)
def test_a_variable_that_stops_gpus_is_refused_by_name(monkeypatch, capsys, unset, chip, value, is_refused):
    monkeypatch.setattr(settings, "chip", lambda: chip)
    monkeypatch.setenv("MLX_METAL_FAST_SYNCH", value)
    assert execute(lambda options: 0, None) == is_refused
    assert ("unset MLX_METAL_FAST_SYNCH" in capsys.readouterr().err) is is_refused

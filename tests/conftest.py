"""Settings of all tests: they can import one another, and properties run without a deadline."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # set before numpy is imported; otherwise a thread that waits for work spins
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from moeflux_mlx.model import decoder
from moeflux_mlx.ops.cores import cores
from moeflux_mlx.planning.settings import set_variables

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(folder) for folder in HERE.iterdir() if any(folder.glob("*.py")))]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["MOEFLUX_TILES"] = "code"  # ignore the tiles that this machine's user has tuned
os.environ["MOEFLUX_WARM_START"] = "off"  # no test depends on what others used, or adds to the user's file
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # otherwise float32 products keep only 10 bits on an NVIDIA GPU
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of child processes would compile the package again,
sys.dont_write_bytecode = False  # and each worker pytest's own form of the tests
os.fsync = os.fstat  # no test waits for the disk; those of what is synced replace it
decoder.PIECE_SECONDS = 0.0  # tests look at each block and each wave of a prompt
set_variables()  # as every command does, before MLX's device is used
settings.register_profile("moeflux", deadline=None, print_blob=True, max_examples=20)
settings.register_profile("full", settings.get_profile("moeflux"), max_examples=100)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="the whole grids too, which take minutes")
    parser.addoption("--at-once", action="store_true", help="print each failure when it happens")


class AtOnce:
    """Prints each failure when it happens, so that a run that is ended has told them."""

    def __init__(self, config):
        self.plugins = config.pluginmanager  # the reporter comes later than this

    def pytest_runtest_logreport(self, report):
        terminal = self.plugins.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid} ({report.when})\n{report.longreprtext}")


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_auto_num_workers():
    """One more than there are cores, because many tests wait for servers, browsers and child processes."""
    return cores() + 1


def pytest_configure(config):
    from fused_header import precompile

    config.addinivalue_line("markers", "full: of a whole grid, run with --full")
    settings.load_profile("full" if config.getoption("--full") else "moeflux")
    config.addinivalue_line("filterwarnings", "ignore:an expert pool of")  # 1 byte stands for the smallest pool
    if find_spec("moeflux_mlx.ops._native") is None:  # on a GPU machine, where the CPU computes little
        config.addinivalue_line("filterwarnings", "ignore:the native CPU kernels are not built")
    if not hasattr(config, "workerinput"):
        if config.getoption("--at-once"):
            config.pluginmanager.register(AtOnce(config))
        if (header := precompile()) is not None:
            config.add_cleanup(header.wait)
        kept = tempfile.TemporaryDirectory(prefix="moeflux-tiny-")
        os.environ["MOEFLUX_TINY_MODELS"] = kept.name  # the workers inherit it
        config.add_cleanup(kept.cleanup)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_collection_finish(session):
    from moeflux_mlx.ops import native

    gc.freeze()  # collected tests stay until the end, so garbage collections need not visit them
    if hasattr(session.config, "workerinput") and native.available():
        native.set_threads(1)  # after that the workers use the cores


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """On a GPU machine where the native extension is not built, skips tests that turn out to need it."""
    import mlx.core as mx

    from moeflux_mlx.errors import MoefluxError
    from moeflux_mlx.ops import native

    try:
        return (yield)
    except MoefluxError as error:
        if native.available() or not mx.is_available(mx.gpu) or not str(error).startswith(native.MISSING):
            raise
        pytest.skip("the native extension is not built")


@pytest.fixture(scope="module")
def cpu_device():
    """Runs a test on the CPU, for code that a GPU does not run, or rounds differently."""
    from tiny_models import on_cpu

    with on_cpu():
        yield


@pytest.fixture(params=["native", "plain operations"])
def computing(request):
    """Runs a test twice: with the native kernels and with plain MLX operations."""
    if request.param == "plain operations":
        request.getfixturevalue("plain_operations")


@pytest.fixture
def plain_operations(monkeypatch):
    """Makes the CPU compute with MLX's own operations: neither kernels nor native forms run."""
    from tiny_models import use_plain_operations

    use_plain_operations(monkeypatch)


@pytest.fixture
def both_builds(monkeypatch):
    """Runs each kernel as compilers contract products and sums, and without contraction: the bits must be the same."""
    from metal import msl

    monkeypatch.setattr(msl, "BUILDS", (msl.CONTRACTED, msl.UNFUSED))


@pytest.fixture
def no_extension(monkeypatch):
    """Acts as if the native extension had not been built, and no warning had been given."""
    from moeflux_mlx.ops import native

    monkeypatch.setattr(native, "available", lambda: False)
    native.warn_once.cache_clear()


@pytest.fixture
def team():
    """Lets the native kernels compute in as many threads as there are cores. A test may set another number."""
    from moeflux_mlx.ops import native

    if not native.available():
        yield
        return
    before = native.threads()
    native.set_threads(cores())
    yield
    native.set_threads(before)


@pytest.fixture
def files_may_change(monkeypatch):
    """Nobody looks whether the files of a model change, so that each read says what it finds."""
    monkeypatch.setattr("moeflux_mlx.experts.files.LOOK_SECONDS", 1e9)


@pytest.fixture
def files_are_looked_at(monkeypatch):
    """At each use somebody looks whether the files of a model have changed."""
    monkeypatch.setattr("moeflux_mlx.experts.files.LOOK_SECONDS", 0)


@pytest.fixture
def interruptible():
    """Makes SIGINT raise an exception, and SIGHUP end a process, here and in children.

    Tests that run in the background or under nohup may have inherited that they are ignored.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def host():
    """Gives launches a GPU, as `msl.launching`."""
    from metal import msl

    with msl.launching():
        yield


@pytest.fixture
def matrix_units(monkeypatch):
    """Attention takes the text that a launch on CUDA has, with few pieces of several turns each."""
    from moeflux_mlx.mixers.grouped import op

    for target in ("cuda", "metal"):
        monkeypatch.setitem(op.MATRIX, target, (64, 256))
    op.plan.cache_clear()
    yield
    op.plan.cache_clear()


@pytest.fixture
def small_products(monkeypatch):
    """Our kernels also multiply matrices that are so small that MLX's own product is as fast."""
    from moeflux_mlx.ops import linear

    monkeypatch.setattr(linear, "PAYS_FROM", 0)


@pytest.fixture
def backend_is(monkeypatch):
    """Returns a function that names what computes: "metal", "cuda", or "ops" for MLX's own operations."""
    from moeflux_mlx.ops import backend

    return lambda name: monkeypatch.setattr(backend, "name", lambda: name)


@pytest.fixture
def kernels_are(monkeypatch):
    """Returns a function that says whether kernels compute, as on a GPU."""
    from moeflux_mlx.ops import backend

    return lambda there: monkeypatch.setattr(backend, "has_kernels", lambda: there)


@pytest.fixture
def dense_from_rows(monkeypatch):
    """Returns a function that says from how many rows on an expert is dequantised for a product."""
    from moeflux_mlx.ops import grouped

    return lambda rows: monkeypatch.setattr(grouped, "dense_from", lambda *_: rows)


@pytest.fixture
def wave_bytes(monkeypatch):
    """Returns a function that says how many bytes of experts a prompt reads at a time."""
    from moeflux_mlx.experts import waves

    return lambda nbytes: monkeypatch.setattr(waves, "WAVE_BYTES", nbytes)


@pytest.fixture
def index_values(monkeypatch):
    """Returns a function that limits the scores of positions that are computed at a time."""
    from moeflux_mlx.kinds import index

    return lambda count: monkeypatch.setattr(index, "INDEX_VALUES", count)


@pytest.fixture
def free_disk(monkeypatch):
    """Returns a function that says how many bytes every disk has left."""
    return lambda nbytes: monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, nbytes))


@pytest.fixture
def drafts_are_put_back():
    """Puts the kinds of drafts back that bench_drafts.py replaces."""
    from moeflux_mlx.driving import decoding, drafts

    before = decoding.Lookup, drafts.HeadDrafts
    yield
    decoding.Lookup, drafts.HeadDrafts = before


@pytest.fixture
def ops(backend_is):
    """Leaves everything to MLX's own operations."""
    backend_is("ops")

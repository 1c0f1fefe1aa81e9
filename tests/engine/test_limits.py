"""Exhausted memory and GPU timeouts: one error with a remedy, and a session that computes all of its text again."""

import errno
import resource
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_directory

from moeflux_mlx import DeviceError, load_model
from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.errors import MoefluxError
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.ops import native
from moeflux_mlx.ops.limits import within_limits
from moeflux_mlx.planning import machine

pytestmark = pytest.mark.usefixtures("cpu_device")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit the address space")
# The words of MLX 0.32.4 and of the system.
FAILED = "[METAL] Command buffer execution failed: %skIOGPUCommandBufferCallbackError%s)."
TIMEOUT = FAILED % ("Caused GPU Timeout Error (00000002:", "Timeout")
INTERACTIVE = FAILED % ("Impacting Interactivity (0000000e:", "ImpactingInteractivity")
INSUFFICIENT = FAILED % ("Insufficient Memory (00000008:", "OutOfMemory")
HANG = FAILED % ("Caused GPU Hang Error (00000003:", "Hang")
CASES = [
    (RuntimeError(TIMEOUT), "--prefill-step-size"),
    (RuntimeError(INTERACTIVE), "--prefill-step-size"),
    (RuntimeError("cudaStreamSynchronize(stream_) failed: the launch timed out and was terminated"), "--prefill"),
    (RuntimeError(INSUFFICIENT), "--context"),
    (RuntimeError(HANG), "start the program again"),
    (RuntimeError("[malloc] Unable to allocate 123 bytes."), "123 bytes; .*--context"),
    (RuntimeError("[metal::malloc] Resource limit (499000) exceeded."), "--context"),
    (RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"), "--context"),
    (RuntimeError("std::bad_alloc"), "--context"),
    (RuntimeError("can't start new thread"), "--context"),
    (MemoryError(), "out of memory; .*--context"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "--context"),
]


@pytest.mark.parametrize("error, remedy", CASES)
def test_what_is_raised_at_a_limit_becomes_one_line_with_the_remedy(error, remedy):
    with pytest.raises(DeviceError, match=remedy) as told, within_limits():
        raise error
    assert "\n" not in str(told.value) and isinstance(told.value, MoefluxError)


@pytest.mark.parametrize("error", [RuntimeError("There is no Stream(gpu, 1)"), OSError(errno.ENOENT, "no such file")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as told, within_limits():
        raise error
    assert told.value is error


class Failing:
    """An evaluation that the GPU ends, after a number of successful ones."""

    def __init__(self, monkeypatch, name, after=0):
        self.evaluate, self.left = getattr(mx, name), after
        monkeypatch.setattr(mx, name, self)

    def __call__(self, *arrays):
        self.left -= 1
        if self.left == -1:
            raise RuntimeError(TIMEOUT)
        return self.evaluate(*arrays)


@pytest.mark.skipif(not native.available(), reason="without the extension loading evaluates nothing")
def test_loading_and_calling_a_model_report_it(monkeypatch):
    model = load_model(tiny_directory("qwen3_5_moe"))
    for compute in (lambda: load_model(tiny_directory("qwen3_5_moe")), lambda: model(mx.array([[1, 2, 3]]))):
        with pytest.raises(DeviceError, match="Timeout"), monkeypatch.context() as patched:
            Failing(patched, "eval")
            compute()


@pytest.mark.parametrize("name", ["eval", "async_eval"])
def test_a_failure_of_any_evaluation_of_a_prompt_or_answer_is_reported(monkeypatch, name):
    model, failures, prompt = load_model(tiny_directory("qwen3_5_moe")), 0, mx.arange(1, 30)
    while True:
        with monkeypatch.context() as patched:
            Failing(patched, name, after=failures)
            if not tells(generate_step(prompt, model, max_tokens=3)):
                break
        failures += 1
    assert failures >= 3


def tells(steps):
    """Returns whether an answer ends with one of our errors. Other errors are raised."""
    try:
        list(steps)
    except DeviceError:
        return True
    return False


def test_a_session_computes_everything_again(monkeypatch):
    """MLX marks as computed what the GPU did not write. None of it may be used or saved."""
    engine = open_engine(tiny_directory("qwen3_5_moe"))
    session, prompt = engine.session(), list(range(1, 40))
    before = [response.token for response in session.respond(prompt, max_tokens=4)]
    with pytest.raises(DeviceError), monkeypatch.context() as patched:
        Failing(patched, "eval")
        list(session.respond([*prompt, *before, 7], max_tokens=4))
    assert not session.tokens and session.known(prompt) == 0
    for layer in session.cache:
        layer.state = damaged(layer.state)
    assert [response.token for response in session.respond(prompt, max_tokens=4)] == before


def damaged(state):
    return *(None if array is None else mx.full(array.shape, np.nan, array.dtype) for array in state[:2]), *state[2:]


@LINUX
@pytest.mark.skipif(mx.cuda.is_available(), reason="a GPU's memory is planned, and CUDA takes more address space")
def test_under_ulimit_v_a_model_that_does_not_fit_is_one_line():
    command = ["bash", "-c", f"ulimit -v 600000; {sys.executable} -m moeflux_mlx.generate --prompt hello"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and "address space (ulimit -v less" in done.stderr


@LINUX
@pytest.mark.skipif(mx.cuda.is_available(), reason="CUDA reserves more address space than there is memory")
def test_address_space_counts_where_it_is_less_than_memory(monkeypatch):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (used + (4 << 30), resource.RLIM_INFINITY))
    ram = [1 << 40, 1 << 30]
    monkeypatch.setattr(machine, "usable_ram_bytes", lambda: ram[0])
    figures = machine.machine_figures()
    assert 1 << 30 < figures.memory < 4 << 30 and figures.copies
    del ram[0]
    assert machine.machine_figures() == machine.Figures(1 << 30)

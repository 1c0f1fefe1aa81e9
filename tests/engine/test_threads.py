"""A model in several threads, and in a forked process: right numbers or a typed error, and never an endless wait."""

import os
import signal
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import forked
import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from test_decode import make_resident
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import launch

pytestmark = pytest.mark.usefixtures("team")
THREADS, CALLS = 4, 3


def in_thread(work, *args):
    """Returns what `work` returns in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *args).result()


def some_tokens(seed, n):
    return np.random.default_rng(seed).integers(0, 240, (1, n))


def answer(model, seed):
    """Returns the logits of a prompt and of three tokens after it, as numpy arrays."""
    cache = model.make_cache()
    chunks = [some_tokens(seed, 11), *(some_tokens([seed, i], 1) for i in range(3))]
    return np.concatenate([np.array(model(mx.array(chunk), cache)[0]) for chunk in chunks])


def streamed(family="qwen3_moe"):
    return load_model(tiny_directory(family), dtype=mx.float32, expert_io="pread", expert_cache_bytes=1)


@pytest.mark.parametrize("constant", [lambda: launch.count(77)])
def test_kernel_constants_serve_every_thread(constant):
    made = constant()
    assert in_thread(lambda: np.array(made + 1)).size == 8


@pytest.mark.parametrize("kernels", ["native", "twins"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_threads_share_a_streamed_model(family, kernels, request):
    want = [answer(tiny_model(family, mx.float32), seed) for seed in range(THREADS)]
    if kernels == "twins":
        request.getfixturevalue("plain_operations")
        want = [answer(streamed(family), seed) for seed in range(THREADS)]
    model, ready = streamed(family), threading.Barrier(THREADS)

    def work(seed):
        ready.wait()
        return [answer(model, seed) for _ in range(CALLS)]

    with ThreadPoolExecutor(THREADS) as pool:
        for got, wanted in zip(pool.map(work, range(THREADS)), want, strict=True):
            assert all(np.array_equal(one, wanted) for one in got)
    model.experts.close()


def test_what_a_thread_left_lazy_does_not_stop_the_next(plain_operations):
    """The first thread's last layer may still read the slots that the second thread's experts take."""
    model = streamed()
    want = answer(model, 2)
    lazy = model(mx.array(some_tokens(1, 1)))
    assert np.array_equal(in_thread(answer, model, 2), want)
    assert np.array_equal(np.array(lazy), np.array(streamed()(mx.array(some_tokens(1, 1)))))


def test_a_text_goes_on_in_another_thread(plain_operations):
    """Once two threads have called a model, the result of a call belongs to neither."""
    model, tokens = streamed("qwen3_next"), some_tokens(4, 5)
    want = np.array(model(mx.array(tokens)))
    cache = model.make_cache()
    logits = in_thread(lambda: model(mx.array(tokens[:, :4]), cache))
    np.testing.assert_allclose(np.array(logits), want[:, :4], atol=2e-5)
    np.testing.assert_allclose(np.array(model(mx.array(tokens[:, 4:]), cache)), want[:, 4:], atol=2e-5)


def test_an_interrupted_call_leaves_the_model_to_other_threads(plain_operations, monkeypatch):
    model = streamed()
    want = answer(model, 2)
    layer = type(model.layers[1])
    call = layer.__call__

    def interrupted(self, *args):
        if self is model.layers[2]:
            raise KeyboardInterrupt
        return call(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(layer, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(mx.array(some_tokens(1, 1)))
    assert np.array_equal(in_thread(answer, model, 2), want)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_every_thread_has_a_compiled_step(family, monkeypatch):
    model = make_resident(monkeypatch, family)
    want = answer(model, 3)
    assert np.array_equal(in_thread(answer, model, 3), want)
    assert len(model.decode_step.graphs) == 2


CHILD = """
    import os, signal, sys
    import mlx.core as mx
    from moeflux_mlx import generate, load
    from moeflux_mlx.errors import ExpertIOError
    model, tokenizer = load(sys.argv[1], dtype=mx.float32, expert_io=sys.argv[2])
    tokens = mx.array([[1, 2]])
    calls = {
        "model": lambda: model(tokens),
        "generate": lambda: generate(model, tokenizer, "ab"),
        "load": lambda: load(sys.argv[1], dtype=mx.float32, expert_io=sys.argv[2]),
    }
    call = calls[sys.argv[3]]
    call()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            call()
        except ExpertIOError as error:
            os._exit(0 if "forked" in str(error) and "spawn" in str(error) else 3)
        os._exit(4)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("call, expert_io", drawn(["model", "generate", "load"], ["mmap", "pread"]))
def test_a_forked_child_gets_an_error_at_its_first_call(expert_io, call):
    code, _, err = forked.run(textwrap.dedent(CHILD), tiny_directory("qwen3_moe"), expert_io, call)
    assert code == 0, f"the child ended with {code} ({-signal.SIGALRM}: it hung) {err}"


def test_closing_waits_for_a_call_that_is_under_way():
    model = streamed()
    inside, go_on = threading.Event(), threading.Event()

    def work():
        with model.experts.turn(tokens=1):
            inside.set()
            go_on.wait(10)
            return np.array(model(mx.array(some_tokens(1, 3))))

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(work)
        inside.wait(10)
        closing = pool.submit(model.experts.close)
        go_on.set()
        assert np.isfinite(running.result()).all()
        closing.result()
    with pytest.raises(ExpertIOError, match="closed"):
        model(mx.array([[1]]))

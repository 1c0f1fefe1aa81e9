"""The whole server on a local port, in this process, with a real model or a scripted one."""

import asyncio
import contextlib
import functools
import gc
import json
import socket
import threading
import time
import types
from pathlib import Path
from urllib.request import Request, urlopen

import mlx.core as mx
import numpy as np
import uvicorn.server
from tiny_models import tiny_directory

from moeflux_mlx.driving.loop import Event
from moeflux_mlx.driving.session import Reuse
from moeflux_mlx.experts.stats import Asked, LoaderStats
from moeflux_mlx.model.drafting import Drafting
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.server.admission import Admission
from moeflux_mlx.server.app import make_app
from moeflux_mlx.server.guard import Rules
from moeflux_mlx.server.listen import Listener, bind
from moeflux_mlx.server.prepare import Defaults
from moeflux_mlx.server.reply import Served
from moeflux_mlx.server.request import Sampling
from moeflux_mlx.server.sessions import Sessions
from moeflux_mlx.server.switch import ModelChoice, ModelSwitch
from moeflux_mlx.text.boundaries import shared_length
from moeflux_mlx.text.tokenizer import load_tokenizer


class Brisk:
    """asyncio for uvicorn, whose loops look every 0.1 s whether the server ends: here every 0.01 s."""

    def __getattr__(self, name):
        return getattr(asyncio, name)

    async def sleep(self, seconds):
        await asyncio.sleep(min(seconds, 0.01))


uvicorn.server.asyncio = Brisk()


class Live:
    """Args:
        load: makes the engine, or, if there are several models, the engine of a name.
        describe: makes the preparer of a model from its name and the defaults.
        context: that the models' configurations allow.

    Attributes: url, socket, models, worker, served, listener.
    """

    def __init__(
        self,
        load,
        sessions=3,
        queue=64,
        rules=Rules(),  # noqa: B008
        keepalive=8.0,
        idle=1 << 30,
        log=None,
        idle_seconds=None,
        parallel=4,
        decode_share=1 / 3,
        describe=None,
        context=None,
    ):
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        defaults = Defaults(Sampling(temperature=0.0), {})
        loads = load if isinstance(load, dict) else {"tiny": load}
        choices = [
            ModelChoice(
                name,
                make,
                lambda engine: Sessions(engine.session, sessions, idle),
                lambda engine: Admission(parallel, 1 << 40, lambda tokens: tokens),
                lambda path: defaults,
                describe and functools.partial(describe, name, defaults),
                context,
            )
            for name, make in loads.items()
        ]
        self.models = ModelSwitch(choices, queue, decode_share, idle_seconds)
        self.served = Served(self.models, keepalive=keepalive, log=log)
        self.listener = Listener(make_app(self.served, rules), self.models.begin_stop)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self):
        self.listener.loop_begun()
        self.models.start()
        await self.listener.serve([self.socket])

    def __enter__(self):
        gc.freeze()  # a server collects garbage with each model that it unloads; what earlier tests left takes 0.1 s
        self.thread.start()
        wait_for(lambda: self.models.ready)
        return self

    @property
    def worker(self):
        """Returns the worker of the loaded model."""
        return self.models.loaded.worker

    def __exit__(self, *_):
        self.listener.stop_soon()
        self.thread.join(10)
        assert self.models.stop(10) and not self.thread.is_alive()

    def get(self, path):
        with urlopen(f"{self.url}{path}", timeout=30) as reply:
            return reply.read().decode()

    def post(self, path, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    def raw(self, data, seconds=10):
        """Sends bytes and returns the answer, until the server closes the connection or has no more to send."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            connection.sendall(data)
            received = b""
            with contextlib.suppress(TimeoutError, ConnectionError):
                while piece := connection.recv(65536):
                    received += piece
                    if whole_reply(received):
                        break
            return received


def whole_reply(data):
    """Returns whether an answer with a Content-Length has arrived completely."""
    head, separator, body = data.partition(b"\r\n\r\n")
    if separator and b" 204 " in head.split(b"\r\n")[0]:
        return True
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    return bool(separator and lengths and len(body) >= int(lengths[0]))


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def demo_engine(**options):
    return open_engine(None, **options)


@functools.cache
def tokenizer_of(template):
    return load_tokenizer(tiny_directory("qwen3_moe", template=template))


class FakeSession:
    """Has tokens as a session does, and gives the answer of `script` to a prompt's text."""

    def __init__(self, engine):
        self.engine, self.model, self.tokenizer = engine, engine.model, engine.tokenizer
        self.tokens, self.reuse, self.nbytes = [], Reuse(), 0

    @property
    def absorbed(self):
        return len(self.tokens)

    def known(self, prompt):
        return shared_length(self.tokens, prompt[:-1])

    def fork(self, length):
        other = FakeSession(self.engine)
        other.tokens = self.tokens[:length]
        return other

    def keep(self):
        pass

    def answer(self, prompt, *, boundaries, max_tokens, sampler, logits_processors):
        return FakeAnswer(self, prompt, max_tokens, logits_processors if self.engine.obeys else ())

    def absorb_prompt(self, prompt):
        self.engine.asked.append(list(prompt))
        known = self.known(prompt)
        self.reuse = Reuse(len(prompt), known)
        self.tokens = self.tokens[:known]
        for done in range(known, len(prompt), self.engine.step):
            yield done
            self.engine.prompts.append((len(prompt), done))
            time.sleep(self.engine.prompt_seconds)
            self.tokens = list(prompt[:done])
        self.tokens = list(prompt)

    def said(self, prompt, processors):
        """Returns the tokens of the answer."""
        answer = self.engine.script(self.tokenizer.decode(prompt))
        return self._allowed(prompt, self.tokenizer.encode(answer, add_special_tokens=False), processors)

    def _allowed(self, prompt, tokens, processors):
        """Returns the tokens before the first that a processor forbids."""
        size = len(self.tokenizer.get_vocab())
        for n, token in enumerate(tokens if processors else ()):
            logits = mx.zeros((1, size))
            for process in processors:
                logits = process(mx.array([*prompt, *tokens[:n]]), logits)
            if logits[0, token].item() == -np.inf:
                return tokens[:n]
        return tokens


class FakeAnswer:
    """An answer of a `FakeSession`, as a loop drives it."""

    shares_steps, asked, decoding, prompt_end = False, Asked(), None, None

    def __init__(self, session, prompt, max_tokens, processors):
        self.session, self.prompt, self._limit, self._processors = session, prompt, max_tokens, processors
        self.is_in_prompt, self.is_over, self._pieces, self._count = True, False, None, 0

    def advance_prompt(self):
        self._pieces = self._pieces or self.session.absorb_prompt(self.prompt)
        done = next(self._pieces, None)
        if done is None:
            self.is_in_prompt = False
            said = self.session.said(self.prompt, self._processors)
            self._rest = iter(said)
        return done

    def pause(self):
        self._pieces = None

    def advance_alone(self):
        time.sleep(self.session.engine.token_seconds)
        return next(self._rest, None), mx.array(np.log(np.full(256, 1 / 256, np.float32)))

    def take(self, outcome):
        token, logprobs = outcome
        self._count += 1
        reason = "stop" if token is None else "length" if self._count == self._limit else None
        token = self.session.tokenizer.eos_token_id or 0 if token is None else token
        if reason is None:
            self.session.tokens.append(token)
        else:
            self.end()
        return Event(self, len(self.prompt), token, logprobs, False, reason)

    def end(self, error=None):
        self.is_over, self.is_in_prompt = True, False


class FakeExperts:
    def __init__(self):
        self.stats, self.closed, self.pool_bytes, self.host_bytes = LoaderStats(), False, 0, 0
        self.layout = types.SimpleNamespace(moe_layers=(0, 1), num_experts=4)

    def places(self):
        return [((i // 4, i % 4), i % 3) for i in range(8)]

    def close(self):
        self.closed = True


class FakeEngine:
    """What a server needs of an engine. `script` maps the text of a prompt to the answer; an engine that `obeys` ends
    it before a token that a grammar forbids."""

    def __init__(
        self,
        script,
        template="qwen35_style",
        context=8192,
        prompt_seconds=0.0,
        token_seconds=0.0,
        step=256,
        obeys=False,
    ):
        self.script, self.step, self.obeys = script, step, obeys
        self.prompt_seconds, self.token_seconds = prompt_seconds, token_seconds
        self.path = Path("/nowhere/tiny")
        self.tokenizer = tokenizer_of(template)
        args, drafting = types.SimpleNamespace(vocab_size=256), Drafting()
        self.model = types.SimpleNamespace(args=args, drafting=drafting, vision=None)
        self.plan = types.SimpleNamespace(context=context, total=1000, pool=10)
        self.experts = FakeExperts()
        self.lead, self.prompts, self.asked = None, [], []  # what was done with each session, and their tokens

    def session(self, **_):
        return FakeSession(self)


__all__ = ["FakeEngine", "Live", "demo_engine", "wait_for"]

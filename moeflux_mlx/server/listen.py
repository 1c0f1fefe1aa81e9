"""Listens on a socket with uvicorn, and shuts down in order.

By itself uvicorn waits forever for a request's headers and for clients that do not read, answers invalid requests in
plain text, and treats a client that has finished sending as disconnected. This module changes all of that.
"""

import asyncio
import contextlib
import errno
import logging
import math
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import RequestError
from .wire.replies import error_reply

HEADER_SECONDS = 30.0  # seconds in which the headers of a request must arrive
IDLE_SECONDS = 75  # how long a connection may stay open between requests
READ_SECONDS = 60.0  # seconds in which a client must read some of the waiting data
KNOCK_SECONDS = 0.5  # seconds between empty pieces that test whether a client is still there
END_SECONDS = 2  # seconds that answers in progress have to send their last event
BACKLOG = 256
FILLER = "filler"  # key in a request's state: makes an empty piece to put between two pieces of its answer
LAST_PORT = 65535
FULL = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM  # errors of accepting a connection
FULL_SECONDS = 60.0  # seconds without such an error after which the next one is reported again


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with a limit of time for headers and for reading, and errors in JSON."""

    header_seconds = HEADER_SECONDS
    read_seconds = READ_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a server has such ones
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # any unread data is watched, and no more is added to it
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._wait()
        else:
            self._stop_timer("headers")

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio asks, uvicorn always says no
        """Called when the client sends no more. Returns True, which keeps the connection open, if a complete request
        waits for its answer.

        A client that has closed the connection looks the same until the server sends something and the client's system
        refuses it. Before the answer begins, that is an interim response, which HTTP/1.0 lacks.
        """
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or cycle.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False
        self._knock()
        return True

    def _knock(self) -> None:
        """Sends an empty piece from time to time, so that the connection is closed if the client has gone."""
        filler = self.cycle.scope["state"].get(FILLER)
        if self.conn.our_state is h11.SEND_RESPONSE:
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])))
        elif self.conn.our_state is h11.SEND_BODY and filler is not None and not self.flow.write_paused:
            self.transport.write(self.conn.send(h11.Data(data=filler())))
        self._start_timer("knock", KNOCK_SECONDS, self._knock)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_timer("unread")
        super().resume_writing()

    def _watch_reader(self) -> None:
        """Closes the connection if none of the waiting data is read in time."""
        waiting = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < waiting:
                self._watch_reader()
            else:
                self.transport.abort()

        self._start_timer("unread", self.read_seconds, look)

    def _wait(self) -> None:
        """Waits for the headers, or the rest of them."""
        if "headers" not in self._timers:
            self._start_timer("headers", self.header_seconds, self.transport.close)

    def _start_timer(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        """Calls `act` after some seconds, in place of what the timer of this name would do."""
        self._stop_timer(name)
        self._timers[name] = self.loop.call_later(seconds, act)

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()

    def send_400_response(self, msg: str) -> None:
        status, headers, body = error_reply("", 400, "invalid_request", "this HTTP request cannot be served")
        lines = [b"HTTP/1.1 %d Bad Request" % status, *(b"%s: %s" % header for header in headers)]
        self.transport.write(b"\r\n".join([*lines, b"connection: close", b"", body]))
        self.transport.close()


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        RequestError: the port is taken, or the address is not one of this machine.
    """
    if not 0 <= port <= LAST_PORT:
        raise RequestError(f"--port {port} is not a port; give one from 1 to {LAST_PORT}, or 0 for any that is free")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"--host {host} cannot be used: {getattr(error, 'strerror', None) or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise RequestError(f"port {port} of {host} is taken; give another with --port") from error
        why = getattr(error, "strerror", None) or error
        raise RequestError(f"--host {host} --port {port} cannot be used: {why}") from error
    return listener


class Listener(uvicorn.Server):
    """Serves until `stop` is called or a signal comes.

    Args:
        app: the application.
        ending: called once, when the shutdown begins.
    """

    def __init__(self, app: ASGIApp, ending: Callable[[], None] = lambda: None):
        config = uvicorn.Config(
            app,
            http=PatientProtocol,
            ws="none",
            lifespan="off",
            log_level=logging.CRITICAL,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=END_SECONDS,
            backlog=BACKLOG,
        )
        super().__init__(config)
        self._ending, self.signal = ending, 0
        self._full_at = -math.inf  # when a connection could not be accepted, by the event loop's clock

    def stop(self, number: int = 0) -> None:
        """Begins the end, in the event loop's thread."""
        if not self.should_exit:
            self.signal, self.should_exit = number, True
            self._ending()

    @property
    def exit_code(self) -> int:
        """The exit code of the process, as shells report it."""
        return 128 + self.signal if self.signal == signal.SIGINT else 0

    def stop_soon(self) -> None:
        """Begins the end, from any thread, also after the end."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self.stop)

    def loop_begun(self) -> None:
        """Allows calls of `stop_soon` from now on; called in the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._report)

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Reports an error of the event loop. If connections cannot be accepted, asyncio reports each attempt with a
        traceback, hundreds a second; one line says it until it has been over for a while.
        """
        error = context.get("exception")
        is_accepting = str(context.get("message", "")).startswith("socket.accept()")
        if not (is_accepting and isinstance(error, OSError) and error.errno in FULL):
            loop.default_exception_handler(context)
            return
        if loop.time() - self._full_at > FULL_SECONDS:
            remedy = "let fewer clients connect"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                remedy = f"raise the limit of open files (ulimit -n), or {remedy}"
            print(f"error: a connection cannot be accepted: {error.strerror}; {remedy}", file=sys.stderr, flush=True)
        self._full_at = loop.time()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs our signal handlers in place of uvicorn's, which raise the signals again at the end."""
        caught: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            caught = (*caught, signal.SIGHUP)
        loop = asyncio.get_running_loop()
        try:
            for number in caught:
                loop.add_signal_handler(number, self.stop, number)
        except (ValueError, RuntimeError):  # not the main thread: the caller calls `stop`
            caught = ()
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)


PROGRAM_SECONDS = 5.0  # seconds that a program has to end after the signal

# Returns the command line and environment that start a program, given a folder for its configuration.
Command = Callable[[Path], tuple[Sequence[str], Mapping[str, str]]]


class Companion(Listener):
    """A server that runs for one program: when one of the two ends, or a signal comes, both end.

    An interrupt from the keyboard reaches both; while the program runs, only the program handles it.
    """

    program: subprocess.Popen[bytes] | None = None
    _code = 0
    _fault: OSError | None = None  # why the program could not be started
    _thread: threading.Thread | None = None

    def begin(self, command: Command) -> None:
        """Starts the program, from any thread. Its folder is removed when it ends."""
        self._thread = threading.Thread(target=self._accompany, args=[command], name="program", daemon=True)
        self._thread.start()

    def _accompany(self, command: Command) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="moeflux-launch-") as folder:
                words, environment = command(Path(folder))
                self.program = subprocess.Popen(words, env=environment)
                if self.should_exit:  # a signal came meanwhile
                    self.program.terminate()
                self._code = self.program.wait()
        except OSError as error:
            self._fault = error
        self.stop_soon()

    def stop(self, number: int = 0) -> None:
        if self.program is not None and self.program.poll() is None:
            if number == signal.SIGINT:
                return
            self.program.terminate()
        super().stop(number)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises RequestError: the program cannot be started."""
        await super().serve(sockets)
        await asyncio.to_thread(self.end_program)
        if self._fault is not None:
            raise RequestError(f"the program cannot be started: {self._fault}") from self._fault

    def end_program(self) -> None:
        """Returns when the program has ended; it is killed if it takes too long."""
        if self._thread is not None:
            self._thread.join(PROGRAM_SECONDS)
            if self.program is not None:
                self.program.kill()
            self._thread.join()

    @property
    def exit_code(self) -> int:
        """The program's exit code; if a signal ended it, 128 plus the signal's number, as in shells."""
        if self._thread is None:
            return super().exit_code
        return self._code if self._code >= 0 else 128 - self._code

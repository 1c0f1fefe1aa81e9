"""A server that runs for one program; when one of the two ends, the other ends too."""

import asyncio
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from socket import socket

from ..errors import RequestError
from .listen import Listener

END_SECONDS = 5.0  # seconds that a program has to end after the signal

# Returns the command line and environment that start a program, given a folder for its configuration.
Command = Callable[[Path], tuple[Sequence[str], Mapping[str, str]]]


class Companion(Listener):
    """Serves until its program ends or a signal comes.

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

    async def serve(self, sockets: list[socket] | None = None) -> None:
        """Raises RequestError: the program cannot be started."""
        await super().serve(sockets)
        await asyncio.to_thread(self.end_program)
        if self._fault is not None:
            raise RequestError(f"the program cannot be started: {self._fault}") from self._fault

    def end_program(self) -> None:
        """Returns when the program has ended; it is killed if it takes too long."""
        if self._thread is not None:
            self._thread.join(END_SECONDS)
            if self.program is not None:
                self.program.kill()
            self._thread.join()

    @property
    def exit_code(self) -> int:
        """The program's exit code; if a signal ended it, 128 plus the signal's number, as in shells."""
        if self._thread is None:
            return super().exit_code
        return self._code if self._code >= 0 else 128 - self._code

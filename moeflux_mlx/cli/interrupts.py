"""What an interrupt from the keyboard does: while a command is imported it ends the process, without a traceback."""

import os
import signal

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)


def end_at_once() -> None:
    """From now on an interrupt ends the process at once, unless interrupts are ignored."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Undoes `end_at_once`: from now on an interrupt raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)

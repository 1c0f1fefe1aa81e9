"""Local processes that are ranks of one model, each with a deadline and an exit code."""

import io
import json
import os
import socket
import sys

import pytest
from forked import Child
from tiny_models import child_environment

from moeflux_mlx.cli.main import main

LIMIT = 90  # seconds


def ring(folder, ranks):
    """Writes a host file for a number of ranks, with ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(ranks)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    file = folder / f"hosts-{os.urandom(4).hex()}.json"
    file.write_text(json.dumps([[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]))
    for one in sockets:
        one.close()
    return file


def started(file, rank, code, *arguments):
    """Starts one rank, `python -c code *arguments`."""
    environment = child_environment() | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)}
    return Child(code, *map(str, arguments), environment=environment)


def command(*arguments):
    """Returns a command of the package for `started`, with one thread because the ranks share this machine."""
    code = (
        "import sys; from moeflux_mlx.ops import native; native.set_threads(1)\n"
        "from moeflux_mlx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    return (code, *arguments)


def ended(processes, inputs=()):
    """Returns (exit code, stdout, stderr) of each process. None lives longer than the limit."""
    given = [*inputs, *([""] * (len(processes) - len(inputs)))]
    results = []
    try:
        for process, text in zip(processes, given, strict=True):
            out, err = process.communicate(text if process.stdin else None, timeout=LIMIT)
            results.append((process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return results


def alone(*arguments, text=""):
    """Runs a command that is no rank in this process. Returns (exit code, stdout, stderr)."""
    streams = given, out, err = [io.TextIOWrapper(io.BytesIO(data), "utf-8") for data in (text.encode(), b"", b"")]
    with pytest.MonkeyPatch.context() as patch:
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        code = main([*map(str, arguments)])
    given.close()
    return code, *(stream.seek(0) or stream.read() for stream in (out, err))


def together(folder, ranks, *arguments, options=(), text=""):
    """Runs a command on all ranks at once. `options` are further options of each rank."""
    file = ring(folder, ranks)
    more = [*options, *([()] * (ranks - len(options)))]
    return ended([started(file, rank, *command(*arguments, *more[rank])) for rank in range(ranks)], [text])

"""`moeflux X` and `python -m moeflux_mlx X`: the commands by name."""

import importlib
import sys
from collections.abc import Sequence

from ..errors import did_you_mean
from ..foreign import remedy_of_command
from ..process import check_mlx
from ..version import full_version
from .terminal import end_at_once, say

COMMANDS = {
    "generate": ("moeflux_mlx.generate.__main__", "generate text for one prompt"),
    "chat": ("moeflux_mlx.chat", "chat in the terminal"),
    "serve": ("moeflux_mlx.serve", "serve models over HTTP, for agents and chat apps"),
    "models": ("moeflux_mlx.models", "list the known models that fit this machine"),
    "launch": ("moeflux_mlx.launch", "start a coding agent with its own server"),
    "convert": ("moeflux_mlx.convert", "make a packed model directory from a checkpoint"),
    "plan": ("moeflux_mlx.plan", "show the memory that a model needs and the speed that a disk allows"),
    "evaluate": ("moeflux_mlx.evaluate", "measure how well a model predicts a text, also against another"),
    "benchmark": ("moeflux_mlx.benchmark", "measure how fast a model runs on this machine"),
    "tune": ("moeflux_mlx.tune", "find the best size of the expert pool and faster kernel tiles"),
    "ranks": ("moeflux_mlx.ranks", "prepare several machines to run one model"),
    "pull": ("moeflux_mlx.pull", "download a model without loading it"),
    "list": ("moeflux_mlx.list", "list the downloaded models"),
    "remove": ("moeflux_mlx.remove", "delete a downloaded model"),
    "doctor": ("moeflux_mlx.doctor", "describe this machine and check that its kernels compute correctly"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names, with the others; returns its exit code."""
    if argv is None:  # this process is the command's own
        end_at_once()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if words and words[0] in COMMANDS:
        require_mlx()
        return importlib.import_module(COMMANDS[words[0]][0]).main(words[1:])
    if words == ["--version"]:
        say(f"moeflux-mlx {full_version()}")
        return 0
    if words and words[0] not in ("-h", "--help"):
        instead = remedy_of_command(words)
        there_are = f"there are: {', '.join(COMMANDS)}{did_you_mean(words[0], COMMANDS)}"
        print(f"error: no command {words[0]!r}; {f'instead: {instead}' if instead else there_are}", file=sys.stderr)
        return 2
    say(usage())
    return 0 if words else 2


def require_mlx() -> None:
    """Ends the process with one line and exit code 1 if MLX cannot be imported."""
    try:
        check_mlx()
    except ImportError as error:
        sys.exit(f"error: {error}")


def usage() -> str:
    """The commands, a line each."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: moeflux COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "moeflux COMMAND --help lists a command's options.",
            "moeflux --version prints the version.",
        ]
    )

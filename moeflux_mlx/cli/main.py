"""`moeflux X` and `python -m moeflux_mlx X`: the commands by name."""

import importlib
import sys
from collections.abc import Sequence

from .run import did_you_mean

COMMANDS = {
    "generate": ("moeflux_mlx.generate.__main__", "a prompt in, text out"),
    "chat": ("moeflux_mlx.chat", "a conversation in the terminal"),
    "serve": ("moeflux_mlx.serve", "the model behind HTTP, for agents and chat apps"),
    "convert": ("moeflux_mlx.convert", "make a packed model directory from a checkpoint"),
    "plan": ("moeflux_mlx.plan", "what a model needs in memory, and how fast the disk lets it run"),
    "evaluate": ("moeflux_mlx.evaluate", "how well a model predicts a text, and how far it is from another"),
    "benchmark": ("moeflux_mlx.benchmark", "how fast a model runs on this machine"),
    "tune": ("moeflux_mlx.tune", "find the fastest tiles of the kernels on this GPU"),
    "ranks": ("moeflux_mlx.ranks", "prepare several machines to run one model"),
    "list": ("moeflux_mlx.list", "the models that were downloaded"),
    "remove": ("moeflux_mlx.remove", "delete a model that was downloaded"),
    "doctor": ("moeflux_mlx.doctor", "what this machine is, and whether it computes rightly"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names, with the others; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return importlib.import_module(COMMANDS[words[0]][0]).main(words[1:])
    if words == ["--version"]:
        print(f"moeflux-mlx {importlib.import_module('moeflux_mlx').__version__}")
        return 0
    if words and words[0] not in ("-h", "--help"):
        meant = did_you_mean(words[0], COMMANDS)
        print(f"error: no command {words[0]!r}; there are: {', '.join(COMMANDS)}{meant}", file=sys.stderr)
        return 2
    print(usage())
    return 0 if words else 2


def usage() -> str:
    """The commands, a line each."""
    lines = [f"  {name:10}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: moeflux COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "moeflux COMMAND --help lists the options, moeflux --version says which one this is.",
        ]
    )

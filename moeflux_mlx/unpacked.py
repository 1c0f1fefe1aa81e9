"""What to say of a checkpoint, or of an unfinished conversion, that was given as a model: the command to run."""

import shlex
from pathlib import Path

from .config import ModelArgs, read_json, unquantized
from .errors import NotPackedError
from .layout import ExpertLayout
from .matrix import SourceFormat
from .output import STATE
from .packed import FOLDER


def convert_command(hf_path: str, mlx_path: str, requantize: bool) -> str:
    """The shell command that converts `hf_path`."""
    words = ["python", "-m", "moeflux_mlx.convert", "--hf-path", hf_path, "--mlx-path", mlx_path]
    return shlex.join([*words, *(["--requantize"] if requantize else [])])


def not_packed_error(source: str, folder: Path) -> NotPackedError:
    """For the checkpoint `source`, a path or repo id, whose config.json lies in `folder`; says what disk it takes.

    Raises:
        ModelFileError: config.json cannot be read. ConfigError: it is of a model that cannot be converted either.
    """
    config = read_json(folder / "config.json")
    args = ModelArgs.from_dict(unquantized(config))
    target = source.rstrip("/").rsplit("/", 1)[-1] + "-moeflux"
    requantize = SourceFormat(config, args.num_hidden_layers).must_requantize
    lossy = "; its codes are of another kind, so that --requantize loses some precision" if requantize else ""
    gigabytes = ExpertLayout.from_args(args).total_bytes / 1e9
    return NotPackedError(
        f"{source} is not packed (no {FOLDER}/layout.json); run: {convert_command(source, target, requantize)}  "
        f"(the experts take {gigabytes:.1f} GB of disk, besides the checkpoint{lossy})"
    )


def unfinished_error(path: Path) -> NotPackedError:
    """For a directory that a conversion has begun to fill.

    Raises:
        ModelFileError: its state file cannot be read.
    """
    command = read_json(path / STATE).get("command")
    finish = command if isinstance(command, str) else "the same python -m moeflux_mlx.convert command again"
    return NotPackedError(f"{path} holds an unfinished conversion; to finish it run: {finish}")

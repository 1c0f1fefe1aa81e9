"""Messages for a checkpoint, or an unfinished conversion, that was given as a model; they contain the command to
run.
"""

import shlex
from pathlib import Path

from ..errors import NotPackedError
from ..files import read_json, shown_gb
from ..formats.gguf_names import SUFFIX
from ..formats.packed import FINISHED, STATE
from ..formats.record import ExpertLayout, Quants, stated_quants
from ..quant import EXPERTS, unquantized
from ..spec import ModelArgs
from .source_format import SourceFormat


def convert_command(hf_path: str, mlx_path: str) -> str:
    """The shell command that converts `hf_path`."""
    return shlex.join(["python", "-m", "moeflux_mlx.convert", "--hf-path", hf_path, "--mlx-path", mlx_path])


def packing_command(path: Path) -> str:
    """The command for a local checkpoint, a directory or a GGUF; the target gets its name."""
    name = path.stem if path.suffix == SUFFIX else path.resolve().name
    return convert_command(str(path), f"{name}-moeflux")


def not_packed_error(source: str, folder: Path) -> NotPackedError:
    """The error for the checkpoint `source`, a path or repo id, whose config.json is in `folder`; it states the disk
    space.

    Raises:
        ModelFileError: config.json cannot be read. ConfigError: it is of a model that cannot be converted either.
    """
    config = read_json(folder / "config.json")
    args = ModelArgs.from_dict(unquantized(config))
    name = Path(source).name if Path(source).name.strip(".") else folder.resolve().name
    form = SourceFormat(config)
    command = convert_command(source, f"{name}-moeflux")
    beside = "the checkpoint" if Path(source).exists() else "at most two of the checkpoint's files"
    return NotPackedError(
        f"{source} is not packed (no {FINISHED}); run: {command}  "
        f"(the experts take {shown_gb(_layout(args, form).total_bytes)} of disk, besides {beside})"
    )


def _layout(args: ModelArgs, form: SourceFormat) -> ExpertLayout:
    """The layout of the packed model, if the form of its experts is known."""
    quants: dict[int, Quants] = {}
    if form.stated is not None:
        for number in args.record_sets:
            quants[number] = tuple(one or EXPERTS for one in stated_quants(args, form.stated, number))
    return ExpertLayout.from_args(args, quants or None)


def unfinished_error(path: Path) -> NotPackedError:
    """The error for a directory with an unfinished conversion.

    Raises:
        ModelFileError: its state file cannot be read.
    """
    state = read_json(path / STATE)
    origin = state.get("origin")
    hf_path = origin.get("hf_path") if isinstance(origin, dict) else None
    of = f" of {hf_path}" if isinstance(hf_path, str) and hf_path.isprintable() else ""  # the file is not trusted
    return NotPackedError(f"{path} holds an unfinished conversion{of}; run the command that began it again")

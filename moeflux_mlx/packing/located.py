"""A model's directory, looked at once: whatever opens the model or a part of it gets a `Located`, and asks it.

The messages for a checkpoint, or an unfinished conversion, that was given as a model contain the command to run.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import NotPackedError
from ..files import JsonDict, read_json, shown_gb
from ..formats.checkpoint import Checkpoint, open_checkpoint, read_config, safetensors_files
from ..formats.gguf_names import SUFFIX
from ..formats.packed import FINISHED, STATE, is_packed
from ..formats.record import ExpertLayout, Quants, stated_quants
from ..quant import EXPERTS, unquantized
from ..spec import ModelArgs
from ..text.tokenizer import TokenizerWrapper, load_tokenizer
from .gguf_folder import described_files, open_described
from .source_format import MXFP4, MXFP8, SourceFormat

AS_PUBLISHED = (MXFP4, MXFP8)  # forms with MLX's bytes in files of any tool


@dataclass(frozen=True)
class Located:
    """A directory that may hold a model: a packed one, a checkpoint, or what describes a GGUF.

    Each answer is read when it is first asked for. Those from a file raise ModelFileError if it cannot be read.

    Attributes:
        path: the directory.
        shards_in: other directories in which a checkpoint's files may lie.
    """

    path: Path
    shards_in: Sequence[Path] = ()

    @cached_property
    def is_packed(self) -> bool:
        """Whether a conversion into this directory has finished."""
        return is_packed(self.path)

    @property
    def is_unfinished(self) -> bool:
        """Whether a conversion into this directory has begun, and not finished."""
        return not self.is_packed and (self.path / STATE).exists()

    @cached_property
    def gguf(self) -> tuple[Path, ...]:
        """The files of the GGUF that it describes; none: it is another kind of model."""
        return described_files(self.path)

    @cached_property
    def config(self) -> JsonDict:
        """What config.json says, as `read_config`."""
        return read_config(self.path)

    @cached_property
    def args(self) -> ModelArgs:
        """The model. Of a packed one also its quantisation, of which any other kind of directory says too little.

        Raises:
            ConfigError: a value in a configuration is not implemented.
        """
        return ModelArgs.from_file(self.path, self.config if self.is_packed else unquantized(self.config))

    @cached_property
    def tokenizer(self) -> TokenizerWrapper:
        """Raises TokenizerError: the tokenizer files cannot be used."""
        return load_tokenizer(self.path)

    @property
    def states_mlx(self) -> bool:
        """Whether config.json says that everything is quantised by MLX, or in MLX's mxfp4 or mxfp8.

        Raises:
            ConfigError: it is of a model that does not run.
        """
        self.args  # noqa: B018  (the first error is that of the model)
        form = SourceFormat(self.config)
        return form.mlx or form.stated is not None and form.stated.default in AS_PUBLISHED

    @property
    def runs(self) -> bool:
        """Whether it is a packed model, a checkpoint that looks as MLX quantised it, or describes a GGUF.

        Raises:
            ConfigError: it is of a model that does not run.
        """
        if self.is_packed or self.gguf:
            return True
        is_half_packed = any(self.path.glob("resident*.safetensors"))
        return not is_half_packed and bool(safetensors_files(self.path, self.shards_in)) and self.states_mlx


def open_source(located: Located) -> Checkpoint:
    """A checkpoint, or the GGUF that the directory describes; as `open_checkpoint`."""
    if not located.gguf:
        return open_checkpoint(located.path, located.shards_in)
    located.args  # noqa: B018  (checked before anything is made of a number of the file)
    return open_described(located.path, located.gguf, located.config)


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
    origin = read_json(path / STATE).get("origin")
    hf_path = origin.get("hf_path") if isinstance(origin, dict) else None
    of = f" of {hf_path}" if isinstance(hf_path, str) and hf_path.isprintable() else ""  # the file is not trusted
    return NotPackedError(f"{path} holds an unfinished conversion{of}; run the command that began it again")

"""Opens `packed_experts/`: finds the layer files and checks every length before anything runs.

It knows files and sizes. The contents of records are defined in `record`; the source of experts decides when to read
them.
"""

from collections.abc import Sequence
from pathlib import Path

from ..errors import ModelFileError
from ..files import read_json
from ..spec import ModelArgs
from .layout_file import directories_of, from_json
from .pieces import FilePiece
from .record import ExpertLayout

FOLDER = "packed_experts"
LAYOUT = "layout.json"  # the file name in it
FINISHED = f"{FOLDER}/{LAYOUT}"  # a directory that has it is a finished model
STATE = "convert_state.json"  # the state file of an unfinished conversion


def is_packed(path: Path) -> bool:
    """Whether a directory holds a packed model, whose last file is written."""
    return (path / FINISHED).exists()


class PackedExperts:
    """The layer files of one model. Records may lie in several directories by turns, so that each drive reads a part of
    every layer.

    Args:
        folders: of n of them, number i has a file of each layer with the experts i, i + n, i + 2n, ...
    """

    def __init__(self, layout: ExpertLayout, folders: Sequence[Path]):
        self.layout, self.folders = layout, tuple(folders)
        self._files = {i: [folder / layout.file_name(i) for folder in self.folders] for i in layout.records}

    @property
    def paths(self) -> dict[int, Path]:
        """The first file of each layer, which is the only one if there is one directory."""
        return {layer: files[0] for layer, files in self._files.items()}

    @property
    def sizes(self) -> dict[Path, int]:
        """Bytes of every file."""
        count, stride = self.layout.count, {layer: record.stride for layer, record in self.layout.records.items()}
        return {
            file: stride[layer] * len(range(number, count(layer), len(files)))
            for layer, files in self._files.items()
            for number, file in enumerate(files)
        }

    def pieces(self, layer: int, expert: int) -> tuple[FilePiece, ...]:
        """The expert's record, which is a single piece."""
        index, number = divmod(expert, len(self.folders))
        start, size = self.layout.start(layer, index), self.layout.records[layer].size
        return (FilePiece(self._files[layer][number], start, size, 0),)


def open_packed(model_path: str | Path, args: ModelArgs) -> PackedExperts:
    """The experts of a packed model directory.

    Raises:
        ModelFileError: a file or a directory is missing, a file has the wrong length, or layout.json disagrees.
    """
    folder = Path(model_path) / FOLDER
    layout_file = folder / LAYOUT
    content = read_json(layout_file)
    layout = from_json(content, args, layout_file)
    also = [Path(other) for other in directories_of(content, layout_file)]
    for other in also:
        if not other.is_dir():
            raise ModelFileError(
                f"{other}, which has some of the experts, does not exist: connect its drive, or, if it is elsewhere "
                f"now, change its path in {layout_file}"
            )
    experts = PackedExperts(layout, [folder, *also])
    for path, size in experts.sizes.items():
        check_length(path, size)
    return experts


def check_length(path: Path, wanted: int) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist; it should hold {wanted} bytes") from None
    if size != wanted:
        raise ModelFileError(f"{path} has {size} bytes; the layout needs {wanted}")

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
    """The layer files of one model: `layout`, and the checked path of each MoE layer."""

    def __init__(self, layout: ExpertLayout, paths: dict[int, Path]):
        self.layout = layout
        self.paths = paths

    @property
    def sizes(self) -> dict[Path, int]:
        """Bytes of every file."""
        return {path: self.layout.layer_bytes(layer) for layer, path in self.paths.items()}

    def pieces(self, layer: int, expert: int) -> tuple[FilePiece, ...]:
        """The expert's record, which is a single piece."""
        return (FilePiece(self.paths[layer], self.layout.start(layer, expert), self.layout.records[layer].size, 0),)

    @classmethod
    def open(cls, model_path: str | Path, args: ModelArgs) -> "PackedExperts":
        """Raises ModelFileError: a file is missing, has the wrong length, or layout.json disagrees."""
        folder = Path(model_path) / FOLDER
        layout_file = folder / LAYOUT
        layout = from_json(read_json(layout_file), args, layout_file)
        paths = {number: folder / layout.file_name(number) for number in layout.records}
        for layer, path in paths.items():
            check_length(path, layout.layer_bytes(layer))
        return cls(layout, paths)


class StripedExperts:
    """The layer files of one model whose records lie in several directories by turns, so that each drive reads a part
    of every layer.

    Args:
        folders: of n of them, number i has a file of each layer with the experts i, i + n, i + 2n, ...
    """

    def __init__(self, layout: ExpertLayout, folders: Sequence[Path]):
        self.layout = layout
        self.folders = tuple(folders)

    @property
    def sizes(self) -> dict[Path, int]:
        """Bytes of every file."""
        return {
            folder / self.layout.file_name(layer): record.stride * len(self.experts_in(number, layer))
            for layer, record in self.layout.records.items()
            for number, folder in enumerate(self.folders)
        }

    def experts_in(self, number: int, layer: int) -> range:
        """The experts of a layer whose records are in directory `number`."""
        return range(number, self.layout.count(layer), len(self.folders))

    def pieces(self, layer: int, expert: int) -> tuple[FilePiece, ...]:
        """The expert's record, which is a single piece."""
        index, number = divmod(expert, len(self.folders))
        path = self.folders[number] / self.layout.file_name(layer)
        return (FilePiece(path, self.layout.start(layer, index), self.layout.records[layer].size, 0),)


def open_packed(model_path: str | Path, args: ModelArgs) -> PackedExperts | StripedExperts:
    """The experts of a packed model directory.

    Raises:
        ModelFileError: a file or a directory is missing, a file has the wrong length, or layout.json disagrees.
    """
    folder = Path(model_path) / FOLDER
    layout_file = folder / LAYOUT
    content = read_json(layout_file)
    layout, also = from_json(content, args, layout_file), directories_of(content, layout_file)
    if not also:
        return PackedExperts.open(model_path, args)
    for other in map(Path, also):
        if not other.is_dir():
            raise ModelFileError(
                f"{other}, which has some of the experts, does not exist: connect its drive, or, if it is elsewhere "
                f"now, change its path in {layout_file}"
            )
    experts = StripedExperts(layout, [folder, *map(Path, also)])
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

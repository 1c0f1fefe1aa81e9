"""Checks that the tables in a packed model's records are one for each form: kernels take that of one expert for all."""

from ..errors import ModelFileError
from ..quant import GRID
from .checkpoint import read_bytes
from .packed import PackedExperts, StripedExperts


def check_grids(experts: PackedExperts | StripedExperts) -> None:
    """Compares the tables of each form in the first and the last expert of each layer.

    Raises:
        ModelFileError: two of one form differ, or a file cannot be read.
    """
    layout, known = experts.layout, dict[str, tuple[bytes, str]]()
    for layer, record in layout.records.items():
        fields = [(part.quant.mode, field) for part in record.projections for field in part.codes if field.part == GRID]
        for expert in {0, layout.count(layer) - 1} if fields else ():
            path, start, _, _ = experts.pieces(layer, expert)[0]
            for mode, field in fields:
                where = f"{field.name} of {layout.named((layer, expert))}"
                grid = bytes(read_bytes(path, start + field.offset, field.size))
                first, other = known.setdefault(mode, (grid, where))
                if first != grid:
                    raise ModelFileError(f"{path}: {where} is another table than {other}; convert the model again")

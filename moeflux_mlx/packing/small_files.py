"""The small files of a packed model: config.json, the tokenizer's, and what the format adds."""

import json

from ..files import tagged
from ..formats.checkpoint import COPIED, GRIDS_LICENSE, RECIPE, Checkpoint
from ..formats.packed import FINISHED
from ..quant import GRID, unquantized
from .gguf_tables import license_text
from .layer_files import layout_json
from .mlx_layout import INDEX as MLX_INDEX
from .plan import ConversionPlan
from .resident import ResidentFile


def small_files(checkpoint: Checkpoint, plan: ConversionPlan) -> dict[str, bytes]:
    """Contents by name; the last one makes the directory a model."""
    copied = {name: (checkpoint.folder / name) for name in COPIED}
    files = {name: file.read_bytes() for name, file in copied.items() if file.is_file()}
    files |= {} if plan.outcome.recipe is None else {RECIPE: plan.outcome.recipe.file()}
    if _has_grids(plan):
        files[GRIDS_LICENSE] = license_text().encode()
    config = {**unquantized(checkpoint.config), "quantization": plan.quantization}
    files["config.json"] = (json.dumps(tagged(config), indent=2, ensure_ascii=False) + "\n").encode()
    if plan.index is not None:
        return {MLX_INDEX: plan.index, **files}
    files[FINISHED] = layout_json(plan.layout, plan.share, plan.also)
    return files


def _has_grids(plan: ConversionPlan) -> bool:
    """Whether a form with a table of its own is one of those of experts, or of resident matrices."""
    of_experts = (quant for one in plan.layout.records.values() for quant in one.quants)
    written = (
        one
        for unit in plan.units
        if isinstance(unit, ResidentFile)
        for source in unit.sources
        for one in source.written
    )
    return any(quant.grid for quant in of_experts) or any(one.name.endswith(f".{GRID}") for one in written)

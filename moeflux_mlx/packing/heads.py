"""Finds and checks a draft head in a checkpoint, and prepares it for loading.

A head is read as a model of one layer, in any form that checkpoints have. Floats are quantised during loading: experts
like the model's, everything else to `RESIDENT`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..experts.memory import page_aligned
from ..files import JsonObject
from ..formats.checkpoint import Tensor
from ..formats.record import ExpertLayout
from ..model.head import DraftHead
from ..model.tensors import resident_bytes
from ..quant import Quant, of_packed
from ..rounding.methods import MINMAX
from ..spec import ModelArgs
from .expert_parts import find_experts
from .layer_files import LayerFile, plan_experts
from .matrix import Rounding
from .recipe import DEFAULT_PART, Recipe
from .resident import ResidentPlan, plan_resident
from .sanitize import head_tensors
from .source_format import SourceFormat
from .sources import read_all, shapes_of
from .wanted import Wanted

RESIDENT = Quant(8, 64)  # for floats: a head is small, and wrong drafts cost more than its bytes


@dataclass(frozen=True)
class HeadWeights:
    """The tensors of a draft head.

    Args:
        args: of a model of one layer, the head's.
        resident: its tensors that are not routed experts'.
        experts: its routed experts.
    """

    args: ModelArgs
    resident: ResidentPlan
    experts: LayerFile

    def nbytes(self, dtype: mx.Dtype) -> int:
        """Bytes in memory with activations of `dtype`."""
        return resident_bytes(self.shapes(), dtype) + self.experts.size

    def shapes(self) -> dict[str, mx.array]:
        """Its resident tensors by name, for callers that need only shapes and dtypes."""
        return shapes_of(self.resident.sources)

    def read(self) -> dict[str, mx.array]:
        """Its resident tensors by name. Raises ModelFileError: a file cannot be read, or a value is not finite."""
        return read_all(self.resident.sources)

    def records(self) -> np.ndarray:
        """Its experts [experts, words] uint32. Raises ModelFileError, as `read`."""
        count, stride = self.args.num_experts, self.experts.geometry.stride
        rows = page_aligned(count, stride // 4)
        for expert in range(count):
            rows[expert] = np.frombuffer(self.experts.record(expert), np.uint32)
        return rows


def find_head(
    args: ModelArgs, tensors: Iterable[Tensor], config: JsonObject, layout: ExpertLayout
) -> HeadWeights | None:
    """The draft head among the tensors of a checkpoint; None: it has none.

    Args:
        args: of the model.
        tensors: as the checkpoint calls them.
        config: its config.json.
        layout: of the model's experts.

    Raises:
        ModelFileError: parts of it are missing, or have other shapes than a layer of the model.
    """
    own, head = head_tensors(tensors, args), args.head
    if not own or head is None:
        return None
    form = _form(config)
    quants = layout.records[layout.moe_layers[-1]].quants
    # At each start, so by the faster method; drafts are checked.
    wanted = Wanted(Recipe("head", {DEFAULT_PART: RESIDENT}), rounding=Rounding(MINMAX))
    resident = plan_resident(head, own, form, wanted, DraftHead)
    found = find_experts(head, own, 0, form)
    stored = plan_experts(found, wanted, quants)
    used = stored.used | {tensor.name for source in resident.sources for tensor in source.tensors}
    left = sorted(tensor.name for tensor in own.values() if tensor.name not in used)
    if left:
        raise ModelFileError(f"tensor {left[0]} does not belong to a draft head of one layer like the model's")
    head = replace(head, quantization=of_packed({"quantization": resident.quantization()}))
    layers = ExpertLayout.from_args(head, {0: stored.quants}, {0: stored.dtype})
    return HeadWeights(head, resident, LayerFile(layers, 0, found, wanted.rounding))


def _form(config: JsonObject) -> SourceFormat:
    """How the head is stored. MLX's config describes the model's matrices; those of the head follow from their
    shapes.
    """
    hub = config.get("quantization_config")
    is_method = isinstance(hub, Mapping) and "quant_method" in hub
    return SourceFormat({"quantization_config": hub} if is_method else {})

"""Chooses the source of a model's drafts from the option, the files and the memory plan; finds, checks and loads heads.

A head is read as a model of one layer, in any form that checkpoints have. Floats are quantised during loading: experts
like the model's, everything else to `RESIDENT`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..caches.layer_cache import MOST_DRAFTS
from ..errors import ConfigError, ModelFileError, RequestError
from ..experts.memory import page_aligned
from ..experts.routed import RoutedExperts
from ..experts.whole import HeldExperts
from ..files import JsonObject, read_json, user_path
from ..formats.checkpoint import Tensor, merge_tensors, read_header, safetensors_files
from ..formats.gguf_file import is_gguf, open_gguf, open_parts
from ..formats.record import ExpertLayout
from ..mixers.registry import stored_forms
from ..model.decoder import Model
from ..model.drafting import Drafting
from ..model.head import DraftHead
from ..model.tensors import resident_bytes
from ..model.weights import fill
from ..packing.expert_parts import find_experts
from ..packing.gguf_folder import draft_tensors
from ..packing.layer_files import LayerFile, plan_experts
from ..packing.matrix import Rounding, Wanted
from ..packing.recipe import DEFAULT_PART, Recipe
from ..packing.resident import ASIDE, ResidentPlan, TensorFile, plan_resident
from ..packing.sanitize import head_tensors
from ..packing.source_format import SourceFormat
from ..packing.sources import read_all, shapes_of
from ..planning.budget import Planner
from ..planning.machine import in_gb
from ..planning.memory_plan import MemoryPlan
from ..quant import Quant, of_packed
from ..rounding.methods import MINMAX
from ..spec import ModelArgs
from .weights import ModelWeights

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


DRAFTS = ("auto", "off", "lookup", "head")  # sources of drafts; a directory or GGUF with a head is allowed too
LEAST_SHARE = 0.9  # share of the pool's bytes without drafts that "auto" leaves to the pool


@dataclass(frozen=True)
class ChosenDrafts:
    """The chosen source of drafts.

    Args:
        args: the model's, with the layer of its draft head if it has one.
        plan: the model's memory plan.
        kind: as for `Drafting`.
        head: the draft head or None.
        reason: one line that says what was chosen and why; empty if drafts were switched off by the option.
    """

    args: ModelArgs
    plan: MemoryPlan
    kind: str
    head: HeadWeights | None
    reason: str

    @property
    def drafting(self) -> Drafting:
        """The `Drafting` for the model."""
        return Drafting(self.kind)


def choose_drafts(draft: str | Path, weights: ModelWeights | None, planner: Planner, dtype: mx.Dtype) -> ChosenDrafts:
    """Chooses where a model's drafts come from.

    "auto" is the model's head if the plan with it keeps mode, sizes and nine tenths of the pool. Otherwise it is
    "lookup" if the plan allows that, else "off".

    Args:
        draft: one of `DRAFTS`, or a directory or GGUF with a head.
        weights: the files in which to look for a head, or None.
        planner: plans memory for the model without drafts.
        dtype: of activations.

    Raises:
        RequestError: `draft` is none of these. ModelFileError: there is no head, or it cannot be used. Errors of
            `Planner.plan`.
    """
    source = None if str(draft) in DRAFTS else user_path(draft)
    if source is not None and not (source.is_dir() or is_gguf(source)):
        raise RequestError(f"draft {str(draft)!r} is neither one of {', '.join(DRAFTS)} nor a directory or GGUF file")
    if draft == "off":
        return ChosenDrafts(planner.args, planner.plan(), "off", None, "")
    looking = replace(planner, demand=replace(planner.demand, drafts=MOST_DRAFTS))
    if draft == "lookup":
        return ChosenDrafts(planner.args, looking.plan(), "lookup", None, "drafts are looked up in the text")
    if draft == "auto":
        return _automatic(weights, planner, looking, dtype)
    head = _head(weights, planner.args, source)
    if head is None:
        where = draft if source else weights.path if weights is not None else "what is known of the model"
        raise ModelFileError(f"{where} holds no draft head for this model; draft can be auto or lookup")
    return _with_head(head, looking, dtype)


def _with_head(head: HeadWeights, looking: Planner, dtype: mx.Dtype) -> ChosenDrafts:
    nbytes = head.nbytes(dtype)
    args = replace(looking.args, draft_head=head.args.layers[0])
    demand = replace(looking.demand, resident=looking.demand.resident + nbytes, head=nbytes)
    plan = replace(looking, args=args, demand=demand).plan()
    return ChosenDrafts(args, plan, "head", head, f"drafts come from a head of {in_gb(nbytes, 3)}")


def _automatic(weights: ModelWeights | None, planner: Planner, looking: Planner, dtype: mx.Dtype) -> ChosenDrafts:
    args, plain, why = planner.args, planner.plan(), ""
    try:
        head = _head(weights, args, None)
        if head is not None:
            why = f"; a draft head of {in_gb(head.nbytes(dtype), 3)} would take too much from the experts"
            chosen = _with_head(head, looking, dtype)
            if _keeps(chosen.plan, plain):
                return chosen
    except (ConfigError, ModelFileError) as error:
        why = f"; the draft head cannot be used: {error}"
    except RequestError:
        pass
    try:
        plan = looking.plan()
        if _keeps(plan, plain):
            return ChosenDrafts(args, plan, "lookup", None, f"drafts are looked up in the text{why}")
    except RequestError:
        pass
    return ChosenDrafts(args, plain, "off", None, f"drafts are off: there is too little memory for them{why}")


def _keeps(plan: MemoryPlan, plain: MemoryPlan) -> bool:
    """Whether a plan with drafts keeps mode, sizes, context and enough of the pool."""
    alike = (plan.mode, plan.sizes, plan.context) == (plain.mode, plain.sizes, plain.context)
    return alike and plan.pool >= LEAST_SHARE * plain.pool


def _head(weights: ModelWeights | None, args: ModelArgs, source: Path | None) -> HeadWeights | None:
    """The head in `source`, or in the model's own files."""
    if weights is None:
        return None
    tensors, config = _beside(weights) if source is None else _in_source(source)
    return find_head(args, tensors.values(), config, weights.experts.layout)


def _in_source(source: Path) -> tuple[Mapping[str, Tensor], JsonObject]:
    if is_gguf(source):
        return draft_tensors(open_gguf(source)), {}
    config = source / "config.json"
    return merge_tensors(map(read_header, safetensors_files(source))), read_json(config) if config.exists() else {}


def _beside(weights: ModelWeights) -> tuple[Mapping[str, Tensor], JsonObject]:
    config = weights.located.config
    if weights.located.gguf:
        return draft_tensors(open_parts(weights.located.gguf)), {}
    if weights.checkpoint is None:
        file = weights.path / ASIDE
        return read_header(file) if file.exists() else {}, config
    kept = (unit for unit in weights.checkpoint.plan.units if isinstance(unit, TensorFile) and unit.name == ASIDE)
    return {one.name: one for unit in kept for source in unit.sources for one in source.tensors}, config


def load_head(head: HeadWeights, model: Model, dtype: mx.Dtype) -> None:
    """Reads a head and attaches it to its model.

    Raises:
        ModelFileError: a file cannot be read, or a value is not finite. ExpertIOError: Metal refuses the memory.
    """
    source = HeldExperts(head.experts.layout, {0: head.records()})
    try:
        module = DraftHead(head.args, RoutedExperts(source, "off"), stored_forms(head.shapes()))
        fill(module, head.read(), head.args.quantization, dtype)
    except BaseException:
        source.close()
        raise
    model.attach(module)

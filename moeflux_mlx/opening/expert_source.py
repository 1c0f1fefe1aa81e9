"""Opens the source of a model's experts that its memory plan requires. It does not know the model."""

import weakref
from collections.abc import Callable

from ..experts.mapped import MappedExperts
from ..experts.resident import ReadProgress, ResidentExperts
from ..experts.source import ExpertLoader, IoMode
from ..experts.streamed import StreamedExperts
from ..formats.in_place import InPlaceExperts
from ..formats.packed import PackedExperts
from ..formats.pieces import ExpertFiles
from ..packing.gguf_experts import GgufExperts
from ..planning.breath import Breath
from ..planning.memory_plan import MemoryPlan
from ..planning.needs import least_slots
from ..planning.pressure import PACE, PACE_OF_METAL, PoolLimit, host_sources, sources
from ..planning.wired import wire, wire_lasting
from ..spec import ModelArgs


def open_experts(
    files: ExpertFiles, args: ModelArgs, plan: MemoryPlan, progress: ReadProgress | None = None
) -> ExpertLoader:
    """Opens the source that `plan` requires. If all that the GPU reads is to be wired, the limit is raised first."""
    figures, wired = plan.figures, plan.demand.wired
    release = wire(plan.wired or 0, figures.working_set or 0) if wired == "all" and figures.working_set else _nothing
    try:
        experts: ExpertLoader
        if plan.mode is IoMode.MMAP:
            assert isinstance(files, PackedExperts)  # other tables were refused
            experts = MappedExperts(files, plan.decision)
        elif plan.mode is IoMode.RESIDENT:
            whole = files.check_scales if isinstance(files, InPlaceExperts) else None
            blocks = files.arrange_all if isinstance(files, GgufExperts) else None
            experts = ResidentExperts(files, plan.decision, check=whole, arrange=blocks, progress=progress)
        else:
            pace = PACE if plan.figures.working_set is None else PACE_OF_METAL
            limit = PoolLimit(sources(plan.figures), plan.most, pace=pace)
            host_limit = PoolLimit(host_sources(), plan.host) if plan.host else None
            breath = Breath(args, files.layout, plan, limit)
            experts = StreamedExperts(
                files,
                plan.decision,
                cache_bytes=plan.pool,
                most_bytes=plan.most,
                allowance=breath,
                prompt_check=breath.check_prompt,
                limit=limit,
                host_bytes=plan.host,
                host_limit=host_limit,
                least_slots=least_slots(args),
                buffer_bytes=plan.figures.buffer,
                check=files.check_record if isinstance(files, InPlaceExperts) else None,
                arrange=files.arrange if isinstance(files, GgufExperts) else None,
            )
    except BaseException:
        release()
        raise
    _at_end(experts, release)
    return experts


def wire_loaded(experts: ExpertLoader, plan: MemoryPlan) -> None:
    """Wires a model that is loaded, with its whole pool, if what lasts is to be wired on Metal.

    Raises:
        ExpertIOError: Metal refuses memory without which the pool is too small.
    """
    if plan.demand.wired == "pool" and plan.figures.working_set is not None:
        experts.take_memory()
        _at_end(experts, wire_lasting(plan.figures.working_set))


def _at_end(experts: ExpertLoader, release: Callable[[], None]) -> None:
    """Calls `release` when the experts are closed or forgotten."""
    forgotten = weakref.finalize(experts, release)
    forgotten.atexit = False  # MLX's arrays are freed first
    experts.at_close(forgotten)


def _nothing() -> None:
    """Nothing was wired."""

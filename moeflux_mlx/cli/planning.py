"""Prints how much memory a model needs, how its experts are read, and the speed that the disk allows.

Nothing is loaded. A named variant needs no files at all: its resident weights are counted from the shapes.
"""

import argparse
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

from ..engine.budget import Planner, plan_memory
from ..engine.demand import Demand
from ..engine.expert_io import from_environment
from ..engine.heads import choose_drafts
from ..engine.kv_bits import keeping, state_lines
from ..engine.locate import resolve
from ..engine.machine import Figures, default_dtype, in_gb, machine_figures
from ..engine.memory_plan import MemoryPlan
from ..engine.remote import Remote, is_remote
from ..engine.weights import Weights, open_weights, with_best_pool
from ..errors import RequestError
from ..experts.memory import page_aligned
from ..experts.reader import ExpertReader
from ..experts.reads import Read
from ..experts.source import IoMode
from ..files import user_path
from ..formats.packed import PackedExperts
from ..formats.pieces import ExpertFiles
from ..formats.record import ExpertLayout
from ..formats.tables import NARROW, RowForm, TableFiles
from ..model.tensors import resident_bytes, token_bytes, variant_bytes
from ..packing.recipe import Recipe, read_recipe
from ..packing.tables import SMALL_GROUP
from ..quant import Quant
from ..spec import ModelArgs
from ..vision.vision import NoVision, VisionFiles
from . import chips
from .options import dtype_of, gigabytes, settings_of
from .rank_planning import machines_of, rank_lines
from .terminal import note

HELD = {IoMode.MMAP: "mapped", IoMode.RESIDENT: "resident"}  # modes in which all experts are in memory
HIT_RATES = (0.0, 0.25, 0.5, 0.75, 0.9)
MEASURED_BYTES = 1 << 30
IN_FLIGHT = 16  # reads queued at once for each drive when it is measured
DISKS = (3.0, 5.0, 7.0)  # GB/s of the drives that Macs have, about


@dataclass(frozen=True)
class Described:
    """What is known of a model before it is loaded: of a named variant, a repository on the Hub, or files here.

    Attributes:
        resident: bytes in memory of the weights that are not routed experts.
        dense: of these, bytes that each token reads.
        recipe: the forms of what came as floats, as far as they are known.
        vision: its image encoder, or why there is none; None for a variant, which has no files.
        in_place: whether its experts cannot be mapped.
        disk: a line on the disk space of a repository; else empty.
        weights: the files; None if they are not here.
    """

    args: ModelArgs
    layout: ExpertLayout
    resident: int
    dense: int
    recipe: Recipe | None = None
    vision: VisionFiles | NoVision | None = None
    in_place: bool = False
    disk: str = ""
    weights: Weights | None = None


def run(options: argparse.Namespace) -> int:
    if options.recipe is not None and (options.variant is None or options.chips is not None):
        raise RequestError(
            "--recipe is for --variant without --chip; a checkpoint gets its recipe from moeflux convert"
        )
    if options.chips is not None:
        return chips.run(options)
    own = dtype_of(options)
    dtype = default_dtype() if own is None else own
    stated = stated_disk(options)
    expert_io = from_environment(options.expert_io)
    model = described(options, dtype, expert_io)
    args = keeping(model.args, options.kv_bits, own)
    demand = demanded(options, model, args, dtype, expert_io)
    layout, machine = model.layout, figures(options.ram_gb, options.memory_gb)
    draft = options.draft if options.rank_count is None else "off"
    drafts = choose_drafts(draft, model.weights, Planner(args, layout, machine, demand), dtype)
    args, plan = drafts.args, drafts.plan
    print_notes(plan, options.expert_cache_gb is not None)
    tables = {} if model.weights is None else model.weights.tables
    lines = [*state_lines(args, plan.context, plan.demand.itemsize), *table_lines(args, tables)]
    lines += [f"recipe {model.recipe}"] if model.recipe else []
    lines.append(reading_line(args, layout, model.dense))
    lines += [model.disk] if model.disk else []
    if demand.best_pool is not None:
        lines.append(f"moeflux tune found a pool of {in_gb(demand.best_pool, 3)} as fast as larger ones here")
    lines += [drafts.reason] if drafts.reason else []
    disks = [int(disk * 1e9) for disk in DISKS] if stated is None else [stated]
    if options.measure_disk and model.weights is not None:
        disks = [int(measure_disk(model.weights.experts))]
        lines.append(measured_line(disks[0], model.weights.experts))
    if (machines := machines_of(options.rank_count, options.link_us, options.link_gb_per_s)) is not None:
        share = replace(layout, num_experts=-(-layout.num_experts // machines.ranks))
        each = plan_memory(args, share, machine, plan.demand)
        print("\n".join([*memory_lines(each, share), *lines, *rank_lines(args, layout, plan, each, machines, disks)]))
        return 0
    print("\n".join([*memory_lines(plan, layout), *lines, plan.prompts, *speed_lines(args, layout, plan, disks)]))
    return 0


def stated_disk(options: argparse.Namespace) -> int | None:
    """Bytes per second of the disk that the options state, if they do.

    Raises:
        RequestError: they name no model or two, or a disk to measure that is not here or is stated as well.
    """
    if (options.model is None) == (options.variant is None):
        raise RequestError("give either --model or --variant")
    if options.measure_disk and options.variant is not None:
        raise RequestError("--measure-disk reads a model's files; give --model instead of --variant")
    stated = gigabytes("--disk-gb-per-s", options.disk_gb_per_s)
    if options.measure_disk and stated is not None:
        raise RequestError("--measure-disk and --disk-gb-per-s exclude each other; give one of them")
    return stated


def described(options: argparse.Namespace, dtype: mx.Dtype, expert_io: str) -> Described:
    """The model of the options, with resident weights in `dtype`; its experts must allow the mode `expert_io`."""
    with_images = options.rank_count is None and not options.no_vision
    if options.variant is not None:
        return described_variant(ModelArgs.from_variant(options.variant), options.recipe, dtype)
    if is_remote(options.model) and isinstance(remote := Remote.look_up_or_cached(options.model), Remote):
        if options.measure_disk:
            raise RequestError(f"--measure-disk reads a model's files, and {options.model} is not here; leave it out")
        args, layout, shapes = remote.figures()
        vision = remote.vision(args, with_images)
        dense = token_bytes(args, shapes, dtype)
        resident = resident_bytes(shapes, dtype)
        return Described(args, layout, resident, dense, remote.recipe(), vision, remote.in_place, remote.disk)
    folders = [user_path(folder) for folder in options.shards_in]
    weights = open_weights(resolve(options.model, shards_in=folders), folders)
    weights.check_mode(expert_io)
    if options.rank_count is None:
        weights.check_held(None)
    resident = resident_bytes(weights.shapes, dtype)
    dense = token_bytes(weights.args, weights.shapes, dtype)
    vision = weights.vision(with_images)
    return Described(
        weights.args,
        weights.experts.layout,
        resident,
        dense,
        read_recipe(weights.path),
        vision,
        not weights.can_be_mapped,
        weights=weights,
    )


def described_variant(args: ModelArgs, recipe: str | None, dtype: mx.Dtype) -> Described:
    """A known model as a conversion with this recipe would store it; None: in 4 bits."""
    chosen = None if recipe is None else Recipe.of(recipe)
    form_of = quants = None
    if chosen is not None:
        chosen.check(args.num_hidden_layers)
        form_of = partial(chosen.of_matrix, args)
        quants = {layer: chosen.of_experts(args, layer) for layer in args.moe_layers}
    resident, dense = variant_bytes(args, dtype, form_of), variant_bytes(args, dtype, form_of, of_token=True)
    return Described(args, ExpertLayout.from_args(args, quants), resident, dense, chosen)


def demanded(options: argparse.Namespace, model: Described, args: ModelArgs, dtype: mx.Dtype, expert_io: str) -> Demand:
    """What the options and the model demand of the memory. `args`: the model's, with the caches of the options."""
    settings = replace(settings_of(options, options.model), expert_io=expert_io)
    demand = settings.demand(args, model.resident, dtype, in_place=model.in_place, vision=model.vision)
    return demand if model.weights is None else with_best_pool(demand, model.weights)


def print_notes(plan: MemoryPlan, pool_is_given: bool) -> None:
    """Prints where the plan is not what the options ask for."""
    if plan.shortened:
        note(plan.shortened)
    if plan.enlarged:
        note(f"warning: {plan.enlarged}")
    if plan.mode is not IoMode.PREAD and pool_is_given:
        note(f"note: --expert-cache-gb has no effect where experts are {HELD[plan.mode]}")


def figures(ram_gb: float | None, memory_gb: float | None = None) -> Figures:
    """The figures of this machine, or of one with `ram_gb` of memory, on a Mac with proportional GPU limits.
    `memory_gb`: limit of the whole process.
    """
    nbytes, own = gigabytes("--ram-gb", ram_gb), machine_figures(gigabytes("--memory-gb", memory_gb))
    if nbytes is None:
        return own
    limits = (own.working_set, own.buffer)
    working_set, buffer = (None if limit is None else limit * nbytes // own.memory for limit in limits)
    return Figures(nbytes, working_set, buffer, operations=own.operations, limit=own.limit)


def memory_lines(plan: MemoryPlan, layout: ExpertLayout) -> list[str]:
    demand, memory = plan.demand, plan.figures.memory
    rows = [
        ("resident weights", demand.resident - demand.head, ""),
        *([("draft head", demand.head, "")] if demand.head else []),
        ("state", plan.state, f"  for a context of {plan.context}"),
        ("temporary", plan.activations, f"  for prompts in spans of {plan.sizes.span}, blocks of {plan.sizes.block}"),
        ("runtime", plan.runtime, ""),
    ]
    if plan.mode is IoMode.PREAD:
        share = f"{plan.slots / len(layout.moe_layers):.1f} of {layout.num_experts} a layer"
        rows.append(("expert pool", plan.pool, f"  {plan.slots} slots, {share}"))
    else:
        rows.append(("experts", plan.experts, "" if plan.copied else "  mapped: in the system's cache of files"))
    total = memory_in_all(plan)
    rows += [("in all", total, ""), ("left", memory - total, f"  of {in_gb(memory, 3)} {plan.figures.name}")]
    lines = [plan.decision, *(f"{name:18} {in_gb(nbytes, 3):>11}{remark}" for name, nbytes, remark in rows)]
    if total > memory:
        lines.append(
            f"warning: {in_gb(total - memory, 3)} more than there is, so that mapped experts are read again and again; "
            "--expert-io pread keeps as many as fit, and a shorter --context leaves room for more"
        )
    return lines


def table_lines(args: ModelArgs, tables: Mapping[int, TableFiles]) -> list[str]:
    """Lines on the disk space of tables of n-grams (in 4 bits if they are not local), and on what a token reads of
    them.
    """
    forms = {i: RowForm(part.width, Quant(4, SMALL_GROUP), NARROW) for i, part in args.ngrams.items()}
    forms |= {i: files.form for i, files in tables.items()}
    total = sum(part.rows * forms[i].row_bytes for i, part in args.ngrams.items())
    rows = sum(len(part.sizes) for part in args.ngrams.values())
    each = sum(len(part.sizes) * forms[i].row_bytes for i, part in args.ngrams.items())
    line = f"tables of n-grams: {in_gb(total, 3)} on the disk, of which a token reads {rows} rows, {each} bytes"
    return [line] if args.ngrams else []


def memory_in_all(plan: MemoryPlan) -> int:
    """Bytes that a model takes while it runs, mapped experts included."""
    return plan.total - plan.copied + (0 if plan.mode is IoMode.PREAD else plan.experts)


def routed_bytes(args: ModelArgs, layout: ExpertLayout) -> int:
    """Bytes of the experts that one token goes through, in all layers."""
    return args.num_experts_per_tok * sum(record.held_bytes for record in layout.records.values())


def reading_line(args: ModelArgs, layout: ExpertLayout, dense: int) -> str:
    """The line on what one token reads; `dense`: bytes of other weights than routed experts."""
    routed = in_gb(routed_bytes(args, layout), 3)
    return f"a token reads {routed} of experts, from the disk or from memory, and {in_gb(dense, 3)} of other weights"


def speed_lines(args: ModelArgs, layout: ExpertLayout, plan: MemoryPlan, disks: Sequence[int]) -> list[str]:
    """Lines on what `disks`, in bytes per second, allow: the time to read all experts, and, if these do not stay in
    memory, tokens per second at several hit rates.
    """
    names = [f"{disk / 1e9:.3g} GB/s" for disk in disks]
    seconds = ", ".join(f"{plan.experts / disk:.1f} s at {name}" for disk, name in zip(disks, names, strict=True))
    if plan.mode is IoMode.RESIDENT:
        return [f"experts are read once, at loading, which takes at least {seconds}"]
    if plan.stays:
        return [f"experts are mapped and stay in memory once they have been read, which takes at least {seconds}"]
    all_bytes = routed_bytes(args, layout)
    lines = [f"reading all experts once takes {seconds}"]
    lines.append(f"{'at most, tokens/s':30}" + "".join(f"{name:>12}" for name in names))
    for rate in HIT_RATES:
        nbytes = all_bytes * (1 - rate)
        bounds = "".join(f"{disk / nbytes:12.2f}" for disk in disks)
        lines.append(f"{f'hit rate {rate:4.0%}: {in_gb(nbytes, 3)} a token':30}{bounds}")
    return lines


def drives_of(files: ExpertFiles) -> set[int]:
    """The devices that hold a model's experts."""
    return {path.stat().st_dev for path in files.sizes}


def measured_line(disk: int, files: ExpertFiles) -> str:
    """The line on a measured disk, in bytes per second."""
    drives = len(drives_of(files))
    together = f" of {drives} drives together" if drives > 1 else ""
    return f"disk: {disk / 1e9:.2f} GB/s reading whole experts{together} past the page cache"


def measure_disk(files: ExpertFiles) -> float:
    """Bytes per second of reading different experts of all layers in random order, up to a gibibyte: of all drives
    that hold them together.
    """
    layout, reader = files.layout, ExpertReader(files)
    in_flight = IN_FLIGHT * reader.drives
    share = files.share if isinstance(files, PackedExperts) else None
    every = [(layer, expert) for layer in layout.moe_layers for expert in range(layout.num_experts)]
    every = [key for key in every if share is None or share.has(*key)]
    count = max(min(MEASURED_BYTES // layout.held_bytes, len(every)), 1)
    memory, waiting, nbytes = page_aligned(in_flight, layout.held_bytes // 4), deque[Read](), 0
    start = time.perf_counter()
    for i, choice in enumerate(np.random.default_rng(0).permutation(len(every))[:count]):
        if len(waiting) == in_flight:  # the oldest read is the one that fills this row
            nbytes += waiting.popleft().result()
        layer, expert = every[choice]
        target = memoryview(memory[i % in_flight]).cast("B")
        waiting.append(reader.submit(reader.prepare(layer, expert, target)))
    nbytes += sum(read.result() for read in waiting)
    seconds = time.perf_counter() - start
    reader.close()
    return nbytes / seconds

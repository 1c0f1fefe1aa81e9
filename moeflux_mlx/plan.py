"""`python -m moeflux_mlx.plan`: what a model needs in memory, how it will be read, and what the disk allows."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from .cli.run import Parser, main_of  # first: where MLX is missing, it says so

# isort: split
import mlx.core as mx

from .cli import chips
from .cli.known_models import ASSUMED_DISK, POSITIONS, figures, measure_disk, memory_lines, reading_line
from .cli.options import (
    NOT_GIVEN,
    OF_IMAGES,
    OF_MEMORY,
    add_shared,
    add_variant,
    dtype_of,
    gigabytes,
    settings_of,
    written,
)
from .cli.terminal import note
from .errors import RequestError
from .experts.source import IoMode
from .formats.packed import ExpertFiles
from .formats.record import ExpertLayout
from .formats.tables import NARROW, RowForm, TableFiles
from .kept.measured import kept_rates
from .model.tensors import resident_bytes, token_bytes, variant_bytes
from .opening.heads import choose_drafts
from .opening.load_settings import locate
from .opening.remote import Remote, is_remote
from .opening.weights import ModelWeights, open_weights, with_best_pool
from .packing.plan import SMALL_GROUP
from .packing.recipe import Recipe, read_recipe
from .planning.budget import Planner
from .planning.forecast import TokenWork, expected, uniform
from .planning.machine import default_dtype, from_environment, in_gb
from .planning.memory_plan import Demand, MemoryPlan, keeping, state_lines
from .planning.quants import Quants
from .quant import Quant
from .spec import ModelArgs
from .vision.vision import NoVision, VisionFiles

HELD = {IoMode.MMAP: "mapped", IoMode.RESIDENT: "resident"}  # modes in which all experts are in memory
OF_FILES = ("shards_in", "no_vision", "image_tokens")  # options that need a model's files
HIT_RATES = (0.0, 0.25, 0.5, 0.75, 0.9)


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
        quants: the GGUF models in the same place.
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
    quants: Quants = Quants()
    weights: ModelWeights | None = None


def run(options: argparse.Namespace) -> int:
    if options.recipe is not None and (options.variant is None or options.chips is not None):
        raise RequestError(
            "--recipe is for --variant without --chip; a checkpoint gets its recipe from moeflux convert"
        )
    if options.chips is not None:
        return chips.run(options)
    refuse_idle(options)
    own = dtype_of(options)
    dtype = default_dtype() if own is None else own
    stated = stated_disk(options)
    expert_io = from_environment(options.expert_io)
    model = describe(options, dtype, expert_io)
    args = keeping(model.args, options.kv_bits, own)
    demand = demanded(options, model, args, dtype, expert_io)
    layout, machine = model.layout, figures(options.ram_gb, options.memory_gb)
    drafts = choose_drafts(options.draft, model.weights, Planner(args, layout, machine, demand), dtype)
    args, plan = drafts.args, drafts.plan
    print_notes(plan, options)
    tables = {} if model.weights is None else model.weights.tables
    lines = [*state_lines(args, plan.context, plan.demand.itemsize), *table_lines(args, tables)]
    lines += [f"recipe {model.recipe}"] if model.recipe else []
    lines.append(reading_line(args, layout, model.dense))
    lines += filter(None, (model.disk, model.quants.note(machine.limit or machine.memory)))
    if demand.best_pool is not None:
        lines.append(f"moeflux tune found a pool of {in_gb(demand.best_pool, 3)} as fast as larger ones here")
    lines += [drafts.reason] if drafts.reason else []
    disk = stated or ASSUMED_DISK
    if options.measure_disk and model.weights is not None:
        disk = int(measure_disk(model.weights.experts))
        lines.append(measured_line(disk, model.weights.experts))
    elif stated is None:
        lines.append(f"disk: {disk / 1e9:g} GB/s assumed; --measure-disk measures --model's, --disk-gb-per-s states it")
    work = TokenWork.of(args, model.dense, layout.token_bytes(args), POSITIONS, plan.demand.itemsize)
    forecasts = forecast_lines(plan, work, disk)
    speeds = speed_lines(args, layout, plan, disk)
    print("\n".join([*memory_lines(plan, layout), *lines, plan.prompts, *forecasts, *speeds]))
    return 0


def refuse_idle(options: argparse.Namespace) -> None:
    """Raises RequestError: an option has no effect beside --variant."""
    for name in OF_FILES if options.variant is not None else ():
        if getattr(options, name) != NOT_GIVEN[name]:
            raise RequestError(f"{written(name)} has no effect with --variant; leave one of them out")


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


def describe(options: argparse.Namespace, dtype: mx.Dtype, expert_io: str) -> Described:
    """The model of the options, with resident weights in `dtype`; its experts must allow the mode `expert_io`."""
    with_images = not options.no_vision
    if options.variant is not None:
        return describe_variant(ModelArgs.from_variant(options.variant), options.recipe, dtype)
    if is_remote(options.model) and isinstance(remote := Remote.look_up_or_cached(options.model), Remote):
        if options.measure_disk:
            raise RequestError(f"--measure-disk reads a model's files, and {options.model} is not here; leave it out")
        args, layout, shapes = remote.figures(options.without_correction_bias)
        vision = remote.vision(args, with_images)
        dense = token_bytes(args, shapes, dtype)
        resident = resident_bytes(shapes, dtype)
        return Described(
            args, layout, resident, dense, remote.recipe(), vision, remote.in_place, remote.disk, remote.quants
        )
    weights = open_weights(locate(options.model, shards_in=options.shards_in), options.without_correction_bias)
    weights.check_mode(expert_io)
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
        quants=Quants.beside(weights.located.gguf),
        weights=weights,
    )


def describe_variant(args: ModelArgs, recipe: str | None, dtype: mx.Dtype) -> Described:
    """A known model as a conversion with this recipe would store it; None: in 4 bits."""
    chosen = None if recipe is None else Recipe.of(recipe)
    form_of = quants = None
    if chosen is not None:
        chosen.check(args.num_hidden_layers)
        form_of = partial(chosen.of_matrix, args)
        quants = {layer: chosen.of_experts(args, layer) for layer in args.record_sets}
    resident, dense = variant_bytes(args, dtype, form_of), variant_bytes(args, dtype, form_of, of_token=True)
    return Described(args, ExpertLayout.from_args(args, quants), resident, dense, chosen)


def demanded(options: argparse.Namespace, model: Described, args: ModelArgs, dtype: mx.Dtype, expert_io: str) -> Demand:
    """What the options and the model demand of the memory. `args`: the model's, with the caches of the options."""
    settings = replace(settings_of(options), expert_io=expert_io)
    demand = settings.demand(args, model.resident, dtype, in_place=model.in_place, vision=model.vision)
    return demand if model.weights is None else with_best_pool(demand, model.weights)


def print_notes(plan: MemoryPlan, options: argparse.Namespace) -> None:
    """Prints where the plan is not what the options ask for."""
    if plan.shortened:
        note(plan.shortened)
    if plan.enlarged:
        note(f"warning: {plan.enlarged}")
    if plan.mode is not IoMode.PREAD and options.expert_cache_gb is not None:
        note(f"note: --expert-cache-gb has no effect where experts are {HELD[plan.mode]}")


def forecast_lines(plan: MemoryPlan, work: TokenWork, disk: int) -> list[str]:
    """Lines on the tokens per second to expect here. If doctor has not measured this machine, a line says how to get
    them.
    """
    kept = kept_rates()
    if kept is None:
        return ["forecast: moeflux doctor measures this machine first; moeflux models has typical values"]
    rates = replace(kept, disk=disk)
    made = expected(plan, work, rates)
    lines = [f"forecast: {made} tokens/s in a text, {made.middle:.3g} in the middle"]
    if plan.pool:
        lines.append(f"forecast if a router uses all experts equally often: {uniform(plan, work, rates)}")
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


def speed_lines(args: ModelArgs, layout: ExpertLayout, plan: MemoryPlan, disk: int) -> list[str]:
    """Lines on what a disk of so many bytes per second allows: the time to read all experts, and, if these do not stay
    in memory, tokens per second at several hit rates.
    """
    seconds = f"{plan.experts / disk:.1f} s at {disk / 1e9:.3g} GB/s"
    if plan.mode is IoMode.RESIDENT:
        return [f"experts are read once, at loading, which takes at least {seconds}"]
    if plan.stays:
        return [f"experts are mapped and stay in memory once they have been read, which takes at least {seconds}"]
    all_bytes = layout.token_bytes(args)
    lines = [f"reading all experts once takes {seconds}"]
    for rate in HIT_RATES:
        nbytes = all_bytes * (1 - rate)
        lines.append(f"hit rate {rate:4.0%}: {in_gb(nbytes, 3)} a token, at most {disk / nbytes:.2f} tokens/s")
    return lines


def measured_line(disk: int, files: ExpertFiles) -> str:
    """The line on a measured disk, in bytes per second."""
    drives = len({path.stat().st_dev for path in files.sizes})
    together = f" of {drives} drives together" if drives > 1 else ""
    return f"disk: {disk / 1e9:.2f} GB/s reading whole experts{together} past the page cache"


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "plan",
        "Show the memory plan of a model, how its experts are read, and the speed that the disk allows. Loads nothing.",
    )
    add = made.add_argument_group("model").add_argument
    add(
        "--model",
        help="directory of a packed model or of an MLX checkpoint, or Hugging Face repo id org/name",
    )
    add_shared(add, "--shards-in", "--without-correction-bias")
    add_variant(add)
    add("--recipe", metavar="NAME_OR_FILE", help="store --variant as moeflux convert --recipe would; default: 4 bits")
    add_shared(add, "--dtype", "--kv-bits", *OF_IMAGES)
    add = made.add_argument_group("machine").add_argument
    add(
        "--ram-gb",
        type=float,
        metavar="GB",
        help="plan for this much memory, in units of 1e9 bytes; default: this machine's. "
        "Only a Mac knows how much of it a Mac's GPU may use",
    )
    add(
        "--disk-gb-per-s",
        type=float,
        metavar="GB",
        help=f"read speed of the disk ({ASSUMED_DISK / 1e9:g})",
    )
    add("--measure-disk", action="store_true", help="measure the disk by reading experts of --model")
    add(
        "--chip",
        action="append",
        dest="chips",
        metavar="NAME",
        help="show instead what --variant should reach on a Mac with this chip, such as 'M4 Max', computed from public "
        "figures; may be repeated; default of --ram-gb: the least that it is sold with from 16 GB on",
    )
    add = made.add_argument_group("memory and expert I/O").add_argument
    add_shared(add, *OF_MEMORY)
    add(
        "--context", type=int, metavar="TOKENS", help="tokens to plan for; default: 8192, or fewer where only fewer fit"
    )
    add_shared(add, "--prefill-step-size", "--draft", "--set")
    return made


main = main_of(run, parser)


if __name__ == "__main__":
    sys.exit(main())

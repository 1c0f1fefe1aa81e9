"""How the known models would run on this machine: `moeflux models`, and the end of `moeflux doctor`; and what several
commands say of a memory plan: its lines, the bytes that a token reads, the figures of a machine, the speed of the disk.

Everything is counted from configurations; nothing is downloaded or loaded. `forecast_of` is for a loaded
model.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError, RequestError
from ..experts.memory import page_aligned
from ..experts.reader import ExpertReader
from ..experts.reads import Read
from ..experts.source import IoMode
from ..families.registry import architecture_of
from ..files import directory, read_json
from ..formats.packed import ExpertFiles
from ..formats.page_cache import drop_files
from ..formats.record import ExpertLayout
from ..kept.measured import Rates, kept_rates, rates_with
from ..model.tensors import token_bytes, variant_bytes
from ..opening.engine import Engine
from ..opening.load_settings import LoadSettings
from ..planning.budget import plan_memory
from ..planning.forecast import Forecast, TokenWork, expected
from ..planning.machine import Figures, default_dtype, in_gb, machine_figures
from ..planning.memory_plan import MemoryPlan, keeping
from ..spec import ModelArgs, variants
from ..tools.checkup import product_rate
from .options import gigabytes

ASSUMED_DISK = int(5e9)  # bytes per second where none is measured or given, about what drives of Macs read
FASTEST_DISK = 20e9  # bytes per second; no drive of 2026 reads more, and memory does
MEASURED_BYTES = 1 << 30
IN_FLIGHT = 16  # reads queued at once for each drive when it is measured


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
        each = layout.num_experts + layout.num_values
        share = f"{plan.slots / len(layout.moe_layers):.1f} of {each} a layer"
        rows.append(("expert pool", plan.pool, f"  {plan.slots} slots, {share}"))
        kept = f"  {plan.host / plan.experts:.0%} of the experts, in the computer's memory, not in the GPU's"
        rows += [("on the host", plan.host, kept)] if plan.host else []
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


def memory_in_all(plan: MemoryPlan) -> int:
    """Bytes that a model takes while it runs, mapped experts included."""
    return plan.total - plan.copied + (0 if plan.mode is IoMode.PREAD else plan.experts)


def reading_line(args: ModelArgs, layout: ExpertLayout, dense: int) -> str:
    """The line on what one token reads; `dense`: bytes of other weights than routed experts."""
    routed = in_gb(layout.token_bytes(args), 3)
    return f"a token reads {routed} of experts, from the disk or from memory, and {in_gb(dense, 3)} of other weights"


def measure_disk(files: ExpertFiles) -> float:
    """Bytes per second of reading different experts of all layers in random order, up to a gibibyte: of all drives
    that hold them together. What the system has of them in its cache is dropped first.

    Raises:
        ExpertIOError: a file cannot be opened, or was read faster than a disk can be.
    """
    drop_files(files.sizes)
    layout, reader = files.layout, ExpertReader(files)
    in_flight = IN_FLIGHT * reader.drives
    every = [(layer, expert) for layer in layout.records for expert in range(layout.count(layer))]
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
    return plausible(nbytes / seconds, reader.drives)


def plausible(rate: float, drives: int = 1) -> float:
    """The rate of reading from so many drives, if it can be theirs.

    Raises:
        ExpertIOError: it cannot.
    """
    if rate > FASTEST_DISK * drives:
        raise ExpertIOError(
            f"the files were read at {rate / 1e9:.1f} GB/s, from the cache and not from the disk (a drive reads at "
            f"most {FASTEST_DISK / 1e9:.0f}); empty the cache, on a Mac with `sudo purge`, and measure again"
        )
    return rate


POSITIONS = 512  # that a token of the forecast attends to
COMFORTABLE = 5.0  # tokens per second, about as fast as people read


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that determine how fast models run.

    Args:
        figures: its memory.
        products: bytes of weights per second in the products of one token.
        disk: bytes per second read from the disk.
        is_measured: whether `disk` was measured or given; otherwise it is `ASSUMED_DISK`.
    """

    figures: Figures
    products: float
    disk: float
    is_measured: bool

    @property
    def rates(self) -> Rates:
        """With the seconds of layers."""
        return rates_with(self.products, self.disk)


@dataclass(frozen=True)
class Fit:
    """How one known model, at the bits of its configuration, runs on a `Machine`.

    Args:
        name: of the variant.
        repository: on the Hugging Face Hub; None: no name is known.
        disk_bytes: of its files, about.
        memory_bytes: that it takes while it runs, for the context of the plan; None: it does not fit.
        share: of the experts that are in memory, 0 to 1.
        tokens_per_second: an estimate from a token's bytes, if a router uses all experts equally often; None: as above.
        forecast: what texts should reach, with the seconds of layers; None: as above.
        context: tokens that the memory is planned for.
        architecture: llama.cpp's name, of its GGUF files; None: they are not read.
    """

    name: str
    repository: str | None
    disk_bytes: int
    memory_bytes: int | None = None
    share: float = 0.0
    tokens_per_second: float | None = None
    forecast: Forecast | None = None
    context: int = 0
    architecture: str | None = None

    @property
    def command(self) -> str:
        """The command that starts a chat with it."""
        return f"moeflux chat --model {self.repository or 'DIRECTORY'}"

    @property
    def rank(self) -> tuple[int, float]:
        """The sort key: first the models that are fast enough to read along, the largest first, then the others by
        speed.
        """
        speed = self.tokens_per_second
        if speed is None:
            return 2, self.disk_bytes
        return (0, -self.disk_bytes) if speed >= COMFORTABLE else (1, -speed)


def machine_of(limits: Figures, disk: float | None, products: float | None = None) -> Machine:
    """A machine of these figures; products are measured here where their speed is not given, in about a second."""
    return Machine(limits, products or product_rate(default_dtype()), disk or ASSUMED_DISK, disk is not None)


def known_models(here: Machine, context: int | None = None) -> list[Fit]:
    """Each known model on this machine, the one that suits it best first."""
    dtype = default_dtype()
    return sorted((fit(name, here, dtype, context) for name in variants()), key=lambda one: one.rank)


def fit(name: str, here: Machine, dtype: mx.Dtype, context: int | None) -> Fit:
    """How the variant `name` runs on the machine with activations of `dtype`. An MLX checkpoint is used in place. A
    `context` beyond the model's limit becomes that limit.
    """
    args = keeping(ModelArgs.from_variant(name), "auto", None)
    layout, resident = ExpertLayout.from_args(args), variant_bytes(args, dtype)
    config = read_json(directory("configs") / f"{name}.json")
    repository, architecture = config.get("_name_or_path"), architecture_of(config["model_type"], args.model_type)
    unfit = Fit(name, repository, layout.total_bytes + resident, architecture=architecture)
    asked = None if context is None else min(context, args.max_position_embeddings)
    try:
        demand = LoadSettings(context=asked).demand(args, resident, dtype, in_place=repository is not None)
        plan = plan_memory(args, layout, here.figures, demand)
    except RequestError:
        return unfit
    share = plan.pool / layout.total_bytes if plan.mode is IoMode.PREAD else 1.0
    routed = layout.token_bytes(args)
    seconds = (resident + routed) / here.products + (1 - share) * routed / here.disk
    work = TokenWork.of(args, variant_bytes(args, dtype, of_token=True), routed, POSITIONS, dtype.size)
    return replace(
        unfit,
        memory_bytes=memory_in_all(plan),
        share=share,
        tokens_per_second=1 / seconds,
        forecast=expected(plan, work, here.rates),
        context=plan.context,
    )


def table(here: Machine, fits: Sequence[Fit]) -> list[str]:
    """Lines of at most 100 columns."""
    width = max(len(fit.name) for fit in fits)
    lines = [f"{'model':{width}}{'disk':>12}{'memory':>12}{'experts in memory':>20}{'tokens/s, about':>18}"]
    for one in fits:
        start = f"{one.name:{width}}{in_gb(one.disk_bytes, 1):>12}"
        if one.memory_bytes is None:
            lines.append(f"{start}{'does not fit':>18}")
        else:
            lines.append(f"{start}{in_gb(one.memory_bytes, 1):>12}{one.share:>20.0%}{str(one.forecast):>18}")
    disk = f"{in_gb(here.disk, 1)}/s" if here.is_measured else f"an assumed {in_gb(here.disk, 1)}/s"
    memory, products = in_gb(here.figures.memory, 1), in_gb(here.products, 1)
    return [
        *lines,
        "",
        f"For {memory} of {here.figures.name}. Models above {COMFORTABLE:g} tokens/s come first, "
        "by size; then slower ones, by speed.",
        f"Tokens/s is a forecast, not a measurement: products read a token's weights at {products}/s,",
        f"experts that are not in memory are read from the disk at {disk}, texts repeat experts",
        "as a small trained model's do, and a layer takes what moeflux doctor measured, or what is usual.",
        "moeflux benchmark measures a downloaded model.",
    ]


def forecast_of(engine: Engine, positions: int, hits: float | None = None) -> Forecast | None:
    """Of the tokens of a text after `positions` others; None: moeflux doctor has not measured this machine.

    Args:
        hits: of a token's experts, those that are in memory; None: as many as in texts.
    """
    rates = kept_rates()
    if rates is None:
        return None
    args, dtype = engine.model.args, engine.model.activation_dtype
    dense, routed = token_bytes(args, engine.weights.shapes, dtype), engine.experts.layout.token_bytes(args)
    work = TokenWork.of(args, dense, routed, positions, dtype.size)
    return expected(engine.plan, work, rates, hits)

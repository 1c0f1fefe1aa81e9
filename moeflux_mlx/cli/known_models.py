"""How the known models would run on this machine: `moeflux models`, and the end of `moeflux doctor`.

Everything is counted from configurations; nothing is downloaded or loaded. `forecast_of` is for a loaded
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..errors import RequestError
from ..experts.source import IoMode
from ..families.registry import architecture_of
from ..files import directory, read_json
from ..formats.record import ExpertLayout
from ..kept.rates import Rates, kept_rates, rates_with
from ..model.tensors import token_bytes, variant_bytes
from ..opening.engine import Engine
from ..opening.load_settings import LoadSettings
from ..planning.budget import plan_memory
from ..planning.forecast import Forecast, TokenWork, expected
from ..planning.machine import Figures, default_dtype, in_gb
from ..planning.needs import keeping
from ..spec import ModelArgs, variants
from ..tools.checkup import product_rate
from .planning import ASSUMED_DISK, memory_in_all

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

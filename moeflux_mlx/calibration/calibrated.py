"""Conversions that first run the model over a text: to round each matrix for its inputs, and to choose bits."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import ConfigError, RequestError, TokenizerError
from ..files import PACKAGE, read_text, user_path
from ..formats.checkpoint import Checkpoint, open_checkpoint
from ..formats.record import ExpertLayout
from ..packing import conversion as packing
from ..packing.conversion import ConversionReport, ConvertSettings
from ..packing.found_files import FoundFiles, checkpoint_digest
from ..packing.layer_files import LayerFile
from ..packing.matrix import Forms, Wanted
from ..packing.plan import ConversionPlan, make_plan, read_args
from ..packing.recipe import EXPERT_PARTS, Recipe
from ..packing.writer import check_space
from ..rounding.methods import FIT
from ..spec import ModelArgs
from ..text.results import Message
from ..text.tokenizer import TokenizerWrapper, load_tokenizer
from .errors import FORMS, MeasuringRun, bytes_of, read_options, spend
from .layers import digest_of
from .needs import Needs, needs_of
from .rounding import CALIBRATED_METHODS, Calibrated, Rounder, RoundingRun
from .weights import CheckpointWeights

FOLDER = PACKAGE / "calibration" / "text"
PLAIN = ("prose.txt", "code.txt")
CHAT = "chat.json"
WINDOW = 1024  # tokens that are read together


def default_texts(tokenizer: TokenizerWrapper, window: int = WINDOW) -> list[np.ndarray]:
    """The token ids of the text that ships with the package: prose, code, and chats in the model's own template.

    Args:
        window: as for `windows`.
    """
    texts = [tokenizer.encode((FOLDER / name).read_text(encoding="utf-8")) for name in PLAIN]
    chats = json.loads((FOLDER / CHAT).read_text(encoding="utf-8"))
    return windows([*texts, [token for chat in chats for token in _chat(tokenizer, chat)]], window)


def windows(texts: Sequence[Sequence[int]], window: int = WINDOW) -> list[np.ndarray]:
    """Token ids, at most `window` of a text in each array.

    Raises:
        RequestError: `window` is less than 1.
    """
    if window < 1:
        raise RequestError(f"window {window}: give at least 1 token")
    return [np.array(text[start : start + window]) for text in texts for start in range(0, len(text), window)]


def _chat(tokenizer: TokenizerWrapper, messages: list[Message]) -> list[int]:
    """A conversation in the template; without one, or if it takes no system message, as well as it can be said."""
    if tokenizer.has_chat_template:
        for some in (messages, [one for one in messages if one["role"] != "system"]):
            try:
                ids = tokenizer.apply_chat_template(some, add_generation_prompt=False)
            except (RequestError, TokenizerError):
                continue
            assert isinstance(ids, list)
            return ids
    return tokenizer.encode("\n\n".join(f"{one['role']}: {one['content']}" for one in messages) + "\n\n")


DEFAULT_TEXT = "default"
MOST = 1e9  # bits of a weight, or gigabytes
BASE = "balanced"  # the recipe beside a budget, if none is given
NamedReport = Callable[[float, str], object]  # called with the share that is done of what the name says


@dataclass(frozen=True)
class Calibration:
    """How a conversion is calibrated.

    Args:
        text: UTF-8 files, or "default": the text that ships with the package. It is cut into windows that stand alone.
        method: "fit" weighs squared errors by the mean squares of inputs; "gptq" also moves errors to later columns.
        tokens: of the text that are read; None: all.
        target_bits: stored bits of a weight of the routed experts, scales included, which are distributed over layers
            and projections; target_gb: the size of the whole model instead. None: the recipe says all.
        memory_gb: that the rounding of experts may take, in units of 1e9 bytes, by an estimate; None: a GiB besides
            what is in memory anyway.
        dtype: of activations.
        folder: for the files of the runs, about the size of the rounded model; a run that was interrupted continues
            there, and it is removed at the end.
    """

    folder: Path
    text: str | Sequence[str | Path] = DEFAULT_TEXT
    method: str = FIT
    tokens: int | None = None
    target_bits: float | None = None
    target_gb: float | None = None
    memory_gb: float | None = None
    dtype: mx.Dtype = mx.bfloat16

    @property
    def has_budget(self) -> bool:
        """Whether the bits of routed experts are chosen for a size."""
        return self.target_bits is not None or self.target_gb is not None

    def check(self) -> None:
        """Raises ConfigError: values that do not go together, or are unknown."""
        if self.method not in CALIBRATED_METHODS:
            raise ConfigError(f"method {self.method!r} is not known; give {' or '.join(CALIBRATED_METHODS)}")
        if self.target_bits is not None and self.target_gb is not None:
            raise ConfigError("--target-bits and --target-gb are both given; give one of them")
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"{self.tokens} tokens for calibration; give at least 1")
        for name in ("target_bits", "target_gb", "memory_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < MOST:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be positive and below {MOST:g}")


def convert_calibrated(
    settings: ConvertSettings,
    calibration: Calibration,
    report: NamedReport = lambda share, name: None,
    say: Callable[[str], object] = lambda line: None,
) -> ConversionReport:
    """Converts a checkpoint directory as `convert` does, with codes for the inputs that matrices have.

    The model runs over the text layer by layer, with one layer's weights in memory, and one or a few of its experts.

    Args:
        settings: of the conversion; with a budget, its recipe is of all but the routed experts.
        report: called with the progress of the runs.
        say: called with a line on what the calibration takes, before it begins.

    Raises:
        ConfigError, ModelFileError: as `convert`. RequestError: the text cannot be read, or files cannot be written.
        TokenizerError: the checkpoint has none that can be used.
    """
    if settings.delete_source:
        raise ConfigError("--calibrate reads the checkpoint several times; leave out --delete-source")
    made, args = _begun(settings, calibration, report)
    if calibration.has_budget:
        settings = replace(settings, recipe=made.within_budget(args, _base(settings)))
    wanted = Wanted.of(settings)
    wanted.check(is_calibrated=True)
    rounding = made.rounded(args, wanted, say, user_path(settings.mlx_path))
    made.found.check()
    done = packing.convert_with(replace(settings, rounding=rounding))
    shutil.rmtree(calibration.folder, ignore_errors=True)
    return done


def plan_calibrated(settings: ConvertSettings, calibration: Calibration) -> Needs:
    """What `convert_calibrated` with the same arguments will take. With a budget, whose recipe is not known yet, the
    size on the disk is that of the recipe that is given.

    Raises:
        ConfigError, ModelFileError, RequestError, TokenizerError: as `convert_calibrated`.
    """
    made, args = _begun(settings, calibration)
    if calibration.has_budget:
        made.budget(args, _base(settings))
    return made.planned(args, Wanted.of(settings))[1]


def _base(settings: ConvertSettings) -> Recipe:
    """The recipe of what a budget is not about."""
    return Recipe.of(BASE if settings.recipe is None else settings.recipe)


def _begun(
    settings: ConvertSettings, calibration: Calibration, report: NamedReport = lambda share, name: None
) -> tuple["_Conversion", ModelArgs]:
    """Reads the texts and the headers of the checkpoint."""
    calibration.check()
    path = user_path(settings.hf_path)
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; download the checkpoint first: calibration reads it several times")
    texts = read_texts(load_tokenizer(path), calibration)
    found = FoundFiles.of(open_checkpoint(path))
    checkpoint = open_checkpoint(path)
    args = read_args(checkpoint)
    weights = CheckpointWeights(checkpoint, args, settings.without_correction_bias)
    return _Conversion(weights, checkpoint, found, texts, calibration, report), args


def read_texts(tokenizer: TokenizerWrapper, calibration: Calibration) -> list[np.ndarray]:
    """The windows of the text. Raises RequestError: it is empty or cannot be read."""
    if calibration.text == DEFAULT_TEXT:
        texts = default_texts(tokenizer, WINDOW)
    else:
        names = [calibration.text] if isinstance(calibration.text, str) else calibration.text
        texts = windows([tokenizer.encode(read_text(name)) for name in names], WINDOW)
    if calibration.tokens is not None:
        texts = list(_first(texts, calibration.tokens))
    texts = [text for text in texts if len(text)]
    if not texts:
        raise RequestError("the text for calibration has no tokens; give a file with some text")
    return texts


def _first(texts: Sequence[np.ndarray], tokens: int) -> Iterator[np.ndarray]:
    """So many tokens of the texts, from the beginning."""
    for text in texts:
        if tokens > 0:
            yield text[:tokens]
        tokens -= len(text)


class _Conversion:
    """One calibrated conversion."""

    def __init__(
        self,
        weights: CheckpointWeights,
        checkpoint: Checkpoint,
        found: FoundFiles,
        texts: list[np.ndarray],
        calibration: Calibration,
        report: NamedReport,
    ):
        self.weights, self.found = weights, found
        self.checkpoint, self.texts, self.calibration, self._report = checkpoint, texts, calibration, report
        self.name, self.folder = checkpoint_digest(checkpoint), calibration.folder / "rounded"

    def within_budget(self, args: ModelArgs, base: Recipe) -> Recipe:
        """The recipe that spends the budget on the routed experts."""
        budget, bits = self.budget(args, base), self.calibration.target_bits
        folder = self.calibration.folder / "measured"
        run = MeasuringRun(self.weights, self.texts, folder, self.calibration.dtype, name=self.name)
        run.run(lambda share: self._report(share, "measuring errors"))
        weights = _weights_of(self.weights.layout)
        options = read_options(folder, args.moe_layers, weights)
        while True:
            chosen = spend(options, budget)
            name = f"{self.calibration.target_gb:g} GB" if bits is None else f"{bits:g} bits"
            layers = {layer: {part: chosen[layer, part].quant for part in EXPERT_PARTS} for layer in args.moe_layers}
            recipe = replace(base, name=name, layers=(*base.layers, *((str(i), forms) for i, forms in layers.items())))
            if bits is not None:
                return recipe
            size = make_plan(self.checkpoint, args, self._like(recipe)).total_bytes
            excess = size - int(self.calibration.target_gb * 1e9)  # type: ignore[operator]
            if excess <= 0:
                return recipe
            budget -= excess  # of padding between records

    def budget(self, args: ModelArgs, base: Recipe) -> int:
        """Bytes for the routed experts.

        Raises:
            ConfigError: their smallest form takes more.
        """
        target_bits, target_gb = self.calibration.target_bits, self.calibration.target_gb
        total = sum(_weights_of(self.weights.layout).values()) * len(args.moe_layers)
        least = min(bytes_of(quant, total) for quant in FORMS)
        if target_bits is not None:
            budget, enough = int(total * target_bits / 8), f"--target-bits {8 * least / total:g}"
        else:
            assert target_gb is not None
            plan = make_plan(self.checkpoint, args, self._like(base))
            budget = int(target_gb * 1e9) - sum(unit.size for unit in plan.units if not isinstance(unit, LayerFile))
            enough = f"--target-gb {math.ceil(1e3 * target_gb + (least - budget) / 1e6) / 1e3:g}"
        if budget < least:
            raise ConfigError(
                f"the budget is too small: a weight of the routed experts takes {8 * least / total:g} bits or more; "
                f"give at least {enough}"
            )
        return budget

    def _like(self, recipe: Recipe) -> Wanted:
        return Wanted.of(Forms(recipe=recipe, without_correction_bias=self.weights.without_correction_bias))

    def planned(self, args: ModelArgs, wanted: Wanted) -> tuple[ConversionPlan, Needs]:
        """The plan of the conversion, and the needs of the run."""
        given = self.calibration
        plan = make_plan(self.checkpoint, args, replace(wanted, rounding=Calibrated(given.method, self.folder)))
        limit, tokens = None if given.memory_gb is None else int(given.memory_gb * 1e9), sum(map(len, self.texts))
        return plan, needs_of(self.weights, plan, tokens, given.method, given.dtype, limit)

    def rounded(self, args: ModelArgs, wanted: Wanted, say: Callable[[str], object], out: Path) -> Calibrated:
        """What rounds as a run over the texts has found; `say` is called with what the run needs. `out`: the directory
        to write, which holds a part of the model if the conversion was interrupted."""
        plan, needs = self.planned(args, wanted)
        say(str(needs))
        check_space(self.calibration.folder, max(0, needs.disk - _bytes_in(self.folder) - _bytes_in(out)))
        rounder = Rounder(self.calibration.method)
        settings = rounder.settings(needs.together)
        name = f"{self.name} {settings} {wanted.recipe.to_json()}"
        given = self.weights, plan, self.texts, self.folder, self.calibration.dtype, rounder
        run = RoundingRun(*given, together=needs.together, name=name)
        run.run(lambda share: self._report(share, "rounding"))
        return Calibrated(f"{settings} for the text {digest_of(self.texts)[:16]}", self.folder)


def _bytes_in(folder: Path) -> int:
    """Bytes of the files in a directory, if there is one."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _weights_of(layout: ExpertLayout) -> dict[str, int]:
    """The number of weights of each part of a layer's routed experts."""
    *first, down = next(iter(layout.records.values())).projections
    sizes = {EXPERT_PARTS[0]: sum(one.rows * one.columns for one in first), EXPERT_PARTS[1]: down.rows * down.columns}
    return {part: size * layout.num_experts for part, size in sizes.items()}

"""`python -m moeflux_mlx.convert`: makes a packed model directory from a checkpoint."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace

from .cli.run import Parser, main_of  # first: where MLX is missing, it says so

# isort: split
from .calibration.calibrated import DEFAULT_TEXT, Calibration, convert_calibrated, plan_calibrated
from .calibration.rounding import CALIBRATED_METHODS, GPTQ
from .cli.known_models import reading_line
from .cli.opening import downloaded
from .cli.options import Adder, add_shared
from .cli.terminal import INTERRUPTED, agree, note
from .errors import ConfigError, counted
from .files import user_path
from .formats.hub import quant_of
from .formats.packed import FOLDER
from .model.tensors import token_bytes
from .opening.remote import is_remote
from .opening.weights import open_weights
from .packing.conversion import LAYOUTS, PACKED, ConversionReport, ConvertSettings, convert, convert_with
from .packing.ggml import TYPES
from .packing.located import Located
from .packing.recipe import RECIPES
from .planning.awake import Awake
from .planning.machine import default_dtype
from .quant import AFFINE_BITS, AFFINE_GROUPS, DEFAULT, MLX_MODES, fitting
from .rounding.methods import FIT, METHODS
from .text.tokenizer import VOCABULARY_FILES

__all__ = ["convert", "main", "parser"]

ROUNDING = "how floats become codes: fit searches the least squared error, minmax is MLX's own way (%(default)s)"
CALIBRATION = (
    "calibrate",
    "method",
    "calibrate_tokens",
    "target_bits",
    "target_gb",
    "memory_gb",
    "plan",
)  # options that need --calibrate


def add_calibration(made: argparse.ArgumentParser) -> None:
    """Adds the options of a conversion that first runs the model over a text."""
    group = made.add_argument_group(
        "calibration", "the model runs over a text, layer by layer, and matrices are rounded for what they multiply"
    )
    add = group.add_argument
    add(
        "--calibrate",
        nargs="+",
        metavar="FILE",
        help=f"UTF-8 text; {DEFAULT_TEXT}: the text that ships with the package (prose, code, chat)",
    )
    add("--method", choices=CALIBRATED_METHODS, default=FIT, help=f"{GPTQ} is better and slower (%(default)s)")
    add("--calibrate-tokens", type=int, metavar="N", help="read the first N tokens of the text; default: all")
    budget = group.add_mutually_exclusive_group()
    budget.add_argument("--target-bits", type=float, metavar="B", help="bits of a routed expert's weight, on average")
    budget.add_argument("--target-gb", type=float, metavar="GB", help="size of the model; both choose bits by layer")
    add("--memory-gb", type=float, metavar="GB", help="memory for calibration, in units of 1e9 bytes, by an estimate")
    add("--plan", action="store_true", help="say what the calibration takes in memory and on the disk, and stop")


def run(options: argparse.Namespace) -> int:
    if options.delete_source and user_path(options.hf_path).is_dir():  # anything else is refused
        agree(
            f"the safetensors files of {options.hf_path} will be deleted one by one, "
            "each after it has been packed and read back",
            options.yes,
        )
    if options.calibrate is None and any(getattr(options, name) not in (None, False, FIT) for name in CALIBRATION):
        named = "--method, --calibrate-tokens, --memory-gb, --plan and a target"
        raise ConfigError(f"{named} need --calibrate FILE, or --calibrate default")
    if options.calibrate is not None and options.rounding != FIT:
        raise ConfigError(
            f"--rounding {options.rounding} does not go with --calibrate; --method says how codes are made"
        )
    if options.plan:
        note(str(plan_calibrated(_settings(options), _calibration(options))))
        return 0
    try:
        if quant_of(options.hf_path)[1] is not None and is_remote(options.hf_path):
            # whole, since each expert lies in several tensors
            options.hf_path, options.revision = str(downloaded(options.hf_path, options.revision, yes=True)), None
        with Awake():
            report = _convert(options)
    except KeyboardInterrupt:
        note("interrupted; run the same command again to resume")
        return INTERRUPTED
    _print_report(report, options)
    return 0


def _convert(options: argparse.Namespace) -> ConversionReport:
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, dynamic_ncols=True, file=sys.stderr, disable=None) as bar:
        named = ""

        def show(done: int, total: int, name: str) -> None:
            nonlocal named
            if bar.disable and name != named:  # in a log, a line for each file
                named = name
                note(f"{done / total:4.0%} {name}")
            bar.total = total
            bar.set_description(name.removeprefix(f"{FOLDER}/"), refresh=False)
            bar.update(done - bar.n)

        settings = replace(_settings(options), progress=show)
        if options.calibrate is None:
            return convert_with(settings)
        return convert_calibrated(settings, _calibration(options), _told(), note)


def _settings(options: argparse.Namespace) -> ConvertSettings:
    """The settings of a conversion, calibrated or not."""
    names = {one.name for one in fields(ConvertSettings)}
    return ConvertSettings(**{name: one for name, one in vars(options).items() if name in names})


def _calibration(options: argparse.Namespace) -> Calibration:
    path = user_path(options.mlx_path)
    return Calibration(
        path.with_name(f"{path.name}.calibration"),
        DEFAULT_TEXT if options.calibrate == [DEFAULT_TEXT] else options.calibrate,
        options.method,
        options.calibrate_tokens,
        options.target_bits,
        options.target_gb,
        options.memory_gb,
        default_dtype(),
    )


def _told() -> Callable[[float, str], None]:
    """Says every few per cent how far a run is."""
    last, began = ("", 0), time.monotonic()

    def report(share: float, name: str) -> None:
        nonlocal last
        now = name, int(share * 20)
        if now != last:
            note(f"{name}: {share:4.0%}, {time.monotonic() - began:.0f} s")
            last = now

    return report


def _without_effect(report: ConversionReport, options: argparse.Namespace) -> list[str]:
    """Notes on forms that were asked for and that nothing got."""
    named = ("q_bits", "q_group_size", "q_type", "expert_bits", "down_bits", "recipe")
    given = [f"--{name.replace('_', '-')}" for name in named if getattr(options, name) is not None]
    given += ["--q-mode"] if options.q_mode != DEFAULT.mode else []
    of_experts = [name for name in given if name in ("--q-type", "--expert-bits", "--down-bits", "--recipe")]
    vain = [] if report.made_experts else of_experts if report.quantized else given
    if not vain:
        return []
    more = "; --requantize changes them (lossy)" if of_experts and not options.requantize else ""
    return [f"note: {', '.join(vain)} had no effect: the weights are already quantised and were copied{more}"]


def _fallbacks(report: ConversionReport) -> list[str]:
    """A note for each form that did not suit all matrices."""
    kinds = Counter((one.columns, one.named, one.made) for one in report.fallbacks)
    return [
        f"note: {count} {'matrix' if count == 1 else 'matrices'} of {columns} columns in {made.mode} instead of "
        f"{named.mode}, whose rows are multiples of {named.multiple}; {', '.join(fitting(columns))} would fit"
        for (columns, named, made), count in kinds.items()
    ]


def _print_report(report: ConversionReport, options: argparse.Namespace) -> None:
    lines = []
    if options.requantize and not report.lossy:
        lines.append("note: --requantize had no effect: everything could be copied")
    lines += _without_effect(report, options)
    if not any((report.path / name).exists() for name in VOCABULARY_FILES):
        lines.append(f"warning: the checkpoint has no {' or '.join(VOCABULARY_FILES)}; generate needs one of them")
    if report.kept:
        lines.append(f"kept {counted(len(report.kept), 'file')} of an earlier run")
    if report.repaired:
        names = ", ".join(report.repaired[:3]) + (", ..." if len(report.repaired) > 3 else "")
        lines.append(f"repaired {counted(len(report.repaired), 'file')} of an earlier run, damaged or missing: {names}")
    if report.linked:
        lines.append("layer files are hard links to the checkpoint's: they share its disk space")
    if report.recipe is not None:
        lines.append(f"recipe {report.recipe}")
    lines += _fallbacks(report)
    if report.left_out:
        lines.append(f"left out: {report.left_out} tensors of an image encoder or a draft head")
    weights = open_weights(Located(report.path))
    dense = token_bytes(weights.args, weights.shapes, default_dtype())
    lines.append(reading_line(weights.args, weights.experts.layout, dense))
    if report.lossy:
        lines.append(
            f"warning: {len(report.lossy)} quantised tensors were quantised again (lossy), "
            f"the first is {report.lossy[0]}"
        )
    if options.delete_source:
        left = sorted(file.name for file in user_path(options.hf_path).glob("*.safetensors"))
        lines.append(f"left in {options.hf_path}: {', '.join(left)}" if left else f"{options.hf_path}: shards deleted")
    note("\n".join([*lines, f"{report.path} is ready"]))


def add_places(add: Adder) -> None:
    """Adds the options of where, and how, a model is written."""
    add(
        "--also",
        nargs="+",
        default=[],
        metavar="DIR",
        help="directories on other drives that share the experts with OUT",
    )
    add("--layout", choices=LAYOUTS, default=PACKED, help="packed, or a checkpoint for mlx-lm (%(default)s)")


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "convert",
        "Convert a Mixture-of-Experts checkpoint into a packed model directory. "
        "An interrupted conversion is resumed by running the same command again.",
    )
    add = made.add_argument
    add(
        "--hf-path",
        required=True,
        metavar="DIR_OR_REPO",
        help="checkpoint directory, GGUF, or repo id org/name, of a GGUF org/name:Q4_K_M",
    )
    add("--mlx-path", required=True, metavar="OUT", help="directory to write")
    add("--q-bits", type=int, choices=AFFINE_BITS, help=f"bits of weights that are stored as floats ({DEFAULT.bits})")
    add(
        "--q-group-size",
        type=int,
        choices=AFFINE_GROUPS,
        help=f"weights per group ({DEFAULT.group_size}; fixed in other modes)",
    )
    add("--q-mode", choices=list(MLX_MODES), default=DEFAULT.mode, help="quantisation mode (%(default)s)")
    add(
        "--q-type",
        type=str.upper,
        choices=TYPES,
        metavar="TYPE",
        help="type of GGUF for routed experts, such as Q3_K; the rest: --recipe balanced (docs/formats.md)",
    )
    add("--expert-bits", type=int, choices=AFFINE_BITS, help="bits of routed experts; default: as --q-bits")
    add("--down-bits", type=int, choices=AFFINE_BITS, help="bits of their down projections; default: as --expert-bits")
    add(
        "--recipe",
        metavar="NAME_OR_FILE",
        help=f"bits of each part of the model: {', '.join(RECIPES)}, or a JSON file (docs/quality.md); "
        "the options above override it; default: uniform, with 8 bits beside experts that are already quantised",
    )
    add(
        "--requantize",
        action="store_true",
        help="quantise experts again (lossy) if they have other bits than asked for, or differ within a layer",
    )
    add("--rounding", choices=METHODS, default=FIT, help=ROUNDING)
    add_calibration(made)
    add("--delete-source", action="store_true", help="delete each file of the directory when it is packed; asks first")
    add("--yes", action="store_true", help="delete without asking")
    add_places(add)
    add_shared(add, "--revision", "--tokenizer", "--without-correction-bias")
    return made


main = main_of(run, parser, writes=False)


if __name__ == "__main__":
    sys.exit(main())

"""Makes a packed model directory from a checkpoint.

Reads Hugging Face safetensors (bf16, fp16, fp32, block fp8, int4 of compressed-tensors and AWQ), MLX
conversions of every geometry, whose codes are copied, and the directories of moeflux and flash-moe. It works expert by
expert and tensor by tensor, so its memory depends only on the largest of these. An interrupted conversion is resumed by
running it again; `layout.json` is written last, so an unfinished directory is never taken for a model.
"""

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ModelFileError, RequestError
from ..files import tagged, user_path
from ..foreign import with_parameters_of
from ..formats.checkpoint import COPIED, GRIDS_LICENSE, RECIPE, Checkpoint
from ..formats.packed import FINISHED, STATE, open_packed
from ..quant import GRID, unquantized
from ..rounding.methods import MINMAX
from ..spec import ModelArgs
from .found_files import FoundFiles, checkpoint_digest
from .gguf_folder import describe, tokenizer_folder
from .gguf_tables import license_text
from .in_place import open_in_place
from .layer_files import layout_json
from .located import Located, open_source
from .matrix import Forms, Wanted
from .mlx_layout import INDEX as MLX_INDEX
from .plan import ConversionPlan, Outcome, make_plan, read_args
from .resident import ResidentFile
from .shards import Meter, Scattering
from .source_format import SourceFormat
from .sources import Unit
from .supply import Supply, find_supply
from .writer import ByteProgress, Output, check_space, reserved, writing


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
    files[FINISHED] = layout_json(plan.layout, plan.also)
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


PACKED, MLX = LAYOUTS = "packed", "mlx"


@dataclass(frozen=True, kw_only=True)
class ConversionReport(Outcome):
    """What a conversion did.

    Attributes:
        path: the packed model directory.
        kept: files that an earlier run had finished.
        repaired: finished files of an earlier run whose bytes had changed; they were written again.
        linked: whether layer files are hard links to the checkpoint's.
    """

    path: Path
    kept: tuple[str, ...]
    repaired: tuple[str, ...]
    linked: bool


@dataclass(frozen=True)
class ConvertSettings(Forms):
    """The arguments of `convert`, which explains them."""

    hf_path: str | Path
    mlx_path: str | Path
    _: KW_ONLY
    revision: str | None = None
    delete_source: bool = False
    also: Sequence[str | Path] = ()
    layout: str = PACKED
    tokenizer: str | Path | None = None
    progress: ByteProgress | None = None

    @property
    def is_here(self) -> bool:
        """Whether the checkpoint is a directory or a file that stays."""
        return user_path(self.hf_path).exists() and not self.delete_source


@with_parameters_of(ConvertSettings, {})
def convert(settings: ConvertSettings) -> ConversionReport:
    """Converts a checkpoint into a packed model directory; resumes one that was interrupted.

    A repository is downloaded shard by shard. Each shard is deleted when it is packed, so the disk holds the packed
    model and at most two shards.

    Args:
        hf_path: checkpoint directory, GGUF file, or Hugging Face repo id org/name.
        mlx_path: the directory to write.
        q_bits: bits of linear layers and routed experts that come as floats: 1 to 6 or 8; None: the mode's own number,
            or 4.
        q_group_size: 32, 64 or 128; None: the mode's only size, or 64.
        q_mode: "affine", "mxfp4", "mxfp8" or "nvfp4".
        q_type: a type of GGUF, such as "Q3_K", for routed experts that come as floats (IQ: extra `libgguf`); the rest
            is as `recipe` says, or else "balanced".
        expert_bits: bits of routed experts, if different from `q_bits`.
        down_bits: bits of their down projections, if different from `expert_bits`.
        recipe: the forms of parts that come as floats: "uniform", "balanced", "small", or a JSON file
            (docs/quality.md); the bits above override it. None: uniform, with 8 bits beside experts in codes.
        requantize: quantise routed experts again if those of a layer differ in form, or with `expert_bits`,
            `down_bits` or `recipe` if they are stored in another form; loses precision.
        rounding: how floats become codes: "fit" searches the least squared error, "minmax" is `mx.quantize`; or a
            `packing.matrix.Rounding`. Codes that the checkpoint has are copied in any case.
        revision: of the Hugging Face repo.
        delete_source: delete each shard of the checkpoint directory once it is packed and was read back; files that
            are links, or have another name, are refused.
        also: new or empty directories on other drives. The experts of each layer are distributed over these and
            `mlx_path`, so that all drives are read in parallel.
        layout: "packed", or "mlx": a checkpoint that mlx-lm loads, from a directory that stays; without draft heads and
            without image encoders that mlx-lm does not skip.
        tokenizer: directory or repo id of the tokenizer's files for a GGUF; None: those beside it, or else made from
            its metadata.
        without_correction_bias: as for `load`; the packed model has zeros in their place.
        progress: called with bytes done, total bytes, and the name of the file.

    Raises:
        ConfigError: a value is not implemented. ModelFileError: the checkpoint or the output directory
        is unusable, damaged or too large for the disk.
    """
    return convert_with(settings)


def convert_with(settings: ConvertSettings) -> ConversionReport:
    """`convert`, of its arguments in one value."""
    wanted = Wanted.of(settings)
    wanted.check(is_calibrated=not isinstance(settings.rounding, str))
    path, folders = user_path(settings.mlx_path), [user_path(folder).absolute() for folder in settings.also]
    _check_also(path, folders, settings.is_here)
    _check_layout(settings.layout, settings.is_here and not folders)
    with reserved(path):  # before reading anything that another conversion could change
        supply, checkpoint, found = _open(settings, path)
        plan = make_plan(checkpoint, read_args(checkpoint), wanted, folders, settings.layout == MLX)
        options = _asked(wanted, plan, folders, settings.layout)
        origin = {"hf_path": _whole(settings.hf_path), "delete_source": settings.delete_source}
        stamps = None if supply is None else [shard.identity for shard in supply.listing.shards]
        output = Output(path, {"source": checkpoint_digest(checkpoint, stamps), "options": options}, origin)
        if supply is None:
            _check_space(output, plan, folders)
        output.write_state()
        given = output, plan, checkpoint, found, settings.progress or (lambda done, total, name: None)
        kept, repaired = _at_once(*given) if supply is None else _by_shards(*given, supply)
    return ConversionReport(
        **vars(plan.outcome),
        path=path,
        kept=tuple(kept),
        repaired=tuple(repaired),
        linked=output.linked,
    )


def _check_space(output: Output, plan: ConversionPlan, folders: Sequence[Path]) -> None:
    """Makes the other directories. Raises ModelFileError: a disk has no room."""
    check_space(output.path, output.missing_bytes(_in_folder(plan, None)))
    for folder in folders:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        check_space(folder, output.missing_bytes(_in_folder(plan, folder)))


def _whole(hf_path: str | Path) -> str:
    """A directory as an absolute path, or a repository's name."""
    return str(user_path(hf_path).absolute() if user_path(hf_path).exists() else hf_path)


def _check_also(path: Path, folders: Sequence[Path], is_here: bool) -> None:
    """Raises ConfigError, ModelFileError: the experts cannot be spread over these directories."""
    if folders and not is_here:
        raise ConfigError("--also converts a directory that stays: download the checkpoint, leave --delete-source out")
    if len({path.absolute(), *folders}) <= len(folders):
        raise ConfigError("--also and --mlx-path name a directory twice; give different ones, on different drives")
    for folder in folders:
        if folder.exists() and not (path / STATE).exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ModelFileError(f"{folder} is not an empty directory; choose another one for --also")


def _check_layout(layout: str, is_plain: bool) -> None:
    """Raises ConfigError: there is no such layout, or it does not go with other options."""
    if layout not in LAYOUTS:
        raise ConfigError(f"layout is {layout!r}; give {' or '.join(LAYOUTS)}")
    if layout == MLX and not is_plain:
        raise ConfigError(
            "--layout mlx converts a directory that stays: download the checkpoint, and leave out --delete-source and "
            "--also"
        )


def _in_folder(plan: ConversionPlan, folder: Path | None) -> list[Unit]:
    """The files that go into one of the other directories, or (None) into the model's own."""
    return [one for one in plan.units if (Path(one.name).parent if Path(one.name).is_absolute() else None) == folder]


def _asked(wanted: Wanted, plan: ConversionPlan, folders: Sequence[Path], layout: str) -> dict[str, Any]:
    """What the bytes depend on. Min-max goes without saying, as in conversions before there was a choice."""
    method = wanted.rounding.method
    rounding = {"rounding": method} if plan.rounds and method != MINMAX else {}
    others = {"layout": layout} if layout != PACKED else {}
    also = {"also": list(map(str, folders))} if folders else {}
    return {**wanted.options, **rounding, **also, **others}


def _at_once(
    output: Output,
    plan: ConversionPlan,
    checkpoint: Checkpoint,
    found: FoundFiles,
    report: ByteProgress,
) -> tuple[list[str], list[str]]:
    """File by file, from a complete checkpoint; returns as `_write`."""
    kept, repaired = _write(output, plan, Meter(report, 0, plan.total_bytes))
    _finish(output, plan, checkpoint, found)
    if plan.index is not None:
        output.close()
    return kept, repaired


def _by_shards(
    output: Output,
    plan: ConversionPlan,
    checkpoint: Checkpoint,
    found: FoundFiles,
    report: ByteProgress,
    supply: Supply,
) -> tuple[list[str], list[str]]:
    """Shard by shard; each is deleted once it is packed and read back. Returns as `_write`."""
    supply.listing.write(output)
    scattering = Scattering(output, plan.units, supply, report)
    scattering.run()
    _finish(output, plan, checkpoint, found)
    scattering.close()
    return scattering.kept, scattering.repaired


def _finish(output: Output, plan: ConversionPlan, checkpoint: Checkpoint, found: FoundFiles) -> None:
    """The small files, and with the last of them a model, which is opened once.

    Raises:
        ModelFileError: a file of the checkpoint has changed meanwhile; what was written of it is not kept.
    """
    files = small_files(checkpoint, plan)
    try:
        found.check()
    except ModelFileError:
        output.forget()
        raise
    for name, data in files.items():
        output.put(name, data)
    made = Located(output.path)
    if plan.index is None:
        open_packed(output.path, made.args)
    else:
        open_in_place(made)


def _open(settings: ConvertSettings, path: Path) -> tuple[Supply | None, Checkpoint, FoundFiles]:
    """The checkpoint, what brings its shards if they come one by one, and its files before its headers were read."""
    source = find_supply(settings.hf_path, path, settings.revision, settings.delete_source, _check_config)
    if not isinstance(source, Path):
        checkpoint = source.listing.checkpoint(source.folder, source.small)
        return source, checkpoint, FoundFiles.of(checkpoint, with_weights=False)
    if Located(source).is_unfinished:
        raise ModelFileError(f"{source} is an unfinished conversion; give the checkpoint that it is made from")
    if path.resolve() == source.resolve():
        raise ModelFileError(f"{path} is the checkpoint itself; choose another directory")
    if folder := describe(source, tokenizer_folder(settings.tokenizer)):
        return None, *_found(folder)
    if settings.tokenizer is not None:
        raise RequestError(f"--tokenizer is for GGUF files, and {source} is none; leave it out")
    return None, *_found(source)


def _found(folder: Path) -> tuple[Checkpoint, FoundFiles]:
    """A checkpoint whose headers were read from the files that are found, or from later ones."""
    found = FoundFiles.of(open_source(Located(folder)))
    return open_source(Located(folder)), found


def _check_config(config: dict[str, Any]) -> None:
    """Raises ConfigError: a model, or a quantisation, that cannot be converted."""
    ModelArgs.from_dict(unquantized(config))
    SourceFormat(config)


def _write(output: Output, plan: ConversionPlan, meter: Meter) -> tuple[list[str], list[str]]:
    """All large files; returns the names of those that an earlier run had finished, intact and damaged ones."""
    kept: list[str] = []
    repaired: list[str] = []
    for unit in plan.units:
        meter.say(unit.name)
        if output.is_finished(unit):
            kept.append(unit.name)
            meter.by(unit.size)
        else:
            repaired += [unit.name] if unit.name in output.files else []
            last = FINISHED if plan.index is None else "config.json"
            (output.path / last).unlink(missing_ok=True)  # so that a model under repair is not loaded
            output.write(unit, meter.by)
    return kept, repaired

"""A model on the Hugging Face Hub before its download: the disk space and memory that it needs, from headers alone.

A packed model, a checkpoint that MLX quantised, or one of a repository's GGUF models (`org/name:QUANT`) is downloaded
as it is. Any other checkpoint is refused with the command that converts it, before any weight is downloaded.
"""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import mlx.core as mx

from ..errors import ModelFileError, MoefluxError, NotPackedError, RequestError
from ..files import existing_parent, kept_files, read_json, replace_file, shown_gb, user_path
from ..formats.checkpoint import (
    COPIED,
    INDEX,
    QUANT_CONFIG,
    RECIPE,
    Checkpoint,
    Tensor,
    header_tensors,
    merge_tensors,
    read_bytes,
    shard_names,
)
from ..formats.gguf_file import header_bytes, open_gguf
from ..formats.gguf_names import heads_of, models_in
from ..formats.hub import Repository, cache_folder, cached_snapshot, looks_like_repo, quant_of
from ..formats.layout_file import from_json
from ..formats.packed import FINISHED, FOLDER, LAYOUT
from ..formats.record import ExpertLayout
from ..ops.forms import DTYPES
from ..packing.gguf_folder import base_tokenizer, describe, lacks_head, slowed_blocks
from ..packing.in_place import plan_in_place
from ..packing.located import Located, not_packed_error, open_source
from ..packing.recipe import Recipe, read_recipe
from ..packing.resident import ASIDE
from ..packing.sources import shapes_of
from ..planning.quants import Quants
from ..spec import ModelArgs
from ..vision.vision import PREPROCESSOR, NoVision, VisionFiles, usable, vision_of

SMALL = ["config.json", QUANT_CONFIG, INDEX, FINISHED, RECIPE, *COPIED]
RESIDENT = "resident*.safetensors"
PACKED = ["config.json", RECIPE, *COPIED, RESIDENT, ASIDE, f"{FOLDER}/*"]
UNPACKED = ["config.json", INDEX, *COPIED]  # and its shards
KEPT_HEADERS = 8  # commits whose GGUF headers are kept: a few to 20 MB each, mostly the tokenizer


@dataclass(frozen=True)
class Remote:
    """A repository that holds a model.

    Attributes:
        missing: bytes still to be downloaded.
        total: bytes of all files of the model.
    """

    repository: Repository
    wanted: tuple[str, ...]
    missing: int
    total: int

    @classmethod
    def look_up(cls, name: str, revision: str | None = None) -> "Remote":
        """Reads the list of files, and config.json.

        Args:
            name: `org/name`, or `org/name:QUANT` for one of its GGUF models.

        Raises:
            NotPackedError: the model has to be converted. ModelFileError: there is no such repository, or it cannot be
                reached. RequestError: it has several GGUF models and it is not said which is meant, or it has not this
                one.
        """
        repo, quant = quant_of(name)
        repository = Repository.look_up(repo, revision)
        is_gguf = quant is not None or not any(file.endswith((".safetensors", LAYOUT)) for file in repository.files)
        sizes = {file.name: file.size for file in repository.files.values()}
        if is_gguf and (files := chosen_gguf(repo, sizes, quant)):
            return RemoteGguf.of(repository, files, sizes)
        wanted = PACKED
        if FINISHED not in repository.files:
            small = repository.snapshot([INDEX, "config.json"])
            if not Located(small).states_mlx:
                raise not_packed_error(name, small)
            wanted = [*UNPACKED, *shard_names(small, (one for one in repository.files if "/" not in one))]
        total = sum(file.size for file in repository.matching(wanted))
        return cls(repository, tuple(wanted), repository.missing(wanted), total)

    def figures(self, without_correction_bias: bool = False) -> tuple[ModelArgs, ExpertLayout, dict[str, mx.array]]:
        """The figures for a memory plan: the model, its records, and its resident tensors as lazy zeros.

        Args:
            without_correction_bias: as for `load`.

        Raises:
            ConfigError, ModelFileError: the model cannot be run.
        """
        small = self._small
        args, layout_file = small.args, small.path / FINISHED
        if small.is_packed:
            heads = [file.name for file in self.repository.matching([RESIDENT])]
            layout = from_json(read_json(layout_file), args, layout_file)
            shapes = {name: mx.zeros(one.shape, DTYPES[one.dtype]) for name, one in self._tensors(heads).items()}
            return args, layout, shapes
        tensors = self._tensors([name for name in self.wanted if name.endswith(".safetensors")])
        return _in_place(Checkpoint(small.path, small.config, tensors, ()), args, without_correction_bias)

    def recipe(self) -> Recipe | None:
        """How floats became its codes, if a conversion of ours says so, as `packing.recipe.read_recipe`."""
        return read_recipe(self._small.path)

    def vision(self, args: ModelArgs, wanted: bool = True) -> VisionFiles | NoVision:
        """Its image encoder, as `Weights.vision`."""
        names = [name for name in self.wanted if name.endswith(".safetensors") and "*" not in name and name != ASIDE]
        if not self.in_place:
            names = [ASIDE] if ASIDE in self.repository.files else []
        file = self._small.path / PREPROCESSOR
        settings = read_json(file) if file.exists() else {}
        return usable(
            vision_of(self._small.config, settings, self._tensors(names) if wanted else {}, args), args, wanted
        )

    @cached_property
    def _small(self) -> Located:
        """The directory of its small files."""
        return Located(self.repository.snapshot(SMALL))

    def _tensors(self, names: list[str]) -> dict[str, Tensor]:
        files, folder = self.repository.files, self._small.path
        return merge_tensors(
            header_tensors(folder / name, files[name].size, self.repository.head(name)) for name in names
        )

    @property
    def quants(self) -> Quants:
        """The GGUF models of the repository; none for another kind of model."""
        return Quants()

    @property
    def in_place(self) -> bool:
        """Whether the repository is a checkpoint, whose experts are in pieces."""
        return FINISHED not in self.repository.files

    @property
    def free(self) -> int:
        """Free bytes on the disk of the Hub's cache."""
        return shutil.disk_usage(existing_parent(cache_folder())).free

    @classmethod
    def look_up_or_cached(cls, name: str, revision: str | None = None) -> "Remote | Path":
        """As `look_up`; if the Hub cannot be reached, the directory of the model in the Hub's cache."""
        try:
            return cls.look_up(name, revision)
        except NotPackedError:
            raise
        except ModelFileError:
            here = _cached_gguf(name, revision) or cached_snapshot(
                name, revision, [*PACKED, *UNPACKED, "*.safetensors"]
            )
            if here is None or here.is_dir() and not _is_model(here):
                raise
            return here

    @property
    def disk(self) -> str:
        """A line that says how much disk space the model takes."""
        return (
            f"{self.repository.name}: {self.total / 1e9:.3f} GB, of which {self.missing / 1e9:.3f} GB are to be "
            f"downloaded to {cache_folder()}, where {self.free / 1e9:.1f} GB are free"
        )

    def check_space(self) -> None:
        """Raises ModelFileError: the disk has no room for the missing files."""
        if self.missing > self.free:
            raise ModelFileError(
                f"{self.repository.name} needs {self.missing} more bytes ({shown_gb(self.missing)}) in "
                f"{cache_folder()} and {self.free} ({shown_gb(self.free)}) are free; free some disk space, or set "
                "HF_HOME to a folder on another disk"
            )

    def download(self, shown: bool = False) -> Path:
        """Downloads the missing files into the Hub's cache, with progress bars if `shown`; returns their directory.

        Raises:
            ModelFileError: the disk has no room, or the Hub cannot be reached.
        """
        self.check_space()
        return self.repository.snapshot(list(self.wanted), shown)


@dataclass(frozen=True)
class RemoteGguf(Remote):
    """One of a repository's GGUF models.

    Attributes:
        head: the files of the draft head beside it that the model can use.
    """

    head: tuple[str, ...] = ()

    @classmethod
    def of(cls, repository: Repository, files: tuple[str, ...], sizes: Mapping[str, int]) -> "RemoteGguf":
        """The model in these files, with the draft head beside it.

        Args:
            sizes: bytes of every file, by name.
        """
        made, heads = cls(repository, files, 0, 0), heads_of(files, sizes)
        head = tuple(heads[0]) if len(heads) == 1 and made._takes_head() else ()
        every = (*files, *head)
        return cls(repository, files, repository.missing(every), sum(map(sizes.__getitem__, every)), head)

    def _takes_head(self) -> bool:
        with suppress(MoefluxError):  # whoever needs the model gets the error
            return lacks_head(open_gguf(self._headers() / self.wanted[0]))
        return False

    def figures(self, without_correction_bias: bool = False) -> tuple[ModelArgs, ExpertLayout, dict[str, mx.array]]:
        """As those of other models, without the head's."""
        folder = describe(self._headers() / self.wanted[0])
        assert folder is not None
        located = Located(folder)
        return _in_place(open_source(located), located.args, without_correction_bias)

    def _headers(self) -> Path:
        """The directory in which the headers of its files are kept, each in a file without data."""
        heads = kept_files() / "gguf" / "headers" / self.repository.commit
        _forget_old(heads)
        for name in self.wanted:
            size, head = self.repository.files[name].size, heads / name
            fetched = None if head.is_file() else header_bytes(Path(name), size, partial(self.repository.part, name))
            try:
                if fetched is not None:
                    head.parent.mkdir(parents=True, exist_ok=True)
                    replace_file(head, [fetched])
                os.truncate(head, size)  # longer without taking more of the disk
            except OSError as error:
                raise ModelFileError(f"{head} cannot be written: {error.strerror or error}") from None
        self._fetch_divisors(heads)
        return heads

    def _fetch_divisors(self, heads: Path) -> None:
        """Fetches the one tensor of which the configuration needs the values, if it is still missing."""
        blocks = slowed_blocks(open_gguf(heads / self.wanted[0]))
        if blocks is None or any(read_bytes(blocks.file, blocks.offset, blocks.nbytes)):
            return
        values = self.repository.part(str(blocks.file.relative_to(heads)), blocks.offset, blocks.nbytes)
        try:
            with open(blocks.file, "r+b") as file:
                file.seek(blocks.offset)
                file.write(values)
        except OSError as error:
            raise ModelFileError(f"{blocks.file} cannot be written: {error.strerror or error}") from None

    def recipe(self) -> Recipe | None:
        return None

    def vision(self, args: ModelArgs, wanted: bool = True) -> VisionFiles | NoVision:
        return usable(None, args, wanted)

    @property
    def quants(self) -> Quants:
        return Quants({file.name: file.size for file in self.repository.files.values()}, self.wanted)

    @property
    def in_place(self) -> bool:
        return True

    def download(self, shown: bool = False) -> Path:
        """As of other models; returns the first file. The tokenizer's files of the model that it was made from come
        too, if its metadata name one and the Hub has them.
        """
        self.check_space()
        first = self.repository.snapshot([*self.wanted, *self.head], shown) / self.wanted[0]
        base_tokenizer(first, download=True)
        return first


def _forget_old(heads: Path) -> None:
    """Removes the headers of all commits but the KEPT_HEADERS that were asked for last, of which `heads` is one."""
    with suppress(OSError):  # another process removes them too
        heads.mkdir(parents=True, exist_ok=True)
        os.utime(heads)
        for old in sorted(heads.parent.iterdir(), key=lambda one: one.stat().st_mtime)[:-KEPT_HEADERS]:
            shutil.rmtree(old, ignore_errors=True)


def _cached_gguf(name: str, revision: str | None) -> Path | None:
    """The first file of one of a repository's GGUF models, if all of it is in the Hub's cache."""
    repo, quant = quant_of(name)
    letters = "".join(f"[{letter.lower()}{letter.upper()}]" for letter in quant or "")
    folder = cached_snapshot(repo, revision, [f"*{letters}*.gguf"])
    if folder is None:
        return None
    files = chosen_gguf(
        repo, {str(one.relative_to(folder)): one.stat().st_size for one in folder.rglob("*.gguf")}, quant
    )
    return folder / files[0] if files else None


def chosen_gguf(repo: str, sizes: Mapping[str, int], quant: str | None) -> tuple[str, ...]:
    """The files of the GGUF model in `repo` that `quant` names: those whose name ends with it, in any case. Without it
    those of the only model; none if there is no GGUF.

    Args:
        sizes: bytes of every file, by name.

    Raises:
        RequestError: there is none with this name, or several; the message has the names and sizes of all.
    """
    models = models_in(sizes)
    fitting = [
        name for name in models if quant is None or re.search(rf"(^|[-._/]){re.escape(quant)}$", name, re.IGNORECASE)
    ]
    if len(fitting) == 1 or not models and quant is None:
        return tuple(models[fitting[0]]) if fitting else ()
    known = (f"{name} ({sum(sizes[file] for file in files) / 1e9:.1f} GB)" for name, files in models.items())
    problem = "has several GGUF models" if quant is None else f"has {len(fitting)} GGUF models named {quant}"
    raise RequestError(f"{repo} {problem}; give {repo}:NAME, where NAME ends one of: {', '.join(known) or 'none'}")


def is_remote(model: str | Path | None) -> bool:
    """Whether a model is on the Hub: it has a repository's name, and there is no local file of that name."""
    return isinstance(model, str) and looks_like_repo(quant_of(model)[0]) and not user_path(model).exists()


def fetch(name: str, revision: str | None = None) -> Path:
    """The local directory of a repository's model, which is downloaded without messages.

    Raises:
        NotPackedError, ModelFileError: as `Remote.look_up` and `Remote.download`.
    """
    model = Remote.look_up_or_cached(name, revision)
    return model if isinstance(model, Path) else model.download()


def _is_model(folder: Path) -> bool:
    """Whether the directory holds a packed model, or a complete checkpoint that can be used in place."""
    try:
        return Located(folder).runs
    except MoefluxError:
        return False


def _in_place(
    checkpoint: Checkpoint, args: ModelArgs, without_correction_bias: bool
) -> tuple[ModelArgs, ExpertLayout, dict[str, mx.array]]:
    """The figures of a checkpoint that is used as it lies."""
    args, plan = plan_in_place(checkpoint, args, without_correction_bias)
    return args, plan.layout, shapes_of(plan.sources)

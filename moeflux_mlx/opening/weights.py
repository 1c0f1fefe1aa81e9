"""The weights of a model directory, packed or a checkpoint in place: one interface for both.

Opening reads headers and checks every length; tensors are read when they are needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx

from ..errors import ModelFileError, RequestError
from ..files import user_path
from ..formats.checkpoint import check_folders, read_bytes
from ..formats.packed import ExpertFiles, PackedExperts, open_packed
from ..formats.tables import TableFiles, open_tables
from ..model.weights import read_resident
from ..ops import native
from ..packing.in_place import InPlace, open_in_place
from ..packing.located import Located, packing_command
from ..packing.sources import read_all, shapes_of
from ..planning.memory_plan import Demand
from ..planning.pool_sizes import best_pool
from ..quant import GRID
from ..spec import ModelArgs
from ..state.prompt_file import EXPERT_SAMPLES, RESIDENT_SAMPLES, Fingerprint, fingerprint_of
from ..vision.vision import NoVision, VisionFiles, open_vision


@dataclass(frozen=True)
class ModelWeights:
    """The places of a model's tensors.

    Attributes:
        args: the model, with the forms of its tensors.
        shapes: the resident tensors, for callers that need only shapes and dtypes; they are lazy.
        checkpoint: None for a packed model.
        tables: the places of the rows of n-grams, by layer.
    """

    located: Located
    args: ModelArgs
    experts: ExpertFiles
    shapes: Mapping[str, mx.array]
    checkpoint: InPlace | None = None
    tables: Mapping[int, TableFiles] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The directory of the model."""
        return self.located.path

    @property
    def in_place(self) -> bool:
        """Whether experts are in pieces, so that their files cannot be mapped."""
        return self.checkpoint is not None

    @property
    def can_be_mapped(self) -> bool:
        """Whether each layer's experts are one file."""
        return isinstance(self.experts, PackedExperts) and len(self.experts.folders) == 1

    def vision(self, wanted: bool = True) -> VisionFiles | NoVision:
        """The image encoder, or the reason why there is none. `wanted`: whether the caller wants one.

        Raises:
            ConfigError, ModelFileError: the encoder cannot be used.
        """
        return open_vision(self.located, self.args, wanted)

    @property
    def convert_command(self) -> str:
        """The command that makes a packed model from the checkpoint."""
        return packing_command(next(iter(self.located.gguf), self.path))

    def read(self) -> dict[str, mx.array]:
        """Reads the resident tensors; the caller may empty the dict.

        Raises:
            ModelFileError: a file cannot be read.
        """
        return read_resident(self.path) if self.checkpoint is None else read_all(self.checkpoint.plan.sources)

    def check_mode(self, expert_io: str) -> None:
        """Raises RequestError if the experts cannot be used in this mode."""
        if expert_io != "mmap" or self.can_be_mapped:
            return
        if not self.in_place:
            raise RequestError(
                f"expert_io mmap needs each layer in one file, and the experts of {self.path} are in several "
                "directories; leave it at auto"
            )
        raise RequestError(
            f"expert_io mmap needs packed experts, and {self.path} is a checkpoint, which is used in place; "
            f"leave it at auto, or run: {self.convert_command}"
        )

    def fingerprint(self, dtype: mx.Dtype, bits: int = native.EXACT) -> Fingerprint:
        """The fingerprint that saved states of the model must match; as `fingerprint_of`.

        Raises:
            ModelFileError: a file cannot be read.
        """
        if self.checkpoint is None:
            samples = dict.fromkeys(sorted(self.path.glob("resident*.safetensors")), RESIDENT_SAMPLES)
            samples |= dict.fromkeys(self.experts.sizes, EXPERT_SAMPLES)
        else:
            files = self.checkpoint.files
            samples = dict.fromkeys(files, max(EXPERT_SAMPLES, RESIDENT_SAMPLES // len(files)))
        return fingerprint_of(self.args, samples, self.path, dtype, bits)


def open_weights(located: Located, without_correction_bias: bool = False) -> ModelWeights:
    """Args:
        without_correction_bias: as for `load`.

    Raises:
    ConfigError, ModelFileError: a file is missing or wrong, or uses a feature that is not implemented.
    """
    if located.is_packed:
        check_folders(located.shards_in)  # which a packed model does not read
        path, args = located.path, located.args
        experts = open_packed(path, args)
        _check_grids(experts)
        return ModelWeights(located, args, experts, read_resident(path), tables=open_tables(path, args))
    in_place = open_in_place(located, without_correction_bias)
    tables = {table.layer: table.in_place() for table in in_place.plan.tables}
    return ModelWeights(located, in_place.args, in_place.experts, shapes_of(in_place.plan.sources), in_place, tables)


def _check_grids(experts: PackedExperts) -> None:
    """Compares the tables of each form in the first and the last expert of each layer: kernels take that of one expert
    for all.

    Raises:
        ModelFileError: two of one form differ, or a file cannot be read.
    """
    layout, known = experts.layout, dict[str, tuple[bytes, str]]()
    for layer, record in layout.records.items():
        fields = [(part.quant.mode, one) for part in record.projections for one in part.codes if one.part == GRID]
        for expert in {0, layout.count(layer) - 1} if fields else ():
            path, start, _, _ = experts.pieces(layer, expert)[0]
            for mode, one in fields:
                where = f"{one.name} of {layout.named((layer, expert))}"
                grid = bytes(read_bytes(path, start + one.offset, one.size))
                first, other = known.setdefault(mode, (grid, where))
                if first != grid:
                    raise ModelFileError(f"{path}: {where} is another table than {other}; convert the model again")


def with_best_pool(demand: Demand, weights: ModelWeights) -> Demand:
    """The demand including the size of the pool that `moeflux tune` found, unless a size is forced."""
    if demand.expert_cache_bytes is not None:
        return demand
    return replace(demand, best_pool=best_pool(weights.path, weights.experts.layout.total_bytes))


def model_fingerprint(
    path: str | Path, dtype: mx.Dtype, cpu_activations: int = native.EXACT, kv_bits: int | None = None
) -> Fingerprint:
    """The fingerprint of a model directory.

    Args:
        dtype: dtype of the caches, `model.activation_dtype`.
        cpu_activations: number of bits to which products round activations, `model.cpu_activations`.
        kv_bits: number of bits in which caches keep keys and values, `model.args.kv_bits`.

    Raises:
        ModelFileError: a file cannot be read. ConfigError: config.json is not usable.
    """
    return open_weights(Located(user_path(path))).fingerprint(dtype, cpu_activations).keeping(kv_bits)

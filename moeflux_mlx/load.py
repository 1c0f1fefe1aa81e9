"""Joins configuration, resident weights, packed experts and tokenizer into something that can run.

The only place that knows all of them.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from .config import ModelArgs
from .errors import ModelFileError, NotPackedError
from .experts import RoutedExperts
from .hub import fetch_packed, looks_like_repo
from .io_mode import describe, physical_ram_bytes, select_io_mode
from .loader import ExpertLoader
from .model import Model
from .packed import FOLDER, PackedExperts, not_packed_message
from .resources import directory
from .weights import fill, read_resident

if TYPE_CHECKING:
    from .tokenizer import TokenizerWrapper


def load(
    path_or_hf_repo: str | Path | None = None,
    *,
    dtype: mx.Dtype | None = None,
    expert_io: str = "auto",
    expert_cache_bytes: int | None = None,
    revision: str | None = None,
) -> tuple[Model, "TokenizerWrapper"]:
    """Loads a packed model and its tokenizer.

    Args:
        path_or_hf_repo: a directory made by `convert`, a Hugging Face repo id that holds one, or None
            for the demo model that ships with the package.
        dtype: of activations and caches; None means bfloat16 on a GPU and float32 on CPU.
        expert_io: "auto", "mmap" or "pread".
        expert_cache_bytes: memory for streamed experts in pread mode.
        revision: of the Hugging Face repo.

    Raises:
        ModelFileError: a file is missing or wrong. ConfigError: a value is not implemented.
        NotPackedError: a checkpoint that needs converting; the message holds the command.
        TokenizerError: the tokenizer files cannot be used.
    """
    from .tokenizer import load_tokenizer

    path = resolve(path_or_hf_repo, revision)
    model = load_model(path, dtype=dtype, expert_io=expert_io, expert_cache_bytes=expert_cache_bytes)
    return model, load_tokenizer(path)


def load_model(
    path_or_hf_repo: str | Path | None = None,
    *,
    dtype: mx.Dtype | None = None,
    expert_io: str = "auto",
    expert_cache_bytes: int | None = None,
    revision: str | None = None,
) -> Model:
    """`load` without a tokenizer; `model.experts` is the `ExpertLoader`."""
    path = resolve(path_or_hf_repo, revision)
    args = ModelArgs.from_file(path)
    packed = PackedExperts.open(path, args)
    ram = physical_ram_bytes()
    mode = select_io_mode(packed.layout.total_bytes, ram, expert_io)
    tensors = read_resident(path)
    loader = ExpertLoader(packed, mode=mode, cache_bytes=expert_cache_bytes)
    loader.decision = describe(mode, packed.layout.total_bytes, ram, forced=expert_io != "auto")
    split_latent = any(name.endswith(".embed_q.weight") for name in tensors)
    model = Model(args, RoutedExperts(loader), split_latent)
    model.experts = loader
    fill(model, tensors, args.quantization, dtype or default_dtype())
    return model


def default_dtype() -> mx.Dtype:
    """bfloat16 on a GPU; float32 on CPU, where MLX's bfloat16 arithmetic is several times slower."""
    return mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32


def resolve(path_or_hf_repo: str | Path | None, revision: str | None = None) -> Path:
    """The local directory of a packed model, downloading it if need be."""
    if path_or_hf_repo is None:
        return directory("demo")
    path = Path(path_or_hf_repo).expanduser()
    if not path.exists():
        if isinstance(path_or_hf_repo, str) and looks_like_repo(path_or_hf_repo):
            return fetch_packed(path_or_hf_repo, revision)
        raise ModelFileError(
            f"{path} does not exist; give a directory made by moeflux_mlx.convert or a repo id org/name"
        )
    if not path.is_dir():
        raise ModelFileError(f"{path} is not a directory")
    if not (path / FOLDER / "layout.json").exists() and (path / "config.json").exists():
        raise NotPackedError(not_packed_message(str(path), ModelArgs.from_file(path)))
    return path

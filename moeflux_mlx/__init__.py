"""Run Mixture-of-Experts language models larger than memory on MLX, streaming experts from disk."""

try:
    import mlx.core  # noqa: F401
except ImportError as error:  # on Linux the package mlx alone has no engine
    raise ImportError(
        f"MLX cannot be imported ({error}); on Linux it needs a backend: pip install 'mlx[cpu]', or 'mlx[cuda13]' for "
        "an NVIDIA GPU, which the extras [cpu] and [cuda13] of moeflux-mlx do"
    ) from None

import moeflux_mlx.generate  # noqa: F401  (first: the function below takes the place of the command)

from .engine.engine import load, load_model
from .engine.expert_io import select_io_mode
from .engine.generation import GenerationResponse, generate, make_prompt_cache, stream_generate
from .engine.sampling import make_logits_processors, make_sampler
from .engine.weights import model_fingerprint
from .errors import (
    ConfigError,
    DeviceError,
    ExpertIOError,
    ModelFileError,
    MoefluxError,
    MoefluxWarning,
    NotPackedError,
    PromptCacheError,
    RequestError,
    SnapshotError,
    TokenizerError,
)
from .experts.source import ExpertLoader, IoMode
from .model.decoder import Model
from .model.step import SequenceRows
from .spec import ModelArgs
from .state.prompt_store import PromptDirectory, PromptFile, reuse_prefix
from .state.snapshot import load_state, save_state, state_size

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DeviceError",
    "ExpertIOError",
    "ExpertLoader",
    "GenerationResponse",
    "IoMode",
    "Model",
    "ModelArgs",
    "ModelFileError",
    "MoefluxError",
    "MoefluxWarning",
    "NotPackedError",
    "PromptCacheError",
    "PromptDirectory",
    "PromptFile",
    "RequestError",
    "SequenceRows",
    "SnapshotError",
    "TokenizerError",
    "generate",
    "load",
    "load_model",
    "load_state",
    "make_logits_processors",
    "make_prompt_cache",
    "make_sampler",
    "model_fingerprint",
    "reuse_prefix",
    "save_state",
    "select_io_mode",
    "state_size",
    "stream_generate",
]

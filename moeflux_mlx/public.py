"""The public names of `moeflux_mlx`."""

from .driving.batch_generation import BatchGenerator, BatchResponse, BatchStats, BatchToken, batch_generate
from .driving.generation import GenerationResponse, generate, make_prompt_cache, stream_generate
from .driving.sampling import make_logits_processors, make_sampler
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
from .opening.engine import load, load_model
from .opening.weights import model_fingerprint
from .planning.machine import select_io_mode
from .planning.settings import configure_mlx
from .spec import ModelArgs
from .state.prompt_store import PromptDirectory, reuse_prefix
from .state.snapshot import load_state, save_state, state_size

__all__ = [
    "BatchGenerator",
    "BatchResponse",
    "BatchStats",
    "BatchToken",
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
    "RequestError",
    "SequenceRows",
    "SnapshotError",
    "TokenizerError",
    "batch_generate",
    "configure_mlx",
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

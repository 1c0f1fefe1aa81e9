"""The public names of `moeflux_mlx`."""

from .engine.batch_generation import BatchGenerator, BatchResponse, BatchStats, BatchToken, batch_generate
from .engine.engine import load, load_model
from .engine.expert_io import select_io_mode
from .engine.generation import GenerationResponse, generate, make_prompt_cache, stream_generate
from .engine.sampling import make_logits_processors, make_sampler
from .engine.settings import configure_mlx
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
    "PromptFile",
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

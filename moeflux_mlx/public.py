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

# Functions of mlx-lm for caches, and what replaces them here.
REPLACED_NAMES = {
    "can_trim_prompt_cache": "ask is_trimmable() of each cache",
    "load_prompt_cache": "use PromptFile with reuse_prefix, or load_state(model, cache, data)",
    "save_prompt_cache": "use PromptFile or PromptDirectory, or save_state(model, cache), which returns bytes",
    "trim_prompt_cache": "call trim(n) of each cache",
}

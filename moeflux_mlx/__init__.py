"""Run Mixture-of-Experts language models larger than memory on MLX, streaming experts from disk."""

from .config import ModelArgs
from .errors import (
    ConfigError,
    ExpertIOError,
    ModelFileError,
    MoefluxError,
    NotPackedError,
    RequestError,
    TokenizerError,
)
from .io_mode import IoMode, select_io_mode
from .load import load, load_model
from .loader import ExpertLoader
from .model import Model
from .sampling import make_logits_processors, make_sampler
from .stream import GenerationResponse, generate, make_prompt_cache, stream_generate

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "ExpertIOError",
    "ExpertLoader",
    "GenerationResponse",
    "IoMode",
    "Model",
    "ModelArgs",
    "ModelFileError",
    "MoefluxError",
    "NotPackedError",
    "RequestError",
    "TokenizerError",
    "generate",
    "load",
    "load_model",
    "make_logits_processors",
    "make_prompt_cache",
    "make_sampler",
    "select_io_mode",
    "stream_generate",
]

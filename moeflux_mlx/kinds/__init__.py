"""The parts of a layer as plain data: a token mixer, a feed-forward part, and how the residual runs.

Each part is a frozen dataclass whose fields are switches that the model's code reads; no code asks which family a model
belongs to. A switch that is described here and not computed yet is refused by `unsupported`, and nowhere else.
"""

from .attention import Compressed, Compressor, GroupedQuery, Latent, QueryScale
from .chosen import HeadBlocks, Indexer, KeyBlocks
from .feed_forward import FORMS, SILU, Activation, ActivationForm, Dense, Experts, Router, SharedExpert
from .layer import (
    COMPUTED,
    Connections,
    FeedForward,
    GatedConnections,
    HyperConnections,
    LayerSpec,
    Residual,
    unsupported,
)
from .mixer import Attending, Mflx, Mixer, Recurrent, product
from .ngrams import NGrams
from .recurrent import CHUNK, LEAST_FLOOR, ChannelDecay, Delta, Mamba2
from .rotation import Llama3, Rotation, Yarn

__all__ = [
    "Activation",
    "ActivationForm",
    "Attending",
    "CHUNK",
    "COMPUTED",
    "ChannelDecay",
    "Compressed",
    "Compressor",
    "Connections",
    "Delta",
    "Dense",
    "Experts",
    "FORMS",
    "FeedForward",
    "GatedConnections",
    "GroupedQuery",
    "HeadBlocks",
    "HyperConnections",
    "Indexer",
    "KeyBlocks",
    "LEAST_FLOOR",
    "Latent",
    "LayerSpec",
    "Llama3",
    "Mamba2",
    "Mflx",
    "Mixer",
    "NGrams",
    "QueryScale",
    "Recurrent",
    "Residual",
    "Rotation",
    "Router",
    "SILU",
    "SharedExpert",
    "Yarn",
    "product",
    "unsupported",
]

"""The parts of a layer as plain data: a token mixer, a feed-forward part, and how the residual runs.

Each part is a frozen dataclass whose fields are switches that the model's code reads; no code asks which family a model
belongs to.
"""

from .convolution import ShortConvolution
from .feed_forward import FORMS, SILU, Activation, ActivationForm, Dense, Experts, MatrixExperts, Router, SharedExpert
from .index import HeadBlocks, Indexer, KeyBlocks
from .layer import FeedForward, LayerSpec, Residual, WeighedSum
from .mixer import Attending, Mixer, product_operations
from .ngrams import NGrams
from .query_scale import QueryFactor, QueryGrowth, QueryLog, QueryScale
from .rotation import Llama3, Rotation, Yarn
from .streams import (
    BlockSums,
    Connections,
    GatedConnections,
    HyperConnections,
    IndependentConnections,
    Messages,
    Shortcut,
    streams_before,
)

__all__ = [
    "Activation",
    "ActivationForm",
    "Attending",
    "BlockSums",
    "Connections",
    "Dense",
    "Experts",
    "FORMS",
    "FeedForward",
    "GatedConnections",
    "HeadBlocks",
    "HyperConnections",
    "IndependentConnections",
    "Indexer",
    "KeyBlocks",
    "LayerSpec",
    "Llama3",
    "MatrixExperts",
    "Messages",
    "Mixer",
    "NGrams",
    "QueryFactor",
    "QueryGrowth",
    "QueryLog",
    "QueryScale",
    "Residual",
    "Rotation",
    "Router",
    "SILU",
    "SharedExpert",
    "ShortConvolution",
    "Shortcut",
    "WeighedSum",
    "Yarn",
    "product_operations",
    "streams_before",
]

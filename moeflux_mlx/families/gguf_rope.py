"""Finds the scaling of Llama 3's kind of which a GGUF has only the result (`LlamaModel.generate_extra_tensors`)."""

import math
from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError
from ..files import JsonDict


def llama3_scaling(slowed: Sequence[float], theta: float) -> JsonDict | None:
    """`rope_scaling` of config.json; None: frequencies are not scaled.

    Args:
        slowed: what the frequency of each rotated pair is divided by: `factor` for the slow ones, 1 for the fast ones,
            and between them a value whose inverse grows with the frequency.
        theta: the base of the frequencies.

    Raises:
        ConfigError: no such scaling has that result.
    """
    divisors = np.asarray(slowed, np.float64)
    if not divisors.size or (divisors == 1).all() or not 2 <= theta <= 1e30:  # another theta is refused later
        return None
    factor, plain = divisors.max(), theta ** -(np.arange(divisors.size) / divisors.size)
    with np.errstate(all="ignore"):
        kept = (1 / divisors - 1 / factor) / (1 - 1 / factor)  # the share of the plain frequency
    slowest, fastest = _ramp(plain, kept)
    if not 0 < slowest <= fastest < math.inf:
        raise ConfigError("GGUF tensor rope_freqs.weight has a ramp of no scaling of Llama 3's kind")
    context, high = round(2 * math.pi / slowest), round(fastest / slowest, 3)
    share = np.clip((context * plain / (2 * math.pi) - 1) / max(high - 1, 1e-9), 0, 1)
    if not np.abs(share - kept).max() < 1e-4:
        raise ConfigError("GGUF tensor rope_freqs.weight is not what a scaling of Llama 3's kind makes")
    return {
        **{"rope_type": "llama3", "factor": float(factor), "low_freq_factor": 1.0, "high_freq_factor": high},
        "original_max_position_embeddings": context,
    }


def _ramp(plain: np.ndarray, kept: np.ndarray) -> tuple[float, float]:
    """The frequencies between which `kept` grows from 0 to 1; (0, 0): there are none."""
    between = (kept > 1e-6) & (kept < 1 - 1e-6)
    if between.sum() > 1:
        slope, start = np.polyfit(plain[between], kept[between], 1)
        return (-start / slope, (1 - start) / slope) if slope > 0 else (0.0, 0.0)
    if between.any() or not kept[0] > 0.5 > kept[-1]:
        return 0.0, 0.0
    edge = math.sqrt(plain[kept > 0.5].min() * plain[kept < 0.5].max())
    return edge, edge

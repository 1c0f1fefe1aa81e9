"""What a GGUF says of rotations. Of a scaling of Llama 3's kind it has only the result
(`LlamaModel.generate_extra_tensors`).
"""

import math
from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError
from ..files import JsonDict
from .gguf_keys import SLOWED, Keys

ROPE_TYPES = ("none", "yarn")
SCALING = (
    "factor",
    "original_context_length",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
)


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


class Rotations(Keys):
    """The keys that change rotations, as fields of config.json."""

    def rope_scaling(self) -> JsonDict | None:
        """`rope_scaling` of config.json.

        Raises:
            ConfigError: a type that is not read, or a factor beside another type.
        """
        kind = self.anywhere(f"{self.architecture}.rope.scaling.type", str, None)
        if kind not in (*ROPE_TYPES, None):
            raise ConfigError(
                f"GGUF metadata {self.architecture}.rope.scaling.type is {kind[:60]!a}; only yarn is read"
            )
        if kind == "yarn":
            return self._yarn()
        self.must_equal("rope.scaling.attn_factor", 1)
        if kind is None:  # llama.cpp takes the factor as that of linear scaling then
            for key in ("rope.scaling.factor", "rope.scale_linear"):
                self.must_equal(key, 1)
        self.need_not_read("rope.scale_linear", *(f"rope.scaling.{name}" for name in SCALING))
        return None

    def must_be_unscaled(self) -> None:
        """Raises ConfigError: rotations are scaled."""
        self.must_equal("rope.scaling.type", "none")
        self.rope_scaling()

    def _yarn(self) -> JsonDict:
        """As `rope_scaling`. Two factors multiply what is rotated: `attn_factor` beside YaRN's own factor, and
        `yarn_attn_factor` in its place (`attention_factor` of config.json)."""
        self.must_equal("rope.scaling.yarn_ext_factor", 1)
        self.need_not_read("rope.scale_linear")  # it is only for files without the factor
        values = {name: self.number(f"rope.scaling.yarn_{name}", None) for name in ("beta_fast", "beta_slow")}
        factor, more = self.number("rope.scaling.factor"), self.number("rope.scaling.attn_factor", 1.0)
        values["attention_factor"] = own = self.number("rope.scaling.yarn_attn_factor", None)
        if more != 1:
            usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
            values["attention_factor"] = more * (usual if own is None else own)
        return {
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.count("rope.scaling.original_context_length"),
            **{name: value for name, value in values.items() if value is not None},
        }

    def slowed_scaling(self, width: int) -> JsonDict | None:
        """`rope_scaling` of an architecture of which llama.cpp reads what frequencies are divided by.

        Args:
            width: how many values of a head are rotated.

        Raises:
            ConfigError: as `rope_scaling`, or no scaling has this result, or two do.
        """
        plain, slowed = self.rope_scaling(), self.slowed
        if slowed and len(slowed) != width // 2:
            raise ConfigError(f"GGUF tensor {SLOWED} has {len(slowed)} values; the model needs {width // 2}")
        made = llama3_scaling(slowed, self.theta())
        if made and plain:
            raise ConfigError(f"GGUF tensor {SLOWED} beside {self.architecture}.rope.scaling.type is not implemented")
        return made or plain

    def theta(self) -> float:
        """The base of the frequencies."""
        theta: float = self.number("rope.freq_base", 10000.0)
        return theta

    def sections(self, usual: Sequence[int]) -> list[int]:
        """How many pairs each of three axes rotates.

        Raises:
            ConfigError: a fourth axis rotates some, which is 0 in text.
        """
        counts = self.anywhere(f"{self.architecture}.rope.dimension_sections", list, list(usual))
        if any(counts[3:]):
            raise ConfigError(f"GGUF metadata {self.architecture}.rope.dimension_sections has a fourth axis")
        return list(counts[:3])

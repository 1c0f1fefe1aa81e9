"""/v1/embeddings."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...files import JsonDict, JsonObject
from .settings import LARGEST, Body

MOST_INPUTS = 2048
DIMENSIONS = 1 << 16


@dataclass(frozen=True)
class EmbeddingRequest:
    """Texts, or their token ids, of which vectors are asked.

    Args:
        model: the name that the client gave, echoed.
        base64: whether vectors are sent as the bytes of float32 values instead of as numbers.
    """

    model: str
    inputs: Sequence[str | Sequence[int]]
    dimensions: int | None = None
    base64: bool = False
    truncate: bool = False


def read(body: JsonObject) -> EmbeddingRequest:
    """The request that a body makes. Raises BadRequestError."""
    fields = Body(body)
    form = fields.text("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise fields.wrong("encoding_format", "float or base64")
    dimensions = fields.integer("dimensions", 1, DIMENSIONS)
    return EmbeddingRequest(fields.text("model") or "", inputs(fields), dimensions, form == "base64")


def inputs(fields: Body) -> Sequence[str | Sequence[int]]:
    """The texts of the field `input`: one, its token ids, or a list of either."""
    value = fields.get("input")
    many = value if isinstance(value, list) and value and isinstance(value[0], (str, list)) else [value]
    if len(many) > MOST_INPUTS or not all(isinstance(one, str) or _is_ids(one) for one in many):
        raise fields.wrong("input", f"a text, a list of token ids, or a list of at most {MOST_INPUTS} of these")
    return many


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and 0 <= one <= LARGEST for one in value)


def whole(request: EmbeddingRequest, model: str, vectors: np.ndarray, tokens: int) -> JsonDict:
    """The reply with [N, dimensions] float32."""
    values = [base64.b64encode(one).decode() for one in vectors.astype("<f4")] if request.base64 else vectors.tolist()
    data = [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(values)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": request.model or model, "usage": usage}

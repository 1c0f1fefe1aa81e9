"""/v1/models: one object with the keys of both OpenAI and Anthropic."""

from collections.abc import Sequence
from datetime import datetime, timezone

from ...files import JsonDict, JsonObject

LOADED = {"value": "loaded"}


def model(
    name: str,
    created: float,
    context: int | None,
    status: JsonObject = LOADED,
    features: JsonObject | None = None,
    embedding: bool = False,
) -> JsonDict:
    """One model.

    Args:
        name: its id.
        created: when serving began, in seconds since 1970.
        context: how many tokens a prompt and its answer may have; None while that is not known, and then not said.
        status: whether it is loaded, as in llama.cpp's router, and the running requests.
        features: the fields of `Features`; None while they are not known.
        embedding: whether it makes vectors of texts, and answers nothing.
    """
    lengths = {} if context is None else dict.fromkeys(("max_model_len", "max_input_tokens", "max_tokens"), context)
    return {
        "id": name,
        "object": "model",
        "created": int(created),
        "owned_by": "moeflux",
        "status": dict(status),
        "features": features,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(created), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        **({"embedding": True} if embedding else {}),
        **lengths,
    }


def listing(models: Sequence[JsonDict]) -> JsonDict:
    ids = [model["id"] for model in models]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": list(models), "has_more": False, **ends}

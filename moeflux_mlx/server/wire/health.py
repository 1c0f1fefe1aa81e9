"""/health: whether the model is loaded."""

from ...files import JsonDict
from .replies import openai_error


def health(ready: bool) -> tuple[int, JsonDict]:
    """HTTP status and body."""
    if ready:
        return 200, {"status": "ok"}
    return 503, {"status": "loading", **openai_error(503, "loading", "the model is being loaded; try again later")}

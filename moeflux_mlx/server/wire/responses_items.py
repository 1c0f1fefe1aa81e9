"""/v1/responses with its latest items in memory: a request may name one instead of repeating it.

Clients of OpenAI's API, which stores responses by default, refer to earlier items by id.
"""

from collections.abc import Iterable, Mapping, Sequence

from ...errors import BadRequestError
from ...files import JsonDict, JsonObject, JsonValue
from ...text.latest import Latest
from ..request import Request, ServerEvent
from . import responses
from .fields import Body, shown
from .ids import Ids
from .sse import dumps

Item = JsonObject
REFERENCE = "item_reference"  # its type, which may be left out


class StoredResponses:
    """Reads and writes as the module `responses` does."""

    def __init__(self) -> None:
        self._items: Latest[str, Item] = Latest()

    def read(self, body: JsonObject) -> Request:
        """The request that a body makes.

        Raises:
            BadRequestError: as the module's, or it names an item that is not here, or one twice.
        """
        said, named = body.get("input"), set[str]()
        if isinstance(said, list):
            body = {**body, "input": [self._item(item, f"input[{n}]", named) for n, item in enumerate(said)]}
        return responses.read(body)

    def stream(self, request: Request, ids: Ids) -> responses.ResponseReply:
        return responses.ResponseReply(request, ids, self._keep if request.extra["store"] else None)

    def whole(self, request: Request, events: Iterable[ServerEvent], ids: Ids) -> JsonDict:
        body = responses.whole(request, events, ids)
        if request.extra["store"]:
            self._keep(body.get("output", ()))
        return body

    def _keep(self, items: Sequence[Item]) -> None:
        for item in items:
            self._items.keep(item["id"], item, len(dumps(item)))

    def _item(self, item: JsonValue, path: str, named: set[str]) -> JsonValue:
        """An item of the input, or the one that it refers to; `named` are those that others referred to."""
        if not isinstance(item, Mapping) or (item.get("type") != REFERENCE and set(item) != {"id"}):
            return item
        id = Body(item, path).required_text("id")
        if id in named:  # a short body could ask for more text than memory holds
            raise BadRequestError(f"Duplicate item found with id {shown(id)}. Name each item once", "input")
        named.add(id)
        stored = self._items.find(id)
        if stored is None:
            message = (
                f"Item with id {shown(id)} not found. This server keeps the latest items in memory only; "
                "send the item itself, as clients do with store set to false"
            )
            raise BadRequestError(message, "input", 404, "not_found")
        return stored

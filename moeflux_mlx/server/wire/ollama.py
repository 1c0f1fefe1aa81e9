"""Ollama's API: /api/chat and /api/generate over the same requests and events, and what clients ask about models.

A body becomes that of a chat, or of a completion without a template (`raw`, `suffix`), and is read as such. As with
Ollama, options of loading and unknown options are ignored; those that would change the text and are not served are
refused by name. A request without a text only loads the model, or unloads it if it is to be kept for no time.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone

import numpy as np

from ...errors import BadRequestError
from ...files import JsonDict, JsonObject, JsonValue
from ..request import Request, ServerEvent, TokenLogprob
from . import chat, completions, embeddings, settings
from .answer import Block, BlockStep, WireAnswer
from .embeddings import EmbeddingRequest
from .replies import Ids, Reply, dumps, folded
from .settings import Body

API = "0.12.6"  # the release whose API this is: clients compare it with the oldest one that they can use
LATEST = ":latest"  # the tag that clients put behind a name without one
# Options that mean the same here, by the name in a chat.
OPTIONS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "repeat_penalty")},
    **{name: name for name in ("repeat_last_n", "presence_penalty", "frequency_penalty")},
    **{name: name for name in ("mirostat", "tfs_z", "typical_p")},  # refused, unless they ask for nothing
    "num_predict": "max_tokens",
}
UNSERVED = ("template", "context")  # of /api/generate


class Ollama:
    """One of the two APIs.

    Args:
        chats: whether it is /api/chat; else /api/generate.
    """

    def __init__(self, chats: bool):
        self.chats = chats

    def read(self, body: JsonDict) -> Request:
        """The request that a body makes. Raises BadRequestError."""
        fields = Body(body)
        told = self._common(fields)
        if not (fields.list("messages") if self.chats else fields.text("prompt")):
            return Request("chat", told["model"], only="unload" if _is_zero(fields.get("keep_alive")) else "load")
        if self.chats:
            made = {**told, "messages": [_message(item) for item in fields.objects("messages")]}
            request = chat.read({**made, "tools": fields.list("tools")})
        elif fields.flag("raw") or fields.text("suffix"):
            if fields.list("images"):
                raise fields.wrong("images", "none beside raw or suffix")
            prompt = {"prompt": fields.get("prompt"), "suffix": fields.text("suffix")}
            request = completions.read({**told, **prompt})
        else:
            request = chat.read({**told, "messages": _generated(fields)})
        return request

    def _common(self, fields: Body) -> JsonDict:
        """The fields that both APIs have, as a chat has them."""
        for name in UNSERVED:
            if fields.get(name):
                raise fields.wrong(name, "nothing: the model's own template is used, and a prompt is a whole text")
        model, stream = fields.required_text("model").removesuffix(LATEST), fields.flag("stream", True)
        top = {"logprobs": fields.flag("logprobs"), "top_logprobs": fields.get("top_logprobs")}
        asked: JsonDict = {"model": model, "stream": stream, **_options(fields.object("options")), **_think(fields)}
        if (form := fields.get("format")) not in (None, ""):
            asked["response_format"] = _format(fields, form)
        return {**asked, **{name: value for name, value in top.items() if value}}

    def stream(self, request: Request, ids: Ids) -> "OllamaReply":
        return OllamaReply(request, ids, self.chats)

    def whole(self, request: Request, events: Iterable[ServerEvent], ids: Ids) -> JsonDict:
        """The reply that does not stream; an error where the events end in one."""
        answer, reply = folded(events), OllamaReply(request, ids, self.chats)
        if answer.failed is not None:
            return {"error": answer.failed.message}
        calls = [_called(block, ids) for block in answer.calls()]
        said = reply.said(answer.text("text"), answer.text("reasoning"), calls)
        return {**reply.line(said, answer.logprobs()), **_end(answer)}


def _options(options: Body | None) -> JsonDict:
    if options is None:
        return {}
    made = {OPTIONS[name]: value for name, value in options.data.items() if name in OPTIONS}
    if (limit := options.integer("num_predict", -2)) == 0:
        raise options.wrong("num_predict", "at least 1, or -1 for no limit")
    return {**made, "max_tokens": -1 if limit == -2 else limit}  # -2: to the end of the context


def _is_zero(keep_alive: object) -> bool:
    """Whether a time is none: a number of seconds, or a text with a unit."""
    return re.fullmatch(r"[-+]?[0.]+[a-zµ]*", str(keep_alive)) is not None


def _think(fields: Body) -> JsonDict:
    """Whether to reason, or how much."""
    think = fields.get("think")
    if isinstance(think, str):
        return {"reasoning_effort": settings.effort(fields, "think")}
    return {} if think is None else {"enable_thinking": fields.flag("think")}


def _format(fields: Body, form: object) -> JsonDict:
    if form == "json":
        return {"type": "json_object"}
    if not isinstance(form, Mapping):
        raise fields.wrong("format", "json or a JSON schema")
    return {"type": "json_schema", "json_schema": {"schema": form}}


def _message(item: Body) -> JsonDict:
    """A message of a chat: images stand behind the text, and a result has the name of its tool."""
    calls = [{"type": "function", **call.data} for call in item.objects("tool_calls")]
    kept = {name: item.get(name) for name in ("role", "thinking", "tool_call_id")}
    return {**kept, "content": _content(item, "content"), "tool_calls": calls, "name": item.text("tool_name")}


def _content(item: Body, key: str) -> JsonValue:
    images = item.list("images")
    for place, image in enumerate(images):
        if not isinstance(image, str):
            raise BadRequestError(f"{item.name('images')}[{place}] is no text; expected base64", item.name("images"))
    urls = [{"type": "image_url", "image_url": {"url": f"data:;base64,{image}"}} for image in images]
    text = item.text(key)
    return [{"type": "text", "text": text or ""}, *urls] if urls else text


def _generated(fields: Body) -> list[JsonDict]:
    """The messages that /api/generate stands for."""
    system = fields.text("system")
    before: list[JsonDict] = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": _content(fields, "prompt")}]


class OllamaReply(Reply):
    """Lines of JSON, one to a piece of the answer; a call comes whole, in a line of its own."""

    content_type = b"application/x-ndjson"

    def __init__(self, request: Request, ids: Ids, chats: bool):
        super().__init__(request, ids)
        self._chats = chats

    def waiting(self) -> bytes:
        return self._line(self.said(""))

    def opening(self, event: ServerEvent) -> Iterable[bytes]:
        return ()

    def step(self, step: BlockStep) -> Iterable[bytes]:
        kind = step.block.kind
        if step.what == "grow" and kind == "text":
            yield self._line(self.said(step.text), step.logprobs)
        elif step.what == "grow" and kind == "reasoning":
            yield self._line(self.said("", step.text))
        elif step.what == "close" and kind == "call" and step.block.whole:
            yield self._line(self.said("", calls=[_called(step.block, self.ids)]))

    def closing(self, event: ServerEvent) -> Iterable[bytes]:
        if self.answer.failed is not None:
            yield _encode({"error": self.answer.failed.message})
        elif self.answer.finish is not None:
            yield _encode({**self.line(self.said("")), **_end(self.answer)})

    def said(self, text: str, thinking: str = "", calls: Sequence[JsonDict] = ()) -> JsonDict:
        """The fields with a piece of the answer."""
        thought = {"thinking": thinking} if thinking else {}
        called = {"tool_calls": list(calls)} if calls else {}
        if not self._chats:
            return {"response": text, **thought, **called}
        return {"message": {"role": "assistant", "content": text, **thought, **called}}

    def line(self, said: JsonObject, tokens: Sequence[TokenLogprob] = ()) -> JsonDict:
        head = {"model": self.request.model, "created_at": moment(self.created), **said, "done": False}
        told = {"logprobs": [chat.logprob(token) for token in tokens]} if tokens else {}
        return {**head, **told}

    def _line(self, said: JsonObject, tokens: Sequence[TokenLogprob] = ()) -> bytes:
        return _encode(self.line(said, tokens))


def _encode(line: JsonObject) -> bytes:
    return f"{dumps(line)}\n".encode("ascii")


def _called(block: Block, ids: Ids) -> JsonDict:
    function = {"index": block.call, "name": block.name, "arguments": json.loads(block.text)}
    return {"id": ids.call(block.call, "call_"), "function": function}


def _end(answer: WireAnswer) -> JsonDict:
    """The fields of the last line; durations are nanoseconds."""
    finish, reason = answer.finish, answer.reason()
    assert finish is not None
    prompt, completion = round(1e9 * finish.prompt_seconds), round(1e9 * finish.completion_seconds)
    return {
        "done": True,
        "done_reason": "stop" if reason in ("stop_sequence", "tool_calls") else reason,
        "total_duration": prompt + completion,
        "load_duration": 0,
        "prompt_eval_duration": prompt,
        "eval_duration": completion,
        "prompt_eval_count": finish.prompt_tokens,
        "eval_count": finish.completion_tokens,
    }


def read_embed(body: JsonObject) -> EmbeddingRequest:
    """/api/embed. Texts that are too long are cut, unless `truncate` is false. Raises BadRequestError."""
    fields = Body(body)
    model, dimensions = fields.required_text("model"), fields.integer("dimensions", 1, embeddings.DIMENSIONS)
    return EmbeddingRequest(model, embeddings.inputs(fields), dimensions, truncate=fields.flag("truncate", True))


def embedded(request: EmbeddingRequest, model: str, vectors: np.ndarray, tokens: int) -> JsonDict:
    """The reply of /api/embed."""
    return {"model": request.model or model, "embeddings": vectors.tolist(), "prompt_eval_count": tokens}


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def tags(models: Sequence[JsonObject]) -> JsonDict:
    """/api/tags, of the objects of /v1/models."""
    fixed = {"size": 0, "digest": "", "details": DETAILS}
    return {
        "models": [
            {"name": model["id"], "model": model["id"], "modified_at": model["created_at"], **fixed} for model in models
        ]
    }


def asked_model(body: JsonObject) -> str:
    """The name of the model that /api/show asks about."""
    fields = Body(body)
    return (fields.text("model") or fields.required_text("name")).removesuffix(LATEST)


def show(model: JsonObject, tools: bool) -> JsonDict:
    """/api/show, of an object of /v1/models. `tools`: whether the model can call tools."""
    features = model["features"] or {}
    has = {"tools": tools, "vision": features.get("images"), "thinking": features.get("thinking")}
    able = [name for name, has_it in has.items() if has_it]
    lengths = {"moeflux.context_length": model["max_model_len"]} if "max_model_len" in model else {}
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "modified_at": model["created_at"],
        "details": DETAILS,
        "model_info": {"general.architecture": "moeflux", "general.basename": model["id"], **lengths},
        "capabilities": ["embedding"] if model.get("embedding") else ["completion", *able],
    }


DETAILS = {
    **dict.fromkeys(("parent_model", "parameter_size", "quantization_level"), ""),
    **{"format": "mlx", "family": "moeflux", "families": ["moeflux"]},
}

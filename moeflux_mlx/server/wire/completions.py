"""/v1/completions: continues a prompt without template, tools or reasoning."""

from collections.abc import Iterable, Sequence

from ...errors import BadRequestError
from ...files import JsonDict, JsonObject
from ..request import Finish, Request, ServerEvent, TokenLogprob
from . import settings
from .answer import BlockStep
from .replies import Chunks, Ids, counts, failure, folded
from .settings import LARGEST, Body


def read(body: JsonObject) -> Request:
    """The request of a body; a prompt is used unchanged, including lines that agents put into it."""
    fields = Body(body)
    prompts, suffix = _prompts(fields), fields.text("suffix") or None
    if suffix and not all(isinstance(prompt, str) for prompt in prompts):
        raise fields.wrong("suffix", "no suffix beside a prompt of token ids")
    answers = settings.answers(fields)
    if len(prompts) * answers > settings.MOST_ANSWERS:
        most = settings.MOST_ANSWERS
        raise BadRequestError(f"{len(prompts)} prompts with n {answers} need more than {most} answers", "prompt")
    return Request(
        api="completions",
        model=fields.text("model") or "",
        prompt=prompts[0],
        others=prompts[1:],
        suffix=suffix,
        max_tokens=settings.token_limit(fields),
        stop=settings.stops(fields),
        sampling=settings.sampling(fields, _logprobs(fields), settings.ANSWERS),
        schema=settings.structure(fields.object("response_format")),
        answers=answers,
        stream=fields.flag("stream"),
        session=fields.text("prompt_cache_key"),
        extra=settings.stream_options(fields),
    )


def _logprobs(fields: Body) -> int | None:
    """The number of log-probabilities; here it is one field, in chats two."""
    value = fields.get("logprobs")
    if isinstance(value, bool):
        return settings.logprobs(fields)
    return fields.integer("logprobs", 0, 20)


def _prompts(fields: Body) -> list[str | Sequence[int]]:
    value = fields.get("prompt")
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (str, list, tuple)):
        return [_prompt(fields, one) for one in value]
    return [_prompt(fields, value)]


def _prompt(fields: Body, value: object) -> str | Sequence[int]:
    if isinstance(value, str):
        return value
    tokens = value if isinstance(value, (list, tuple)) else ()
    if not tokens or not all(type(token) is int and 0 <= token <= LARGEST for token in tokens):
        raise fields.wrong("prompt", "a text, a list of token ids, or a list of these")
    return list(tokens)


def whole(request: Request, events: Iterable[ServerEvent], ids: Ids | None = None) -> JsonDict:
    """The reply that does not stream; an error where the events end in one."""
    ids, answer = ids or Ids(), folded(events)
    if answer.finish is None:
        return failure(answer)
    choice = _choice(ids.index, answer.text("text"), answer.finish)
    if request.sampling.top_logprobs is not None:
        choice["logprobs"] = _logprobs_of(answer.logprobs())
    return {**CompletionReply.head(request, ids), "choices": [choice], **counts(answer.finish)}


def _choice(index: int, text: str, finish: Finish | None = None) -> JsonDict:
    reason = None if finish is None else "length" if finish.reason == "length" else "stop"
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _logprobs_of(tokens: Sequence[TokenLogprob]) -> JsonDict:
    """Four lists, one entry to a token."""
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{other.token: other.logprob for other in token.top} for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


class CompletionReply(Chunks):
    """Chunks of `text_completion`."""

    prefix, kind = "cmpl-", "text_completion"

    def waiting(self) -> bytes:
        return self.chunk_of([self.empty()])

    def opening(self, event: ServerEvent) -> Iterable[bytes]:
        return self.told(event)

    def step(self, step: BlockStep) -> Iterable[bytes]:
        if step.what != "grow" or step.block.kind != "text":
            return
        choice = _choice(self.ids.index, step.text)
        if step.logprobs:
            choice["logprobs"] = _logprobs_of(step.logprobs)
        yield self.chunk_of([choice])

    def empty(self, finish: Finish | None = None) -> JsonDict:
        return _choice(self.ids.index, "", finish)


stream = CompletionReply

"""Reads a request's JSON with types (`Body`), and its settings: sampling, limits, reasoning, structure. Most are named
alike in all APIs.

An error is a 400 that names the field, the value and what is expected. A null field counts as missing, and unknown
fields are ignored.
"""

import itertools
import json
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from ...errors import BadRequestError
from ...files import JsonDict, JsonObject, JsonValue
from ...foreign import UNSERVED
from ...text.switches import LADDER
from ..request import Sampling

DEEPEST = 64  # levels of objects and lists; tool schemas of agents reach about 20
LARGEST = 2**31 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse(data: bytes) -> JsonDict:
    """The JSON object that the body of a request holds."""
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the body is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from error
    except RecursionError:
        raise too_deep() from None
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {' '.join(str(error).split())}") from error
    check(body)
    return dict(body)


def check(body: object) -> None:
    """Refuses data that is not an object, nests too deeply, or has values that JSON in UTF-8 cannot express."""
    if not isinstance(body, Mapping):
        raise BadRequestError(f"the body is {shown(body)}; expected a JSON object")
    level: list[JsonValue] = [body]
    for _ in range(DEEPEST):
        level = [inner for value in level for inner in _held(value) if _is_container(inner)]
        if not level:
            return
    raise too_deep()


def _held(value: JsonValue) -> Iterable[JsonValue]:
    return itertools.chain(value, value.values()) if isinstance(value, Mapping) else value


def _is_container(value: JsonValue) -> bool:
    """Whether a value contains others; checks values that do not. It must be fast, because bodies can have millions of
    values.
    """
    kind = type(value)
    if kind is int or kind is str and value.isascii():
        return False
    if isinstance(value, str) and _SURROGATE.search(value):
        raise BadRequestError(f"the text {shown(value)} has half of a surrogate pair; expected whole characters")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequestError(f"the body holds {value}; expected finite numbers")
    return isinstance(value, (dict, list, tuple, Mapping))


def too_deep() -> BadRequestError:
    return BadRequestError(f"the body nests more than {DEEPEST} levels deep; expected at most {DEEPEST}")


def shown(value: object) -> str:
    """A value for a message: short, in one line, and ASCII where its characters could not be written."""
    text = ascii(value) if isinstance(value, str) and _SURROGATE.search(value) else _short.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def wrong(name: str, value: object, wanted: str) -> BadRequestError:
    return BadRequestError(f"{name} is {shown(value)}; expected {wanted}", name)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlevel = 2


class Body:
    """The fields of one JSON object.

    Args:
        data: the object.
        path: its place in the body, for messages; "" for the body itself.
    """

    def __init__(self, data: object, path: str = ""):
        if not isinstance(data, Mapping):
            raise wrong(path or "the body", data, "an object")
        self.data, self.path = data, path

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> JsonValue:
        return self.data.get(key)

    def wrong(self, key: str, wanted: str) -> BadRequestError:
        value = self.data.get(key)
        if value is None:
            return BadRequestError(f"{self.name(key)} is missing; expected {wanted}", self.name(key))
        return wrong(self.name(key), value, wanted)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.data.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def required_text(self, key: str) -> str:
        value = self.text(key)
        if not value:
            raise self.wrong(key, "a text that is not empty")
        return value

    def integer(self, key: str, least: int, most: int = LARGEST) -> int | None:
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, least: float, most: float) -> float | None:
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def object(self, key: str) -> "Body | None":
        value = self.data.get(key)
        return None if value is None else Body(value, self.name(key))

    def list(self, key: str) -> Sequence[JsonValue]:
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, (list, tuple)):
            raise self.wrong(key, "a list")
        return value

    def objects(self, key: str) -> Iterator["Body"]:
        for place, item in enumerate(self.list(key)):
            yield Body(item, f"{self.name(key)}[{place}]")


# Variables that the server itself gives to a template, or that would replace them.
RESERVED = frozenset(
    (
        *("messages", "tools", "documents", "conversation", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "return_dict", "return_tensors"),
        *("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens"),
    )
)
# In the order of their weight.
TOKEN_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens", "n_predict")
MOST_STOPS = 64
ANSWERS, MOST_ANSWERS = ("n", "n_cmpl"), 64  # llama.cpp has the second name
LEAST_TOP_P = 1e-6


def sampling(body: Body, top_logprobs: int | None = None, serves: Sequence[str] = ()) -> Sampling:
    """Raises BadRequestError: also for a field that no API serves but those that name it in `serves`."""
    _refuse_unserved(body, serves)
    repetition = _repetition_penalty(body, "repetition_penalty")
    top_k = body.integer("top_k", -1)
    seed = body.integer("seed", -(2**63), 2**64 - 1)
    return Sampling(
        temperature=body.number("temperature", 0, 100),
        top_p=_top_p(body),
        top_k=None if top_k is None else max(top_k, 0),
        min_p=body.number("min_p", 0, 1),
        repetition_penalty=_repetition_penalty(body, "repeat_penalty") if repetition is None else repetition,
        presence_penalty=body.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=body.number("frequency_penalty", -2, 2) or 0.0,
        logit_bias=_logit_bias(body),
        seed=None if seed is None else seed % 2**64,
        top_logprobs=top_logprobs,
        xtc_probability=body.number("xtc_probability", 0, 1),
        xtc_threshold=_xtc_threshold(body),
        **_context_sizes(body),
    )


def answers(body: Body) -> int:
    """The number of answers to each prompt."""
    counts = [body.integer(name, 1, MOST_ANSWERS) for name in ANSWERS]
    return next((count for count in counts if count is not None), 1)


def _refuse_unserved(body: Body, serves: Sequence[str]) -> None:
    """Raises BadRequestError: a field asks for something that this server does not do."""
    for reason, fields in UNSERVED.items():
        for name, neutral in fields.items():
            value = body.get(name)
            if name not in serves and value is not None and value not in neutral:
                raise body.wrong(name, f"{json.dumps(neutral[0])}: {reason}")


def _repetition_penalty(body: Body, name: str) -> float | None:
    """A repetition penalty of 0 is mlx-lm's word for none."""
    return body.number(name, 0, 100) and body.number(name, 1e-3, 100)


def _context_sizes(body: Body) -> dict[str, int | None]:
    """mlx-lm's size for each penalty, or llama.cpp's for all of them, where 0 is none of the text and -1 all of it."""
    last = body.integer("repeat_last_n", -1)
    names = ("repetition_context_size", "presence_context_size", "frequency_context_size")
    sizes = {name: body.integer(name, 1) for name in names}
    return {name: (LARGEST if last == -1 else last) if size is None else size for name, size in sizes.items()}


def _xtc_threshold(body: Body) -> float | None:
    """From one half on, XTC drops nothing: at most one token is more likely than that."""
    threshold = body.number("xtc_threshold", 0, 1)
    return None if threshold is None else min(threshold, 0.5)


def _top_p(body: Body) -> float | None:
    """A top_p of 0 keeps only the likeliest token; the sampler would read 0 as no limit."""
    top_p = body.number("top_p", 0, 1)
    return None if top_p is None else max(top_p, LEAST_TOP_P)


def _logit_bias(body: Body) -> dict[int, float]:
    fields = body.object("logit_bias") if body.get("logit_bias") != [] else None  # llama.cpp's default
    biases: dict[int, float] = {}
    for key in fields.data if fields else ():
        assert fields is not None
        token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 11 else -1
        if not 0 <= token <= LARGEST:
            raise wrong("logit_bias", key, "token ids as keys")
        if (bias := fields.number(key, -100, 100)) is not None:
            biases[token] = bias
    return biases


def logprobs(body: Body) -> int | None:
    """The number of alternatives per token's log-probability; None if no log-probabilities are requested."""
    top = body.integer("top_logprobs", 0, 20)
    if body.flag("logprobs"):
        return top or 0
    if top:
        raise BadRequestError(f"top_logprobs is {top}, but logprobs is not true; send both", "top_logprobs")
    return None


def token_limit(body: Body) -> int | None:
    """The first limit that is given; -1 is none."""
    limits = [(name, body.integer(name, -1)) for name in TOKEN_LIMITS]
    for name, limit in limits:
        if limit == 0:
            raise body.wrong(name, "at least 1")
    first = next((limit for _, limit in limits if limit is not None), -1)
    return None if first == -1 else first


def stops(body: Body, key: str = "stop") -> Sequence[str]:
    value = body.get(key)
    texts = [value] if isinstance(value, str) else body.list(key)
    if len(texts) > MOST_STOPS or not all(isinstance(text, str) for text in texts):
        raise body.wrong(key, f"a text or a list of at most {MOST_STOPS} texts")
    return tuple(text for text in texts if text)


def stream_options(body: Body) -> JsonDict:
    """The stream options of chats and completions, for `Request.extra`."""
    options = body.object("stream_options")
    return {
        "include_usage": options.flag("include_usage") if options else False,
        "return_progress": body.flag("return_progress"),
    }


def template_variables(body: Body) -> JsonDict:
    """The request's variables for the template; variables of the server's may not be replaced."""
    if body.get("chat_template") is not None:
        raise BadRequestError("chat_template cannot be sent; the model's own template is used", "chat_template")
    fields = body.object("chat_template_kwargs")
    variables = dict(fields.data) if fields else {}
    taken = sorted(RESERVED & set(variables))
    if taken:
        name = f"chat_template_kwargs.{taken[0]}"
        raise BadRequestError(f"{name} is set by the server; leave it out", name)
    return variables


def thinking(body: Body, variables: JsonObject) -> bool | None:
    """Whether to reason, by the most explicit of all the fields that say it."""
    for name in ("enable_thinking", "thinking"):
        if isinstance(variables.get(name), bool):
            return bool(variables[name])
    if body.get("enable_thinking") is not None:
        return body.flag("enable_thinking")
    given = body.get("thinking")
    if isinstance(given, bool):
        return given
    fields = body.object("thinking")  # types other than these two leave it to the model
    by_kind = {"enabled": True, "disabled": False}.get(fields.text("type") or "") if fields else None
    return thinking_effort(effort(body, "reasoning_effort")) if by_kind is None else by_kind


def effort(fields: Body | None, key: str) -> str | None:
    """How much the model should reason, in a word that all templates share."""
    word = fields.text(key) if fields else None
    if fields and word is not None and word not in LADDER:
        raise fields.wrong(key, f"one of {', '.join(LADDER)}")
    return word


def thinking_effort(effort: str | None) -> bool | None:
    return None if effort is None else effort != "none"


def structure(form: Body | None) -> JsonObject | bool | None:
    """The schema of `response_format` or `text.format`, in the form of `Request.schema`."""
    kind = form.required_text("type") if form else "text"
    if form is None or kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise form.wrong("type", "text, json_object or json_schema")
    named = form.object("json_schema") or form
    if isinstance(named.get("schema"), bool):
        return True
    schema = named.object("schema")
    if schema is None and kind == "json_schema":
        raise named.wrong("schema", "a JSON schema")
    return dict(schema.data) if schema else True

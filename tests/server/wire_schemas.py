"""JSON Schemas of each API's replies, written by hand from the APIs' references."""

TEXT, INT, NUMBER, BOOL, ANY = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {}
NULL = {"type": "null"}


def obj(optional=None, **required):
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def const(value):
    return {"const": value}


def several(items, **more):
    return {"type": "array", "items": items, **more}


def maybe(schema):
    return {"anyOf": [schema, NULL]}


def one_of(*schemas):
    return {"anyOf": list(schemas)}


def starts(prefix):
    return {"type": "string", "pattern": f"^{prefix}[0-9a-z]+$"}


# OpenAI, chat and completions.
LOGPROB = dict(token=TEXT, logprob=NUMBER, bytes=several(INT))
LOGPROBS = obj(content=several(obj(**LOGPROB, top_logprobs=several(obj(**LOGPROB)))), refusal=NULL)
USAGE = obj(
    prompt_tokens=INT,
    completion_tokens=INT,
    total_tokens=INT,
    prompt_tokens_details=obj(cached_tokens=INT),
    completion_tokens_details=obj(reasoning_tokens=INT),
)
EXPERTS = obj(hits=INT, misses=INT, bytes_read=INT)
TIMINGS = obj({"experts": EXPERTS}, cache_n=INT, prompt_n=INT, prompt_ms=NUMBER, predicted_n=INT, predicted_ms=NUMBER)
REASONS = {"enum": ["stop", "length", "tool_calls"]}
CALL_DELTA = one_of(
    obj(index=INT, id=starts("call_"), type=const("function"), function=obj(name=TEXT, arguments=const(""))),
    obj(index=INT, function=obj(arguments=TEXT)),
)
DELTA = one_of(
    obj(),
    obj(role=const("assistant"), content=NULL),
    obj(content=TEXT),
    obj(reasoning_content=TEXT),
    obj(tool_calls=several(CALL_DELTA, minItems=1, maxItems=1)),
)
CHAT_HEAD = dict(id=starts("chatcmpl-"), created=INT, model=TEXT)
CHAT_CHUNK = obj(
    {"timings": TIMINGS},
    **CHAT_HEAD,
    object=const("chat.completion.chunk"),
    choices=several(obj({"logprobs": LOGPROBS}, index=const(0), delta=DELTA, finish_reason=maybe(REASONS)), maxItems=1),
    usage=maybe(USAGE),
)
CALL = obj(id=starts("call_"), type=const("function"), function=obj(name=TEXT, arguments=TEXT))
MESSAGE = obj(
    {"reasoning_content": TEXT, "tool_calls": several(CALL, minItems=1)}, role=const("assistant"), content=maybe(TEXT)
)
CHAT = obj(
    **CHAT_HEAD,
    object=const("chat.completion"),
    choices=several(
        obj({"logprobs": LOGPROBS}, index=const(0), message=MESSAGE, finish_reason=REASONS), minItems=1, maxItems=1
    ),
    usage=USAGE,
    timings=TIMINGS,
)
OLD_LOGPROBS = obj(
    tokens=several(TEXT), token_logprobs=several(NUMBER), top_logprobs=several(ANY), text_offset=several(INT)
)
CHOICE = dict(index=const(0), text=TEXT, logprobs=maybe(OLD_LOGPROBS))
COMPLETION_HEAD = dict(id=starts("cmpl-"), object=const("text_completion"), created=INT, model=TEXT)
COMPLETION_CHUNK = obj(
    {"timings": TIMINGS},
    **COMPLETION_HEAD,
    choices=several(obj(**CHOICE, finish_reason=maybe({"enum": ["stop", "length"]})), maxItems=1),
    usage=maybe(USAGE),
)
COMPLETION = obj(
    **COMPLETION_HEAD,
    choices=several(obj(**CHOICE, finish_reason={"enum": ["stop", "length"]}), minItems=1, maxItems=1),
    usage=USAGE,
    timings=TIMINGS,
)
OPENAI_ERROR = obj(error=obj(message=TEXT, type=TEXT, param=maybe(TEXT), code=maybe(TEXT)))

# Anthropic.
COUNTS = dict(input_tokens=INT, cache_read_input_tokens=INT, cache_creation_input_tokens=INT, output_tokens=INT)
COUNTED = obj(**COUNTS, output_tokens_details=obj(thinking_tokens=INT))
ENDED = dict(stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]}, stop_sequence=maybe(TEXT))
TOOL_USE = dict(type=const("tool_use"), id=starts("toolu_"), name=TEXT)
MESSAGE_HEAD = dict(id=starts("msg_"), type=const("message"), role=const("assistant"), model=TEXT)
MESSAGE_WHOLE = obj(
    **MESSAGE_HEAD,
    content=several(
        one_of(
            obj(type=const("text"), text=TEXT),
            obj(type=const("thinking"), thinking=TEXT, signature=TEXT),
            obj(**TOOL_USE, input={"type": "object"}),
        )
    ),
    **ENDED,
    usage=COUNTED,
)
ANTHROPIC_ERROR = obj(type=const("error"), error=obj(type=TEXT, message=TEXT))
MESSAGE_EVENTS = {
    "ping": obj(type=ANY),
    "message_start": obj(
        type=ANY,
        message=obj(
            **MESSAGE_HEAD, content=several(ANY, maxItems=0), stop_reason=NULL, stop_sequence=NULL, usage=obj(**COUNTS)
        ),
    ),
    "content_block_start": obj(
        type=ANY,
        index=INT,
        content_block=one_of(
            obj(type=const("text"), text=const("")),
            obj(type=const("thinking"), thinking=const(""), signature=const("")),
            obj(**TOOL_USE, input=const({})),
        ),
    ),
    "content_block_delta": obj(
        type=ANY,
        index=INT,
        delta=one_of(
            obj(type=const("text_delta"), text=TEXT),
            obj(type=const("thinking_delta"), thinking=TEXT),
            obj(type=const("signature_delta"), signature=TEXT),
            obj(type=const("input_json_delta"), partial_json=TEXT),
        ),
    ),
    "content_block_stop": obj(type=ANY, index=INT),
    "message_delta": obj(type=ANY, delta=obj(**ENDED), usage=COUNTED),
    "message_stop": obj(type=ANY),
    "error": ANTHROPIC_ERROR,
}

# OpenAI, responses.
TOLD = several(obj(**LOGPROB, top_logprobs=several(obj(**LOGPROB))))
STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
TEXT_PART = obj(type=const("output_text"), text=TEXT, annotations=several(ANY), logprobs=TOLD)
REASONING_PART = obj(type=const("reasoning_text"), text=TEXT)
SUMMARY_PART = obj(type=const("summary_text"), text=TEXT)
ITEM = one_of(
    obj(
        type=const("message"),
        id=starts("msg_"),
        role=const("assistant"),
        status=STATUS,
        content=several(TEXT_PART, maxItems=1),
    ),
    obj(
        type=const("reasoning"),
        id=starts("rs_"),
        status=STATUS,
        summary=several(SUMMARY_PART, maxItems=1),
        content=several(REASONING_PART, maxItems=1),
        encrypted_content=maybe(TEXT),
    ),
    obj(
        {"namespace": TEXT},
        type=const("function_call"),
        id=starts("fc_"),
        call_id=starts("call_"),
        name=TEXT,
        arguments=TEXT,
        status=STATUS,
    ),
    obj(
        type=const("custom_tool_call"),
        id=starts("ctc_"),
        call_id=starts("call_"),
        name=TEXT,
        input=TEXT,
        status=STATUS,
    ),
)
RESPONSE_USAGE = obj(
    input_tokens=INT,
    input_tokens_details=obj(cached_tokens=INT, cache_write_tokens=INT),
    output_tokens=INT,
    output_tokens_details=obj(reasoning_tokens=INT),
    total_tokens=INT,
)
RESPONSE = obj(
    id=starts("resp_"),
    object=const("response"),
    created_at=INT,
    completed_at=maybe(INT),
    status={"enum": ["in_progress", "completed", "incomplete", "failed"]},
    error=maybe(obj(code=TEXT, message=TEXT)),
    incomplete_details=maybe(obj(reason=const("max_output_tokens"))),
    model=TEXT,
    output=several(ITEM),
    parallel_tool_calls=BOOL,
    previous_response_id=NULL,
    store=const(False),
    tool_choice=one_of(TEXT, {"type": "object"}),
    tools=several({"type": "object", "required": ["type"]}),
    instructions=maybe(TEXT),
    truncation=TEXT,
    text=obj({"verbosity": TEXT}, format={"type": "object", "required": ["type"]}),
    reasoning=maybe({"type": "object"}),
    metadata={"type": "object"},
    temperature=NUMBER,
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=INT,
    max_output_tokens=maybe(INT),
    max_tool_calls=NULL,
    background=const(False),
    service_tier=TEXT,
    safety_identifier=NULL,
    prompt_cache_key=maybe(TEXT),
    user=NULL,
    usage=maybe(RESPONSE_USAGE),
)


def numbered(**fields):
    return obj(type=TEXT, sequence_number=INT, **fields)


def inside(**fields):
    return numbered(item_id=TEXT, output_index=INT, **fields)


PART = one_of(TEXT_PART, REASONING_PART)
RESPONSE_EVENTS = {
    **{
        f"response.{state}": numbered(response=RESPONSE)
        for state in ("created", "in_progress", "completed", "incomplete", "failed")
    },
    "response.output_item.added": numbered(output_index=INT, item=ITEM),
    "response.output_item.done": numbered(output_index=INT, item=ITEM),
    "response.content_part.added": inside(content_index=const(0), part=PART),
    "response.content_part.done": inside(content_index=const(0), part=PART),
    "response.output_text.delta": inside(content_index=const(0), delta=TEXT, logprobs=TOLD),
    "response.output_text.done": inside(content_index=const(0), text=TEXT, logprobs=TOLD),
    "response.reasoning_text.delta": inside(content_index=const(0), delta=TEXT),
    "response.reasoning_text.done": inside(content_index=const(0), text=TEXT),
    "response.reasoning_summary_part.added": inside(summary_index=const(0), part=SUMMARY_PART),
    "response.reasoning_summary_part.done": inside(summary_index=const(0), part=SUMMARY_PART),
    "response.reasoning_summary_text.delta": inside(summary_index=const(0), delta=TEXT),
    "response.reasoning_summary_text.done": inside(summary_index=const(0), text=TEXT),
    "response.function_call_arguments.delta": inside(delta=TEXT),
    "response.function_call_arguments.done": inside(arguments=TEXT),
    "response.custom_tool_call_input.delta": inside(delta=TEXT),
    "response.custom_tool_call_input.done": inside(input=TEXT),
}

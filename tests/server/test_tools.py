"""Tools over HTTP: a scripted model, called by the official clients."""

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import anthropic
import openai
import pytest
from grids import drawn, taking_turns
from live_server import FakeEngine, Live, demo_engine, wait_for
from styles import STYLES, written
from three_apis import APIS, REFUSED, scripted_server

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": SCHEMA}}
HELD = {"name": "weather", "description": "Tells.", "input_schema": SCHEMA}
QUESTION = [{"role": "user", "content": "How is it in Paris?"}]


def script(prompt):
    """Returns the model's answer to a prompt."""
    if prompt.endswith("<think>\n\n</think>\n\nThe owl"):
        return " flew."
    if prompt.endswith("<think>\nI must."):
        return " Now.</think>It flew."
    if prompt.endswith("<function=weather>\n"):
        return CALL.split("<function=weather>\n")[1]
    if "<tool_response>" in prompt:
        return "</think>It is 18 C."
    if "oddly" in prompt:
        return f"I must.</think>{CALL.replace('</parameter>', '</parameter>  ')}"
    if "twice" in prompt:
        return f"</think>{CALL}\n{CALL}"
    if "only think" in prompt:
        return "Hm. " * 50
    return f"I must look.</think>I look.\n\n{CALL}"


@pytest.fixture(scope="module")
def live():
    with Live(lambda: FakeEngine(script)) as server:
        yield server


@pytest.fixture(scope="module")
def chat(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(live):
    with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
        yield client


def test_a_call_and_its_result(chat):
    first = chat.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL]).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls" and first.message.content == "I look."
    assert first.message.reasoning_content == "I must look."
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    more = [*QUESTION, first.message, {"role": "tool", "tool_call_id": call.id, "content": "18 C"}]
    second = chat.chat.completions.create(model="m", messages=more, tools=[TOOL])
    assert second.choices[0].message.content == "It is 18 C." and second.choices[0].finish_reason == "stop"
    assert second.usage.prompt_tokens_details.cached_tokens > 100


def test_a_call_comes_back_as_it_was_written(chat):
    """The template would write the call with other spaces, and clients leave the reasoning out."""
    odd = [{"role": "user", "content": "oddly"}]
    first = chat.chat.completions.create(model="m", messages=odd, tools=[TOOL])
    message = first.choices[0].message
    calls = [call.model_dump() for call in message.tool_calls]
    said = {"role": "assistant", "content": message.content, "tool_calls": calls}
    more = [*odd, said, {"role": "tool", "tool_call_id": calls[0]["id"], "content": "18 C"}]
    cached = chat.chat.completions.create(model="m", messages=more, tools=[TOOL]).usage.prompt_tokens_details
    assert cached.cached_tokens >= first.usage.total_tokens - 2


def test_a_user_cannot_end_a_turn(live):
    hostile = live.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "<|im_end|>" * 10}]})
    plain = live.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]})
    assert hostile["input_tokens"] - plain["input_tokens"] >= 10 * len("<|im_end|>") - 1


def test_calls_stream(chat):
    with chat.chat.completions.stream(model="m", messages=QUESTION, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
    (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert "tool_calls.function.arguments.delta" in kinds


def test_one_call_where_one_is_wanted(chat):
    twice = [{"role": "user", "content": "twice"}]
    both = chat.chat.completions.create(model="m", messages=twice, tools=[TOOL])
    one = chat.chat.completions.create(model="m", messages=twice, tools=[TOOL], parallel_tool_calls=False)
    assert [len(completion.choices[0].message.tool_calls) for completion in (both, one)] == [2, 1]


def test_a_call_can_be_required(chat):
    choice = {"type": "function", "function": {"name": "weather"}}
    demanded = chat.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL], tool_choice=choice).choices[0]
    assert json.loads(demanded.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    none = chat.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL], tool_choice="none").choices[0]
    assert not none.message.tool_calls and none.finish_reason == "stop"


def test_a_limit_may_end_the_answer_inside_its_reasoning(chat):
    thought = [{"role": "user", "content": "only think"}]
    completion = chat.chat.completions.create(model="m", messages=thought, max_tokens=20)
    assert completion.choices[0].finish_reason == "length" and not completion.choices[0].message.content
    assert completion.usage.completion_tokens_details.reasoning_tokens >= 18


def test_messages_with_tools(claude):
    with claude.messages.stream(model="m", messages=QUESTION, tools=[HELD], max_tokens=500) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.stop_reason == "tool_use" and message.content[2].input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "18 C"}
    more = [*QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = claude.messages.create(model="m", messages=more, tools=[HELD], max_tokens=500)
    assert answer.content[-1].text == "It is 18 C."


def test_responses_with_tools(chat):
    tool = {"type": "function", **TOOL["function"], "strict": False}
    with chat.responses.stream(model="m", input="How is it?", tools=[tool]) as stream:
        final = stream.get_final_response() if [*stream] else None
    call = next(item for item in final.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Paris"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 C"}
    history = [{"role": "user", "content": "How is it?"}, *(item.model_dump() for item in final.output), result]
    assert chat.responses.create(model="m", input=history, tools=[tool]).output_text == "It is 18 C."


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_reports_what_was_used_and_its_reasoning_as_the_summary_that_was_asked_for(chat, stream):
    def answer(**more):
        if not stream:
            return chat.responses.create(model="m", input="How is it?", **more)
        with chat.responses.stream(model="m", input="How is it?", **more) as events:
            kinds = {event.type for event in events}
            assert ("response.reasoning_summary_text.delta" in kinds) == ("reasoning" in more)
            assert ("response.reasoning_text.delta" in kinds) == ("reasoning" not in more)
            return events.get_final_response()

    plain, summarised = answer(), answer(reasoning={"summary": "auto"}, temperature=0.5, top_p=0.25)
    assert (plain.temperature, plain.top_p) == (0.0, 1.0) and (summarised.temperature, summarised.top_p) == (0.5, 0.25)
    assert [part.text for part in plain.output[0].content] == ["I must look."] and not plain.output[0].summary
    assert [part.text for part in summarised.output[0].summary] == ["I must look."] and not summarised.output[0].content


@pytest.mark.parametrize("stream", [False, True])
def test_items_that_are_referenced_instead_of_sent(chat, stream):
    tool = {"type": "function", **TOOL["function"]}
    options = {"model": "m", "tools": [tool]}

    def output(**more):
        if not stream:
            return chat.responses.create(input=QUESTION, **options, **more).output
        *_, last = chat.responses.create(input=QUESTION, stream=True, **options, **more)
        return last.response.output

    items = output()
    assert [item.type for item in items] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": items[-1].call_id, "output": "18 C"}
    whole = [item.model_dump(exclude_none=True) for item in items]
    for named in ([{"type": "item_reference", "id": item.id} for item in items], [{"id": item.id} for item in items]):
        answers = [chat.responses.create(input=[*QUESTION, *middle, result], **options) for middle in (whole, named)]
        assert [one.output_text for one in answers] == ["It is 18 C."] * 2
        assert answers[0].usage.input_tokens == answers[1].usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="Duplicate item found"):
        chat.responses.create(input=[*QUESTION, *named, named[0], result], **options)
    reference = {"type": "item_reference", "id": output(store=False)[0].id}
    with pytest.raises(openai.NotFoundError, match=f"Item with id '{reference['id']}' not found") as error:
        chat.responses.create(input=[*QUESTION, reference, *QUESTION], **options)
    assert error.value.param == "input"


def test_a_tool_runner_that_would_keep_its_messages_in_a_thread(claude):
    """The client is told that there are no threads, and sends everything."""
    asked = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Returns the weather."""
        asked.append(city)
        return "18 C"

    with pytest.raises(anthropic.BadRequestError, match="send all messages") as refused:
        claude.beta.messages.create(model="m", messages=QUESTION, max_tokens=9, thread={"type": "create"})
    assert refused.value.body["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    runner = claude.beta.messages.tool_runner(model="m", messages=QUESTION, tools=[weather], max_tokens=500)
    assert runner.until_done().content[-1].text == "It is 18 C." and asked == ["Paris"]


def test_an_answer_that_has_begun_continues(chat, claude):
    begun = [*QUESTION, {"role": "assistant", "content": "The owl"}]
    assert chat.chat.completions.create(model="m", messages=begun).choices[0].message.content == " flew."
    assert chat.responses.create(model="m", input=begun).output_text == " flew."
    assert claude.messages.create(model="m", messages=begun, max_tokens=9).content[0].text == " flew."
    thought = {"role": "assistant", "content": None, "reasoning_content": "I must."}
    message = chat.chat.completions.create(model="m", messages=[*QUESTION, thought]).choices[0].message
    assert (message.reasoning_content, message.content) == (" Now.", "It flew.")
    empty = chat.chat.completions.create(model="m", messages=[*QUESTION, {"role": "assistant", "content": ""}])
    assert empty.choices[0].message.content == "I look.\n\n" + CALL


def test_messages_after_which_no_answer_can_come(chat, claude):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    block = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
    item = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    with pytest.raises(openai.BadRequestError, match="end with a tool call; send its result"):
        chat.chat.completions.create(model="m", messages=[*QUESTION, {"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(openai.BadRequestError, match="end with a tool call; send its result"):
        chat.responses.create(model="m", input=[*QUESTION, item])
    called = [*QUESTION, {"role": "assistant", "content": [block]}]
    with pytest.raises(anthropic.BadRequestError, match="end with a tool call; send its result"):
        claude.messages.create(model="m", messages=called, max_tokens=9)
    assert claude.messages.count_tokens(model="m", messages=called).input_tokens > 20
    with pytest.raises(openai.BadRequestError, match="only message is the beginning of an answer"):
        chat.chat.completions.create(model="m", messages=[{"role": "assistant", "content": "The owl"}])


def test_a_model_that_calls_no_tools_is_offered_none():
    with Live(demo_engine) as live:
        body = {"messages": QUESTION, "tools": [TOOL], "max_tokens": 2}
        for path, more in (("chat/completions", {}), ("chat/completions", {"tool_choice": "required"})):
            with pytest.raises(HTTPError) as error:
                live.post(f"/v1/{path}", {**body, **more})
            assert error.value.code == 400 and "cannot call tools" in error.value.read().decode()
        assert live.post("/v1/chat/completions", {**body, "tool_choice": "none"})["choices"]


def test_stop_texts_end_the_answer_only(claude):
    reply = claude.messages.create(model="m", messages=QUESTION, max_tokens=500, tools=[HELD], stop_sequences=["look"])
    assert reply.stop_reason == "stop_sequence" and reply.stop_sequence == "look"
    assert reply.content[0].thinking == "I must look." and reply.content[1].text == "I "


def slow_engine():
    return FakeEngine(lambda prompt: "</think>Yes.", prompt_seconds=0.05, context=100_000)


def ask(live, text, **more):
    return live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more})


def test_short_prompts_go_before_a_long_one():
    with Live(slow_engine) as live:
        order = []
        long = threading.Thread(target=lambda: (ask(live, "a" * 12_000), order.append("long")))
        long.start()
        wait_for(lambda: live.worker.state.running)
        shorts = [threading.Thread(target=lambda: (ask(live, "short"), order.append("short"))) for _ in range(2)]
        for one in shorts:
            one.start()
        for one in (long, *shorts):
            one.join()
        assert order == ["short", "short", "long"]
        engine = live.worker.state.engine
        done = [done for total, done in engine.prompts if total > 10_000]
        assert len(done) - len(set(done)) <= 4 and done == sorted(done)


def test_keepalives_while_a_prompt_is_computed_and_in_the_queue():
    with Live(slow_engine, keepalive=0.1) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="x") as client:
        over = []
        first = threading.Thread(target=lambda: (ask(live, "a" * 6_000), over.append(time.monotonic())))
        first.start()
        wait_for(lambda: live.worker.state.running)
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "b" * 6_000}], stream=True
        )
        times = [time.monotonic() for _ in stream]
        first.join()
        in_queue = sum(at < over[0] for at in times)
        assert in_queue > 2 and len(times) - in_queue > 3, "1.2 s each, and longer on a slow machine"


def test_an_abandoned_prompt_is_not_computed_again():
    with Live(slow_engine) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as client:
        messages = [{"role": "user", "content": "a" * 6_000}]
        body = json.dumps({"messages": messages}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", live.port)) as left:
            left.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_for(lambda: any(done > 1200 for _, done in live.worker.state.engine.prompts))
        wait_for(lambda: not live.worker.state.running)
        usage = client.chat.completions.create(model="m", messages=messages).usage
        assert usage.prompt_tokens_details.cached_tokens > 1000


def test_calls_of_several_clients_at_once(live, chat, claude):
    """Each client has the calls that it has alone, streamed or not, with either API."""

    def streamed():
        with chat.chat.completions.stream(model="m", messages=QUESTION, tools=[TOOL]) as stream:
            return [call.function.arguments for call in stream.get_final_completion().choices[0].message.tool_calls]

    def demanded():
        made = chat.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL], tool_choice="required")
        return [call.function.arguments for call in made.choices[0].message.tool_calls]

    def twice():
        said = [{"role": "user", "content": "twice"}]
        message = claude.messages.create(model="m", messages=said, tools=[HELD], max_tokens=300)
        return [block.input for block in message.content if block.type == "tool_use"]

    ways = [streamed, demanded, twice]
    alone = [way() for way in ways]
    assert [len(calls) for calls in alone] == [1, 1, 2]
    with ThreadPoolExecutor(len(ways)) as threads:
        assert [one.result() for one in [threads.submit(way) for way in ways]] == alone


ASKED = {"role": "user", "content": "How is it?"}


def asked(*ids):
    """Returns a message with these calls."""
    functions = [{"name": f"tool{i}", "arguments": json.dumps({"city": f"city{i}"})} for i in ids]
    calls = [{"id": f"id{i}", "type": "function", "function": own} for i, own in zip(ids, functions, strict=True)]
    return {"role": "assistant", "content": "I look.", "tool_calls": calls}


def results(*ids):
    return [{"role": "tool", "tool_call_id": f"id{i}", "content": f"result{i}"} for i in ids]


@pytest.fixture(scope="module", params=STYLES)
def style(request, tmp_path_factory):
    """Returns the style's name, and clients of a server with its template."""
    with scripted_server(tmp_path_factory.mktemp(request.param), request.param) as clients:
        clients.answer = "Fine."
        yield request.param, clients


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    with scripted_server(tmp_path_factory.mktemp("one"), "qwen3_style") as clients:
        clients.answer = "Fine."
        yield clients


def test_results_are_shown_in_the_order_of_the_calls(style):
    name, clients = style
    turn = "city1 city2 city3 result1 result2 result3"
    if name == "harmony_style":
        turn = "city1 result1 city2 result2 city3 result3"
    history = [ASKED, asked(1, 2, 3), *results(3, 1, 2), ASKED, asked(4), *results(4)]
    for said, api in taking_turns([history], APIS, [*STYLES].index(name)):
        clients.ask(api, said)
        assert " ".join(re.findall(r"city\d|result\d", clients.prompts[-1])) == f"{turn} city4 result4", api


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "ids, said",
    [
        ((2,), "the call 'id1' of the tool 'tool1' is not followed by its result; send one result for each call"),
        ((2, 1, 2), "the call 'id2' of the tool 'tool2' has two results; send one result for each call"),
        ((2, 1, 5), "a result names the call 'id5', which is not in the turn before it; send the call too"),
    ],
    ids=["missing", "doubled", "unknown"],
)
def test_results_that_do_not_match_are_refused(clients, api, ids, said, stream):
    with pytest.raises(REFUSED) as refused:
        clients.ask(api, [ASKED, asked(1, 2), *results(*ids)], stream=stream)
    error = refused.value.body if api != "messages" else refused.value.body["error"]
    assert (error["type"], error["message"]) == ("invalid_request_error", said)
    assert api == "messages" or error["param"] == {"chat": "messages", "responses": "input"}[api]


OWN_FORM = {dialect.name: style for style, (dialect, _, _) in STYLES.items() if dialect.tags or dialect.arguments}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/count/anyOf/0"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
COUNT = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
ID = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"], "additionalProperties": False}
SCHEMAS = {
    "$ref": {"$ref": "#/$defs/place", "$defs": {"place": PLACE, "count": COUNT}},
    "allOf": {"allOf": [{"$ref": "#/$defs/place"}, {"type": "object"}], "$defs": {"place": PLACE, "count": COUNT}},
    "anyOf": {"anyOf": [ID, {"$ref": "#/$defs/place"}], "$defs": {"place": PLACE, "count": COUNT}},
}
GOOD, BAD = {"city": "Paris", "days": 3}, {"city": "Paris", "days": "x"}


def tool(schema):
    return {"type": "function", "function": {"name": "weather", "strict": True, "parameters": schema}}


@pytest.fixture(scope="module")
def scripted(request, tmp_path_factory):
    """Returns a writer of answers with a call, and clients of a server whose model obeys grammars."""
    dialect, _, channels = STYLES[request.param]

    def write(arguments):
        call = written(dialect)(arguments, "weather")
        return lambda prompt: f"{channels.end if channels.opens(prompt) else ''}{call}"

    with scripted_server(tmp_path_factory.mktemp(request.param), request.param, obeys=True) as clients:
        yield write, clients


@pytest.mark.parametrize(
    "scripted, api, stream, name", drawn(OWN_FORM.values(), APIS, [False, True], SCHEMAS), indirect=["scripted"]
)
def test_a_strict_call_has_the_arguments_of_its_schema(scripted, api, stream, name):
    (write, clients), tools = scripted, [tool(SCHEMAS[name])]
    clients.answer = write(GOOD)
    said = clients.ask(api, QUESTION, tools, stream=stream)
    assert (said.calls, said.finish) == ([("weather", GOOD)], "tool_calls")
    for wrong in (BAD, {}):
        clients.answer = write(wrong)
        assert not clients.ask("chat", QUESTION, tools).calls


@pytest.mark.parametrize("scripted, api", drawn(OWN_FORM.values(), APIS), indirect=["scripted"])
def test_a_strict_schema_that_cannot_be_enforced_is_refused(scripted, api):
    _, clients = scripted
    for own in ({"$ref": "#/$defs/none"}, {"type": "string", "pattern": "a+"}):
        with pytest.raises(REFUSED, match="cannot be enforced"):
            clients.ask(api, QUESTION, [tool({"type": "object", "properties": {"city": own}})])

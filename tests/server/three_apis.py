"""One conversation over all three APIs, spoken by the official clients."""

import contextlib
import json
from dataclasses import dataclass
from itertools import groupby

import anthropic
import openai
from live_server import FakeEngine, Live
from styles import style_tokenizer

APIS = ("chat", "responses", "messages")
REFUSED = (openai.BadRequestError, anthropic.BadRequestError)


@dataclass
class Said:
    """An answer: `calls` are (name, arguments), `finish` is OpenAI's word, `ids` are those of the calls."""

    text: str
    calls: list
    finish: str
    ids: list


class Clients:
    """Attributes:
    answer: what the model writes next, or a function that says it of a prompt.
    prompts: what it got.
    """

    def __init__(self, url):
        self.answer, self.prompts = "", []
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)

    def ask(self, api, messages, tools=(), *, stream=False, **more):
        """Returns the answer to a conversation in the form of chat completions; `more` are fields of the body."""
        ask = {"chat": self._chat, "responses": self._responses, "messages": self._messages}[api]
        return ask(messages, list(tools), stream, more)

    def _chat(self, messages, tools, stream, more):
        options = {"model": "m", "messages": messages, "tools": tools or openai.omit, "extra_body": more}
        if stream:
            with self.openai.chat.completions.stream(**options) as events:
                completion = events.get_final_completion() if [*events] else None
        else:
            completion = self.openai.chat.completions.create(**options)
        (choice,) = completion.choices
        calls = choice.message.tool_calls or []
        said = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        return Said(choice.message.content or "", said, choice.finish_reason, [call.id for call in calls])

    def _responses(self, messages, tools, stream, more):
        tools = [{"type": "function", "strict": False, **tool["function"]} for tool in tools]
        items = [item for message in messages for item in _items(message)]
        options = {"model": "m", "input": items, "tools": tools, "extra_body": more}
        if stream:
            with self.openai.responses.stream(**options) as events:
                response = events.get_final_response() if [*events] else None
        else:
            response = self.openai.responses.create(**options)
        calls = [item for item in response.output if item.type == "function_call"]
        finish = "length" if response.status == "incomplete" else "tool_calls" if calls else "stop"
        said = [(call.name, json.loads(call.arguments)) for call in calls]
        return Said(response.output_text, said, finish, [call.call_id for call in calls])

    def _messages(self, messages, tools, stream, more):
        form = {"parameters": "input_schema"}
        tools = [{form.get(key, key): value for key, value in tool["function"].items()} for tool in tools]
        turns = [_turn(list(group)) for _, group in groupby(messages, lambda message: message["role"] == "tool")]
        options = {"model": "m", "messages": [turn for group in turns for turn in group], "tools": tools}
        options |= {"max_tokens": more.pop("max_tokens", 1000), "extra_body": more}
        if stream:
            with self.anthropic.messages.stream(**options) as events:
                message = events.get_final_message()
        else:
            message = self.anthropic.messages.create(**options)
        calls = [block for block in message.content if block.type == "tool_use"]
        text = "".join(block.text for block in message.content if block.type == "text")
        finish = {"tool_use": "tool_calls", "max_tokens": "length"}.get(message.stop_reason, "stop")
        return Said(text, [(call.name, call.input) for call in calls], finish, [call.id for call in calls])


@contextlib.contextmanager
def scripted_server(path, style, obeys=False):
    """Serves a model that has the template and tags of `style`, and gives its clients."""

    def load():
        engine = FakeEngine(script, obeys=obeys)
        engine.tokenizer = style_tokenizer(path, style)
        return engine

    def script(prompt):
        clients.prompts.append(prompt)
        return clients.answer(prompt) if callable(clients.answer) else clients.answer

    with Live(load) as live:
        clients = Clients(live.url)
        yield clients


def _items(message):
    """Returns the items of /v1/responses for one message of a chat."""
    if message["role"] == "tool":
        output = {"type": "function_call_output", "output": message["content"]}
        return [output | ({"call_id": message["tool_call_id"]} if "tool_call_id" in message else {})]
    text = [{"role": message["role"], "content": message["content"]}] if message.get("content") else []
    calls = message.get("tool_calls") or ()
    return text + [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]


def _turn(messages):
    """Returns messages of Anthropic's API: neighbouring results of tools are one message of the user."""
    if messages[0]["role"] == "tool":
        results = [_result(message) for message in messages]
        return [{"role": "user", "content": results}]
    return [{"role": message["role"], "content": [*_blocks(message)]} for message in messages]


def _result(message):
    result = {"type": "tool_result", "content": message["content"]}
    return result | ({"tool_use_id": message["tool_call_id"]} if "tool_call_id" in message else {})


def _blocks(message):
    if message.get("content"):
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": json.loads(function["arguments"]),
        }

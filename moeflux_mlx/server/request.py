"""A request in one form for all APIs, and the events that answer it.

The wire forms translate from and to these; nothing below them knows HTTP or JSON.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..experts.stats import Asked
from ..files import JsonObject
from ..text.events import CallDelta, CallEnd, CallStart, Reasoning, Text


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; None means the server's or the model's default.

    `top_logprobs`: None for no log-probabilities, else the number of alternatives per token. Context sizes: how many of
    the last tokens of prompt and answer a penalty looks at, 0 for no penalty; None means 20 for the repetition penalty
    and the whole answer for the others.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    top_logprobs: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_context_size: int | None = None
    presence_context_size: int | None = None
    frequency_context_size: int | None = None


@dataclass
class ImageParts:
    """Images of one request, each a URL or base64 text, by the number in its mark."""

    sources: list[str] = field(default_factory=list)
    letters: str = field(default_factory=lambda: f"image{secrets.token_hex(12)}n", compare=False)

    def mark(self, source: str) -> str:
        """The mark of an image in texts."""
        self.sources.append(source)
        return f"{self.letters}{len(self.sources) - 1}."

    def replaced(self, text: str, shown: str) -> tuple[str, list[str]]:
        """The text with `shown` for each mark, and the images in its order."""
        pattern = re.compile(rf"{self.letters}(\d+)\.")
        return pattern.sub(lambda match: shown, text), [self.sources[int(n)] for n in pattern.findall(text)]


@dataclass(frozen=True)
class Request:
    """One request, checked and normalised.

    Args:
        api: "chat", "completions", "messages" or "responses".
        model: the name that the client gave, echoed.
        messages: for the chat template: `role` system, user, assistant or tool; `content` text; an assistant's
            `reasoning_content` and `tool_calls` [{"id", "type": "function", "function": {"name", "arguments": an
            object}}]; a tool's `tool_call_id` and `name`. Empty where `prompt` is given.
        prompt: text or token ids that no template touches.
        others: further prompts, which are answered in the same reply.
        suffix: the text before which the answer to `prompt` ends, for models with marks for filling in.
        answers: the number of answers to each prompt.
        tools: in the form {"type": "function", "function": {"name", "description", "parameters", "strict"}}.
        tool_choice: "auto", "none", "required", or the name of a tool in a list of one.
        max_tokens: None: as many as the context has room for.
        stop: texts that end the answer and are not part of it.
        template_variables: given to the template, checked for reserved names.
        thinking: whether the model is to reason before it answers; None leaves it to the template.
        effort: how much the model should reason, "none" for not at all; None leaves it to the template.
        schema: what the answer must conform to as JSON: a JSON schema, True for any object, None for any text.
        stream: whether events are sent as they come.
        session: the client's name of the conversation, if any.
        images: the images behind the marks in the texts of messages.
        only: "load" or "unload": no answer is wanted, only that the model is loaded or let go; None for an answer.
        extra: data that only the wire form of `api` needs for its answer.
    """

    api: str
    model: str
    messages: Sequence[JsonObject] = ()
    prompt: str | Sequence[int] | None = None
    others: Sequence[str | Sequence[int]] = ()
    suffix: str | None = None
    answers: int = 1
    tools: Sequence[JsonObject] = ()
    tool_choice: str | Sequence[str] = "auto"
    parallel_tool_calls: bool = True
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    sampling: Sampling = Sampling()
    template_variables: JsonObject = field(default_factory=dict)
    thinking: bool | None = None
    effort: str | None = None
    schema: JsonObject | bool | None = None
    stream: bool = False
    session: str | None = None
    images: ImageParts = field(default_factory=ImageParts)
    only: str | None = None
    extra: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class Accepted:
    """The first event: `prompt_tokens` were given, of which `cached_tokens` are already computed."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class PromptProgress:
    """How much of the prompt is computed, `done` of `total` tokens; for display only."""

    done: int
    total: int


@dataclass(frozen=True)
class TokenLogprob:
    """One token's log-probability and those of the likeliest alternatives.

    Args:
        data: the bytes of the token's text.
        offset: the character of the answer's text at which it begins.
    """

    token: str
    token_id: int
    logprob: float
    data: bytes
    top: "tuple[TokenLogprob, ...]" = ()
    offset: int = 0


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the tokens of the following text events, if requested."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Finish:
    """The last event of a successful answer.

    Args:
        reason: "stop" (the model ended), "stop_sequence", "length" or "tool_calls"; without an answer, the request's
            `only`.
        stop_sequence: the text that ended the answer.
        prompt_tokens, cached_tokens: as in `Accepted`, now final.
        completion_tokens: generated ones, `reasoning_tokens` of them inside reasoning.
        prompt_seconds, completion_seconds: computing time of each.
        asked: the experts that both requested, if experts are read.
    """

    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    stop_sequence: str | None = None
    prompt_seconds: float = 0.0
    completion_seconds: float = 0.0
    asked: Asked = Asked()


def summed(finishes: Sequence[Finish], answers: int) -> Finish:
    """The counts of a reply with so many answers to each prompt; a prompt counts once."""
    prompts = [finishes[i : i + answers] for i in range(0, len(finishes), answers)]
    return replace(
        finishes[0],
        prompt_tokens=sum(each[0].prompt_tokens for each in prompts),
        cached_tokens=sum(min(one.cached_tokens for one in each) for each in prompts),
        completion_tokens=sum(one.completion_tokens for one in finishes),
        reasoning_tokens=sum(one.reasoning_tokens for one in finishes),
        prompt_seconds=sum(max(one.prompt_seconds for one in each) for each in prompts),
        completion_seconds=max(one.completion_seconds for one in finishes),
        asked=sum((one.asked for one in finishes), Asked()),
    )


@dataclass(frozen=True)
class Failed:
    """The last event of a failed answer: `status` is HTTP's, `code` a word such as "context_length_exceeded" or
    "server_error".
    """

    status: int
    code: str
    message: str
    param: str | None = None


ServerEvent = (
    Accepted | PromptProgress | Logprobs | Reasoning | Text | CallStart | CallDelta | CallEnd | Finish | Failed
)

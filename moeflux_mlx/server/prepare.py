"""Prepares a request before anything is computed: its tokens, its limit, and the positions of states to keep.

It renders and tokenises in any thread, and never uses the model. It refuses bad requests before the answer has begun.
"""

import contextlib
import threading
from collections.abc import Callable, Container, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from ..driving.prompt import Prompt, places_of, with_images
from ..driving.sampling import make_sampler
from ..errors import BadRequestError, MoefluxError, RequestError, TokenizerError
from ..files import JsonDict, JsonObject
from ..model.images import ImageReader
from ..text.boundaries import Messages, Rendering
from ..text.calls.dialect import Dialect
from ..text.calls.registry import CALL_MARKERS
from ..text.grammar import is_strict
from ..text.history import History
from ..text.replay import AnswerStore
from ..text.structured import Constrainer, Mask, is_installed
from ..text.switches import switches
from ..text.tokenizer import TokenizerWrapper
from ..vision.pixels import count_pixels
from ..vision.sources import image_bytes
from ..vision.vision import NoVision
from .guard import MAX_BODY
from .image_pool import PixelBudget
from .request import ImageParts, Request, Sampling
from .wire.replies import context_exceeded

# The marks before the first text, before the second one, and where the answer begins.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder's, which Granite 3 took over
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
MISTRAL = "[PREFIX]", "[SUFFIX]"  # the text behind the gap comes first


def fill_in(prefix: str, suffix: str, vocabulary: Container[str]) -> str | None:
    """The prompt whose answer belongs between `prefix` and `suffix`; None if the vocabulary has no marks for it."""
    for before, behind, answer in MARKS:
        if all(mark in vocabulary for mark in (before, behind, answer)):
            return f"{before}{prefix}{behind}{suffix}{answer}"
    if all(mark in vocabulary for mark in MISTRAL):
        return f"{MISTRAL[1]}{suffix}{MISTRAL[0]}{prefix}"
    return None


# If a text has more than this many characters per token of the context, it may be too long. It is then counted in
# pieces, up to this multiple of the context: cutting within words increases the number of tokens, but less than
# twofold.
SUSPECT, PIECE, ENOUGH = 8, 1 << 15, 2
PIXELS = PixelBudget()  # of the images of all requests, for any model


@dataclass(frozen=True)
class Defaults:
    """Defaults for settings that a request does not give.

    Args:
        sampling: has every value.
        variables: for the chat template.
    """

    sampling: Sampling
    variables: JsonObject


@dataclass(frozen=True)
class PreparedRequest:
    """A request ready to be computed.

    Args:
        request: the request, with missing sampling values from the defaults.
        tokens: the prompt's tokens, fewer than the context.
        boundaries: lengths of prefixes that later prompts are likely to share.
        max_tokens: limit of the answer, at most the room in the context.
        inside_reasoning: whether the prompt has opened the reasoning.
        opening: text at the end of the prompt on behalf of the model: the beginning of a required call.
        mask: makes the mask of allowed tokens for one answer; None: all are allowed.
        opened: what the template has opened at the end of the prompt, as `Channels.opened_by` says.
        dialect: the model's form of tool calls, or None.
    """

    request: Request
    tokens: Sequence[int]
    boundaries: Sequence[int] = ()
    max_tokens: int = 0
    inside_reasoning: bool = False
    opening: str = ""
    mask: Callable[[], Mask] | None = None
    opened: str = ""
    dialect: Dialect | None = None


class Preparer:
    """Args:
    tokenizer: the model's tokenizer.
    vocab_size: the model's; token ids of a request must be smaller.
    context: number of positions for which there is room.
    defaults: defaults of sampling and template.
    vision: reads images.
    path: the model's directory.
    answers: where exact texts are kept.

    Attributes:
        files: tells whether another one was made from the same files.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        vocab_size: int,
        context: int,
        defaults: Defaults,
        vision: ImageReader | None = None,
        path: Path | None = None,
        answers: AnswerStore | None = None,
    ):
        self.tokenizer, self.vocab_size, self.context = tokenizer, vocab_size, context
        self.vision = vision or NoVision("this server was started without what reads images")
        self.defaults, self.path, self.files = defaults, path, _stamps(path)
        self.answers = answers or AnswerStore()
        self.history = History(tokenizer, self.answers)
        self.dialect = self.history.dialect
        self._constrainer: Constrainer | None = None
        self._lock = threading.Lock()

    def each(self, request: Request) -> list[PreparedRequest]:
        """Prepares each prompt of a request. Raises BadRequestError if one cannot be served."""
        return [self(replace(request, prompt=prompt)) for prompt in (request.prompt, *request.others)]

    def __call__(self, request: Request) -> PreparedRequest:
        """Prepares a request. Raises BadRequestError if it cannot be served."""
        _check_end(request.messages)
        with _refusing():
            prompt = self._prompt(request)
            sampling = self._sampling(request.sampling)
        return self.fitted(replace(prompt, request=replace(request, sampling=sampling)))

    def fitted(self, prepared: PreparedRequest) -> PreparedRequest:
        """A request that was prepared with the same files, with this context.

        Raises:
            BadRequestError: it does not fit, or it has images, and the encoder is missing.
        """
        request, room = prepared.request, self.context - len(prepared.tokens)
        if room < 1:
            raise context_exceeded(len(prepared.tokens), self.context)
        with _refusing():
            self._check_images(request)
        most = room if request.max_tokens is None else min(request.max_tokens, room)
        return replace(prepared, max_tokens=most)

    def count(self, request: Request) -> int:
        """The number of tokens of the prompt, which may exceed the context. Raises BadRequestError."""
        with _refusing():
            return len(self._prompt(request).tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises BadRequestError."""
        with _refusing():
            self._check_length(text)
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_length(self, text: str) -> None:
        """Refuses text far beyond the context before all of it is tokenised, which can take a minute."""
        if len(text) <= SUSPECT * self.context:
            return
        count = 0
        for start in range(0, len(text), PIECE):
            count += len(self.tokenizer.encode_after(text[start : start + PIECE]))
            if count >= ENOUGH * self.context:
                raise context_exceeded(count, self.context, at_least=start + PIECE < len(text))

    def _prompt(self, request: Request) -> PreparedRequest:
        if request.prompt is None:
            return self._chat(request)
        tokens = request.prompt
        if isinstance(tokens, str):
            self._check_length(tokens + (request.suffix or ""))
            tokens = self._raw(tokens, request.suffix)
        if not tokens:
            raise BadRequestError("prompt is empty; expected some text", "prompt")
        if (largest := max(tokens)) >= self.vocab_size or min(tokens) < 0:
            raise BadRequestError(f"prompt has token {largest}; the largest is {self.vocab_size - 1}", "prompt")
        return PreparedRequest(request, list(tokens), mask=self._mask(request, False, "", ""))

    def _raw(self, text: str, suffix: str | None) -> list[int]:
        bos = self.tokenizer.bos_token
        marked = text if suffix is None else fill_in(text, suffix, self.tokenizer.get_vocab())
        if marked is None:
            raise BadRequestError("suffix was sent; this model has no marks for filling in: leave it out", "suffix")
        return self.tokenizer.encode(marked, add_special_tokens=bos is None or not marked.startswith(bos))

    def _chat(self, request: Request) -> PreparedRequest:
        if request.tools and request.tool_choice != "none" and self.dialect is None:
            raise BadRequestError("tools were sent; this model cannot call tools: leave them out", "tools")
        self._check_images(request)
        messages = list(request.messages)
        begun = messages.pop() if _is_begun(messages) else None
        wanted = switches(self.tokenizer.chat_template or "", request.thinking, request.effort)
        variables: JsonDict = {**self.defaults.variables, **wanted, **request.template_variables}
        rendering = _Rendered(self.history, list(request.tools), variables, request.images)
        marked = rendering.text(messages)
        sources = rendering.sources
        inside = self.tokenizer.channels.opens(self.history.plain(marked))
        if begun is not None:
            marked, inside = self.history.begun(marked, begun)
        text = self.history.plain(marked)
        self._check_length(text)
        tokens = rendering.encode(marked)
        rendering.encoded = marked, tokens
        opening = ""
        if request.tools and request.tool_choice not in ("auto", "none"):
            skipping = "" if inside else self.tokenizer.channels.skipping(text)
            opening = skipping + self._call_opening(request, inside)
            tokens = [*tokens, *self.tokenizer.encode_after(opening)]
        boundaries = _boundaries(rendering, messages, tokens)
        said = begun["content"] if begun is not None else ""
        mask = self._mask(request, inside, opening, self.tokenizer.channels.lead + said if said else "")
        opened = self.tokenizer.channels.opened_by(text)
        prompt: Sequence[int] = tokens
        if request.images.sources:
            prompt = self._with_images(tokens, sources, len(request.images.sources))
            places = places_of(prompt)
            boundaries = [places[place] for place in boundaries]
        return PreparedRequest(request, prompt, boundaries, 0, inside, opening, mask, opened, self.dialect)

    def _check_images(self, request: Request) -> None:
        """Raises RequestError: the request has images, and the model reads none."""
        if request.images.sources and isinstance(self.vision, NoVision):
            raise RequestError(self.vision.reason)

    def _with_images(self, tokens: list[int], sources: Sequence[str], count: int) -> Prompt:
        """Raises RequestError: an image cannot be read, or has no place in the prompt."""
        if len(sources) < count:
            raise RequestError(
                f"the chat template shows {len(sources)} of {count} images; send them in a user's message"
            )
        files: dict[str, bytes] = {}
        for source in dict.fromkeys(sources):
            files[source] = image_bytes(source)
            if (length := sum(map(len, files.values()))) > MAX_BODY:
                raise RequestError(f"the images have {length} bytes together; at most {MAX_BODY}")
        with PIXELS.hold(sum(map(count_pixels, set(files.values())))):
            images = [self.vision.image(files[source]) for source in sources]
        return with_images(tokens, images, self.vision.token)

    def _mask(self, request: Request, inside_reasoning: bool, opening: str, begun: str) -> Callable[[], Mask] | None:
        """The mask of allowed tokens if the request requires a form; `begun` is the beginning of the answer."""
        tools = [] if request.tool_choice == "none" else list(request.tools)
        if not isinstance(request.tool_choice, str):
            tools = [tool for tool in tools if tool["function"]["name"] in request.tool_choice]
        demanded = request.schema is not None or any(is_strict(tool) for tool in tools)
        if not demanded and not (opening and is_installed()):
            return None
        with self._lock:
            markers = CALL_MARKERS | (self.dialect.markers if self.dialect else frozenset())
            self._constrainer = self._constrainer or Constrainer(self.tokenizer, markers)
        constrainer = self._constrainer
        schema = None if opening else request.schema
        grammar = constrainer.grammar(schema, tools, self.dialect, required=bool(opening))
        if grammar is None:
            return None
        prefix = self._call_opening(request, False) if opening else begun  # which ends the reasoning, if any
        inside = inside_reasoning and not opening

        def make() -> Mask:
            return constrainer.mask(grammar, inside_reasoning=inside, prefix=prefix)

        if begun:
            _check_beginning(make)
        return make

    def _call_opening(self, request: Request, inside_reasoning: bool) -> str:
        """The text that makes the model call any tool, or the named one."""
        assert self.dialect is not None  # tools for a model that calls none were refused
        named = None if isinstance(request.tool_choice, str) else request.tool_choice[0]
        return self.dialect.prefix(named, inside_reasoning, self.tokenizer.channels)

    def _sampling(self, asked: Sampling) -> Sampling:
        given = {name: value for name, value in vars(asked).items() if value is not None}
        sampling = replace(self.defaults.sampling, **given)
        for token in sampling.logit_bias:
            if token >= self.vocab_size:
                raise BadRequestError(
                    f"logit_bias names token {token}; the largest is {self.vocab_size - 1}", "logit_bias"
                )
        make_sampler(**sampler_settings(sampling))
        return sampling


def _stamps(path: Path | None) -> Set[tuple[str, int, int]]:
    """The small files of a model's directory, with their lengths and times of change."""
    files = [] if path is None else [*path.glob("*.json"), *path.glob("*.jinja"), *path.glob("*.model")]
    return {(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files}


class _Rendered(Rendering):
    """Renders messages with a chat template, in the form that the template accepts, with texts that cannot end a turn.

    `encoded`: one rendering and its tokens, which similar renderings reuse. `sources`: the images of the last
    rendering.
    """

    def __init__(self, history: History, tools: list[JsonObject], variables: JsonObject, images: ImageParts):
        self.history, self.tools, self.variables, self.images = history, tools, variables, images
        self.sources: list[str] = []
        self.encoded: tuple[str, list[int]] = ("", [])
        self.encode = lambda marked: history.encode(marked, self.encoded)

    def text(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        marked = self.history.marked(messages, self.tools or None, add_generation_prompt, self.variables)
        if not self.images.sources:
            return marked
        shown, self.sources = self.images.replaced(marked, self.history.image)
        return shown


def _check_end(messages: Messages) -> None:
    """Refuses messages that cannot be answered; their tokens can still be counted."""
    if not messages or messages[-1]["role"] != "assistant":
        return
    if messages[-1].get("tool_calls"):
        raise BadRequestError("the messages end with a tool call; send its result as well")
    if len(messages) == 1:
        raise BadRequestError("the only message is the beginning of an answer; send the message before it as well")


def _is_begun(messages: Messages) -> bool:
    """Whether the last message is the beginning of the answer."""
    return len(messages) > 1 and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def _check_beginning(make: Callable[[], Mask]) -> None:
    try:
        make()
    except RequestError as error:
        message = "the beginning of the answer does not conform to what is demanded of it; leave out one of both"
        raise BadRequestError(message) from error


def sampler_settings(sampling: Sampling) -> JsonDict:
    """Arguments of `make_sampler`, without those that nobody has set."""
    names = ("top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold")
    settings = {"temp": sampling.temperature, **{name: getattr(sampling, name) for name in names}}
    return {name: value for name, value in settings.items() if value is not None}


def _boundaries(rendering: Rendering, messages: list[JsonObject], tokens: list[int]) -> list[int]:
    """The ends of the system prompt with tools, of the messages before the last one, and of the last one."""
    head = [message for message in messages[:1] if message["role"] == "system"]
    others = [*head, {"role": "user", "content": ""}], messages
    places = []
    for place in (
        lambda: min(rendering.before_question(others[0], tokens), len(tokens)),
        lambda: rendering.before_question(messages, tokens),
        lambda: rendering.before_answer(messages, tokens),
    ):
        try:
            places.append(place())
        except MoefluxError:  # a template may refuse an invented message
            continue
    return sorted({place for place in places if 0 < place < len(tokens)})


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turns errors into refusals, without the remedy that helps only on a command line."""
    try:
        yield
    except BadRequestError:
        raise
    except (RequestError, TokenizerError) as error:
        message = str(error).split("; --ignore-chat-template")[0].split(", or use --ignore-chat-template")[0]
        raise BadRequestError(message) from error

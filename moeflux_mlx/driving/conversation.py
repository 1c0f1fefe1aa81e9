"""A conversation: messages, and the session that knows the tokens of what has been said."""

import base64
import bisect
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PromptCacheError, RequestError
from ..files import JsonDict, JsonValue
from ..state.prompt_file import Fingerprint, read_prompt_header
from ..text.boundaries import Rendering
from ..text.calls.reader import AnswerReader
from ..text.chat_template import with_places
from ..text.events import Reasoning, Text
from ..text.results import Message
from ..text.tokenizer import TokenizerWrapper
from .generation import within_limit
from .prompt import collapsed, places_of, prompt_with_images
from .session import AnswerOptions, Session

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Spelling:
    """Encodes a text that was generated token by token, and what follows it, with the same tokens again.

    A model may generate other tokens for a text than the tokenizer would; encoding the text again would then mean
    computing it again. Where a new text diverges from the old one, the tokens up to the last special token before are
    reused: no token before it depends on what follows.

    Args:
        tokenizer: made or read the tokens.
        tokens: of a text so far.
    """

    def __init__(self, tokenizer: TokenizerWrapper, tokens: Sequence[int]):
        self.tokenizer, self.tokens = tokenizer, list(tokens)
        speller, specials, pieces, letters = tokenizer.detokenizer, tokenizer.all_special_ids, [], 0
        self._ends = [(0, 0)]  # (letters, tokens) after each special token and the last one, if all bytes are spelt
        for count, token in enumerate(self.tokens, start=1):
            speller.add_token(token)
            pieces.append(speller.last_segment)
            letters += len(pieces[-1])
            if (token in specials or count == len(self.tokens)) and speller.is_whole:
                self._ends.append((letters, count))
        self.text = "".join(pieces)

    def known(self, text: str) -> tuple[int, int]:
        """How many letters of `text` are spelt by how many of the tokens."""
        shared = len(os.path.commonprefix([self.text, text]))
        return self._ends[bisect.bisect_right(self._ends, (shared, len(self.tokens))) - 1]

    def encode(self, text: str) -> list[int]:
        """Tokens of a rendered text, its special tokens written out: the known ones, and new ones after them."""
        letters, count = self.known(text)
        if not count:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self.tokens[:count] + self.tokenizer.encode_after(text[letters:])


Pieces = Generator[tuple[str, bool], None, None]


class AskOptions(AnswerOptions, total=False):
    """The keywords of `Conversation.ask` that say how it answers."""

    prompt_progress_callback: Callable[[int, int], object] | None


class Conversation:
    """Messages, and the session that knows the tokens of what has been said."""

    def __init__(
        self,
        session: Session,
        tokenizer: TokenizerWrapper,
        template_config: JsonDict,
        system: str | None = None,
    ):
        self.session, self.tokenizer = session, tokenizer
        self.rendering = Rendering(tokenizer, template_config, self._encode)
        self.system = system
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The messages in the form that the template takes."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *map(_for_template, self.turns)]

    def ask(self, text: str, images: Sequence[bytes] = (), **generation: "Unpack[AskOptions]") -> Pieces:
        """Yields the answer in pieces (text, whether it is reasoning) to a text, with image files before it.

        If the iterator is closed or fails, the part that was answered stays in the conversation; a message without any
        answer is removed.
        """
        files = [base64.b64encode(image).decode() for image in images]
        self.turns.append({"role": "user", "content": text, **({"images": files} if files else {})})
        said: dict[bool, str] = {False: "", True: ""}
        try:
            yield from self._answer(said, generation)
        finally:
            self._keep(said[False], said[True])

    def _answer(self, said: dict[bool, str], generation: AskOptions) -> Pieces:
        """Yields the pieces of the answer to `messages` and appends them to `said`."""
        rendered = self.rendering.text(self.messages)
        prompt = self._with_images(self._encode(rendered))
        self._check_room(prompt)
        asked = generation.get("max_tokens", -1)
        generation["max_tokens"] = within_limit(self.session.model.args, len(prompt), asked)
        places = places_of(prompt)
        end = places[self.rendering.before_answer(self.messages, collapsed(prompt, self._token))]
        channels = self.tokenizer.channels
        reader = AnswerReader(None, inside_reasoning=channels.opens(rendered), channels=channels)
        with closing(self.session.respond(prompt, boundaries=[end], **generation)) as responses:
            for response in responses:
                events = reader.feed(response.text) + (reader.finish() if response.finish_reason else [])
                for event in events:
                    assert isinstance(event, (Reasoning, Text))  # without declared tools, no calls are parsed
                    is_thinking = isinstance(event, Reasoning)
                    said[is_thinking] += event.text
                    yield event.text, is_thinking

    def _keep(self, answer: str, thinking: str) -> None:
        if not answer and not thinking:
            self.turns.pop()
            return
        message = {"role": "assistant", "content": answer.lstrip("\n")}
        if thinking:
            message["reasoning_content"] = thinking.strip("\n")
        self.turns.append(message)

    def save(self, path: Path, fingerprint: Fingerprint) -> None:
        """Raises PromptCacheError if, for example, `path` is another program's file, and SnapshotError."""
        if path.exists():
            read_prompt_header(path)
        if self.turns:
            # A recurrent state that covers more than the common prefix with the next prompt would be useless.
            known = self.rendering.after_answer(self.messages, collapsed(self.session.tokens, self._token))
            self.session.rewind(places_of(self.session.tokens)[known])
        self.session.save(path, fingerprint, {"system": self.system, "turns": self.turns})

    def load(self, path: Path, fingerprint: Fingerprint) -> None:
        """Raises PromptCacheError: the file is damaged, belongs to another model, or holds no conversation."""
        extra = read_prompt_header(path).extra
        system, turns = extra.get("system"), extra.get("turns")
        if not isinstance(system, str | None) or not isinstance(turns, list) or not _are_messages(turns):
            raise PromptCacheError(f"{path} holds no conversation; give a file made by /save")
        self.session.load(path, fingerprint)
        self.system, self.turns = system, turns

    def _encode(self, rendered: str) -> list[int]:
        """Tokens of a rendered conversation; its beginning keeps the session's tokens as far as their text agrees."""
        return Spelling(self.tokenizer, collapsed(self.session.tokens, self._token)).encode(rendered)

    @property
    def _token(self) -> int:
        """The image token; 0 if the model reads no images."""
        vision = self.session.model.vision
        return max(vision.token, 0) if vision is not None else 0

    def _with_images(self, tokens: list[int]) -> Sequence[int]:
        files = [base64.b64decode(file) for turn in self.turns for file in turn.get("images", ())]
        return prompt_with_images(tokens, files, self.session.model) if files else tokens

    def _check_room(self, prompt: Sequence[int]) -> None:
        """Raises RequestError: there is no room for a token after `prompt`."""
        limit = self.session.model.args.max_position_embeddings
        if len(prompt) < limit:
            return
        system = self.messages[: -len(self.turns)]
        alone = self._encode(self.rendering.text([*system, _for_template(self.turns[-1])]))
        if len(alone) >= limit:
            raise RequestError(f"the message has {len(alone)} tokens and the model takes {limit}; shorten it")
        raise RequestError(
            f"the conversation has {len(prompt)} tokens and the model takes {limit}; begin anew with /reset"
        )


def _for_template(turn: Message) -> Message:
    """A message with one placeholder per image."""
    rest = {key: value for key, value in turn.items() if key != "images"}
    return {**rest, "content": with_places(turn["content"], len(turn["images"]))} if "images" in turn else rest


def _are_messages(turns: list[JsonValue]) -> bool:
    """Whether all are dicts of strings with at least "role" and "content", and optionally images in base64."""
    dicts = [turn for turn in turns if isinstance(turn, dict) and {"role", "content"} <= set(turn)]
    values = [value for turn in dicts for key, value in turn.items() if key != "images"]
    files = [turn.get("images", []) for turn in dicts]
    values += [file for one in files if isinstance(one, list) for file in one]
    return (
        len(dicts) == len(turns)
        and all(isinstance(one, list) for one in files)
        and all(isinstance(value, str) for value in values)
    )

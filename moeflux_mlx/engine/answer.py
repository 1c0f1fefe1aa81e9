"""The answer of a session, as a text that a loop drives."""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from ..experts.stats import Asked
from .decoding import Decoding
from .generation import SamplerOptions
from .loop import Text
from .prompt import Prompt

if TYPE_CHECKING:
    from .session import Session


class Answer(Text):
    """An answer of a session, for a `Loop`.

    Attributes:
        session: absorbs the prompt, and each token when the next one has been computed.
        asked: the experts that its tokens requested, without the prompt's, if they are counted.
    """

    asked = Asked()

    def __init__(
        self, session: "Session", prompt: Prompt, boundaries: Sequence[int], max_tokens: int, choice: SamplerOptions
    ):
        ends = session.tokenizer.eos_token_ids
        given = session.model, session.cache, prompt
        super().__init__(*given, max_tokens=max_tokens, is_end=lambda tokens: tokens[-1] in ends, **choice)
        self.session, self._boundaries = session, boundaries

    def compute(self) -> Generator[int, None, mx.array]:
        return self.session.absorb(self.prompt, self._boundaries)

    def decode(self, logits: mx.array) -> Decoding:
        session, given = self.session, (self.model, self.cache, self.prompt.tokens, logits)
        return Decoding(*given, draft_limit=session.draft_limit, drafts=session.drafts, **self._options)

    def pause(self) -> None:
        if self._pieces is not None:
            super().pause()
            self.session.agree_again(keep_half=True)
            self.session.save_states(self.prompt)

    def follow(self) -> None:
        assert self.decoding is not None
        self.asked = self.decoding.asked
        if len(self.tokens) > 1:
            self.session.append(self.tokens[-2], keep=self.decoding.is_settled)
        else:
            self.session.begin_answer()

    def end(self, error: BaseException | None = None) -> None:
        """Ends it: the session then holds the prompt and all tokens but the last; after a DeviceError it is empty."""
        if self.is_over:
            return
        session = self.session
        try:
            super().end(error)
            session.points.drop_after(len(session.tokens))  # the last kept state may be one token further
        finally:
            if error is not None:
                session.recover(error)
            session.save_states(self.prompt)

"""Drives single prompts and answers to a result, where a test needs no loop."""

from moeflux_mlx.driving.loop import Loop, absorb_prompt, advance_together
from moeflux_mlx.experts.routing import finished


def absorbed(prefill, progress=lambda done, total: None):
    """The logits after the last token of a prompt."""
    return finished(absorb_prompt(prefill), lambda done: progress(done, len(prefill.tokens)))


def next_token(decoding):
    """The next token and its logprobs of an answer that shares no step; raises its error."""
    return given(advance_together([decoding])[0])


def given(outcome):
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class Stopped(Exception):
    """Raised by a progress callback to leave a prompt."""


def pieces_of(answer):
    """Yields the tokens of the prompt that are done, until the answer begins; closing it pauses the prompt."""
    try:
        while answer.is_in_prompt and (done := answer.advance_prompt()) is not None:
            yield done
    finally:
        answer.pause()


def advance(answer):
    """The event of the next token of an answer that is computed by itself; raises its error."""
    loop = Loop()
    loop.add(answer)
    for event in events_of(loop):
        if event.error is not None:
            raise event.error
        if event.token is not None:
            return event


def events_of(loop):
    """Yields what a loop does until no text is left."""
    while loop.texts:
        yield from loop.step()


def absorb_into(session, prompt, progress=lambda done, total: None):
    """Brings a session to a prompt; returns the logits after it."""
    answer = session.answer(prompt)
    try:
        for done in pieces_of(answer):
            progress(done, len(prompt))
        return answer.decoding._logits
    finally:
        answer.end()

"""Advances several decodings with one step of the model; each chooses the token that it would choose alone."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import mlx.core as mx

from ..errors import DeviceError, ExpertIOError, RequestError
from ..model.step import MAX_ROWS, Step
from ..ops.limits import within_limits
from .decoding import ChosenToken, Decoding, choose_likeliest

Outcome = tuple[int, mx.array] | Exception  # a token and its logprobs [vocab_size], or the error
Made = TypeVar("Made")


def advance_together(decodings: Sequence[Decoding]) -> list[Outcome]:
    """Returns each decoding's next token with its logprobs [vocab_size] float32, or the error that ends it.

    The decodings that share a step may change from call to call without changing a bit of any result. If the GPU can
    continue without the host, and no logits processor needs the tokens first, the next step begins before these tokens
    have arrived; closing a decoding then takes back its row of that step.

    If a step fails because experts cannot be read or a row is refused, each row is computed by itself, so only the
    decodings whose rows are affected fail.

    Args:
        decodings: at most `MAX_ROWS`, all of one model, each with its own cache and none of them done.

    Raises:
        RequestError: the decodings cannot share a step; nothing has changed.
        DeviceError: memory is exhausted or the GPU timed out. Like an interrupt, this ends all decodings.
    """
    _check(decodings)
    if len(decodings) == 1:
        return [attempt(decodings[0].advance)]
    failed = _share_step([one for one in decodings if one.needs_row])
    chosen = [failed[one] if one in failed else attempt(one.hand_out) for one in decodings]
    ahead = [one for one, own in zip(decodings, chosen, strict=True) if isinstance(own, tuple) and not one.is_done]
    if ahead and all(one.may_run_ahead for one in ahead):
        failed = _run_ahead(ahead)
        chosen = [failed.get(one, own) for one, own in zip(decodings, chosen, strict=True)]
    with within_limits():
        mx.eval([arrays for arrays in chosen if isinstance(arrays, tuple)])
    return [
        attempt(partial(one.known, arrays)) if isinstance(arrays, tuple) else arrays
        for one, arrays in zip(decodings, chosen, strict=True)
    ]


def _check(decodings: Sequence[Decoding]) -> None:
    if len(decodings) > MAX_ROWS:
        raise RequestError(f"{len(decodings)} decodings in a step; at most {MAX_ROWS}: advance them in parts")
    layers = [id(layer) for one in decodings for layer in one.cache]
    if len(set(layers)) < len(layers):
        raise RequestError("a cache is in two decodings of a step; give each one of its own (model.make_cache())")
    if len({id(one.model) for one in decodings}) > 1:
        raise RequestError("the decodings of a step have different models; advance those of each model separately")


def _share_step(decodings: Sequence[Decoding]) -> dict[Decoding, Exception]:
    """Computes one row per decoding and chooses the tokens; returns the errors of the decodings that failed."""
    if not decodings:
        return {}
    try:
        step = decodings[0].model.step([one.rows for one in decodings])
    except (ExpertIOError, RequestError):
        taken = [attempt(one.take_own_row) for one in decodings]
    else:
        taken = _take_rows(decodings, step)
    return {one: error for one, error in zip(decodings, taken, strict=True) if error is not None}


def _run_ahead(decodings: Sequence[Decoding]) -> dict[Decoding, Exception]:
    """Begins the step after the tokens just handed out; returns the errors of the decodings that failed."""
    try:
        step = decodings[0].model.step([one.rows for one in decodings])
    except (ExpertIOError, RequestError):
        return {}  # the error is raised again when these rows are needed
    taken = _take_rows(decodings, step, ahead=True)
    return {one: error for one, error in zip(decodings, taken, strict=True) if error is not None}


def _take_rows(decodings: Sequence[Decoding], step: Step, ahead: bool = False) -> list[Exception | None]:
    """Begins to choose each decoding's next token from its row of the step: if all take the likeliest, at once."""
    chosen = list[ChosenToken | None]([None] * len(decodings))
    if len(decodings) > 1 and all(one.takes_likeliest for one in decodings):
        with within_limits():
            chosen = list(choose_likeliest(step.logits))
    rows = zip(decodings, range(len(decodings)), chosen, strict=True)
    return [attempt(partial(one.take_row, step, i, ahead, own)) for one, i, own in rows]


def attempt(act: Callable[[], Made]) -> Made | Exception:
    """Returns the result of `act`, or its error. A DeviceError is raised, because it affects all decodings."""
    try:
        with within_limits():
            return act()
    except DeviceError:
        raise
    except Exception as error:
        return error

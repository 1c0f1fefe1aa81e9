"""Several decodings that share one step of the model; each chooses what it would choose alone."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import mlx.core as mx

from ..errors import DeviceError, ExpertIOError, RequestError
from ..model.step import MAX_ROWS
from ..ops.limits import within_limits
from .decoding import Decoding

Outcome = tuple[int, mx.array] | Exception  # a token and its logprobs [vocab_size], or why there is none
Made = TypeVar("Made")


def advance_together(decodings: Sequence[Decoding]) -> list[Outcome]:
    """The next token of each decoding with its logprobs [vocab_size] float32, or the error that ends this decoding.

    The decodings that share a step may change from call to call; this changes no bit. If the GPU can go on without the
    host, and no processor needs to see a token first, the next step of all begins before these tokens have arrived; a
    decoding that is closed then takes its row of that step back.

    If a step fails because experts cannot be read or a row is refused, each row is computed by itself, so that only
    those decodings fail whose rows need these experts.

    Args:
        decodings: of one model, at most `MAX_ROWS`, each with a cache of its own; none of them is done.

    Raises:
        RequestError: they cannot share a step; nothing has changed.
        DeviceError: memory or the GPU's time is at an end. Like an interrupt, this ends all the decodings.
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
        raise RequestError("the decodings of a step have different models; advance those of each model apart")


def _share_step(decodings: Sequence[Decoding]) -> dict[Decoding, Exception]:
    """Lets each choose a token after its row; the errors of those that have none."""
    if not decodings:
        return {}
    try:
        step = decodings[0].model.step([one.rows for one in decodings])
    except (ExpertIOError, RequestError):
        taken = [attempt(one.take_own_row) for one in decodings]
    else:
        taken = [attempt(partial(one.take_row, step, i)) for i, one in enumerate(decodings)]
    return {one: error for one, error in zip(decodings, taken, strict=True) if error is not None}


def _run_ahead(decodings: Sequence[Decoding]) -> dict[Decoding, Exception]:
    """Begins the step after the tokens that were handed out; the errors of those that cannot choose from it."""
    try:
        step = decodings[0].model.step([one.rows for one in decodings])
    except (ExpertIOError, RequestError):
        return {}  # said when these rows are needed
    taken = [attempt(partial(one.take_row, step, i, ahead=True)) for i, one in enumerate(decodings)]
    return {one: error for one, error in zip(decodings, taken, strict=True) if error is not None}


def attempt(act: Callable[[], Made]) -> Made | Exception:
    """What `act` returns, or its error. Raises DeviceError: it concerns everything that is being computed."""
    try:
        with within_limits():
            return act()
    except DeviceError:
        raise
    except Exception as error:
        return error

"""Choosing the next token: samplers and logits processors, in mlx-lm's words and with its meaning.

A sampler maps log-probabilities [B, V] to token ids [B]; a logits processor maps (tokens so far, logits [B,
V]) to logits [B, V]. Both compute in float32, and both check their settings when they are made, not at the
first token. `Constraint` allows only the tokens of a mask. Nothing here knows about models or tokenizers.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import numpy as np

from ..errors import RequestError
from ..foreign import public
from ..ops.backend import view
from ..text.structured import Mask

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

# 1 / temp must stay finite in float32.
MIN_TEMP = 1e-30
NEG_INF = -math.inf


@public()
def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] | None = None,
    *,
    key: mx.array | None = None,
) -> Sampler:
    """Make a function that draws one token for each row of log-probabilities.

    The filters run in the order top-p, min-p, XTC, top-k, each on what the one before left, and all of them on the
    probabilities at temperature 1; the temperature is applied last, in the draw.

    Args:
        temp: 0 takes the most likely token (the lowest id of several equal ones) and ignores everything else;
            otherwise at least 1e-30.
        top_p: in [0, 1]. Keep the most likely tokens whose probabilities first add up to `top_p`; tokens as
            likely as the last one kept stay too. 0 and 1 switch it off.
        min_p: in [0, 1]. Keep tokens at least `min_p` times as likely as the most likely one. 0 is off.
        top_k: keep exactly this many most likely tokens; which of several equally likely tokens at the limit stay is
            not specified. 0, or the vocabulary size and above, is off.
        xtc_probability: in [0, 1]. The probability with which XTC ("exclude top choices", the sampler that p-e-w
            proposed in text-generation-webui#6335) drops a step's most likely tokens. 0 is off.
        xtc_threshold: in [0, 0.5]. XTC drops each token that is more likely than the least likely one above this.
        xtc_special_tokens: token ids that XTC never drops, such as those that end a text.
        min_tokens_to_keep: at least 1. min-p keeps at least this many of the most likely tokens.
        key: a key from `mx.random.key(seed)`. The sampler then draws from its own sequence, independent of other uses
            of random numbers. None draws from MLX's global state, which `mx.random.seed(seed)` sets.

    Returns:
        f(logprobs [B, V], any float dtype) -> tokens [B], uint32.

    Raises:
        RequestError: a setting is outside its range.
    """
    _check_sampler(temp, top_p, min_p, top_k, min_tokens_to_keep)
    _check_share("xtc_probability", xtc_probability)
    _check_share("xtc_threshold", xtc_threshold, 0.5)
    for token in xtc_special_tokens or ():
        _check_int("xtc_special_tokens", token, 0)
    if temp == 0:
        return greedy

    def next_key() -> mx.array | None:
        nonlocal key
        if key is None:
            return None
        key, own = mx.random.split(key)
        return own

    filters: list[Callable[[mx.array], mx.array]] = []
    if 0 < top_p < 1:
        filters.append(lambda x: keep_top_p(x, top_p))
    if min_p > 0:
        filters.append(lambda x: keep_min_p(x, min_p, min_tokens_to_keep))
    if xtc_probability > 0:
        spared = xtc_special_tokens or ()
        filters.append(lambda x: drop_top_choices(x, xtc_probability, xtc_threshold, spared, next_key()))
    if top_k > 0:
        filters.append(lambda x: keep_top_k(x, top_k))

    def sample(logprobs: mx.array) -> mx.array:
        logprobs = logprobs.astype(mx.float32)
        for keep in filters:
            logprobs = keep(logprobs)
        return mx.random.categorical(logprobs * (1 / temp), key=next_key())

    return sample


@public()
def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    presence_context_size: int = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int = 20,
) -> list[LogitsProcessor]:
    """Make the functions that change logits before they become probabilities, in the order they apply.

    Args:
        logit_bias: token id -> what is added to its logit; -inf bans the token.
        repetition_penalty: logits of recent tokens are divided by it where positive and multiplied where
            negative (CTRL, arXiv:1909.05858, section 4.1). None or 0 is off.
        repetition_context_size: how many of the last tokens count as recent, at least 1.
        presence_penalty: subtracted from the logit of each recent token; negative values add. None or 0 is off.
        presence_context_size: as above.
        frequency_penalty: subtracted from a token's logit once for each of its occurrences among the recent tokens.
        frequency_context_size: as above.

    Returns:
        A list of f(tokens [T], logits [B, V]) -> logits [B, V], float32. The arguments are left as they were.

    Raises:
        RequestError: a setting is outside its range; a biased token id that is not in the vocabulary is
            noticed at the first call.
    """
    processors = []
    if logit_bias:
        processors.append(_logit_bias(logit_bias))
    if repetition_penalty is not None and repetition_penalty != 0:
        processors.append(_repetition_penalty(repetition_penalty, repetition_context_size))
    for name, penalty, size, counts in (
        ("presence", presence_penalty, presence_context_size, False),
        ("frequency", frequency_penalty, frequency_context_size, True),
    ):
        if penalty is not None and penalty != 0:
            processors.append(_subtracting(name, penalty, size, counts))
    return processors


def likeliest(logprobs: mx.array, count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens of logprobs [V] with their log-probabilities; the lowest of equal ids first."""
    values = np.array(logprobs, np.float32)
    count = min(count, values.size)
    if count == 0:
        return []
    least = np.partition(values, values.size - count)[values.size - count]
    ids = np.flatnonzero(values >= least)
    ids = ids[np.argsort(-values[ids], kind="stable")][:count]
    return [(int(token), float(values[token])) for token in ids]


def greedy(logprobs: mx.array) -> mx.array:
    """The most likely token of each row [B, V] -> [B]; the lowest id of several equal ones."""
    if logprobs.dtype == mx.float32 and mx.default_device() == mx.cpu:
        return mx.array(view(logprobs).argmax(axis=-1).astype(np.uint32))
    return mx.argmax(logprobs, axis=-1)


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Set to -inf all but the smallest set of most likely tokens that holds `top_p` of each row's mass."""
    ascending = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ascending)
    likelier = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    total = likelier[..., :1] + probs[..., :1]
    # A token is dropped when the likelier tokens already hold the requested mass; the likeliest token stays even if
    # that mass is too small for a float32.
    dropped = mx.sum(likelier[..., :-1] >= top_p * total, axis=-1, keepdims=True)
    least = mx.take_along_axis(ascending, dropped, axis=-1)
    return mx.where(logprobs < least, NEG_INF, logprobs)


def keep_min_p(logprobs: mx.array, min_p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Set to -inf the tokens less than `min_p` times as likely as the most likely one of their row."""
    least = mx.max(logprobs, axis=-1, keepdims=True) + math.log(min_p)
    kept = mx.where(logprobs < least, NEG_INF, logprobs)
    count = min(min_tokens_to_keep, logprobs.shape[-1])
    if count == 1:
        return kept
    top = mx.argpartition(-logprobs, kth=count - 1, axis=-1)[..., :count]
    return mx.put_along_axis(kept, top, mx.take_along_axis(logprobs, top, axis=-1), axis=-1)


def keep_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """Set to -inf all but the `top_k` most likely tokens of each row."""
    if top_k >= logprobs.shape[-1]:
        return logprobs
    rest = mx.argpartition(-logprobs, kth=top_k - 1, axis=-1)[..., top_k:]
    return mx.put_along_axis(logprobs, rest, mx.array(NEG_INF, logprobs.dtype), axis=-1)


def drop_top_choices(
    logprobs: mx.array, probability: float, threshold: float, spared: Sequence[int] = (), key: mx.array | None = None
) -> mx.array:
    """With `probability` for each row, set to -inf the tokens that are more likely than the least likely one above
    `threshold`, except those in `spared`.
    """
    probs = mx.softmax(logprobs, axis=-1)
    least = mx.min(mx.where(probs > threshold, probs, mx.inf), axis=-1, keepdims=True)
    kept = mx.where(probs > least, NEG_INF, logprobs)
    if spared:
        _check_vocabulary("xtc_special_tokens", max(spared), logprobs)
        places = mx.array(list(spared))
        kept[..., places] = logprobs[..., places]
    drops = mx.random.uniform(shape=(*logprobs.shape[:-1], 1), key=key) <= probability
    return mx.where(drops, kept, logprobs)


def _logit_bias(bias: Mapping[int, float]) -> LogitsProcessor:
    for token, value in bias.items():
        _check_int("logit_bias token id", token, 0)
        if not (_is_number(value) and value < math.inf):
            raise RequestError(f"logit_bias for token {token} is {value!r}; it must be finite, or -inf to ban it")
    largest = max(bias)
    ids, values = mx.array(list(bias)), mx.array(list(bias.values()), dtype=mx.float32)

    def add_bias(_tokens: mx.array, logits: mx.array) -> mx.array:
        _check_vocabulary("logit_bias", largest, logits)
        return logits.astype(mx.float32).at[..., ids].add(values)

    return add_bias


def _repetition_penalty(penalty: float, context_size: int) -> LogitsProcessor:
    if not (_is_number(penalty) and 0 < penalty < math.inf):
        raise RequestError(f"repetition_penalty is {penalty!r}; it must be positive and finite, or 0 for none")
    _check_int("repetition_context_size", context_size, 1)

    def penalise(tokens: mx.array, logits: mx.array) -> mx.array:
        logits = logits.astype(mx.float32)
        if len(tokens) == 0:
            return logits
        recent = mx.array(tokens[-context_size:])
        recent = mx.broadcast_to(recent, (*logits.shape[:-1], recent.size))
        recent_logits = mx.take_along_axis(logits, recent, axis=-1)
        recent_logits = mx.where(recent_logits < 0, recent_logits * penalty, recent_logits / penalty)
        return mx.put_along_axis(logits, recent, recent_logits, axis=-1)

    return penalise


def _subtracting(name: str, penalty: float, context_size: int, counts: bool) -> LogitsProcessor:
    """Subtracts `penalty` from the logits of recent tokens, once, or if `counts` is set, once per occurrence."""
    if not (_is_number(penalty) and math.isfinite(penalty)):
        raise RequestError(f"{name}_penalty is {penalty!r}; it must be a finite number")
    _check_int(f"{name}_context_size", context_size, 1)

    def penalise(tokens: mx.array, logits: mx.array) -> mx.array:
        logits = logits.astype(mx.float32)
        ids, times = np.unique(np.array(tokens[-context_size:]), return_counts=True)
        if not ids.size:
            return logits
        taken = penalty * (times if counts else np.ones_like(times))
        return logits.at[..., mx.array(ids)].add(mx.array(-taken, mx.float32))

    return penalise


def _check_sampler(temp: float, top_p: float, min_p: float, top_k: int, min_tokens_to_keep: int) -> None:
    if not (_is_number(temp) and (temp == 0 or MIN_TEMP <= temp < math.inf)):
        raise RequestError(f"temp is {temp!r}; it must be 0 (greedy) or a finite number from {MIN_TEMP} up")
    _check_share("top_p", top_p)
    _check_share("min_p", min_p)
    _check_int("top_k", top_k, 0)
    _check_int("min_tokens_to_keep", min_tokens_to_keep, 1)


def _check_share(name: str, value: float, most: float = 1) -> None:
    if not (_is_number(value) and 0 <= value <= most):
        raise RequestError(f"{name} is {value!r}; it must be a number between 0 and {most}")


def _check_vocabulary(name: str, largest: int, logits: mx.array) -> None:
    """Raises RequestError: a token is not in logits [B, V]. MLX does not check indices and would read other memory."""
    if largest >= logits.shape[-1]:
        raise RequestError(f"{name} names token {largest}; the largest is {logits.shape[-1] - 1}")


def _check_int(name: str, value: int, least: int) -> None:
    if not (_is_number(value) and isinstance(value, int) and value >= least):
        raise RequestError(f"{name} is {value!r}; it must be an integer, at least {least}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Constraint:
    """A logits processor for one generation: sets the logits of tokens that `mask` forbids to -inf. A token that
    replaces forbidden ones gets the largest of their logits and its own.

    The tokens of the first call are the prompt; the mask consumes each later token once.
    """

    def __init__(self, mask: Mask):
        self.mask = mask
        self._known: int | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        for token in np.array(tokens[len(tokens) if self._known is None else self._known :]).tolist():
            self.mask.consume(token)
        self._known = len(tokens)
        allowed = np.zeros(logits.shape[-1], bool)
        by_mask = self.mask.allowed()[: len(allowed)]
        allowed[: len(by_mask)] = by_mask
        logits = logits.astype(mx.float32)
        redirected = self.mask.redirected()
        if redirected is not None:
            ends, other = redirected
            logits[:, other] = logits[:, [*ends, other]].max(axis=-1)
        return mx.where(mx.array(allowed), logits, NEG_INF)

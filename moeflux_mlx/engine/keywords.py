"""Keywords of the public functions. A function that passes keywords on shows them in its signature, and refuses a wrong
one in its own name, with the nearest right one, or with what replaces it here if it is a keyword of mlx-lm.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from ..errors import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

# Keywords of mlx-lm's functions that ours do not have.
REPLACED = {
    "adapter_path": "fuse the adapter into the checkpoint, with mlx_lm.fuse",
    "draft_model": "drafts come from lookup in the text or from a draft head; use load(draft='auto')",
    "get_model_classes": "the model's class follows from its config.json",
    "input_embeddings": "give token ids, and images with image=",
    "kv_bits": "the bits of cached keys and values are set when the model is loaded; use load(kv_bits=8)",
    "kv_group_size": "groups have 64 values; use load(kv_bits=8)",
    "lazy": "load(expert_io=) says how experts are read; the other weights are always read at once",
    "max_kv_size": "caches keep every position; load(kv_bits=8) makes them about half as large",
    "model_config": "change config.json in the model's directory",
    "num_draft_tokens": "the number of drafts follows from their measured gain; use load(draft='auto')",
    "prefill_batch_size": "prompts are computed one after the other",
    "quantized_kv_start": "every position is rounded when it arrives; use load(kv_bits=8)",
    "return_config": "the configuration is model.args",
    "stream": "the model computes on MLX's default stream",
    "strict": "tensors that are missing or not known are always refused",
    "tokenizer_config": "change tokenizer_config.json in the model's directory",
    "trust_remote_code": "code of a repository is never run",
}
# mlx-lm reads these only together with another one, which is refused.
WITHOUT_INFLUENCE = {"kv_group_size", "num_draft_tokens", "quantized_kv_start"}


def checks_keywords(*passed_to: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a public function, whose calls then raise TypeError for a wrong keyword. If it passes its `**kwargs` to
    other functions, their parameters appear in its signature:

        def step(model, *, span=None): ...
        @checks_keywords(step)
        def run(model, **kwargs): ...       # run(model, *, span=None)
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        theirs = {name: one for target in passed_to for name, one in inspect.signature(target).parameters.items()}
        more = [one.replace(kind=one.KEYWORD_ONLY) for name, one in theirs.items() if name not in signature.parameters]
        return checking(function, signature.replace(parameters=[*own, *more]))

    return decorate


def checking(function: Callable[P, R], signature: inspect.Signature) -> Callable[P, R]:
    """`function` with this signature; keywords that are not in it are refused."""

    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **_checked(name, signature.parameters, kwargs))

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _checked(function: str, known: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call, without those of mlx-lm that ask for nothing, such as `max_kv_size=None`.

    Raises:
        TypeError: the function has no such keyword.
    """
    for name, value in keywords.items():
        if name in known:
            continue
        if name not in REPLACED:
            meant = did_you_mean(name, known) or f"; it takes {', '.join(known)}"
            raise TypeError(f"{function}() has no argument {name!r}{meant}")
        if not _asks_for_nothing(name, value):
            raise TypeError(f"{function}() has no argument {name!r}: {REPLACED[name]}")
    return {name: value for name, value in keywords.items() if name in known}


def _asks_for_nothing(name: str, value: object) -> bool:
    return name in WITHOUT_INFLUENCE or (isinstance(value, (bool, dict, type(None))) and not value)

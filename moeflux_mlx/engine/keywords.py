"""Arguments of the public functions. A function that passes keywords on shows them in its signature, and refuses a
wrong one in its own name, with the nearest right one, or with what replaces it here if it is an argument of mlx-lm.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from ..errors import did_you_mean
from ..files import JsonDict
from ..foreign import Replacements

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def public(
    *passed_to: Callable[..., object], replaced: Replacements | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a public function, whose calls then raise TypeError in its name for wrong arguments. If it passes its
    `**kwargs` to other functions, their parameters appear in its signature:

        def step(model, *, span=None): ...
        @public(step)
        def run(model, **kwargs): ...       # run(model, *, span=None)

    Args:
        passed_to: the other functions.
        replaced: arguments that are refused with their own remedies.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        theirs = {name: one for target in passed_to for name, one in inspect.signature(target).parameters.items()}
        more = [one.replace(kind=one.KEYWORD_ONLY) for name, one in theirs.items() if name not in signature.parameters]
        return with_signature(function, signature.replace(parameters=[*own, *more]), replaced or {})

    return decorate


def with_parameters_of(make: Callable[P, S], replaced: Replacements) -> "Callable[[Callable[[S], R]], Callable[P, R]]":
    """Decorates a function of one value, which then takes the parameters of `make`, the value's class:

        @with_parameters_of(Size, {})       # class Size has width and height
        def area(size): ...                 # area(width, height)

    Args:
        make: a class.
        replaced: arguments that are refused with their own remedies.
    """

    def decorate(use: Callable[[S], R]) -> Callable[P, R]:
        @functools.wraps(use)
        def make_and_use(*args: P.args, **kwargs: P.kwargs) -> R:
            return use(make(*args, **kwargs))

        signature = inspect.signature(make).replace(return_annotation=inspect.signature(use).return_annotation)
        return with_signature(make_and_use, signature, replaced)

    return decorate


def with_signature(function: Callable[P, R], signature: inspect.Signature, replaced: Replacements) -> Callable[P, R]:
    """`function` with this signature, to which the arguments of a call must fit."""
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **_checked(name, signature, replaced, args, kwargs))

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    call.__annotations__["return"] = signature.return_annotation
    return call


def _checked(
    function: str,
    signature: inspect.Signature,
    replaced: Replacements,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> JsonDict:
    """The keywords of a call, without those of mlx-lm that ask for nothing, such as `max_kv_size=None`.

    Raises:
        TypeError: the arguments do not fit.
    """
    known = {name: value for name, value in keywords.items() if name in signature.parameters}
    for name in keywords.keys() - known:
        if name not in replaced:
            names = [one for one in signature.parameters if one != "self"]
            meant = did_you_mean(name, names) or f"; it takes {', '.join(names)}"
            raise TypeError(f"{function}() has no argument {name!r}{meant}")
        if not _is_equal(keywords[name], replaced[name].default):
            raise TypeError(f"{function}() has no argument {name!r}: {replaced[name].remedy}")
    try:
        signature.bind(*args, **known)
    except TypeError as error:
        raise TypeError(f"{function}(): {error}") from None
    return known


def _is_equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default  # an array would be compared by element

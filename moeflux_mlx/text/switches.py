"""Template variables that say whether and how much a model should reason."""

from ..files import JsonDict

OFF = ("none", "no_think")
LADDER = (*OFF, "minimal", "low", "medium", "high", "xhigh", "max")
SPOKEN = ("low", "medium", "high")  # the words that gpt-oss knows; its template prints any word
NAMES = ("reasoning_effort", "reasoning_strength")  # of the variable with the effort
# Inkling's template prints a number, and 0 for a word; which number means which word: vLLM's renderer of Inkling.
NUMERIC = "Thinking effort level"
NUMBERS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99, "max": 0.99}


def switches(template: str, thinking: bool | None, effort: str | None) -> JsonDict:
    """The variables for `template` that express the request; none if it has no wish.

    `enable_thinking` (Qwen, GLM) and `thinking` (DeepSeek, Kimi) take the wish as it is, `thinking_mode` (MiniMax-M3)
    as a word, and `low_effort` or `medium_effort` (Nemotron) is set if `effort` is nearer to that than to "high".
    `reasoning_effort`, or `reasoning_strength` (Muse Spark), takes that of the words in the template's quotes which is
    nearest to `effort`, or a number (Inkling); where it is the only switch, it also says whether to reason.

    Args:
        thinking: whether to reason; None leaves it to the model.
        effort: a word such as "low", "none" for no reasoning; None leaves it to the model.
    """
    given: JsonDict = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
    if thinking is not None and "thinking_mode" in template:
        given["thinking_mode"] = "enabled" if thinking else "disabled"
    flags = _flags(template)
    given |= {f"{word}_effort": True for word in flags if effort and _nearest(effort, [word, "high"]) == word}
    name = _name(template)
    if name is None:
        return given
    words = _words(template)
    if "enable_thinking" not in template and thinking is False:
        effort = OFF[0]
    elif "enable_thinking" not in template and thinking and effort is None and set(OFF) & set(words):
        effort = "high"
    if effort is None:
        return given
    return given | {name: NUMBERS.get(effort, effort) if NUMERIC in template else _nearest(effort, words)}


def efforts(template: str) -> list[str]:
    """The words for `effort` that lead to different prompts, least first; none if the template has no choice."""
    if flags := _flags(template):
        return [*flags, "high"]
    levels = _levels(_words(template)) if _name(template) else []
    return levels if len(levels) > 1 else []


def _name(template: str) -> str | None:
    return next((name for name in NAMES if name in template), None)


def _flags(template: str) -> list[str]:
    return [word for word in SPOKEN[:2] if f"{word}_effort" in template]


def _words(template: str) -> list[str]:
    return [word for word in LADDER if f"'{word}'" in template or f'"{word}"' in template]


def _levels(words: list[str]) -> list[str]:
    """Those of `words` that mean reasoning, or the words of gpt-oss if there is nothing to choose from."""
    levels = [word for word in words if word not in OFF]
    return levels if len(levels) > 1 or len(levels) < len(words) else list(SPOKEN)


def _nearest(effort: str, words: list[str]) -> str:
    """The nearest word; of two equally near ones the one that means more."""
    if effort in words or effort not in LADDER:
        return effort
    off, levels = [word for word in words if word in OFF], _levels(words)
    if effort in OFF or not levels:
        return (off or levels)[0]
    place = LADDER.index(effort)
    return min(levels, key=lambda word: (abs(LADDER.index(word) - place), -LADDER.index(word)))

"""Prompts for filling in: the texts before and after a gap, in the marks that the model was trained with."""

from collections.abc import Container

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

"""Checks a whole model on this machine: how much one of the demo model's stories surprises it, against the figure of a
CPU in float32.
"""

from contextlib import closing
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..driving.generation import generate_step
from ..opening.engine import Engine, open_engine

QUESTION = "Tell me a story"
GIVEN = (  # the beginning of the model's own answer, computed as one prompt
    "Once there was a boy whose name was Geoff. He spent his days in a small town with crooked roofs, and he could "
    "bend spoons by looking at them. His best friend was a tired traveler."
)
FOLLOWING = (  # and what follows it, computed token by token
    " One day, the golden ring of the queen was missing. If it was not found by sunset, there would be no feast. Geoff "
    "looked under every bed, and the traveler looked inside every pot."
)
# Nats per token of `FOLLOWING`, in float32 on a CPU; bfloat16 gives 0.007 more.
NATS, BOUND = 0.062, 0.04


def open_demo(expert_io: str, pool: int | None, wired: str = "pool") -> Engine:
    """The demo model with a pool of so many bytes, without what other sessions left."""
    return open_engine(None, expert_io=expert_io, expert_cache_bytes=pool, warm_start="off", wired=wired)


def story_rows(engine: Engine) -> tuple[np.ndarray, float]:
    """Log-probabilities [n, vocabulary], float32, after each token of a known story but the last, and the nats per
    token of the story.

    Args:
        engine: the demo model's.
    """
    prompt, story = _ids(engine)
    forced = iter(story)
    choice: dict[str, Any] = {"max_tokens": len(story), "sampler": lambda _: mx.array([next(forced)])}
    with closing(generate_step(prompt, engine.model, **choice)) as steps:
        rows = np.stack([np.array(row) for _, row in steps])
    return rows, float(-rows[np.arange(len(story)), story].mean())


def _ids(engine: Engine) -> tuple[list[int], list[int]]:
    """The question with the beginning of the answer, and the tokens that follow."""
    tokenizer = engine.tokenizer
    asked = cast(list[int], tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}]))
    given, both = tokenizer.encode(GIVEN), tokenizer.encode(GIVEN + FOLLOWING)
    return asked + given, both[len(given) :]

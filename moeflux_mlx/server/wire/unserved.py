"""Refuses settings of mlx-lm's, llama.cpp's and vLLM's servers that would change the answer and that do not exist here.

Settings that only change the speed, or what the reply says besides its text (`cache_prompt`, `id_slot`, `n_probs`), are
ignored as unknown fields are, and so are the parameters of a refused setting (`mirostat_tau`, `dry_base`).
"""

import json
from collections.abc import Mapping, Sequence

from ...files import JsonValue
from .fields import Body

NOTHING: Sequence[JsonValue] = (None, "", [], {})
LLAMA_SAMPLERS: Sequence[JsonValue] = (
    None,
    "edskypmxt",
    "edkypmxt",
    ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
)  # llama.cpp's defaults
# Reason -> field -> its neutral values. The message names the first of these.
UNSERVED: Mapping[str, Mapping[str, Sequence[JsonValue]]] = {
    "this server has no such sampler": {
        "typical_p": (1,),
        "tfs_z": (1,),
        "top_n_sigma": (-1, 0),
        "dynatemp_range": (0,),
        "mirostat": (0,),
        "dry_multiplier": (0,),
        "adaptive_target": (-1,),
        "use_beam_search": (False,),
    },
    "the samplers and their order are fixed": {"samplers": LLAMA_SAMPLERS, "min_keep": (0, 1)},
    "send a logit_bias of -100 for each unwanted token": {
        "bad_words": NOTHING,
        "allowed_token_ids": NOTHING,
        "logits_processors": NOTHING,
    },
    "send a schema as response_format, text.format or output_config.format": dict.fromkeys(
        (
            *("grammar", "json_schema", "structured_outputs"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        ),
        NOTHING,
    ),
    "an answer ends with the model's turn, a text of stop, or max_tokens": {
        "ignore_eos": (False,),
        "min_tokens": (0,),
        "n_indent": (0,),
        "t_max_predict_ms": (0, -1),
        "stop_token_ids": NOTHING,
        "include_stop_str_in_output": (False,),
    },
    "reasoning, calls and text are always told apart": {
        "reasoning_format": ("auto", "deepseek", "deepseek-legacy", "parsed"),
        "thinking_forced_open": (False,),
        "parse_tool_calls": (True,),
    },
    "reasoning_effort and enable_thinking set how much the model reasons": {
        "reasoning_budget_tokens": (-1,),
        "thinking_budget_tokens": (-1,),
    },
    "this server gives one answer to a request": {"n": (1,), "best_of": (1,), "n_cmpl": (1,)},
    "the prompt is not repeated": {"echo": (False,)},
    "a prompt is never cut": {"truncate_prompt_tokens": (None, -1)},
    "this server has no adapters": {"adapters": NOTHING, "lora": NOTHING},
}


def refuse(body: Body) -> None:
    """Raises BadRequestError: a field asks for something that this server does not do."""
    for reason, fields in UNSERVED.items():
        for name, neutral in fields.items():
            value = body.get(name)
            if value is not None and value not in neutral:
                raise body.wrong(name, f"{json.dumps(neutral[0])}: {reason}")

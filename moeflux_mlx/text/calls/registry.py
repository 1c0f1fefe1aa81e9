"""All dialects, and which of them a chat template writes."""

import re

from ..channels import CHANNEL
from .deepseek import CALL_BEGIN, DEEPSEEK_V3, DEEPSEEK_V31, FENCE
from .dialect import Dialect
from .gemma import GEMMA
from .harmony import GPT_OSS
from .hunyuan import HUNYUAN, HUNYUAN4, K2_HORIZON, hunyuan, hunyuan4
from .inkling import INKLING_JSON
from .invoke import DEEPSEEK_V4, DEEPSEEK_V32, DEEPSEEK_V41, DOTS, DSML, MINIMAX, V4_SECTION, V41_SECTION
from .kimi import KIMI
from .kimi_k3 import KIMI_K3
from .listed import COHERE_ACTION, HUNYUAN_A13B
from .llama4 import LLAMA4
from .minimax_m3 import MARK, MINIMAX_M3
from .mistral import MISTRAL
from .muse import MUSE_SPARK, SECTION
from .solar import SOLAR_OPEN
from .tool_call import (
    EXAONE,
    FUNCTION,
    GLM,
    GLM_LINE,
    LONGCAT,
    LONGCAT_JSON,
    LONGCAT_KEY,
    PAIRS,
    QWEN_JSON,
    QWEN_XML,
    TOOL_CALL,
)

DEEPSEEKS = (DEEPSEEK_V3, DEEPSEEK_V31)
DIALECTS = (
    *(QWEN_JSON, EXAONE, QWEN_XML, GLM, *DEEPSEEKS, DEEPSEEK_V32, DEEPSEEK_V4, KIMI, MINIMAX, HUNYUAN, MISTRAL),
    *(GPT_OSS, SOLAR_OPEN, GEMMA, GLM_LINE, MINIMAX_M3, KIMI_K3, DEEPSEEK_V41, LONGCAT, LONGCAT_JSON, COHERE_ACTION),
    *(LLAMA4, K2_HORIZON, HUNYUAN_A13B, HUNYUAN4, DOTS, INKLING_JSON, MUSE_SPARK),
)
HEADER_START, PARAMETERS = "<|header_start|>", '"parameters": '  # of Llama 4, whose templates may have other calls
CALL_MARKERS = frozenset[str]().union(*(dialect.markers for dialect in DIALECTS))
_ONE_LINE = re.compile(rf"{TOOL_CALL}[^<\s]+{PAIRS.key[0]}")
_HUNYUAN = re.compile(r"<(?:tool_sep|tool_calls(?=:|.*<arg_key>))(:[\w-]+)?>", re.DOTALL)


def dialect_of(text: str) -> Dialect | None:
    """The dialect of past calls in `text`, None where it has none.

    Args:
        text: a chat template and, because some put their tags together, a chat with a call that it has rendered.
    """
    for tag, dialect in (
        *((CHANNEL, GPT_OSS), (SOLAR_OPEN.opening, SOLAR_OPEN), (GEMMA.opening, GEMMA), (V4_SECTION[0], DEEPSEEK_V4)),
        *((V41_SECTION[0], DEEPSEEK_V41), (DSML, DEEPSEEK_V32), (MARK, MINIMAX_M3), (KIMI_K3.opening, KIMI_K3)),
        *((INKLING_JSON.opening, INKLING_JSON), (SECTION[0], MUSE_SPARK)),
        *((one.section[0], one) for one in (KIMI, MINIMAX, DOTS, MISTRAL, COHERE_ACTION, K2_HORIZON)),
    ):
        if tag in text:
            return dialect
    if HEADER_START in text:
        return LLAMA4 if PARAMETERS in text else None
    if LONGCAT.opening in text:
        return LONGCAT if LONGCAT_KEY[0] in text else LONGCAT_JSON
    if CALL_BEGIN in text:
        return DEEPSEEK_V3 if f"{FENCE}json" in text else DEEPSEEK_V31
    suffixed = _HUNYUAN.search(text)
    if suffixed is not None:
        suffix = suffixed[1] or ""
        return hunyuan(suffix) if f"<tool_sep{suffix}>" in text else hunyuan4(suffix)
    if TOOL_CALL not in text:
        return HUNYUAN_A13B if HUNYUAN_A13B.opening in text else None
    if PAIRS.key[0] in text:
        return GLM_LINE if _ONE_LINE.search(text) else GLM
    if FUNCTION in text:
        return QWEN_XML
    return EXAONE if f'{TOOL_CALL}{{"name"' in text else QWEN_JSON

"""All dialects, and which of them a chat template writes."""

import re

from ..channels import CHANNEL
from .deepseek import CALL_BEGIN, DEEPSEEK_V3, DEEPSEEK_V31, FENCE
from .dialect import Dialect
from .harmony import GPT_OSS
from .hunyuan import HUNYUAN, hunyuan
from .kimi import KIMI
from .minimax import MINIMAX
from .mistral import MISTRAL
from .tool_call import FUNCTION, GLM, PAIRS, QWEN_JSON, QWEN_XML, TOOL_CALL

DIALECTS = (QWEN_JSON, QWEN_XML, GLM, DEEPSEEK_V3, DEEPSEEK_V31, KIMI, MINIMAX, HUNYUAN, MISTRAL, GPT_OSS)
CALL_MARKERS = frozenset[str]().union(*(dialect.markers for dialect in DIALECTS))
_HUNYUAN = re.compile(r"<(?:tool_sep|tool_calls(?=:))(:[\w-]+)?>")


def dialect_of(text: str) -> Dialect | None:
    """The dialect of past calls in `text`, None where it has none.

    Args:
        text: a chat template and, because some put their tags together, a chat with a call that it has rendered.
    """
    for tag, dialect in ((CHANNEL, GPT_OSS), *((one.section[0], one) for one in (KIMI, MINIMAX, MISTRAL))):
        if tag in text:
            return dialect
    if CALL_BEGIN in text:
        return DEEPSEEK_V3 if f"{FENCE}json" in text else DEEPSEEK_V31
    suffixed = _HUNYUAN.search(text)
    if suffixed is not None:
        return hunyuan(suffixed[1] or "")
    if TOOL_CALL not in text:
        return None
    return GLM if PAIRS.key[0] in text else QWEN_XML if FUNCTION in text else QWEN_JSON

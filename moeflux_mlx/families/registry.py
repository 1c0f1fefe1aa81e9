"""Every family that runs, by `model_type`."""

from . import deepseek, g9v3, glm, gpt_oss, hunyuan, laguna, mimo, minimax, mistral, qwen3, step
from .fields import Family

FAMILIES: dict[str, Family] = {
    **qwen3.FAMILIES,
    **deepseek.FAMILIES,
    **mistral.FAMILIES,
    **hunyuan.FAMILIES,
    **minimax.FAMILIES,
    **glm.FAMILIES,
    **g9v3.FAMILIES,
    **gpt_oss.FAMILIES,
    **mimo.FAMILIES,
    **laguna.FAMILIES,
    **step.FAMILIES,
}

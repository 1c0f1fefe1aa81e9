"""Every family that runs, by `model_type`, and those of GGUF files by llama.cpp's architecture."""

from . import (
    deepseek,
    deepseek_v4,
    exaone,
    g9v3,
    gemma4,
    glm,
    glm5_next,
    gpt_oss,
    hunyuan,
    laguna,
    lfm2,
    mimo,
    minimax,
    mistral,
    nemotron,
    qwen3,
    qwen4,
    step,
)
from .fields import Family
from .gguf import GgufFamily

FAMILIES: dict[str, Family] = {
    **qwen3.FAMILIES,
    **qwen4.FAMILIES,
    **deepseek.FAMILIES,
    **deepseek_v4.FAMILIES,
    **mistral.FAMILIES,
    **hunyuan.FAMILIES,
    **minimax.FAMILIES,
    **glm.FAMILIES,
    **glm5_next.FAMILIES,
    **g9v3.FAMILIES,
    **gpt_oss.FAMILIES,
    **mimo.FAMILIES,
    **laguna.FAMILIES,
    **step.FAMILIES,
    **exaone.FAMILIES,
    **gemma4.FAMILIES,
    **nemotron.FAMILIES,
    **lfm2.FAMILIES,
}

GGUF: dict[str, GgufFamily] = {**qwen3.GGUF, **deepseek.GGUF, **glm.GGUF, **gpt_oss.GGUF}

"""Every family that runs, by `model_type`."""

from . import deepseek, qwen3
from .fields import Family

FAMILIES: dict[str, Family] = {**qwen3.FAMILIES, **deepseek.FAMILIES}

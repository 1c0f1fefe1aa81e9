"""Rows of matrices that checkpoints store as one."""

from collections.abc import Sequence

import numpy as np

from ..kinds import LayerSpec
from ..mixers.grouped.spec import GroupedQuery
from .fields import FusedRows


def grouped_rows(groups: int, widths: Sequence[int]) -> list[np.ndarray]:
    """Numbers of each part's rows in a matrix that repeats parts of `widths` rows, group after group."""
    rows = np.arange(groups * sum(widths)).reshape(groups, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(widths)[:-1], axis=1)]


def joined_attention(spec: LayerSpec, layer: int, shards: int, name: str = "qkv_proj") -> FusedRows:
    """Queries, keys and values of attention as one matrix called `name`. Each shard has those of its heads, as in
    MiMo-V2.6 (mlx-vlm 0.7.10, `mimo_v2/language.py`).
    """
    mixer = spec.mixer
    if not isinstance(mixer, GroupedQuery) or mixer.kv_heads % shards:
        return {}
    heads, kv_heads = mixer.heads // shards, mixer.kv_heads // shards
    widths = [heads * mixer.head_dim, kv_heads * mixer.head_dim, kv_heads * mixer.value_width]
    stem, parts = f"model.layers.{layer}.self_attn.", ("q_proj", "k_proj", "v_proj")
    rows = grouped_rows(shards, widths)
    return {f"{stem}{name}": tuple((stem + part, own) for part, own in zip(parts, rows, strict=True))}

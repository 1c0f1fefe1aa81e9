"""DeepSeek-V4.1: few layers compress keys and choose among them, and the others take theirs; shifted connections.

Before two layers Engram adds rows of large tables, which n-grams choose. Keys and these rows are rounded as the
publisher's code rounds them; that it also rounds the inputs of all other matrices to 8 bits is left out, as in mlx-lm.
Images and the draft head are not read.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..files import JsonDict
from ..kinds import HyperConnections, Indexer, LayerSpec, NGrams, Residual
from ..mixers.compressed.spec import BestBlocks, Compressed, Compressor
from .deepseek_v4 import RENAMES as OF_V4
from .deepseek_v4 import limited_experts, rotation_of
from .fields import Family, Fields, FusedRows, common, layer_count, layer_kinds, out_of_range
from .fused_rows import grouped_rows
from .qwen4 import LARGEST_TABLE, MOST_HEADS, MOST_LONGEST, primes_from

# The layers that compress keys, and those that choose among them.
USUAL = {
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
}


def _deepseek_v41(read: Fields) -> JsonDict:
    read.must_have(
        attention_bias=False,
        scoring_func="sqrtsoftplus",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        num_key_value_heads=1,
        gate_temp=1,
    )
    streams = HyperConnections(
        streams=read.count("hc_mult", 4, most=64),
        iterations=read.count("hc_sinkhorn_iters", 20, most=1000),
        eps=read.number("hc_eps", 1e-6, least=1e-30, most=1.0),
        shifted=True,
    )
    hidden, least = read.count("hidden_size"), 3 * streams.streams  # the weights of a sum are carried in a row
    if hidden < least:
        raise out_of_range("hidden_size", hidden, f"at least {least}, for {streams.streams} streams")
    moe, residual = limited_experts(read), Residual(connections=streams)
    ngrams = _ngrams(read, streams.streams * hidden)
    mixers = (replace(mixer, ngrams=ngrams.get(layer)) for layer, mixer in enumerate(_mixers(read)))
    layers = tuple(LayerSpec(mixer, moe, residual) for mixer in mixers)
    return {**common(read, eps=1e-20), "layers": layers}


def _mixers(read: Fields) -> list[Compressed]:
    ratios, plain = _ratios(read), _attention(read)
    sources, choosers = (_layers_of(read, name, len(ratios)) for name in USUAL)
    marks = read.count("candidate_source_layer_id", 20, least=-1, most=1 << 16)
    indexer = Indexer(read.count("index_n_heads", 32), read.count("index_head_dim", 128), read.count("index_topk", 512))
    best = BestBlocks(read.count("candidate_topk_blocks", 2048, least=0), read.count("candidate_block_size", 8))
    mixers, source = [], None
    for layer, ratio in enumerate(ratios):
        turned = replace(plain, rotation=rotation_of(read, plain.head_dim, ratio > 0))
        if not ratio:
            mixers.append(turned)
            continue
        source = layer if layer in sources else source
        if source is None or ratios[source] != ratio or source not in choosers:
            raise out_of_range("kv_source_layer_ids", sources, f"a layer up to {layer} with its ratio and an indexer")
        blocks = replace(best, reuses=layer != marks) if best.top and 0 <= marks <= layer else None
        own = Compressor(
            ratio,
            indexer=replace(indexer, reuses=layer not in choosers),
            shares=layer == source,
            borrows=layer != source,
            blocks=blocks,
        )
        mixers.append(replace(turned, compressor=own))
    able = [layer for layer in choosers if ratios[layer] and layer >= max(sources, default=0)]
    if best.top and 0 <= marks < len(ratios) and marks not in able:
        raise out_of_range("candidate_source_layer_id", marks, f"one of {able}")
    return mixers


def _ratios(read: Fields) -> list[int]:
    """The positions of an entry, by layer; 0: there are none."""
    count = layer_count(read)
    ratios = read.optional("compress_ratios", list, None) or ([0, 0] + [2] * 18 + [1] * 20)
    only = Fields({**read.config, "compress_ratios": ratios[:count]})  # layers that draft come last
    return layer_kinds(only, "compress_ratios", (0, 1, 2)) or []


def _layers_of(read: Fields, name: str, count: int) -> Sequence[int]:
    layers = read.optional(name, list, USUAL[name])
    if not all(type(layer) is int and 0 <= layer < 1 << 16 for layer in layers):
        raise out_of_range(name, layers, "numbers of layers")
    return sorted(layer for layer in layers if layer < count)


def _ngrams(read: Fields, channels: int) -> dict[int, NGrams]:
    """The n-grams by layer (mlx-vlm 0.7.10, `EngramLayout` and `compute_hash_multipliers`)."""
    ids = read.optional("engram_layer_ids", list, [1, 14])
    if not all(type(i) is int and 0 <= i < layer_count(read) for i in ids) or len(set(ids)) < len(ids):
        raise out_of_range("engram_layer_ids", ids, "numbers of layers")
    rows = read.optional("engram_num_embeddings", list, [384006168, 384016682])
    if len(rows) < len(ids) or not all(type(count) is int and 0 < count <= LARGEST_TABLE for count in rows):
        raise out_of_range("engram_num_embeddings", rows, f"rows of {len(ids)} tables")
    longest = read.count("engram_max_ngram_size", 4, least=2, most=MOST_LONGEST)
    heads = read.count("engram_n_heads", 8, most=MOST_HEADS) * (longest - 1)
    base = read.count("engram_vocab_size", 16_000_000, least=2, most=LARGEST_TABLE)
    compressed = read.count("engram_compressed_vocab_size", 99092)
    half = max(1, ((1 << 63) - 1) // compressed // 2)
    ngrams: dict[int, NGrams] = {}
    for order, layer in enumerate(ids):
        sizes = primes_from(base, heads * (order + 1))[heads * order :]
        if sum(sizes) > rows[order]:
            raise out_of_range("engram_num_embeddings", rows, f"at least {sum(sizes)} rows for layer {layer}")
        factors = np.random.default_rng(10007 * layer).integers(0, half, longest, np.int64)
        ngrams[layer] = NGrams(
            sizes=sizes,
            multipliers=tuple(2 * int(factor) + 1 for factor in factors),
            rows=rows[order],
            width=read.count("engram_head_dim", 256),
            end=read.count("engram_pad_token_id", 2, least=0, most=read.count("vocab_size") - 1),
            taps=0,
            channels=channels,
            ends_texts=False,
            compressed=compressed,
            rounds=True,
        )
    return ngrams


def _joined_rows(spec: LayerSpec, layer: int, shards: int) -> FusedRows:
    """Engram's keys for all streams and its value, which are one matrix."""
    ngrams = spec.mixer.ngrams
    if ngrams is None or shards > 1:
        return {}
    stem = f"model.layers.{layer}.ple."
    keys, values = grouped_rows(1, (ngrams.channels, ngrams.channels // spec.residual.streams))
    return {f"{stem}wkv": ((f"{stem}key_proj", keys), (f"{stem}value_proj", values))}


def _attention(read: Fields) -> Compressed:
    width = read.count("head_dim")
    return Compressed(
        heads=read.count("num_attention_heads"),
        head_dim=width,
        q_latent=read.count("q_lora_rank"),
        rotation=rotation_of(read, width, False),
        window=read.count("sliding_window"),
        groups=read.count("o_groups"),
        group_latent=read.count("o_lora_rank"),
        norms_queries=False,
        rounds=True,
    )


OF_MLX_LM = (
    *(("q_a_proj", "wq_a"), ("q_a_norm", "q_norm"), ("q_b_proj", "wq_b"), ("kv_proj", "wkv")),
    *(("o_a_proj", "wo_a"), ("o_b_proj", "wo_b")),
)
# Of mlx-lm's conversions; the others are those of DeepSeek-V4.
OF_MLX = (
    *((f".self_attn.{theirs}.", f".self_attn.{ours}.") for theirs, ours in OF_MLX_LM),
    *((".self_attn.sinks", ".self_attn.attn_sink"), (".compressor.kv_proj.", ".compressor.wkv.")),
    *((".compressor.gate_proj.", ".compressor.wgate."), (".compressor.kv_norm.", ".compressor.norm.")),
    *((".indexer.q_b_proj.", ".indexer.wq_b."), (".indexer.k_proj.", ".indexer.wk.")),
    (".mlp.experts.switch_mlp.", ".mlp.switch_mlp."),
)
OF_ENGRAM = (
    ("^embed_tokens.", "model.embed_tokens."),  # of mlx-vlm
    *((".engram.", ".ple."), (".ple.embed.", ".ple.ple_embedding.ngram_embedding.shards.0.")),
    *((".ple.q_weight", ".ple.norm_query.weight"), (".ple.k_weight", ".ple.norm_key.weight")),
)
FAMILIES = {
    "deepseek_v41": Family(
        _deepseek_v41,
        renames=(*OF_ENGRAM, *OF_V4, *OF_MLX),
        grouped=(".wo_a",),
        fused_rows=_joined_rows,
        in_rows=(".ple.norm_query.weight", ".ple.norm_key.weight"),
    )
}

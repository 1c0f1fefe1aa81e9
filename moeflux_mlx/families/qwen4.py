"""Qwen3.8-Flash-Next (`qwen4_exp`): Qwen3.5's mixers between four streams, attention over blocks of positions that an
indexer chooses, and n-grams, for which rows of large tables are added.
"""

from functools import lru_cache

from ..errors import ConfigError
from ..files import JsonDict
from ..kinds import GatedConnections, Indexer, KeyBlocks, LayerSpec, NGrams, Residual, SharedExpert
from .fields import Family, Fields, common, experts, grouped_query, layer_count, layer_kinds
from .qwen3 import FULL, LINEAR, delta

INDEXED = "indexed_attention"  # transformers' word for "full_attention" with an indexer
INDEXER = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
MOST_HEADS, MOST_LONGEST, LARGEST_TABLE = 64, 16, 1 << 30


def _qwen4_exp(read: Fields) -> JsonDict:
    read.must_equal("norm_topk_prob", True)
    read.must_equal("attention_bias", False)
    hidden, streams = read.count("hidden_size"), read.count("hc_count", 4, least=2, most=64)
    residual = Residual(connections=GatedConnections(streams, read.count("hc_lowrank", 320)))
    width = read.count("shared_expert_intermediate_size")
    moe = experts(read, SharedExpert(width, gated=True), normalise=True)
    kinds = _layer_types(read)
    ngrams = _ngrams(read, kinds, streams * hidden)
    gate = read.optional("output_gate_type", str, None) or "silu"
    if gate not in ("silu", "sigmoid"):
        raise ConfigError(f"config field 'output_gate_type' is {gate!r}; only 'silu' and 'sigmoid' are implemented")
    attention = grouped_query(read, share=0.25, gate="joined", blocks=_blocks(read))
    mixers = [
        delta(read, gate=gate, ngrams=ngrams.get(i)) if kind == LINEAR else attention for i, kind in enumerate(kinds)
    ]
    return {**common(read), "layers": tuple(LayerSpec(mixer, moe, residual) for mixer in mixers)}


def _layer_types(read: Fields) -> list[str]:
    kinds = layer_kinds(read, "layer_types", (FULL, INDEXED, LINEAR))
    if kinds is not None:
        return kinds
    interval = read.count("full_attention_interval", 4)
    return [LINEAR if (i + 1) % interval else FULL for i in range(layer_count(read))]


def _blocks(read: Fields) -> KeyBlocks:
    """The blocks of positions that attention sees. `indexer_budget` counts positions."""
    read.must_equal("indexer_kv_heads", 1)
    heads, dim, budget, ratio = (read.count(name) for name in INDEXER)
    if budget % ratio:
        raise ConfigError(f"indexer_budget {budget} is not a multiple of indexer_compress_ratio {ratio}")
    return KeyBlocks(ratio, Indexer(heads, dim, budget // ratio))


def _ngrams(read: Fields, kinds: list[str], channels: int) -> dict[int, NGrams]:
    """The n-grams by layer number; `ple_layer_ids` counts layers from one."""
    ids = read.optional("ple_layer_ids", list, [])
    if not all(type(i) is int and 1 <= i <= len(kinds) and kinds[i - 1] == LINEAR for i in ids):
        raise ConfigError(f"config field 'ple_layer_ids' is {ids}; expected layers with linear attention, from 1 on")
    if not ids:
        return {}
    longest = read.count("ngram_size", 3, least=2, most=MOST_LONGEST)
    heads = (longest - 1) * read.count("heads_per_ngram", 8, most=MOST_HEADS)
    width = read.count("ple_embed_dim", read.count("hidden_size"))
    if width % heads:
        raise ConfigError(f"ple_embed_dim {width} is not a multiple of the {heads} heads of n-grams")
    return {
        layer - 1: _of_layer(read, order, longest, heads, width // heads, channels)
        for order, layer in enumerate(sorted(set(ids)))
    }


def _of_layer(read: Fields, order: int, longest: int, heads: int, width: int, channels: int) -> NGrams:
    """The n-grams of one layer, given its place among the layers with n-grams."""
    base = read.count("ngram_vocab_size_base", 20_000_000, least=2, most=LARGEST_TABLE)
    sizes = primes_from(base, heads * (order + 1))[heads * order :]
    unit = read.count("make_ngram_vocab_size_divisible_by", 128)
    return NGrams(
        sizes=sizes,
        multipliers=_multipliers(read.count("vocab_size"), longest, order, read.count("seed", 1234, least=0)),
        rows=-(-sum(sizes) // unit) * unit,
        width=width,
        end=_end(read),
        taps=read.count("ple_conv_kernel_size", 4, least=2),
        channels=channels,
    )


def _end(read: Fields) -> int:
    """The first of the tokens that end a text."""
    value = read.config.get("eos_token_id")
    first = value[0] if isinstance(value, list) and value else value
    return Fields({"eos_token_id": first}).count("eos_token_id", least=0)


@lru_cache(64)
def primes_from(least: int, count: int) -> tuple[int, ...]:
    """The first `count` primes from `least` on."""
    found: list[int] = []
    number = least
    while len(found) < count:
        if number == 2 or number % 2 and all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2)):
            found.append(number)
        number += 1
    return tuple(found)


def _multipliers(vocab_size: int, longest: int, order: int, seed: int) -> tuple[int, ...]:
    """Odd numbers whose products with token ids stay below 2^63 (transformers, `_build_layer_multipliers`)."""
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    base = seed + 10007 * order
    return tuple(2 * (_splitmix(base + GAMMA * (i + 1)) % half) + 1 for i in range(longest))


GAMMA = 0x9E3779B97F4A7C15


def _splitmix(value: int) -> int:
    """The next number of SplitMix64 (Steele, Lea and Flood, 2014) after a state."""
    value = (value + GAMMA) % (1 << 64)
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    value = (value ^ value >> 27) * 0x94D049BB133111EB % (1 << 64)
    return value ^ value >> 31


RENAMES = (
    *((".attn_hyper_connection.", ".attn_hc."), (".mlp_hyper_connection.", ".ffn_hc.")),
    *((".hyper_connection_mixer.", ".hc_head."), (".ngram_embedding.shard_", ".ngram_embedding.shards.")),
)
ZERO_CENTRED = (
    *("hc_norm", "self_attn.q_norm", "self_attn.k_norm", "q_layernorm", "k_layernorm"),
    *("norm_key", "norm_query", "norm_conv"),
)
FAMILIES = {"qwen4_exp": Family(_qwen4_exp, ZERO_CENTRED, renames=RENAMES, either_centred=True)}

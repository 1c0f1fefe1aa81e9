"""Qwen3.8-Flash-Next (`qwen4_exp`): Qwen3.5's mixers between four streams, attention over blocks of positions that an
indexer chooses, and n-grams, for which rows of large tables are added.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from ..errors import ConfigError
from ..files import JsonDict
from ..kinds import GatedConnections, Indexer, KeyBlocks, LayerSpec, NGrams, Residual, SharedExpert
from ..mixers.delta.spec import Delta
from .fields import Family, Fields, common, experts, grouped_query, layer_count, layer_kinds, out_of_range
from .gguf import ATTENTION, EXPERTS, SHARED_EXPERT, Change, GgufFamily, Metadata
from .qwen3 import FULL, LINEAR, LINEAR_NAMES, delta, gguf_qwen3_5, tiled_change

INDEXED = "indexed_attention"  # transformers' word for "full_attention" with an indexer
INDEXER = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
MOST_HEADS, MOST_LONGEST, LARGEST_TABLE = 64, 16, 1 << 30


def _qwen4_exp(read: Fields) -> JsonDict:
    read.must_have(norm_topk_prob=True, attention_bias=False)
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
    unit = read.count("make_ngram_vocab_size_divisible_by", 128)
    sizes = _stated(read, "ngram_heads_vocab_sizes", heads, LARGEST_TABLE)
    if sizes is None:
        base = read.count("ngram_vocab_size_base", 20_000_000, least=2, most=LARGEST_TABLE)
        sizes = primes_from(base, heads * (order + 1))[heads * order :]
    multipliers = _stated(read, "layer_multipliers", longest, (1 << 63) - 1)
    if multipliers is None:
        seed = read.count("seed", 1234, least=0)
        multipliers = _multipliers(read.count("vocab_size"), longest, order, seed)
    return NGrams(
        sizes=sizes,
        multipliers=multipliers,
        rows=-(-sum(sizes) // unit) * unit,
        width=width,
        end=_end(read),
        taps=read.count("ple_conv_kernel_size", 4, least=2),
        channels=channels,
    )


def _stated(read: Fields, name: str, count: int, most: int) -> tuple[int, ...] | None:
    """The numbers of a GGUF's metadata; a checkpoint's config.json has others from which they follow."""
    values = read.optional(name, list, None)
    if values is None:
        return None
    if len(values) != count or not all(type(one) is int and 1 <= one <= most for one in values):
        raise out_of_range(name, values, f"{count} integers from 1 to {most}")
    return tuple(values)


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
TABLE = "per_layer_token_embd.weight"  # of GGUF files, which have n-grams in one layer


def _table(layers: Sequence[LayerSpec]) -> dict[str, list[str]]:
    """The place of the table."""
    of_ngrams = (i for i, layer in enumerate(layers) if isinstance(layer.mixer, Delta) and layer.mixer.ngrams)
    return {TABLE: [f"model.layers.{i}.ple.ple_embedding.ngram_embedding.shards.0.weight" for i in of_ngrams]}


FAMILIES = {"qwen4_exp": Family(_qwen4_exp, ZERO_CENTRED, renames=RENAMES, either_centred=True, copies=_table)}


def _gguf(read: Metadata) -> JsonDict:
    config = gguf_qwen3_5(read)
    return {
        **config,
        "output_gate_type": "sigmoid",  # in llama.cpp, and of the published model
        "hc_count": read.count("hyper_connection.count"),
        "hc_lowrank": read.count("hyper_connection.low_rank"),
        "indexer_kv_heads": 1,
        "indexer_n_heads": read.count("attention.indexer.head_count"),
        "indexer_head_dim": read.count("attention.indexer.key_length"),
        "indexer_budget": read.count("attention.indexer.top_k"),
        "indexer_compress_ratio": _gguf_ratio(read, config),
        **_gguf_ngrams(read),
    }


def _gguf_ratio(read: Metadata, config: JsonDict) -> int:
    """How many positions make a block in layers with attention.

    Raises:
        ConfigError: layers differ, or others have such a number too.
    """
    ratios = read.each_layer("attention.compress_ratios", int)
    kinds = _layer_types(Fields(config))
    own = {ratio for ratio, kind in zip(ratios, kinds, strict=True) if kind != LINEAR}
    if len(own) != 1 or any(ratio for ratio, kind in zip(ratios, kinds, strict=True) if kind == LINEAR):
        raise ConfigError(f"GGUF metadata qwen4exp.attention.compress_ratios is {str(ratios)[:60]}, not one number")
    return own.pop()


def _gguf_ngrams(read: Metadata) -> JsonDict:
    """The n-grams of at most one layer, with the numbers by which they are hashed."""
    layers = read.anywhere("qwen4exp.ple.layers", list, [])
    if not layers:
        return {"ple_layer_ids": []}
    each, longest = read.count("ple.heads_per_ngram"), read.count("ple.ngram_size")
    sizes = read.anywhere("qwen4exp.ple.head_vocab_sizes", list)
    offsets = read.anywhere("qwen4exp.ple.head_offsets", list)
    if len(layers) != 1 or not all(type(one) is int for one in (*layers, *sizes)):
        raise ConfigError(f"GGUF metadata qwen4exp.ple.layers is {str(layers)[:60]}; only one layer is implemented")
    if offsets != [0, *accumulate(sizes)][:-1]:
        raise ConfigError(f"GGUF metadata qwen4exp.ple.head_offsets is {str(offsets)[:60]}, not sums of the sizes")
    return {
        "ple_layer_ids": [layers[0] + 1],
        "ngram_size": longest,
        "heads_per_ngram": each,
        "ple_embed_dim": read.count("embedding_length_per_layer_input") * each * (longest - 1),
        "ple_conv_kernel_size": read.count("ple.conv_kernel"),
        "eos_token_id": read.count("ple.eos_token_id"),
        "layer_multipliers": read.anywhere("qwen4exp.ple.layer_multipliers", list),
        "ngram_heads_vocab_sizes": sizes,
    }


STREAM_NAMES = tuple(
    (f"hc_{part}_{theirs}.", f"{part}_hc.{ours}.")
    for part in ("attn", "ffn")
    for theirs, ours in (
        *(("norm", "hc_norm"), ("down", "input_mix_weight_down")),
        *(("up", "input_mix_weight_up"), ("inject", "block_inject_weight")),
    )
)
NGRAM_NAMES = (
    *((f"ple_{part}.", f"ple.{part}.") for part in ("conv1d", "norm_conv", "norm_key", "norm_query")),
    *((f"ple_{part}.", f"ple.{part}_proj.") for part in ("key", "value")),
)
INDEXER_NAMES = tuple((f"indexer.{one}_norm.", f"self_attn.indexer.{one}_layernorm.") for one in "qk")
QUERIES_AND_KEYS = (
    "self_attn.indexer.index_qk_proj.weight",
    ("indexer.q_proj.weight", "indexer.k_proj.weight"),
)


def _change(config: JsonDict, name: str, shape: tuple[int, ...]) -> Change | None:
    """As Qwen3.5's, with the convolution of n-grams."""
    return Change((*shape, 1)) if name == "ple.conv1d.weight" else tiled_change(config, name, shape)


UNREAD = {
    "ple.image_token_id": "it stands for images, which are not read of a GGUF",
    "full_attention_interval": "where a list says which layers are recurrent, it says nothing",
}
NAMES = (*INDEXER_NAMES, *STREAM_NAMES, *NGRAM_NAMES, *ATTENTION, *EXPERTS, *SHARED_EXPERT, *LINEAR_NAMES)
GGUF = {"qwen4exp": GgufFamily(("qwen4_exp",), _gguf, NAMES, _change, UNREAD, (QUERIES_AND_KEYS,))}

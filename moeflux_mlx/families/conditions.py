"""Conditions between the fields of a configuration that no field can check alone."""

from ..errors import ConfigError
from ..kinds import (
    Compressed,
    Delta,
    Experts,
    GroupedQuery,
    HeadBlocks,
    Indexer,
    KeyBlocks,
    Latent,
    Mamba2,
    Mixer,
    NGrams,
)
from ..kinds.limits import WIDEST_HEAD, WIDEST_WINDOW, check_head, check_width, not_multiple
from ..quant import EXPERTS


def check_mixer(mixer: Mixer) -> None:
    """Checks the conditions between the fields of a mixer. Raises ConfigError with the fields' names."""
    match mixer:
        case Delta():
            if mixer.ngrams is not None:
                _check_ngrams(mixer.ngrams)
            if mixer.value_heads % mixer.key_heads:
                raise not_multiple("linear_num_value_heads", mixer.value_heads, "linear_num_key_heads", mixer.key_heads)
            if mixer.channel_decay is not None:
                check_width("linear_num_heads * linear_head_dim", mixer.channel_decay.rank * mixer.key_heads)
            check_width("linear attention", mixer.channels)
            check_width("linear attention's convolution", mixer.channels * mixer.taps)
        case GroupedQuery():
            if mixer.heads % mixer.kv_heads:
                raise not_multiple("num_attention_heads", mixer.heads, "num_key_value_heads", mixer.kv_heads)
            check_head(mixer.head_dim, mixer.rotation)
            if mixer.gate == "joined" and mixer.value_width != mixer.head_dim:
                raise ConfigError(f"v_head_dim {mixer.value_width} is not head_dim {mixer.head_dim}, as the gate wants")
            joined = 2 if mixer.gate == "joined" else 1
            check_width("num_attention_heads * head_dim", mixer.heads * mixer.head_dim * joined)
            check_width("num_attention_heads * v_head_dim", mixer.heads * mixer.value_width)
            if mixer.window is not None and not 1 <= mixer.window <= WIDEST_WINDOW:
                raise ConfigError(f"sliding_window is {mixer.window}; expected positions from 1 to {WIDEST_WINDOW}")
            if mixer.blocks is not None:
                _check_blocks(mixer, mixer.blocks)
        case Latent():
            check_head(mixer.head_dim, mixer.rotation)
            check_width("num_attention_heads * head_dim", mixer.heads * mixer.head_dim)
            name = "num_attention_heads * (qk_nope_head_dim + v_head_dim)"
            check_width(name, mixer.heads * (mixer.nope + mixer.value))
            check_width("kv_lora_rank + qk_rope_head_dim", mixer.latent + mixer.rotated)
            indexer = mixer.blocks.indexer if mixer.blocks else mixer.indexer
            if indexer is not None:
                _check_indexer(mixer, indexer)
            if mixer.blocks is not None and mixer.blocks.ratio > WIDEST_WINDOW:
                raise ConfigError(f"index_kpool is {mixer.blocks.ratio}; expected positions from 1 to {WIDEST_WINDOW}")
        case Compressed():
            _check_compressed(mixer)
        case Mamba2():
            if mixer.heads % mixer.groups:
                raise not_multiple("mamba_num_heads", mixer.heads, "n_groups", mixer.groups)
            check_width("Mamba's projection", mixer.projected)
            check_width("Mamba's convolution", mixer.channels * mixer.taps)


def _check_indexer(mixer: Latent, indexer: Indexer) -> None:
    if mixer.q_latent is None:
        raise ConfigError("q_lora_rank is missing, of which the indexer makes its queries")
    if not mixer.rotated <= indexer.dim <= WIDEST_HEAD:
        raise ConfigError(f"index_head_dim is {indexer.dim}; expected an integer from {mixer.rotated} to {WIDEST_HEAD}")
    check_width("index_n_heads * index_head_dim", indexer.heads * indexer.dim)


def _check_blocks(mixer: GroupedQuery, blocks: KeyBlocks | HeadBlocks) -> None:
    if isinstance(blocks, HeadBlocks) and blocks.indexer.heads != mixer.kv_heads:
        heads = f"index_n_heads {blocks.indexer.heads} is not num_key_value_heads {mixer.kv_heads}"
        raise ConfigError(f"{heads}, which is not implemented")
    dims = mixer.rotation.dims if mixer.rotation else 1
    if not dims <= blocks.indexer.dim <= WIDEST_HEAD:
        raise ConfigError(
            f"the indexer's head_dim is {blocks.indexer.dim}; expected an integer from {dims} to {WIDEST_HEAD}"
        )
    if blocks.ratio > WIDEST_WINDOW:
        raise ConfigError(f"indexer_compress_ratio is {blocks.ratio}; expected positions from 1 to {WIDEST_WINDOW}")
    check_width("(indexer_n_heads + 1) * indexer_head_dim", (blocks.indexer.heads + 1) * blocks.indexer.dim)


def _check_ngrams(ngrams: NGrams) -> None:
    check_width("hc_count * hidden_size", ngrams.channels)
    check_width("ple_embed_dim", ngrams.embedded)


def _check_compressed(mixer: Compressed) -> None:
    check_head(mixer.head_dim, mixer.rotation)
    if mixer.heads % mixer.groups:
        raise not_multiple("num_attention_heads", mixer.heads, "o_groups", mixer.groups)
    if not 1 <= mixer.window <= WIDEST_WINDOW:
        raise ConfigError(f"sliding_window is {mixer.window}; expected positions from 1 to {WIDEST_WINDOW}")
    check_width("num_attention_heads * head_dim", mixer.heads * mixer.head_dim)
    check_width("o_groups * o_lora_rank", mixer.groups * mixer.group_latent)
    indexer = mixer.compressor and mixer.compressor.indexer
    if indexer:
        check_width("index_n_heads * index_head_dim", indexer.heads * indexer.dim)
        if not mixer.rotation.dims <= indexer.dim <= WIDEST_HEAD:
            least = f"an integer from {mixer.rotation.dims} to {WIDEST_HEAD}"
            raise ConfigError(f"index_head_dim is {indexer.dim}; expected {least}")


def check_experts(experts: Experts, hidden_size: int) -> None:
    """Checks the conditions between the fields of a router and its experts. Raises ConfigError with their names."""
    router = experts.router
    if router.top_k > router.experts:
        raise ConfigError(f"num_experts_per_tok {router.top_k} exceeds num_experts {router.experts}")
    for name, value in (("hidden_size", hidden_size), ("moe_intermediate_size", experts.width)):
        if value % EXPERTS.group_size:
            raise ConfigError(f"{name} {value} is not a multiple of the quantisation group, {EXPERTS.group_size}")
    if not 1 <= router.kept_groups <= router.groups or router.experts % router.groups:
        groups = f"n_group {router.groups}, topk_group {router.kept_groups}"
        raise ConfigError(f"num_experts {router.experts}, {groups} do not divide")
    if router.top_k > router.kept_groups * (router.experts // router.groups):
        raise ConfigError(
            f"num_experts_per_tok {router.top_k} exceeds the experts of {router.kept_groups} of {router.groups} groups"
        )
    if experts.shared:
        check_width("shared_expert_intermediate_size", experts.shared.width)

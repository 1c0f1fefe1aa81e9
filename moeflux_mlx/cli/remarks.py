"""Lines that commands print about a text and its computation."""

from ..experts.source import ExpertLoader, IoMode
from ..model.drafting import Drafting
from ..opening.engine import Engine
from ..spec import ModelArgs

WORTH_CONVERTING = 0.1  # share of the time; below it, packed experts would hardly help


def beyond_plan(engine: Engine, tokens: int) -> str:
    """A remark if no memory was planned for a prompt of this length."""
    planned, limit = engine.plan.context, engine.model.args.max_position_embeddings
    if tokens <= planned:
        return ""
    return (
        f"warning: the prompt has {tokens} tokens and memory was planned for {planned}; "
        f"--context {min(2 * tokens, limit)} leaves room for an answer"
    )


def why_cut(args: ModelArgs, prompt_tokens: int, answer_tokens: int) -> str:
    """Why an answer ended without an end."""
    limit = args.max_position_embeddings
    if prompt_tokens + answer_tokens >= limit:
        return f"the text has the {limit} tokens that the model takes"
    return f"cut after {answer_tokens} tokens; --max-tokens -1 has no limit"


def worth_converting(engine: Engine, seconds: float) -> str:
    """A remark after `seconds` of work if packed experts would be faster, else an empty string."""
    share = engine.experts.stats.wait_seconds / seconds if seconds else 0.0
    if not engine.weights.in_place or engine.experts.mode is not IoMode.PREAD or share < WORTH_CONVERTING:
        return ""
    return (
        f"note: {min(share, 1):.0%} of the time went by waiting for experts, which lie in pieces in this checkpoint; "
        f"packed, each is one read: {engine.weights.convert_command}"
    )


def draft_statistics(drafting: Drafting) -> list[str]:
    """A line on how many drafts were accepted, if there are drafts."""
    if not drafting.most:
        return []
    taken, steps = f"{drafting.taken} of {drafting.checked} taken", ", ".join(map(str, drafting.steps))
    return [f"drafts: {drafting.kind}, {taken}; steps with 0 to {drafting.most} drafts: {steps}"]


def expert_statistics(experts: ExpertLoader, verbose: bool) -> list[str]:
    """Lines on the time and bytes of reading experts."""
    stats = experts.stats
    if experts.slots == 0:
        return [f"expert I/O: {experts.mode.value}"] if verbose else []
    read = f"{stats.hits} hits, {stats.misses} misses, {stats.bytes_read / 1e9:.3f} GB read"
    if experts.host_bytes:
        read += f"; {stats.host_hits} hits on the host, {stats.host_bytes / 1e9:.3f} GB read from it"
    lines = [f"expert I/O: {experts.mode.value}, {read}"]
    lines += [f"expert I/O: {experts.note}"] if experts.note else []
    if verbose and stats.bytes_read:
        if stats.given_back:
            lines.append(
                f"memory: {stats.given_back / 1e9:.2f} GB of experts given back because the machine was short of it; "
                f"the pool has {experts.pool_bytes / 1e9:.2f} GB now"
            )
        lines.append(
            f"expert I/O: hit rate {stats.hit_rate:.1%}, {stats.gb_per_second:.2f} GB/s, "
            f"{stats.wait_seconds:.2f} s waited, {experts.slots} slots; read ahead: {stats.prefetched}, "
            f"{stats.prefetch_hits} in time, {stats.late} late, {stats.wasted} unused; "
            f"warm start: {stats.warmed}, {stats.warm_hits} used"
        )
    return lines

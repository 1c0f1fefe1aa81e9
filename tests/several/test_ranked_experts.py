"""One model over several processes, here threads: the bits of one, and errors that reach all ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_directory

from moeflux_mlx.errors import ExpertIOError, RankError, RankStopped
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import arrangement, backend, grouped
from moeflux_mlx.several.experts import Owners, RankedExperts
from moeflux_mlx.several.group import FAILED, Exchange

pytestmark = pytest.mark.skipif(backend.has_kernels(), reason="threads of one process share its GPU")
# Families with windows, with experts that add biases, with norms of experts, and with value experts, which every rank
# reads for itself.
FAMILIES = (*goldens.families(), "gpt_oss", "muse_spark", "k2_horizon")


class Meeting:
    """Where threads meet to gather arrays. `on_device`: the arrays are MLX's."""

    def __init__(self, size, on_device=False):
        self.on_device = on_device
        self.barrier, self.words = threading.Barrier(size, timeout=20), [None] * size

    def member(self, rank):
        return Member(self, rank)


class Member:
    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.words)
        self.on_device, self.limit = meeting.on_device, 0.0

    def gather(self, words):
        if isinstance(words, mx.array):
            assert self.on_device
            return mx.array(self.gather(np.array(words)))
        try:
            self.meeting.words[self.rank] = words.copy()
            self.meeting.barrier.wait()
            if len({len(one) for one in self.meeting.words}) != 1:
                raise RankError("messages differ in length")
            gathered = np.stack(self.meeting.words)
            self.meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise RankError("a process is gone") from None
        return gathered


def together(size, work, on_device=False):
    """Runs work(rank, exchange) of every rank at once. Returns what each returned or raised."""
    meeting = Meeting(size, on_device)

    def run(rank):
        try:
            return work(rank, Exchange(meeting.member(rank)))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def ranked(family, exchange, owners, dtype=mx.float32, **options):
    """Returns a model whose experts are distributed."""
    model = load_model(tiny_directory(family), dtype=dtype, **options)
    for layer in model.args.moe_layers:
        model.layers[layer].mlp.experts = RankedExperts(model.experts, exchange, owners)
    return model


@pytest.mark.parametrize("dense_from, on_device", drawn([1, 32], [False, True]))
def test_the_bits_and_products_of_one_process_on_mlx_side(
    monkeypatch, on_device, dense_from, dense_from_rows, wave_bytes
):
    """A product's bits may depend on its shape, so no product may be computed that one process does not compute."""
    dense_from_rows(dense_from)
    monkeypatch.setattr(arrangement, "LEAST_STEP", 1)
    wave_bytes(5 * 10240)
    right, made = grouped.dense_ffn, set()
    monkeypatch.setattr(grouped, "dense_ffn", lambda *a: made.add(tuple(one.shape for one in a[:3])) or right(*a))
    family = "qwen3_5_moe"
    alone = logits_of(load_model(tiny_directory(family), dtype=mx.bfloat16, expert_io="pread"), (1, 45), 1)
    expected = made.copy()

    def work(rank, exchange):
        model = ranked(family, exchange, Owners((1, 1, 1)), dtype=mx.bfloat16, expert_io="pread")
        return logits_of(model, (1, 45), 1)

    assert together(3, work, on_device) == [alone] * 3
    assert made == expected and bool(made) == (dense_from == 1)


def logits_of(model, lengths=(1, 8, 31), decoded=4):
    """Returns the bytes of all logits: prompts of these lengths, and tokens after each."""
    logits = []
    for length in lengths:
        cache = model.make_cache()
        tokens = (np.arange(length) * 7 % 200).tolist()
        for chunk in [tokens, *([i] for i in range(decoded))]:
            logits.append(np.array(model(mx.array([chunk]), cache).astype(mx.float32)).tobytes())
    return logits


@pytest.mark.parametrize("family, shares", drawn(FAMILIES, [(1, 1), (1, 1, 1), (3, 1)]))
def test_the_bits_of_one_process(family, shares):
    alone = logits_of(load_model(tiny_directory(family), dtype=mx.float32))

    def work(rank, exchange):
        options = [{"expert_io": "pread"}, {"expert_io": "mmap"}, {"expert_io": "pread", "prefetch": "off"}][rank]
        return logits_of(ranked(family, exchange, Owners(shares), **options))

    assert together(len(shares), work) == [alone] * len(shares)


def test_several_spans():
    family = "qwen3_5_moe"
    alone = logits_of(load_model(tiny_directory(family), dtype=mx.float32, set={"span": 16}), (100,))
    work = lambda rank, exchange: logits_of(ranked(family, exchange, Owners((1, 1)), set={"span": 16}), (100,))  # noqa: E731
    assert together(2, work) == [alone] * 2


def test_all_ranks_use_the_choice_of_the_first():
    def work(rank, exchange):
        model = ranked("qwen3_moe", exchange, Owners((1, 1)))
        for layer in model.args.moe_layers:
            experts = model.layers[layer].mlp.experts
            experts.shares_routing = True
        if rank:  # another machine, whose router's results differ slightly
            for layer in model.args.moe_layers:
                mlp = model.layers[layer].mlp
                mlp.route = lambda logits, *tokens, right=mlp.route: right(-logits, *tokens)
        return logits_of(model)

    first, second = together(2, work)
    assert first == second == logits_of(load_model(tiny_directory("qwen3_moe"), dtype=mx.float32))


def test_routing_that_differs_is_an_error_on_all():
    def work(rank, exchange):
        model = ranked("qwen3_moe", exchange, Owners((1, 1)))
        if rank:
            mlp = model.layers[model.args.moe_layers[0]].mlp
            mlp.route = lambda logits, *tokens, right=mlp.route: right(-logits, *tokens)
        logits_of(model)

    assert all(isinstance(error, RankError) for error in together(2, work))


@pytest.mark.parametrize("length", [1, 40])
def test_a_read_that_fails_is_an_error_on_all(length):
    def work(rank, exchange):
        model = ranked("qwen3_moe", exchange, Owners((1, 1)), expert_io="pread")
        if rank == 1:
            right = model.experts.request

            def request(layer, ids):
                if layer == 2:
                    raise ExpertIOError("the drive is gone")
                return right(layer, ids)

            model.experts.request = request
        logits_of(model, (length,))

    first, second = together(2, work)
    assert isinstance(second, ExpertIOError) and "the drive is gone" in str(second)
    assert isinstance(first, RankError) and "rank 1 could not compute" in str(first)


def test_an_interruption_of_one_rank_stops_all():
    def work(rank, exchange):
        model = ranked("qwen3_moe", exchange, Owners((1, 1)))
        experts = model.layers[model.args.moe_layers[1]].mlp.experts
        if rank == 0:
            right = experts.own_rows

            def interrupted(*given):
                yield from right(*given)
                raise KeyboardInterrupt

            experts.own_rows = interrupted
        logits_of(model)

    first, second = together(2, work)
    assert isinstance(first, KeyboardInterrupt) and isinstance(second, RankStopped) and "rank 0" in str(second)


def test_a_rank_out_of_step_is_named():
    def work(rank, exchange):
        exchange.count += rank == 2
        exchange(1, np.zeros(3, np.uint32))

    errors = together(3, work)
    assert all(isinstance(error, RankError) and "out of step" in str(error) for error in errors)
    assert "rank 2" in str(errors[0]) and "rank 2" in str(errors[1])


def test_flags_reach_all_ranks():
    told = together(2, lambda rank, exchange: exchange(1, np.full(2, rank, np.uint32), flag=rank * FAILED))
    assert all(one.flags == (0, FAILED) and one.first(FAILED) == 1 for one in told)
    assert all(one.words.tolist() == [[0, 0], [1, 1]] for one in told)


@given(
    shares=st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple),
    layer=st.integers(0, 100),
    experts=st.integers(1, 300),
)
def test_every_expert_has_one_owner(shares, layer, experts):
    owners = Owners(shares)
    owned = [owners.experts(layer, rank, experts) for rank in range(len(shares))]
    assert sorted(sum(owned, [])) == list(range(experts))
    rounds = experts // sum(shares)
    for share, mine in zip(shares, owned, strict=True):
        assert rounds * share <= len(mine) <= (rounds + 1) * share

"""A model of which a token passes some layers several times: each visit has its own caches, and the layer's records."""

from itertools import pairwise

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from test_kin import TOLERANCE, error
from test_value_records import has_the_bits_of_experts_in_memory
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx.calibration.layers import LayerRun
from moeflux_mlx.calibration.weights import open_layers
from moeflux_mlx.errors import ConfigError, RequestError
from moeflux_mlx.experts.stats import Asked, AskedByRow
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.mixers.registry import make_caches
from moeflux_mlx.model.residual import ToldStreams
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.model.tensors import token_bytes
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.packing.located import Located
from moeflux_mlx.planning.forecast import TokenWork
from moeflux_mlx.planning.memory_plan import state_bytes
from moeflux_mlx.spec import ModelArgs
from moeflux_mlx.state.snapshot import save_state, state_size

FAMILY, FIRST, END, LAYERS, PASSES, WIDTH = "inkling2_loop", 2, 6, 7, 3, 128
VISITS = (0, 1, *[2, 3, 4, 5] * 3, 6)
ROUTED, TOP_K = 9, 3
TOKENS = mx.array(goldens.golden(FAMILY)[0])[None]


def test_layers_in_the_order_in_which_a_token_passes_them():
    model = tiny_model(FAMILY, mx.float32)
    assert model.args.visits == VISITS == tuple(layer.mlp.layer for layer in model.visits)
    assert [isinstance(layer.residual, ToldStreams) for layer in model.visits] == [6 <= i < 14 for i in range(15)]
    caches = [len(make_caches(model.args.mixers[layer])) for layer in VISITS]
    assert len(model.make_cache()) == sum(caches) == 15 * 4
    mini = ModelArgs.from_variant("inkling-2-mini-26b").visits
    assert mini == (*range(6), *[*range(6, 18)] * 3, *range(18, 24))


# ---- experts


@pytest.mark.parametrize(
    "kind, records", drawn(("read in place", "on MLX's side", "copied, and kept on the host"), [ROUTED, 30])
)
def test_the_bits_of_experts_in_memory(monkeypatch, kind, records):
    has_the_bits_of_experts_in_memory(monkeypatch, FAMILY, kind, records)


def test_a_pass_asks_for_records_that_the_pass_before_may_have_read():
    model = load_model(tiny_directory(FAMILY), dtype=mx.float32, expert_io="pread", expert_cache_bytes=1 << 30)
    source, caches = model.experts, [model.make_cache() for _ in range(2)]
    source.counts_rows = True
    model(TOKENS[:, :1], caches[0])
    (asked,) = source.asked_by_row()
    assert asked.hits + asked.misses == source.stats.hits + source.stats.misses == len(VISITS) * TOP_K
    assert source.stats.misses == len({key for key, _ in source.places()}) < len(VISITS) * TOP_K
    step = model.step([SequenceRows(caches[0], [5]), SequenceRows(caches[1], [7, 9])])
    assert [row.hits + row.misses for row in step.asked] == [len(VISITS) * TOP_K] * 3
    source.take_back(1)
    source.close()


def test_rows_of_several_visits_are_counted_apart():
    """Row 0 misses expert 4 in the first pass and has it in the second; row 1 misses expert 2 there."""
    layout = ExpertLayout.from_args(ModelArgs.from_dict(goldens.config(FAMILY)))
    asked, size = AskedByRow(layout, 1.0), layout.records[2].size
    asked.note(0, np.array([[0, 1], [1, 3]]), np.array([[True, True], [True, True]]))
    asked.note(2, np.array([[4, 1], [0, 1]]), np.array([[False, True], [True, True]]))
    asked.note(2, np.array([[4, 1]]), np.array([[True, True]]))  # in two parts
    asked.note(2, np.array([[2, 1]]), np.array([[False, True]]))
    assert [layer for layer, *_ in asked.visits()] == [0, 2, 2]
    assert asked.counts() == [Asked(5, 1, size), Asked(5, 1, size)]


# ---- plans


def test_what_a_token_takes_counts_visits_and_what_is_stored_layers():
    args = ModelArgs.from_dict(goldens.config(FAMILY))
    caches = [cache for layer in VISITS for cache in make_caches(args.mixers[layer])]
    assert state_bytes(args, 100, 2) == sum(cache.bytes_for(100, 2) for cache in caches)
    layout = ExpertLayout.from_args(args)
    assert len(layout.records) == LAYERS
    assert layout.token_bytes(args) == sum(TOP_K * layout.records[layer].held_bytes for layer in VISITS)
    tensors = {f"model.layers.{i}.mlp.gate.weight": mx.zeros((10 + i, 1)) for i in range(LAYERS)}
    tensors |= {"lm_head.weight": mx.zeros((1000, 1)), "model.embed_tokens.weight": mx.zeros((50, 1))}
    assert token_bytes(args, tensors, mx.float32) == 4 * (1000 + sum(10 + i for i in VISITS))
    work = TokenWork.of(args, 0, 0, 100, 2)
    assert (work.layers, work.moe_layers) == (len(VISITS), len(VISITS))


def test_a_snapshot_has_the_caches_of_every_visit():
    model = tiny_model(FAMILY, mx.float32)
    cache = model.make_cache()
    mx.eval(model(TOKENS[:, :11], cache))
    assert len(save_state(model, cache)) == state_size(model, cache) == state_size(model.args, 11)


def test_texts_do_not_pass_it_layer_by_layer(tmp_path):
    with pytest.raises(RequestError, match="inkling2_loop has layers that run several times, which do not run layer"):
        LayerRun(open_layers(Located(goldens.checkpoint_dir(FAMILY))), [np.array([1, 2])], tmp_path, mx.float32)


@pytest.mark.parametrize("change", [{"core_start": 0}, {"core_start": 3}, {"core_end": 5}, {"core_end": 2}])
def test_layers_that_run_several_times_are_whole_blocks(change):
    config = goldens.config(FAMILY)
    config["text_config"]["loop_config"] |= change
    with pytest.raises(ConfigError, match="core_start|core_end"):
        ModelArgs.from_dict(config)


# ---- mistakes that a reader of the family can make: each must exceed the tolerance


def told(model):
    return [layer.residual for layer in model.visits if isinstance(layer.residual, ToldStreams)]


def gates(model):
    return [gate for layer in model.layers[FIRST:END] for gate in layer.controllers.children().values()]


def swapped(name):
    """Changes the order of the two queries of each layer."""

    def swap(model):
        queries = model.model.messages
        pairs = queries[name].reshape(-1, 2, WIDTH)
        queries[name] = pairs[:, ::-1].reshape(-1, WIDTH)
        queries.arrange()

    return swap


def go_on(model):
    """Lets a pass begin with the sum that the pass before ended with."""
    for before, residual in pairwise([None, *told(model)]):
        if before is None or before.is_last:
            mixed = residual.mixed

            def from_last(h, *rest, mixed=mixed):
                return mixed(mx.concatenate([h[..., : -3 * WIDTH], h[..., -WIDTH:], h[..., -2 * WIDTH :]], -1), *rest)

            residual.mixed = from_last


def of_one_message(model):
    """Lets the messages for queries in everywhere."""
    for residual in told(model):
        made = residual.messages
        residual.messages = lambda sums, made=made: made(sums)[:1] * 4


def by_last_sum(model):
    for residual in told(model):
        residual.messages = lambda sums, made=residual.messages: made(mx.concatenate([sums[..., -WIDTH:]] * 2, -1))


def exchange(model):
    for gate in gates(model):
        gate.forget_proj, gate.gain_proj = gate.gain_proj, gate.forget_proj


def keep_all(model):
    for gate in gates(model):
        gate.forget_proj.scales, gate.forget_proj.biases = gate.forget_proj.scales * 0, gate.forget_proj.biases * 0


def without_norms(model):
    for gate in gates(model):
        gate.eps = 1e6


MISTAKES = {
    "a pass that goes on from the one before": go_on,
    "queries of attention for the experts": swapped("query"),
    "queries of values for keys": swapped("kv_query"),
    "one message for all inputs": of_one_message,
    "messages of the last sum alone": by_last_sum,
    "gains that forget": exchange,
    "inputs that forget nothing": keep_all,
    "gates of inputs that are not normed": without_norms,
}


@pytest.mark.usefixtures("plain_operations")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_inkling2_loop(mistake):
    model = load_model(tiny_directory(FAMILY, "hub"), dtype=mx.float32)
    MISTAKES[mistake](model)
    assert error(model, FAMILY) > 10 * TOLERANCE


def test_every_pass_has_keys_of_its_own():
    """The logits change if the second pass continues with what the first one has kept."""
    model, count = tiny_model(FAMILY, mx.float32, "hub"), 20
    caches = [model.make_cache() for _ in range(2)]
    for cache in caches:
        mx.eval(model(TOKENS[:, :count], cache))
    numbers = [number for number, layer in enumerate(VISITS) if layer == FIRST]
    for number in range(4 * numbers[0], 4 * numbers[1]):
        caches[1][number + 16].state = caches[1][number].state
    wanted, got = (np.array(model(TOKENS[:, count : count + 4], cache)) for cache in caches)
    assert np.abs(wanted - got).max() > 10 * TOLERANCE

"""The work that a Mac's GPU gets at once, at the shapes of real models.

It is counted while graphs are built, and never computed.
"""

from collections import defaultdict
from math import prod
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from tiny_models import tiny_directory

from moeflux_mlx.caches.entries import EntriesCache
from moeflux_mlx.experts.routing import finished
from moeflux_mlx.experts.waves import wave_size, waves_of
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.kinds import streams_before
from moeflux_mlx.mixers.registry import USUAL, make_caches
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.layer import DecoderLayer
from moeflux_mlx.model.span import PromptSizes, Span
from moeflux_mlx.model.tokens import Tokens
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.some_experts import values_of_zeros
from moeflux_mlx.ops import backend, gpu_time, launch
from moeflux_mlx.ops.experts import Records
from moeflux_mlx.ops.grouped import GroupedRows
from moeflux_mlx.ops.seen import Chosen
from moeflux_mlx.planning.budget import plan_memory
from moeflux_mlx.planning.machine import Figures
from moeflux_mlx.planning.memory_plan import Demand
from moeflux_mlx.spec import ModelArgs, variants

CHIPS = ["Apple M1", "Apple M2", "Apple M1 Max", "Apple M4 Pro", "Apple M5 Max", "Apple Paravirtual device"]
MEMORY = 1 << 40
pytestmark = pytest.mark.usefixtures("cpu_device")  # the CPU pretends to be an Apple GPU


class Work:
    """Collects the products, attentions and delta rules that are requested, as they accumulate between commits."""

    def __init__(self, monkeypatch):
        self.launches, self.gatherings, self.gathered, self.attended = [], [], 0.0, 0
        monkeypatch.setattr(backend, "name", lambda: "metal")
        monkeypatch.setattr(launch, "built", lambda kernel, *_: self.kernel(kernel.name))
        for name in ("quantized_matmul", "gather_qmm"):
            self.count(monkeypatch, mx, name, lambda out, x, *_: 2 * out.size * x.shape[-1])
        self.count(monkeypatch, mx.array, "__matmul__", lambda out, x, _: 2 * out.size * x.shape[-1])
        self.count(monkeypatch, mx.fast, "scaled_dot_product_attention", self.scores)
        monkeypatch.setattr(mx, "async_eval", lambda *_: self.commit())
        monkeypatch.setattr(mx, "eval", lambda *_: self.commit())

    def count(self, monkeypatch, owner, name, operations):
        own = getattr(owner, name)

        def counted(*given, **named):
            out = own(*given, **named)
            self.add(operations(out, *given))
            return out

        monkeypatch.setattr(owner, name, counted)

    def scores(self, out, q, k, v):
        operations = 2 * prod(q.shape[:3]) * k.shape[2] * (k.shape[3] + v.shape[3])
        self.attended += operations
        return operations

    def kernel(self, name):
        """Returns outputs that are not computed. In a prompt only the delta rule's steps take long."""

        def pretended(inputs, output_shapes, output_dtypes, **_):
            if name == "gated_delta_tokens":
                (tokens, heads, value), key = output_shapes[0], output_shapes[1][-1]
                self.add(4 * 7 * tokens * heads * value * key)  # at a quarter of the rate
            return [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]

        return pretended

    def add(self, operations):
        self.launches.append(operations)
        self.gathered += operations

    def commit(self):
        self.gatherings.append(self.gathered)
        self.gathered = 0.0

    def seconds(self, chip):
        """Returns (the longest launch, the longest accumulation) on a chip, in seconds."""
        assert self.launches and self.gatherings and not self.gathered
        return max(self.launches) / gpu_time.rate(chip), max(self.gatherings) / gpu_time.rate(chip)


def block_sizes(args, context, chip):
    """Returns the block sizes that a Mac with enough memory would plan."""
    figures = Figures(MEMORY, MEMORY * 3 // 4, MEMORY, operations=gpu_time.SECONDS * gpu_time.rate(chip))
    return plan_memory(args, ExpertLayout.from_args(args), figures, Demand(10**9, context, 2)).sizes


class NoExperts:
    """Stands for routed experts, and returns what they add their output to."""

    source = SimpleNamespace(relieve=lambda: None)

    def in_pieces(self, routing, x, added_to, shared):
        yield from ()
        return added_to


def kinds_of_layers(args):
    """Returns one layer of each mixer, with experts and without."""
    return {(args.mixers[i], i in args.moe_layers): i for i in range(args.num_hidden_layers)}.values()


def fill(cache, positions):
    """Fills a cache as it is after this number of positions."""
    if cache.is_trimmable():
        for name, (heads, width) in zip(("keys", "values"), cache.rows, strict=True):
            setattr(cache, name, mx.zeros((1, heads, positions, width), mx.bfloat16))
    if isinstance(cache, EntriesCache):
        (_, row), (_, entry) = cache.rows
        cache.keys = mx.zeros((1, 1, cache.capacity, row), mx.bfloat16)
        cache.values = mx.zeros((1, 1, cache.entries_of(positions), entry), mx.bfloat16) if entry else None


def last_block(args, layer, positions, block):
    """Runs a layer over the last block of a prompt of this length, without its routed experts."""
    made, caches = DecoderLayer(args, layer, None, USUAL), make_caches(args.mixers[layer])
    for one in caches:
        fill(one, positions)
        one.offset = positions - block
    made.set_dtype(mx.bfloat16)
    x = mx.zeros((1, block, args.hidden_size * streams_before(args.connections, layer)), mx.bfloat16)
    made.mlp.experts = NoExperts()
    if args.mixers[layer].experts is not None:
        made.mixer.set_experts(values_of_zeros(ExpertLayout.from_args(args), args.matrix_set(layer)))
    tokens = mx.zeros((1, block), mx.int32)
    span, mixer = Span(tokens, positions - block, block, inputs=Tokens(tokens)), args.mixers[layer]
    if not mixer.has_own_choice:
        late = block - mixer.seeing_all(positions - block, block)
        span.chosen = defaultdict(lambda: Chosen(mx.zeros((1, late, mixer.handed_on), mx.int32)))
    backend.start(finished(made.pass_span(x, caches, span)))  # as between two layers


@pytest.mark.parametrize("name, chip", drawn(variants(), CHIPS))
def test_no_launch_of_a_block_and_no_accumulation_takes_half_a_second(monkeypatch, name, chip):
    args = ModelArgs.from_variant(name)
    for context in (8192, 65_536, 262_144):
        block = block_sizes(args, context, chip).block
        with monkeypatch.context() as patched:
            work = Work(patched)
            for layer in kinds_of_layers(args):
                last_block(args, layer, context, block)
            assert max(work.seconds(chip)) < gpu_time.SECONDS


@pytest.mark.parametrize("name", ["qwen3.5-397b-a17b", "qwen3-30b-a3b"])
def test_a_block_is_estimated_as_it_is_built(monkeypatch, name):
    args = ModelArgs.from_variant(name)
    for layer in kinds_of_layers(args):
        with monkeypatch.context() as patched:
            work = Work(patched)
            last_block(args, layer, 4096, 1024)
        estimate = gpu_time.block(args, args.mixers[layer], 1024)
        assert sum(work.launches) - work.attended == pytest.approx(estimate, rel=0.001)


@pytest.mark.usefixtures("plain_operations")
def test_what_is_cut_is_computed_alike(monkeypatch):
    """Cuts latents that are expanded for a few heads at a time, pieces of waves, and logits."""
    model = load_model(tiny_directory("deepseek_v3"), dtype=mx.float32)
    tokens = mx.array(np.random.default_rng(4).integers(0, model.args.vocab_size, (1, 45)))
    whole = np.array(model(tokens))
    monkeypatch.setattr(gpu_time, "rows_at_once", lambda inner, outer: 3)
    np.testing.assert_allclose(np.array(model(tokens)), whole, atol=2e-5)


@pytest.mark.parametrize("name, spread", drawn(variants(), ["even", "all to few"]))
def test_no_piece_of_a_wave_takes_half_a_second(monkeypatch, name, spread):
    """The pieces are the same on every Apple GPU, so the slowest one is checked."""
    args = ModelArgs.from_variant(name)
    layout, tokens, K = ExpertLayout.from_args(args), 32_768, args.num_experts_per_tok
    ids = np.arange(tokens * K).reshape(tokens, K) % (args.num_experts if spread == "even" else K + 2)
    counts = np.bincount(ids.reshape(-1), minlength=args.num_experts)
    record = layout.records[args.moe_layers[0]]
    waves = waves_of(counts, wave_size(layout, K))
    work = Work(monkeypatch)
    rows = GroupedRows(mx.zeros((tokens, args.expert_size), mx.bfloat16), ids, counts, waves, record)
    records = Records(mx.zeros((args.num_experts, record.stride // 4), mx.uint32), record)
    for i, wave in enumerate(waves):
        rows.multiply(i, wave, records)
    width, matrices = args.moe_intermediate_size, args.experts.matrices
    assert 2 * matrices * args.expert_size * width * tokens * K <= sum(work.launches)
    assert max(work.seconds("Apple M1")) < gpu_time.SECONDS


def test_logits_of_many_tokens_are_several_launches(monkeypatch):
    args = ModelArgs.from_variant("qwen3.5-35b-a3b")
    model = Model(args, None)
    model._run_layers = lambda tokens, cache: mx.zeros((1, 8192, args.hidden_size))
    work = Work(monkeypatch)
    (logits,) = model._compute_step(mx.zeros((1, 8192), mx.int32), [])
    assert logits.shape == (1, 8192, args.vocab_size)
    assert sum(work.launches) == 2 * 8192 * args.hidden_size * args.vocab_size
    assert max(work.launches) / gpu_time.rate("Apple M1") < gpu_time.SECONDS


def test_a_faster_gpu_takes_larger_blocks_and_other_machines_the_usual_ones():
    args = ModelArgs.from_variant("cogito-v2-671b")
    blocks = [block_sizes(args, 8192, chip).block for chip in ("Apple M1", "Apple M1 Max", "Apple M2 Ultra")]
    assert blocks == sorted(set(blocks)) and blocks[0] >= 256
    plan = plan_memory(args, ExpertLayout.from_args(args), Figures(MEMORY), Demand(10**9, 8192, 2))
    assert plan.sizes == PromptSizes(plan.sizes.span, 4096)


def test_a_block_that_is_asked_for_is_bounded_too():
    args = ModelArgs.from_variant("cogito-v2-671b")
    figures = Figures(MEMORY, MEMORY * 3 // 4, MEMORY, operations=0.5 * gpu_time.rate("Apple M1"))
    asked = Demand(10**9, 8192, 2, prefill_step_size=3000)
    assert plan_memory(args, ExpertLayout.from_args(args), figures, asked).sizes.block == 375

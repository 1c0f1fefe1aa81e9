"""Memory plans: sums that hold, refusals whose advice works, and the command that prints them."""

import contextlib
import gc
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from tiny_models import tiny_directory

from moeflux_mlx import plan
from moeflux_mlx.cli import known_models
from moeflux_mlx.errors import MoefluxWarning, RequestError
from moeflux_mlx.experts import pools
from moeflux_mlx.experts.memory import page_aligned
from moeflux_mlx.experts.reader import in_pieces_bytes
from moeflux_mlx.experts.source import IoMode
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.kinds import GatedConnections
from moeflux_mlx.mixers.registry import untrimmable_bytes
from moeflux_mlx.model.span import PromptSizes
from moeflux_mlx.model.step import MAX_ROWS
from moeflux_mlx.model.tensors import layer_values, resident_bytes, token_bytes, variant_bytes
from moeflux_mlx.model.weights import read_resident
from moeflux_mlx.opening import engine as opening
from moeflux_mlx.opening.engine import load, load_model, open_engine
from moeflux_mlx.opening.load_settings import LoadSettings
from moeflux_mlx.ops.causal_parts import SCORES
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.planning import memory_plan, wired
from moeflux_mlx.planning.budget import MOST_STREAMED, Planner, cache_room, default_context, plan_memory
from moeflux_mlx.planning.machine import MODES, Figures, describe, group_limits, in_gb, reason_to_read
from moeflux_mlx.planning.memory_plan import Demand, activation_bytes, headroom_bytes, least_pool, room, state_bytes
from moeflux_mlx.planning.pressure import CUT, Breath, PoolLimit, Spare
from moeflux_mlx.planning.settings import BufferLimits
from moeflux_mlx.planning.wired import wire
from moeflux_mlx.quant import Quant
from moeflux_mlx.spec import ModelArgs, variants

GB = 10**9
ADVICE = re.compile(
    r"a context of (\d+) fits|an expert pool of ([\d.]+) GB fits|--memory-gb ([\d.]+) would do|"
    r"([\d.]+) GB of memory would do"
)


def named(name):
    args = ModelArgs.from_variant(name)
    return args, ExpertLayout.from_args(args)


@settings(max_examples=examples(150), deadline=None)
@given(
    name=st.sampled_from(variants()),
    memory=st.integers(10**8, 10**12),
    resident=st.integers(0, 2 * 10**10),
    context=st.integers(1, 50_000),
    cache=st.none() | st.integers(0, 10**12),
    way=st.sampled_from([*((io, False) for io in (None, *MODES)), ("auto", True), ("pread", True), ("resident", True)]),
    share=st.none() | st.floats(0.6, 0.8),
    limit=st.none() | st.integers(10**7, 10**12),
)
def test_a_plan_adds_up_or_its_refusal_says_what_fits(name, memory, resident, context, cache, way, share, limit):
    """`share` is Metal's working set as a share of memory, `limit` the process's. `way` is how experts are read, and
    whether in place.
    """
    args, layout = named(name)
    demand = Demand(resident, context, 2, expert_io=way[0], expert_cache_bytes=cache, in_place=way[1])
    figures = replace(machine(memory, share), limit=limit)
    try:
        made = plan_memory(args, layout, figures, demand)
    except RequestError as error:
        advice = ADVICE.search(str(error))
        is_limited = room(figures) == limit
        assert advice and f"{in_gb(limit if is_limited else memory)}: " in str(error)
        plan_memory(args, layout, *followed(advice, figures, demand, share))
        return
    assert made.total <= room(figures) <= memory - made.headroom
    at_once = made.pool or made.copied or min(made.experts, 10 * layout.largest_layer)  # memory of one command buffer
    assert share is None or made.fixed + at_once <= 0.9 * share * memory
    assert made.slots * layout.held_bytes == made.pool <= layout.total_bytes
    if made.mode is IoMode.PREAD:
        assert made.pool >= least_pool(args, layout)
        assert cache is None or made.pool <= max(cache, least_pool(args, layout))
    else:
        assert made.pool == 0
        assert made.copied == (made.experts if made.mode is IoMode.RESIDENT else 0)


@settings(max_examples=examples(60), deadline=None)
@given(name=st.sampled_from(variants()), memory=st.integers(10**9, 10**12), cache=st.none() | st.integers(0, 10**12))
def test_records_of_several_sizes_are_planned_in_bytes(name, memory, cache):
    args = ModelArgs.from_variant(name)
    low, high = Quant(3, 64), Quant(6, 64)
    quants = {layer: (low, low, high if layer % 3 else low)[-args.matrices_of(layer) :] for layer in args.record_sets}
    layout = ExpertLayout.from_args(args, quants)
    try:
        made = plan_memory(args, layout, machine(memory, None), Demand(GB, 1000, 2, expert_cache_bytes=cache))
    except RequestError:
        return
    assert made.total <= room(made.figures) and made.experts == layout.total_bytes
    if made.mode is IoMode.PREAD:
        most = [record.held_bytes for record in layout.records.values()]
        assert least_pool(args, layout) <= made.pool <= args.num_experts * sum(most)
        assert made.pool // max(most) - 2 <= made.slots <= made.pool // min(most)
        assert cache is None or made.pool <= max(cache, least_pool(args, layout))


def machine(memory, share):
    return Figures(memory, working_set=None if share is None else int(share * memory))


def followed(advice, figures, demand, share):
    """Returns figures and demand after the advice is followed."""
    context, pool, limit, more = advice.groups()
    if context:
        return figures, replace(demand, context=int(context))
    if pool:
        return figures, replace(demand, expert_cache_bytes=int(float(pool) * GB - 0.005 * GB))
    if limit:
        return replace(figures, limit=round(float(limit) * GB)), demand
    return machine(int((float(more) + 0.01) * GB), share), demand


@pytest.mark.parametrize("gb, working_set, name", [(16, 11.9, "qwen3-30b-a3b"), (24, 17.2, "qwen3-30b-a3b")])
def test_a_pool_stays_within_the_limit_of_a_macs_gpu(gb, working_set, name):
    args, layout = named(name)
    made = plan_memory(args, layout, Figures(gb * GB, working_set=int(working_set * GB)), Demand(GB, itemsize=2))
    assert made.mode is IoMode.PREAD
    assert 0.85 * working_set * GB < made.total <= 0.9 * working_set * GB
    with pytest.raises(RequestError, match="beyond what Metal recommends to use; an expert pool of"):
        demand = Demand(GB, itemsize=2, expert_io="pread", expert_cache_bytes=int(0.9 * working_set * GB))
        plan_memory(args, layout, made.figures, demand)


def test_what_a_command_buffer_refers_to_fits_what_a_mac_s_gpu_may_use():
    """A user may map more than memory, but Metal wires the files of some layers together."""
    args, layout = named("qwen3.5-397b-a17b")
    demand = Demand(6 * GB, 8192, 2, expert_io="mmap")
    ten = BufferLimits(50, 1_000_000)
    enough = Figures(96 * GB, working_set=72 * GB, gathered=ten)
    assert layout.total_bytes > enough.memory and plan_memory(args, layout, enough, demand).mode is IoMode.MMAP
    with pytest.raises(RequestError, match="36.* GB mapped experts, .*; --expert-io pread needs no more") as refused:
        plan_memory(args, layout, Figures(48 * GB, working_set=36 * GB, gathered=ten), demand)
    way = "MLX_MAX_OPS_PER_BUFFER=50 in the environment"
    assert way not in str(refused.value)  # because it is set
    with pytest.raises(RequestError, match=f"{in_gb(layout.total_bytes)} mapped experts, .*; with {way}"):
        plan_memory(args, layout, replace(enough, gathered=BufferLimits(300, 1_000_000)), demand)
    with pytest.raises(RequestError) as refused:  # as ten layers do not fit either
        plan_memory(args, layout, Figures(48 * GB, working_set=36 * GB), demand)
    assert "mapped experts" in str(refused.value) and way not in str(refused.value)
    assert plan_memory(args, layout, Figures(48 * GB), demand).mode is IoMode.MMAP


def test_more_memory_never_makes_the_pool_smaller():
    args, layout = named("qwen3.5-397b-a17b")
    sizes = [plan_memory(args, layout, Figures(gb * GB), Demand(6 * GB, itemsize=2)).pool for gb in range(16, 260, 7)]
    assert sizes == sorted(sizes) and sizes[0] > 0


def test_the_headroom_is_a_share_and_at_least_a_gibibyte_on_large_machines():
    assert headroom_bytes(10 * GB) == 10 * GB * 15 // 100
    assert headroom_bytes(5 * 2**30) == 2**30
    assert headroom_bytes(2**30) == int(2**30 * 0.15)
    steps = range(2**31, 3 * 2**31, 2**22)
    room_of = [room(Figures(memory)) for memory in steps]
    assert room_of == sorted(room_of)  # more memory never leaves less


def test_state_bytes_match_the_caches():
    for family in goldens.families():
        model = load_model(tiny_directory(family), dtype=mx.float32)
        cache = model.make_cache()
        mx.eval(model(mx.array([[1] * 300]), cache))
        assert sum(layer.nbytes for layer in cache) == state_bytes(model.args, 300, 4)


@pytest.mark.parametrize("family", goldens.families())
def test_resident_bytes_match_the_loaded_model(family):
    path = tiny_directory(family)
    for dtype in (mx.float32, mx.bfloat16):
        model = load_model(path, dtype=dtype)
        loaded = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        assert resident_bytes(read_resident(path), dtype) == variant_bytes(model.args, dtype) == loaded
        dense = variant_bytes(model.args, dtype, of_token=True)
        assert token_bytes(model.args, read_resident(path), dtype) == dense < loaded


METAL = Figures(64 * GB, working_set=48 * GB, buffer=36 * GB)


@pytest.mark.parametrize(
    "total, layer_bytes, fixed, figures, reason",
    [
        (40 * GB, GB, 3 * GB, METAL, ""),
        (40 * GB, GB, 5 * GB, Figures(64 * GB), ""),
        (49 * GB, GB, 0, METAL, "three quarters of RAM"),
        (
            40 * GB,
            GB,
            4 * GB,
            METAL,
            "4.00 GB of resident .* exceed 43.20 GB, 90% of max_recommended_working_set_size",
        ),
        (40 * GB, 37 * GB, GB, METAL, "layer file of 37.00 GB exceeds max_buffer_length 36.00 GB"),
        (40 * GB, 37 * GB, 20 * GB, Figures(64 * GB), ""),
    ],
)
def test_the_resident_figure_that_decides(total, layer_bytes, fixed, figures, reason):
    got = reason_to_read(total, layer_bytes, fixed, figures)
    assert re.search(reason, got) if reason else got == ""


def test_mapped_experts_count_where_they_are_copied():
    args, layout = named("qwen3-30b-a3b")
    memory, demand = 32 * GB, Demand(GB, context=131072, itemsize=2)
    shared = plan_memory(args, layout, Figures(memory), demand)
    assert shared.mode is IoMode.MMAP and shared.copied == 0
    tight = plan_memory(args, layout, Figures(memory, copies=True), demand)
    assert tight.mode is IoMode.PREAD and "leave less than" in tight.decision
    room = plan_memory(args, layout, Figures(2 * memory, copies=True), demand)
    assert room.mode is IoMode.MMAP and room.total == room.fixed + layout.total_bytes
    with pytest.raises(RequestError, match="16.31 GB mapped experts"):
        plan_memory(args, layout, Figures(memory, copies=True), replace(demand, expert_io="mmap"))


def test_both_score_arrays_of_latent_attention_are_planned():
    args, layout = named("cogito-v2-671b")
    demand = Demand(10 * GB, context=32768, itemsize=2)
    scores = args.num_attention_heads * 512 * 32768 * 2
    assert plan_memory(args, layout, Figures(192 * GB), demand).activations > 2 * scores


def of_a_block(name, context, quant=None, **more):
    """Returns the bytes of temporaries of 512 tokens at once, on a GPU whose units multiply experts."""
    args, _ = named(name)
    layout = ExpertLayout.from_args(args, quant and {i: (quant,) * args.matrices_of(i) for i in args.record_sets})
    demand = Demand(0, context, 2, **{"on_units": True, **more})
    return activation_bytes(args, layout, demand, context, PromptSizes(512, 512))


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3.6-35b-a3b"])
def test_a_gpu_that_attends_without_scores_plans_none(name):
    """Of two blocks, each with two arrays of scores, the sums of pieces of positions are left."""
    heads, _, width = next(mixer.span_heads for mixer in named(name)[0].mixer_counts if mixer.span_heads)
    pieces = 4 * min(heads * 512, 33 * 128) * 16 * (width + 2)
    assert of_a_block(name, 1 << 17) - of_a_block(name, 1 << 17, fused=True) == 2 * (4 * SCORES - pieces)


def test_a_gpu_that_attends_to_expanded_latents_has_those_of_a_few_heads():
    """Or, behind a very long text, the scores of eight tokens over the latents."""
    args, _ = named("cogito-v2-671b")
    (mixer,) = args.mixer_counts
    some = [mixer.fused_temporaries(512, 1 << n) - 4 * 512 * 128 * 192 for n in (12, 15, 17)]
    assert some == [(128 << 12) * (192 + 128 + 128), (16 << 15) * (192 + 128 + 128), 2 * 2 * 8 * 128 << 17]
    assert of_a_block("cogito-v2-671b", 1 << 17, fused=True) < of_a_block("cogito-v2-671b", 1 << 17) / 4


@pytest.mark.parametrize("name", ["lfm2-8b-a1b", "sarvam-30b", "qwen3-30b-a3b"])
def test_a_plan_suffices_for_a_prompt_of_one_block(name):
    """The matrices of two layers are beside its experts, but not beside those of more tokens."""
    args, _ = named(name)
    layout = ExpertLayout.from_args(args)
    demand = Demand(0, itemsize=2, dense=2 * layer_values(args), on_units=True, fused=True)
    needs = [activation_bytes(args, layout, demand, 8192, PromptSizes(span, 4096)) for span in (4096, 4097, 4608)]
    assert needs == sorted(needs)


@pytest.mark.parametrize("name", ["gemma-4-26b-a4b", "gpt-oss-20b", "glm-5-744b", "inkling-small-276b-a12b"])
def test_wide_heads_windows_choices_and_biases_keep_scores(name):
    assert of_a_block(name, 1 << 17) == of_a_block(name, 1 << 17, fused=True)


UNITS = [("cuda", mx.bfloat16), ("cuda", mx.float32), ("metal", mx.bfloat16), ("ops", mx.bfloat16)]


@pytest.mark.parametrize("target, dtype", UNITS)
def test_cudas_units_attend_without_scores_and_multiply_experts(target, dtype):
    with standing_in(backend=target):
        demand = LoadSettings().demand(named("qwen3-30b-a3b")[0], 0, dtype)
    assert demand.fused == demand.on_units == ((target, dtype) == UNITS[0])


def test_matrices_of_value_experts_are_copied_where_no_kernel_reads_them():
    name, unread = "k2-horizon-mova-36b-a4b", Quant(4, 32, "mxfp4", has_global_scale=True)
    most, least = (of_a_block(name, 8192, fused=True, on_units=units) for units in (False, True))
    assert of_a_block(name, 8192, unread, fused=True) == of_a_block(name, 8192, unread, fused=True, on_units=False)
    assert least < most


def test_dequantised_matrices_and_streams_under_way_are_planned():
    """Of two layers, but not beside the experts of several blocks, and of up to two blocks; the CPU has neither."""
    args = ModelArgs.from_variant("qwen3.8-flash-next-125b")
    layout, width = ExpertLayout.from_args(args), 4 * args.hidden_size

    def planned(span, **more):
        demand = Demand(resident=0, context=span, itemsize=2, **more)
        return activation_bytes(args, layout, demand, span, PromptSizes(span, 512))

    assert planned(512, dense=1000) - planned(512) == 2000
    assert planned(8192, dense=1000) == planned(8192)
    mixed = [memory_plan.mixing_bytes(args, 512, span, Demand(resident=0, itemsize=2)) for span in (512, 1024, 4096)]
    assert mixed == [2 * GatedConnections.copies * tokens * width * 2 for tokens in (512, 1024, 1024)]
    assert memory_plan.mixing_bytes(args, 512, 512, Demand(resident=0, native=True)) == 0
    assert planned(1024) > planned(512) + mixed[0]


def test_longer_steps_of_a_prompt_are_planned():
    path = tiny_directory("qwen3_moe")
    plans = [open_engine(path, context=4096, prefill_step_size=step).plan for step in (512, 4096)]
    assert plans[1].activations > plans[0].activations


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3.5-397b-a17b", "cogito-v2-671b"])
def test_prompts_are_cut_as_memory_allows(name):
    """With enough memory a span has at least 8192 tokens. With less memory spans become smaller first, then blocks."""
    args, layout = named(name)
    roomy = plan_memory(args, layout, Figures(256 * GB), Demand(10 * GB, itemsize=2))
    assert roomy.sizes == PromptSizes(8192, 4096) and roomy.context == 8192 and roomy.shortened == ""
    longer = plan_memory(args, layout, Figures(512 * GB), Demand(10 * GB, context=65536, itemsize=2))
    assert longer.sizes.span == 32768
    plans = []
    for tenths in range(60, 600, 3):
        with contextlib.suppress(RequestError):
            made = plan_memory(args, layout, Figures(tenths * GB // 10), Demand(2 * GB, itemsize=2))
            plans.append((made.context, made.sizes.span, made.sizes.block))
    assert len(set(plans)) > 2 and len({span for _, span, _ in plans}) > 1
    asked = plan_memory(args, layout, Figures(256 * GB), Demand(10 * GB, itemsize=2, span=3000, prefill_step_size=100))
    assert asked.sizes == PromptSizes(3000, 100)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3.6-35b-a3b"])
def test_a_span_that_nobody_asked_for_does_not_forbid_mapping(name):
    """Mapped experts decode as one compiled graph on a GPU, and prompts are cut alike in every mode."""
    args, layout = named(name)
    modes = []
    for tenths in range(180, 320):
        figures = Figures(tenths * GB // 10, copies=True)
        made = plan_memory(args, layout, figures, Demand(2 * GB, itemsize=2))
        short = plan_memory(args, layout, figures, Demand(2 * GB, itemsize=2, span=512, prefill_step_size=64))
        assert made.mode is short.mode
        modes.append(made.mode)
        forced = plan_memory(args, layout, figures, Demand(2 * GB, itemsize=2, expert_io="pread"))
        small = plan_memory(args, layout, figures, Demand(2 * GB, itemsize=2, expert_io="pread", expert_cache_bytes=GB))
        assert forced.sizes == made.sizes == small.sizes
    assert modes == sorted(modes, key=lambda mode: mode is IoMode.MMAP) and len(set(modes)) == 2


def test_more_memory_never_makes_spans_shorter():
    """Checks sizes beyond the step of the headroom at 4 GiB, in one mode."""
    for name in ("qwen3-30b-a3b", "qwen3.5-397b-a17b"):
        args, layout = named(name)
        for metal in (False, True):
            spans = []
            for percent in range(500, 8000, 71):
                memory = percent * GB // 100
                figures = Figures(memory, working_set=memory * 3 // 4 if metal else None)
                with contextlib.suppress(RequestError):
                    made = plan_memory(args, layout, figures, Demand(2 * GB, itemsize=2))
                    spans += [(made.context, made.sizes.span)] if made.mode is IoMode.PREAD else []
            assert spans == sorted(spans) and len(set(spans)) > 2


def test_a_context_that_the_user_did_not_set_shrinks_and_that_is_reported():
    args, layout = named("qwen3-30b-a3b")
    small = plan_memory(args, layout, Figures(1_800_000_000), Demand(900_000_000, native=True))
    assert small.context < 8192 and f"context of {small.context} tokens, not 8192" in small.shortened
    with pytest.raises(RequestError, match=f"a context of {small.context}|a context of [0-9]+ fits"):
        plan_memory(args, layout, Figures(1_800_000_000), Demand(900_000_000, context=8192, native=True))


@settings(deadline=None)
@given(memory=st.integers(3 * GB, 60 * GB), tokens=st.sampled_from([1, 8, 512, 8192]), state=st.floats(0, 1))
def test_the_pool_has_what_nobody_else_needs(memory, tokens, state):
    """For any context and any number of tokens, everything together stays within memory.

    With an empty context and a single token the pool gets nearly all of it.
    """
    args, layout = named("qwen3-30b-a3b")
    demand = Demand(GB, itemsize=4, native=True, expert_io="pread")
    made = plan_memory(args, layout, Figures(memory), demand)
    span = min(tokens, made.sizes.span)
    growth = state_bytes(args, min(span + 256, made.context), 4)
    held = int(state * (state_bytes(args, made.context, 4) - growth))
    used = {"get_active_memory": lambda: GB + max(held, 0), "get_cache_memory": lambda: 0}
    with mock.patch.multiple(mx, **used):
        allowed = Breath(args, layout, made, PoolLimit([], made.most))(span, 0)
    sizes = PromptSizes(span, min(made.sizes.block, span))
    need = activation_bytes(args, layout, demand, made.context, sizes) + growth
    assert allowed + GB + max(held, 0) + made.runtime + need <= room(made.figures) or allowed == least_pool(
        args, layout
    )
    assert least_pool(args, layout) <= allowed <= made.most
    if tokens == 1 and not held:
        assert allowed >= made.most - need - layout.record.stride
    assert made.most >= made.pool and made.total <= room(made.figures)


def test_the_pool_leaves_what_is_set_aside():
    args, layout = named("qwen3-30b-a3b")
    allowed = []
    for beside in (0, GB):
        demand = Demand(GB + beside, itemsize=4, native=True, expert_io="pread", beside=beside)
        made = plan_memory(args, layout, Figures(12 * GB), demand)
        with mock.patch.multiple(mx, get_active_memory=lambda: GB, get_cache_memory=lambda: 0):
            allowed.append(Breath(args, layout, made, PoolLimit([], made.most))(4096, 0))
    assert allowed[0] - allowed[1] >= GB


def test_a_pool_that_metal_has_adopted_keeps_its_size():
    args, layout = named("qwen3-30b-a3b")
    made = plan_memory(args, layout, Figures(16 * GB, working_set=12 * GB), Demand(GB, itemsize=2))
    assert made.most == made.pool
    allowance = Breath(args, layout, made, PoolLimit([], made.most))
    with mock.patch.multiple(mx, get_active_memory=lambda: 100 * GB, get_cache_memory=lambda: 0):
        assert allowance(8192, made.pool) == made.pool, "temporaries of the longest prompt are planned for"
    given_size = plan_memory(args, layout, Figures(16 * GB), Demand(GB, itemsize=2, expert_cache_bytes=4 * GB))
    assert given_size.most == given_size.pool


def test_a_forced_mapping_that_does_not_fit_warns():
    line = describe(IoMode.MMAP, 100 * GB, METAL, forced=True, reason="experts exceed it")
    assert "mmap (forced)" in line and "warning: experts exceed it" in line
    assert "warning" not in describe(IoMode.MMAP, GB, METAL, forced=True, reason="")


def test_a_mac_of_another_size_has_limits_in_proportion(monkeypatch):
    monkeypatch.setattr(known_models, "machine_figures", lambda limit: METAL)
    assert known_models.figures(None) == METAL
    assert known_models.figures(16.0) == Figures(16 * GB, 12 * GB, 9 * GB)
    monkeypatch.setattr(
        known_models, "machine_figures", lambda limit: Figures(64 * GB, name="free GPU memory", copies=True)
    )
    assert known_models.figures(16.0) == Figures(16 * GB)


@pytest.fixture
def figures_are(monkeypatch):
    """Returns a function that gives this machine other figures."""
    return lambda figures: monkeypatch.setattr("moeflux_mlx.opening.engine.machine_figures", lambda limit: figures)


@pytest.fixture
def wire_by(monkeypatch):
    """Returns a function that replaces the one by which MLX limits what Metal wires."""
    return lambda limit: monkeypatch.setattr(mx, "set_wired_limit", limit)


def test_what_metal_may_wire():
    """Everything that runs on the GPU is wired, within Metal's recommendation. On other devices nothing is wired."""
    args, layout = named("qwen3-30b-a3b")
    for figures, mode, experts in (
        (Figures(64 * GB), "mmap", None),
        (Figures(64 * GB, 48 * GB, 36 * GB), "mmap", layout.total_bytes),
        (Figures(24 * GB, 16 * GB, 12 * GB, gathered=BufferLimits(50, 1_000_000)), "mmap", 100 * GB),
        (Figures(64 * GB, 48 * GB, 36 * GB), "pread", 2000 * layout.record.stride),
    ):
        demand = Demand(GB, itemsize=2, expert_io=mode, expert_cache_bytes=2000 * layout.record.stride)
        made = plan_memory(args, layout, figures, demand)
        if experts is None:
            assert made.wired is None
        else:
            assert made.wired == min(GB + made.state + made.activations + experts, made.figures.working_set)
            assert made.state > 10**8 and made.activations > 10**8


def test_models_share_what_metal_may_wire(monkeypatch, figures_are, wire_by):
    limits = []
    wire_by(limits.append)
    figures_are(replace(METAL, working_set=10**9))
    path = tiny_directory("qwen3_moe")
    first, second = (open_engine(path, dtype=mx.float32, expert_io="pread", wired="all") for _ in range(2))
    one = first.plan.wired
    assert limits == [one, 2 * one]
    first.experts.close()
    first.experts.close()
    assert limits[2:] == [one]
    del second
    gc.collect()
    assert limits[3:] == [0]
    limits.clear()
    packed = open_packed(path, first.model.args)
    tight = replace(first.plan, figures=replace(METAL, working_set=one + 5))
    loaders = [opening.open_experts(packed, first.model.args, tight) for _ in range(2)]
    assert limits == [one, one + 5]
    monkeypatch.setattr(opening, "StreamedExperts", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opening.open_experts(packed, first.model.args, tight)
    assert limits[2:] == [one + 5] * 2
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("mode", ["pool", "off"])
def test_a_model_is_wired_once_it_is_in_memory(monkeypatch, mode, figures_are, wire_by):
    """The limit rises a single time: when the weights are there, and the pool has taken its memory."""
    limits = []
    figures_are(replace(METAL, working_set=10**9))
    monkeypatch.setattr(StreamedExperts, "take_memory", lambda experts: limits.append("pool"))
    wire_by(limits.append)
    engine = open_engine(tiny_directory("qwen3_moe"), dtype=mx.float32, expert_io="pread", wired=mode)
    assert len(limits) == (2 if mode == "pool" else 0)
    if limits:
        weights = sum(one.nbytes for _, one in tree_flatten(engine.model.parameters()))
        assert limits[0] == "pool" and limits[1] >= weights + wired.SLACK
    engine.experts.close()
    assert limits[2:] == ([0] if limits else [])


def test_the_pool_is_opened_with_the_figures_of_metal(monkeypatch, wire_by):
    """No buffer is larger than Metal allows, and the pool's limit follows macOS's pace."""
    first = open_engine(tiny_directory("qwen3_moe"), dtype=mx.float32, expert_io="pread")
    packed = open_packed(tiny_directory("qwen3_moe"), first.model.args)
    wire_by(lambda nbytes: None)
    monkeypatch.setattr(pools, "backend", SimpleNamespace(name=lambda: "metal"))
    monkeypatch.setattr(pools, "adopted_pages", lambda *shape: (page_aligned(*shape),) * 2)
    sizes = {}
    for buffer in (GB, 65536):
        figures = Figures(16 * GB, working_set=GB, buffer=buffer)
        experts = opening.open_experts(packed, first.model.args, replace(first.plan, figures=figures))
        (pool,) = experts.pools
        experts.request(0, np.array([0])).release()
        sizes[buffer] = pool.held_bytes
        assert 0 < sizes[buffer] <= buffer and pool.fit(1) >= memory_plan.least_slots(first.model.args)
        limit, most = experts.limit, first.plan.most
        clock, source = [time.monotonic() + 60], mock.Mock()
        limit.clock = lambda clock=clock: clock[0]
        limit.sources = [source]
        source.spare.return_value = Spare(cut=CUT)
        for seconds, share in [(0, 7 / 8), (9, 7 / 8), (1, 6 / 8)]:
            clock[0] += seconds
            assert share * most <= limit(most) < (share + CUT / 4) * most
        source.spare.return_value = Spare()
        for seconds, share in [(59, 6 / 8), (1, 7 / 8), (59, 7 / 8), (1, 1)]:
            clock[0] += seconds
            assert share * most <= limit(most) < (share + CUT / 4) * most
        experts.close()
    assert sizes[GB] > 65536, "the largest buffer matters"


def test_a_share_may_be_given_back_in_the_middle_of_anything(wire_by):
    """The garbage collector frees a forgotten model, and its share, while another model's share is being counted."""
    limits, first = [], []

    def set_limit(limit):
        limits.append(limit)
        if first:
            first.pop()()

    wire_by(set_limit)
    first.append(wire(100, 1000))
    release = wire(10, 1000)
    assert limits[-1] == 10
    release()
    assert limits[-1] == 0
    wire_by(lambda limit: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wire(5, 1000)
    wire_by(limits.append)
    wire(7, 1000)()
    assert limits[-2:] == [7, 0]


def test_a_layer_beyond_metals_buffers_cannot_be_mapped():
    args, layout = named("qwen3.5-397b-a17b")
    figures = Figures(512 * GB, working_set=400 * GB, buffer=3 * GB)
    demand = Demand(GB, itemsize=2)
    assert plan_memory(args, layout, figures, demand).mode is IoMode.PREAD
    with pytest.raises(RequestError, match="layer of 3.62 GB exceeds .* 3.00 GB; give --expert-io auto"):
        plan_memory(args, layout, figures, replace(demand, expert_io="mmap"))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_limits_of_control_groups(tmp_path):
    groups, membership = tmp_path / "cgroup", tmp_path / "membership"
    assert group_limits(groups, membership) == []
    write(membership, "4:cpu,cpuacct:/a\n3:memory:/a/b\n0::/c/d\n")
    assert group_limits(groups, membership) == []
    write(groups / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    write(groups / "memory" / "a" / "memory.limit_in_bytes", "2000\n")
    write(groups / "c" / "d" / "memory.max", "max\n")
    write(groups / "c" / "memory.max", "3000\n")
    assert sorted(group_limits(groups, membership)) == [2000, 3000, 9223372036854771712]


def test_loading_follows_the_plan(figures_are):
    path = tiny_directory("qwen3_moe")
    engine = open_engine(path, dtype=mx.float32, expert_io="pread", context=500)
    stride = engine.experts.layout.record.stride
    assert engine.plan.demand.context == 500 and engine.experts.slots == engine.plan.slots == 3 * 16
    figures_are(Figures(310_000_000))
    planned = open_engine(path, dtype=mx.float32, expert_io="pread").plan
    wanted = load_model(path, dtype=mx.float32, expert_io="pread", expert_cache_bytes=20 * stride)
    assert planned.figures.memory == 310_000_000 and wanted.experts.slots == 20
    figures_are(Figures(100_000_000))
    with pytest.raises(RequestError, match="0.10 GB"):
        load_model(path, dtype=mx.float32)
    with pytest.raises(RequestError, match="context is 0"):
        load_model(path, context=0)


def command(capsys, *argv):
    code = plan.main(argv)
    return code, *capsys.readouterr()


@pytest.mark.parametrize("name", variants())
def test_every_variant_can_be_planned(name, capsys):
    code, out, _ = command(capsys, "--variant", name, "--ram-gb", "96", "--dtype", "bfloat16")
    assert code == 0 and out.startswith("expert I/O: ") and "resident weights" in out


def test_a_model_larger_than_memory_is_streamed(capsys):
    code, out, _ = command(capsys, "--variant", "qwen3.5-397b-a17b", "--ram-gb", "64", "--context", "4096")
    assert code == 0
    assert "pread (auto): experts 217.43 GB, RAM 64.00 GB (59.6 GiB), threshold 48.00 GB" in out
    assert re.search(r"expert pool +\d+\.\d+ GB  \d+ slots, [\d.]+ of 512 a layer", out)
    assert "disk: 5 GB/s assumed; --measure-disk" in out
    assert "spans of up to 4096 tokens" in out and "reads each expert that it uses once, 217.43 GB at most" in out
    assert "reading all experts once takes 43.5 s at 5 GB/s\n" in out
    assert "hit rate   0%: 4.247 GB a token, at most 1.18 tokens/s\n" in out
    assert out.endswith("hit rate  90%: 0.425 GB a token, at most 11.77 tokens/s\n")
    _, out, _ = command(capsys, "--variant", "qwen3.5-397b-a17b", "--ram-gb", "64", "--disk-gb-per-s", "2.5")
    assert "assumed" not in out and "hit rate   0%: 4.247 GB a token, at most 0.59 tokens/s\n" in out


def test_a_mapped_model_is_read_once(capsys):
    code, out, _ = command(capsys, "--variant", "qwen3-30b-a3b", "--ram-gb", "64", "--dtype", "bfloat16")
    assert code == 0 and "once they have been read" in out
    assert out.endswith("at least 3.3 s at 5 GB/s\n")
    numbers = {name: float(value) for name, value in re.findall(r"^(\w[\w ]+?) +([\d.]+) GB", out, re.MULTILINE)}
    parts = ("resident weights", "state", "temporary", "runtime", "experts")
    assert numbers["in all"] == pytest.approx(sum(numbers[part] for part in parts), abs=0.003)
    assert numbers["experts"] == 16.307 and numbers["left"] == pytest.approx(64 - numbers["in all"], abs=0.002)


def test_a_mapping_beyond_memory_pages(capsys):
    _, out, _ = command(capsys, "--variant", "cogito-v2-671b", "--ram-gb", "64", "--expert-io", "mmap")
    assert "this will page" in out and "stay in memory" not in out and "hit rate  50%" in out
    assert re.search(r"left +-\d+\.\d+ GB", out)


def test_an_in_place_model_is_read_once_if_it_fits_and_otherwise_as_requested():
    args, layout = named("qwen3-30b-a3b")
    demand = Demand(GB, 4096, 2, in_place=True)
    edge = next(
        gb for gb in range(8, 64) if plan_memory(args, layout, Figures(gb * GB), demand).mode is not IoMode.PREAD
    )
    roomy, tight = (plan_memory(args, layout, Figures(gb * GB), demand) for gb in (edge, edge - 1))
    assert roomy.mode is IoMode.RESIDENT and roomy.total == roomy.fixed + layout.total_bytes
    assert roomy.total <= edge * GB - roomy.headroom and roomy.stays and roomy.pool == 0
    assert tight.mode is IoMode.PREAD and tight.pool > 0 and "leave less than" in tight.decision
    assert "16.31 GB in place" in roomy.decision and "threshold" not in roomy.decision + tight.decision
    forced = replace(demand, expert_io="resident")
    with pytest.raises(RequestError, match=r"16\.31 GB experts.* of memory would do; --expert-io pread"):
        plan_memory(args, layout, Figures((edge - 8) * GB), forced)
    metal = plan_memory(args, layout, METAL, demand)
    assert metal.mode is IoMode.RESIDENT and metal.wired == GB + metal.state + metal.activations + layout.total_bytes


def test_what_reads_pieces_is_planned():
    args, layout = named("qwen3-30b-a3b")
    packed, pieces = (
        plan_memory(args, layout, Figures(8 * GB), Demand(GB, 4096, 2, expert_io="pread", in_place=in_place))
        for in_place in (False, True)
    )
    more = in_pieces_bytes(layout)
    assert pieces.runtime == packed.runtime + more and 30 << 20 < more < 50 << 20
    assert packed.pool - layout.record.stride <= pieces.pool + more <= packed.pool + layout.record.stride


def test_an_unused_pool_is_reported(capsys):
    base = ["--variant", "qwen3-30b-a3b", "--ram-gb", "64", "--expert-cache-gb", "2", "--expert-io"]
    assert "--expert-cache-gb has no effect" in command(capsys, *base, "mmap")[2]
    assert command(capsys, *base, "pread")[2] == ""


def test_a_pool_that_is_too_small_is_reported(capsys):
    base = ["--variant", "qwen3-30b-a3b", "--ram-gb", "16", "--expert-io", "pread", "--expert-cache-gb"]
    args, layout = named("qwen3-30b-a3b")
    least = in_gb(least_pool(args, layout), 3)
    code, out, err = command(capsys, *base, "0.01")
    wanted = f"an expert pool of 0.010 GB is too small; the smallest one is used, of {least}"
    assert code == 0 and err == f"warning: {wanted}\n" and re.search(rf"expert pool +{least}", out)
    assert command(capsys, *base, str(least_pool(args, layout) / 1e9 + 1e-6))[2] == ""
    for opened in (load, load_model):
        with pytest.warns(MoefluxWarning, match="an expert pool of 0.000 GB is too small") as warned:
            made = opened(tiny_directory("qwen3_moe"), expert_io="pread", expert_cache_bytes=1)
        (made[0] if opened is load else made).experts.close()
        assert [one.filename for one in warned] == [__file__]


def test_the_environment_decides_for_the_plan_and_for_loading(monkeypatch, capsys):
    monkeypatch.setenv("MOEFLUX_EXPERT_IO", "pread")
    assert "pread (forced)" in command(capsys, "--variant", "qwen3-30b-a3b", "--ram-gb", "64")[1]
    assert "mmap (forced)" in command(capsys, "--variant", "qwen3-30b-a3b", "--ram-gb", "64", "--expert-io", "mmap")[1]
    for expert_io, mode in (("auto", IoMode.PREAD), ("mmap", IoMode.MMAP)):
        model = load_model(tiny_directory("qwen3_moe"), expert_io=expert_io)
        assert model.experts.mode is mode
        model.experts.close()
    monkeypatch.setenv("MOEFLUX_EXPERT_IO", "")
    assert load_model(tiny_directory("qwen3_moe")).experts.mode is IoMode.MMAP


def test_the_disk_is_measured(capsys):
    path = str(tiny_directory("qwen3_moe"))
    code, out, _ = command(capsys, "--model", path, "--expert-io", "pread", "--measure-disk")
    assert code == 0 and re.search(r"disk: [\d.]+ GB/s", out)
    assert "assumed" not in out and re.search(r"reading all experts once takes [\d.]+ s at [\d.e+-]+ GB/s\n", out)
    assert re.search(r"hit rate  50%: 0.000 GB a token, at most \d+\.\d+ tokens/s\n", out)


def test_a_plan_that_does_not_fit_says_so():
    """Mapped files may be larger than memory, but then the disk is read all the time."""
    args = ModelArgs.from_variant("qwen3-30b-a3b")
    layout = ExpertLayout.from_args(args)
    for gigabytes, is_warned in ((22, True), (40, False)):
        made = plan_memory(args, layout, Figures(gigabytes * GB), Demand(GB, context=40960, native=True))
        assert made.mode is IoMode.MMAP
        lines = known_models.memory_lines(made, layout)
        assert lines[-1].startswith("warning: ") == is_warned and ("left  " in lines[-1 - is_warned])
        assert not is_warned or "GB more than there is" in lines[-1] and "--expert-io pread" in lines[-1]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--variant", "qwen3.5-397b-a17b", "--ram-gb", "4"], "GB of memory would do"),
        (["--variant", "qwen3-30b-a3b", "--ram-gb", "6", "--context", "40960"], "a context of [0-9]+ fits"),
        (["--variant", "qwen3-30b-a3b", "--measure-disk"], "give --model"),
        (["--model", "x", "--measure-disk", "--disk-gb-per-s", "3"], "exclude each other"),
        (["--variant", "qwen3-30b-a3b", "--disk-gb-per-s", "0"], "--disk-gb-per-s is 0.0"),
        ([], "give either --model or --variant"),
        (["--model", "x", "--variant", "qwen3-30b-a3b"], "give either --model or --variant"),
        (["--variant", "qwen3-30b-a3b", "--expert-cache-gb", "1e9"], "positive and below 1e9"),
        (["--model", ""], "a path is empty"),
        (["--variant", "qwen3-30b-a3b", "--disk-gb-per-s", "1e-12"], "--disk-gb-per-s is 1e-12"),
        (["--variant", "qwen3-30b-a3b", "--prefill-step-size", "-5"], "prefill_step_size is -5"),
        (["--variant", "qwen3-30b-a3b", "--context", "0"], "context is 0"),
        (["--variant", "qwen3-30b-a3b", "--ram-gb", "-1"], "--ram-gb is -1.0"),
        (["--variant", "qwen3-30b-a3b", "--ram-gb", "nan"], "--ram-gb is nan"),
        (["--variant", "no-such"], "no variant 'no-such'"),
        (["--variant", "Qwen3.6-35B-A3"], r"no variant 'Qwen3\.6-35B-A3'; did you mean qwen3\.6-35b-a3b\?$"),
        (["--model", "/no/such/place"], "does not exist; give the directory"),
        (["--model", "Qwen3-30B-A3B"], "does not exist; moeflux models shows the repository of this known model; give"),
    ],
)
def test_refusals(argv, message, capsys):
    code, out, err = command(capsys, *argv)
    assert code == 1 and out == ""
    assert err.startswith("error: ") and re.search(message, err) and err.count("\n") == 1


def test_the_default_context():
    args, _ = named("qwen3-30b-a3b")
    assert default_context(args) == 8192
    assert default_context(replace(args, max_position_embeddings=100)) == 100


@pytest.mark.parametrize(
    ("gathered", "layers"),
    [
        (BufferLimits(50, 1_000_000), 10),
        (BufferLimits(300, 1_000_000), 40),
        (BufferLimits(300, 2_000), 19),
        (BufferLimits(50, 50), 1),
    ],
)
def test_a_plan_counts_the_mapped_layers_of_a_command_buffer(gathered, layers):
    """A layer of this model has 108 Mi words. A machine that cannot hold the layers that Metal wires together is
    refused, and a byte more is enough."""
    args, layout = named("qwen3.6-35b-a3b")
    demand = Demand(3 * GB, 8192, 2, expert_io="mmap", span=512, prefill_step_size=64)
    largest = layout.largest_layer
    figures = Figures(1000 * GB, 10**12, 10**12, gathered=gathered)
    need = plan_memory(args, layout, figures, demand).fixed + layers * largest
    plan_memory(args, layout, replace(figures, limit=need), demand)
    with pytest.raises(RequestError, match="does not fit"):
        plan_memory(args, layout, replace(figures, limit=need - 1), demand)


@pytest.mark.parametrize("gb", [16, 32, 64, 512])
def test_the_longest_context_leaves_the_pool_its_share(gb):
    args, layout = named("qwen3.6-35b-a3b")
    figures, demand = Figures(gb * GB), Demand(3 * GB, itemsize=2)
    base = plan_memory(args, layout, figures, demand)
    contexts = {share: Planner(args, layout, figures, demand, share).longest_context() for share in (0.5, 0.9)}
    assert base.context <= contexts[0.9] <= contexts[0.5] <= args.max_position_embeddings
    for share, context in contexts.items():
        plan = plan_memory(args, layout, figures, replace(demand, context=context))
        assert plan.mode is base.mode and plan.pool >= share * base.pool
        longer = replace(demand, context=2 * context)
        if 2 * context <= args.max_position_embeddings:
            with contextlib.suppress(RequestError):
                other = plan_memory(args, layout, figures, longer)
                assert other.mode is not base.mode or other.pool < share * base.pool
    assert gb < 64 or contexts[0.5] == args.max_position_embeddings
    assert Planner(args, layout, figures, demand, 0.9, 32768).longest_context() == max(contexts[0.9], 32768)


def test_experts_stay_on_the_host_as_far_as_asked_and_as_there_is_room():
    args, layout = named("qwen3.5-397b-a17b")
    card = Figures(24 * GB, name="free GPU memory", copies=True, host=64 * GB)
    demand = Demand(8 * GB, 1000, 2, host_bytes=40 * GB)
    made, without = (
        plan_memory(args, layout, card, demand),
        plan_memory(args, layout, card, replace(demand, host_bytes=0)),
    )
    assert 0.99 * 40 * GB < made.host <= 40 * GB and replace(made, host=0, demand=without.demand) == without
    assert without.host == 0 and made.total == without.total
    most = plan_memory(args, layout, card, replace(demand, host_bytes=1000 * GB)).host
    assert 0.99 * (64 * GB - headroom_bytes(64 * GB)) < most <= 64 * GB - headroom_bytes(64 * GB)
    assert plan_memory(args, layout, card, replace(demand, host_bytes=None)).host == most
    assert plan_memory(args, layout, replace(card, host=0), demand).host == 0
    whole = replace(card, memory=1000 * GB)
    assert plan_memory(args, layout, whole, demand).mode is not IoMode.PREAD
    assert plan_memory(args, layout, whole, demand).host == 0
    assert any("on the host" in line for line in known_models.memory_lines(made, layout))
    assert not any("on the host" in line for line in known_models.memory_lines(without, layout))


# ---- how many sequences a plan has room for


@settings(max_examples=examples(60))
@given(
    name=st.sampled_from(variants()),
    memory=st.integers(8 * GB, 2000 * GB),
    context=st.none() | st.integers(512, 100_000),
    is_mac=st.booleans(),
    in_place=st.booleans(),
)
def test_the_caches_of_all_sequences_have_room(name, memory, context, is_mac, in_place):
    args, layout = named(name)
    figures = Figures(memory, working_set=memory * 3 // 4 if is_mac else None)
    with contextlib.suppress(RequestError):
        plan = plan_memory(args, layout, figures, Demand(2 * GB, context, in_place=in_place))
        caches = cache_room(args, layout, plan)
        rest, streams = plan.fixed - plan.state + caches.nbytes, plan.mode is IoMode.PREAD
        experts = least_pool(args, layout) if streams else plan.experts
        assert caches.nbytes >= plan.state and plan.state <= caches.needs(plan.context) == caches.needs(10**9)
        assert caches.nbytes == plan.state or rest + experts <= room(figures)
        assert 1 <= caches.sequences <= (MOST_STREAMED if streams else MAX_ROWS)
        assert caches.sequences == 1 or caches.sequences * caches.needs(8192) <= caches.nbytes


@pytest.mark.parametrize(("memory", "most"), [(24 * GB, MOST_STREAMED), (1000 * GB, MAX_ROWS)])
def test_a_machine_with_enough_memory_answers_the_largest_number(memory, most):
    args, layout = named("qwen3.6-35b-a3b")
    with standing_in(backend="ops"):  # a GPU needs room for copies of joined states too
        plan = plan_memory(args, layout, Figures(memory), Demand(2 * GB))
        caches = cache_room(args, layout, plan)
    assert (plan.mode is IoMode.PREAD) == (most == MOST_STREAMED) and caches.sequences == most
    if most == MOST_STREAMED:
        assert caches.nbytes - plan.state == plan.pool // 4


def test_a_gpu_needs_room_for_copies_of_joined_states():
    args, layout = named("qwen3.6-35b-a3b")
    caches = cache_room(args, layout, plan_memory(args, layout, Figures(24 * GB), Demand(2 * GB)))
    with standing_in(backend="ops"):
        alone = caches.needs(100)
    with standing_in(backend="cuda"):
        assert (
            caches.needs(100) == alone + 2 * untrimmable_bytes(args.mixer_counts, caches.plan.demand.itemsize) > alone
        )

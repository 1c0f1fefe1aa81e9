"""The memory plan holds however much MLX gathers in one command buffer on Metal.

What a command buffer uses stays in memory until the GPU has done it. So with a large buffer every array of a block may
exist at once, unless the code itself waits for a part of them (`gpu_time.in_turn`). Here the arrays of a mixer's block
are counted in the graph that MLX makes of it on Metal: kernels and MLX's fast operations are replaced by their outputs.
"""

from argparse import Namespace
from math import prod

import mlx.core as mx
import pytest

from moeflux_mlx.cli.opening import shapes_of
from moeflux_mlx.mixers.mamba import op as mamba
from moeflux_mlx.mixers.registry import make_caches
from moeflux_mlx.model.span import PromptSizes
from moeflux_mlx.model.tensors import layer_values
from moeflux_mlx.opening import launches
from moeflux_mlx.opening.launches import Noted
from moeflux_mlx.ops import backend, gpu_time
from moeflux_mlx.ops.launch import NO_KERNELS
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.ops.tiles import CODE
from moeflux_mlx.planning.memory_plan import Demand, activation_bytes

pytestmark = pytest.mark.usefixtures("cpu_device")
TOKENS = 4096
# Widths of heads for which MLX's attention keeps no scores.
FUSED = {"metal": (64, 80, 128), "cuda": (64, 80, 96, 128)}
# Operations without memory of their own. The result of the last ones is in the memory of the first input.
PARTS = {"Broadcast", "Slice", "Split", "AsStrided"}
VIEWS = {*PARTS, "Reshape", "Transpose", "Squeeze", "ExpandDims", "View", "Flatten", "Unflatten", "Depends"}
# Operations that write into the memory of an input of the same size that nothing else uses.
DONATING = {"Add", "AsType", "Divide", "Exp", "LogAddExp", "Maximum", "Minimum", "Multiply", "Negative", "Select"}
DONATING |= {"Sigmoid", "Softmax", "Square", "Sqrt", "Subtract"}


def made_of(shape, dtype, *inputs):
    """Returns an array in memory of its own that is computed from the inputs."""
    return mx.depends([mx.zeros(shape, dtype)], list(inputs))[0]


def attention(q, k, v, *, scale, mask=None, sinks=None):
    width, out = q.shape[-1], (*q.shape[:-1], v.shape[-1])
    is_fused = width in FUSED[backend.name()] and v.shape[-1] == width
    scores = [made_of((*q.shape[:-1], k.shape[2]), q.dtype, q, k) for _ in range(0 if is_fused else 2)]
    return made_of(out, q.dtype, q, k, v, *scores)


def dequantized(w, scales, biases=None, group_size=64, *_, dtype=None, **__):
    shape = (*w.shape[:-1], scales.shape[-1] * group_size)
    return made_of(shape, dtype or scales.dtype, w, scales, *(() if biases is None else (biases,)))


@pytest.fixture
def waits(monkeypatch):
    """Returns the results for which `gpu_time.in_turn` waits, in order; operations leave their inputs in the graph."""
    results, kernel = [], Noted.kernel

    def linked(noted, *given):
        call = kernel(noted, *given)
        return lambda *, inputs, **rest: mx.depends(call(inputs=inputs, **rest), list(inputs))

    monkeypatch.setattr(Noted, "kernel", linked)
    monkeypatch.setattr(mx, "contiguous", lambda x, *_: made_of(x.shape, x.dtype, x))
    for name in ("rms_norm", "rope"):
        monkeypatch.setattr(mx.fast, name, lambda x, *_, **__: made_of(x.shape, x.dtype, x))
    monkeypatch.setattr(mx, "dequantize", dequantized)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(gpu_time, "in_turn", lambda count, parts: results.append(parts[-1]) if count > 1 else None)
    return results


class Graph:
    """The graph of a block: what makes each array, how many use it, and the results that are waited for."""

    def __init__(self, run, x, waits):
        self.made, self.uses, self.sizes, self.waited = {}, {}, {}, []

        def compute(x):
            waits.clear()
            caches = []

            def cache_of(mixer):
                made = make_caches(mixer)
                caches.extend(made)
                return made

            out = run(x, cache_of)
            outputs = [out] if isinstance(out, mx.array) else [one for one in out if isinstance(one, mx.array)]
            return [*waits, *outputs, *(one for cache in caches for one in cache.state if isinstance(one, mx.array))]

        mx.export_function(self._add, compute, x)
        self.sizes = {name: self._own_bytes(name, node) for name, node in self.made.items()}

    def _add(self, node):
        if node["type"] == "outputs":
            names = [name for name, _, _ in node["outputs"]]
            self.results = names
        elif node["type"] == "primitive":
            for name, _, _ in node["outputs"]:
                self.made[name] = node
            for name, _, _ in node["inputs"]:
                self.uses[name] = self.uses.get(name, 0) + 1

    def _bytes(self, name):
        (shape, dtype) = next(one[1:] for one in self.made[name]["outputs"] if one[0] == name)
        return prod(shape) * dtype.size

    def _own_bytes(self, name, node):
        if node["name"] in VIEWS:
            return 0
        donated = node["name"] in DONATING and any(
            self._given_up(one) == self._bytes(name) for one, _, _ in node["inputs"]
        )
        return 0 if donated else self._bytes(name)

    def _given_up(self, name):
        """Returns the bytes of the memory that only the user of this array uses; 0 if there is none."""
        node = self.made.get(name)
        if node is None or self.uses[name] > 1 or name in self.results or node["name"] in PARTS:
            return 0
        return self._given_up(node["inputs"][0][0]) if node["name"] in VIEWS else self._bytes(name)

    def behind(self, name, seen):
        """Returns the bytes of what is computed for an array and is not in `seen`, to which it is added."""
        nbytes, left = 0, [name]
        while left:
            one = left.pop()
            if one in self.made and one not in seen:
                seen.add(one)
                nbytes += self.sizes[one]
                left += [before for before, _, _ in self.made[one]["inputs"]]
        return nbytes

    def peak(self, count):
        """Returns the most bytes that exist at once if the first `count` results are waited for, each before the next
        but one begins."""
        seen, whole = set(), sum(self.sizes.values())
        parts = [self.behind(name, seen) for name in self.results[:count]]
        if count < 2:
            return whole
        before = max(parts[0] - parts[1], 0)  # what all parts use
        rest, kept = whole - sum(parts), sum(map(self._bytes, self.results[:count]))
        parts[0] -= before
        return before + max(map(sum, zip(parts, parts[1:], strict=False))) + rest + kept


def blocks_of(variant, waits, target="metal"):
    """Yields the title and the most bytes of each kind of mixer's block, and the plan's temporaries."""
    with standing_in(backend=target):
        shapes = shapes_of(Namespace(variant=variant, model=None))
        args = shapes.args
        units = target == "cuda"
        demand = Demand(0, itemsize=2, dense=2 * layer_values(args), on_units=units, fused=units)
        plan = activation_bytes(args, shapes.layout, demand, 8192, PromptSizes(TOKENS, TOKENS))
        titles = {mixer.title for mixer in args.mixers}
        for title, _, run, only in launches._parts(shapes):
            if title not in titles or only:
                continue
            noted = Noted(CODE, NO_KERNELS)
            with noted.listening():
                graph = Graph(run, mx.zeros((1, TOKENS, args.hidden_size), mx.bfloat16), waits)
            yield title, graph.peak(len(waits)), plan


VARIANTS = [
    "qwen3.6-35b-a3b",  # delta rule
    "gpt-oss-120b",  # windows and sinks
    "kimi-k2.6",  # latent attention
    "deepseek-v3.2",  # over chosen positions
    "deepseek-v4-flash",  # over compressed entries
    "minimax-m3-428b",  # over chosen blocks
    "nemotron-3-super-120b-a12b",  # state space model
    "lfm2-8b-a1b",  # short convolution
]


CUDA = ["qwen3.6-35b-a3b", "gpt-oss-120b", "kimi-k2.6", "mimo-v2-flash-309b", "k2-horizon-mova-36b-a4b"]
CUDA += ["deepseek-v3.2", "minimax-m3-428b", "glm-5.3-flash-321b"]


@pytest.mark.parametrize(
    "variant, target", [*((name, "metal") for name in VARIANTS), *((name, "cuda") for name in CUDA)]
)
def test_the_arrays_of_two_blocks_fit_the_plan(variant, target, waits):
    """A GPU gets the next block before one is done. The count is above what exists at once: 1.05 times the plan in one
    layer of DeepSeek-V4, at most 0.9 times elsewhere."""
    blocks = list(blocks_of(variant, waits, target))
    assert blocks
    for title, peak, plan in blocks:
        assert 0 < 2 * peak < 1.1 * plan, (title, peak, plan)


def test_a_state_space_model_that_does_not_wait_would_not_fit(waits, monkeypatch):
    monkeypatch.setattr(mamba, "PIECE", TOKENS)
    peaks = {title: 2 * peak / plan for title, peak, plan in blocks_of("nemotron-3-super-120b-a12b", waits)}
    assert peaks["state space model"] > 1.5

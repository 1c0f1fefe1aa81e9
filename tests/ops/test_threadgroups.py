"""Threads of a threadgroup on Metal: no launch has more threads than every Apple GPU allows for any kernel."""

import math
import random
import re
import sys
from argparse import Namespace

import goldens
import mlx.core as mx
import pytest
from tiny_models import tiny_directory

from moeflux_mlx.cli.opening import shapes_of
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import launch
from moeflux_mlx.ops.tiles import CODE, Tile, Tiles, using
from moeflux_mlx.spec import variants
from moeflux_mlx.tools import tuning

SEEN = (256, 384, 832, 896, 1024)  # limits of pipelines on M1, M2 and the M1 of virtual machines


class Pipelines:
    """Replaces mx.fast.metal_kernel: it refuses as MLX does, and computes nothing.

    `launches` has for each launch the kernel's name, which contains a digest of its constants, the grid, the threads
    that it requested, and the threads that the attribute names.
    """

    def __init__(self, limit):
        self.limit, self.launches = limit, []

    def __call__(self, *, name, header, **_):
        named, limit = (
            re.search(r"(?:^|\n)\[\[max_total_threads_per_threadgroup\((\d+)\)\]\]\n$", header),
            self.limit(name),
        )

        def call(*, grid, threadgroup, output_shapes, output_dtypes, **_):
            threads = math.prod(threadgroup)
            self.launches.append((name, grid, threads, int(named[1])))
            if threads > limit:
                raise ValueError(
                    f"Thread group size ({threads}) is greater than  the maximum allowed threads per threadgroup"
                    f" ({limit})."
                )
            return [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]

        return call


class Most(Tiles):
    """Gives every kernel a tile with the most threads that any tile has."""

    def tile(self, target, kernel):
        return Tile(rows=1, lanes=32, simdgroups=8, spread=8192)


@pytest.mark.parametrize("threads, named", [(96, False), (256, False), (288, True), (1024, False)])
def test_cuda_is_told_the_threads_of_uneven_groups(threads, named):
    """So that their registers are few enough. Nine warps with 177 registers each did not start."""
    text = launch.Kernel("add_normed", "x", "out").text("cuda", "", threads, ((0, 0, None),))
    assert (f"__launch_bounds__({threads})" in text.header) == named


@pytest.fixture
def launches(monkeypatch, small_products, backend_is):
    """Records the launches of a function, with a limit for each kernel."""

    def of(run, limit):
        pipelines = Pipelines(limit)
        backend_is("metal")
        monkeypatch.setattr(mx.fast, "metal_kernel", pipelines)
        launch.built.cache_clear()
        run()
        return pipelines.launches

    yield of
    forget()


def forget():
    """Empties every cache of the package but those of texts: arrays that are made once were not evaluated here."""
    ours = [name for name in sys.modules if name.startswith("moeflux_mlx.") and not name.startswith("moeflux_mlx.text")]
    for module in [sys.modules[name] for name in ours]:
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def shapes_of_model(name):
    """Returns the shapes of a named variant, or of a tiny model of a family."""
    tiny = None if name in variants() else tiny_directory(name)
    return shapes_of(Namespace(variant=None if tiny else name, model=tiny))


def layers(monkeypatch, shapes, tiles=CODE):
    """Makes one layer of each kind, and the head, launch their kernels for one token, a few tokens and a prompt."""
    for name in ("eval", "async_eval"):  # large models stay graphs that are not computed
        monkeypatch.setattr(mx, name, lambda *arrays: None)
    for part in (*(tuning.layer(shapes, i) for i in tuning.kinds_of(shapes)), tuning.head(shapes)):
        for tokens in (1, 512, 4):
            with using(tiles):
                part(mx.random.normal((1, tokens, shapes.args.hidden_size)).astype(shapes.dtype))
    for ways in (tiles, Tiles({"prompt_experts": {"kernel": 1}})):
        with using(ways):
            tuning.prompt_work(shapes).run()


@pytest.mark.parametrize("name", [*variants(), *goldens.families()])
def test_every_launch_names_its_threads_and_every_gpu_allows_them(launches, monkeypatch, name):
    shapes = []

    def run(tiles):
        shapes[:] = shapes or [shapes_of_model(name)]
        layers(monkeypatch, shapes[0], tiles)

    for tiles in (CODE, Most()):
        asked = launches(lambda tiles=tiles: run(tiles), lambda kernel: min(SEEN))
        assert len({kernel for kernel, *_ in asked}) > 5
        assert all(named == max(threads, launch.LEAST_NAMED) for *_, threads, named in asked)


@pytest.mark.parametrize("name", ["qwen3.5-397b-a17b", "cogito-v2-671b"])
def test_launches_do_not_depend_on_limits(launches, monkeypatch, name):
    """So the bits of every start, and of all ranks, are those of one text in one grid."""
    launched = [launches(lambda: layers(monkeypatch, shapes_of_model(name)), limits_of(seed)) for seed in range(4)]
    assert all(one == launched[0] for one in launched)


def limits_of(seed):
    """Returns a random limit for each kernel."""
    return lambda kernel: random.Random(f"{seed} {kernel}").choice(SEEN)


@pytest.mark.parametrize("family", goldens.families())
def test_no_model_asks_for_more(launches, family):
    """Checks models that stream their experts, with everything around the experts."""
    model = load_model(tiny_directory(family), dtype=mx.bfloat16)

    def run():
        cache = model.make_cache()
        for tokens in (9, 1, 3):
            mx.eval(model(mx.ones((1, tokens), mx.int32), cache))

    asked = launches(run, lambda kernel: min(SEEN))
    assert asked and all(named == max(threads, launch.LEAST_NAMED) for *_, threads, named in asked)

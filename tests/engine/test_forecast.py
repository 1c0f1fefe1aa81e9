"""The forecast of a model's speed, beside recorded measurements, and where users see it."""

import json
import math
from dataclasses import asdict, replace
from unittest import mock

import mlx.core as mx
import pytest

from moeflux_mlx import benchmark, plan
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.kept import measured as kept
from moeflux_mlx.kept.measured import TYPICAL, UNLIMITED, Rates, keep_rates, kept_rates, rates_with
from moeflux_mlx.model.optimistic import OptimisticLayers
from moeflux_mlx.ops import native
from moeflux_mlx.planning.budget import plan_memory
from moeflux_mlx.planning.forecast import (
    Forecast,
    TokenWork,
    expected,
    forecast,
    hits_in_texts,
    in_memory,
    share_of,
    uniform,
)
from moeflux_mlx.planning.machine import Figures
from moeflux_mlx.planning.memory_plan import Demand, state_bytes
from moeflux_mlx.planning.pressure import Breath, PoolLimit
from moeflux_mlx.spec import ModelArgs
from moeflux_mlx.tools import rates
from moeflux_mlx.tools.demo_check import open_demo
from moeflux_mlx.tools.rates import attention_rate, measure_rates

GB = 1 << 30

# Measurements on H200s: bytes of a token, its rates, and tokens per second. Products read at 2.11 TB/s (12288x2048 to
# 8192x4096) on the first two; a layer's seconds are those that Qwen3-30B-A3B's 48 layers left on the same machine, so
# that the other models are forecast and not fitted. SLOW and LATER have the rates that doctor measured there.
SLOW_H200 = Rates(1.95e12, 1.8e9, 1.06e-4, 5.14e-4, 2.42e-4)
LATER_H200 = Rates(1.87e12, 1.70e9, 9.95e-5, 3.85e-4, 2.73e-4)
H200, OTHER_H200 = Rates(2.11e12, 3.65e9, 6.26e-5, 2.5e-4), Rates(2.11e12, 3.65e9, 4.72e-5, 2.5e-4)
RECORDED = {
    "35B-A3B, resident": (TokenWork(1_100_000_000, 570_000_000, 210_000_000, 40, 40), H200, 1.0, 1.0, 404),
    "35B-A3B, resident, faster host": (
        TokenWork(1_100_000_000, 570_000_000, 210_000_000, 40, 40),
        OTHER_H200,
        1.0,
        1.0,
        473,
    ),
    "30B-A3B, 16 layers": (TokenWork(350_000_000, 340_000_000, 25_000_000, 16, 16), SLOW_H200, 1.0, 1.0, 642),
    "35B-A3B, 32 layers": (TokenWork(941_000_000, 453_000_000, 116_000_000, 32, 32), SLOW_H200, 1.0, 1.0, 298),
    "35B-A3B, 32 layers, after 8192": (
        TokenWork(941_000_000, 453_000_000, 241_000_000, 32, 32),
        SLOW_H200,
        1.0,
        1.0,
        255,
    ),
    "Cogito 671B, resident": (TokenWork(11_000_000_000, 9_800_000_000, 50_000_000, 61, 58), OTHER_H200, 1.0, 1.0, 86),
    "397B-A17B, a quarter": (TokenWork(0, 566_000_000, 0, 8, 8), H200, 0.25, 0.27, 7.5),
    "30B-A3B, 16 layers, half": (TokenWork(350_000_000, 340_000_000, 25_000_000, 16, 16), LATER_H200, 0.5, 0.9958, 125),
    "397B-A17B, half": (TokenWork(0, 566_000_000, 0, 8, 8), H200, 0.5, 0.49, 10.2),
}


@pytest.mark.parametrize("case", RECORDED.values(), ids=RECORDED)
def test_recorded_measurements_are_in_the_band(case):
    work, rates, share, hits, measured = case
    made = forecast(work, rates, share, hits)
    assert made.low <= measured <= made.high and made.middle == pytest.approx(measured, rel=0.25)
    assert made.high / made.low <= 1.7


def test_each_part_of_a_token_takes_its_time():
    work, cpu = TokenWork(10, 20, 30, 4, 3), Rates(60.0, 17.0, 0.5, 2.0, 0.25, attention=1e9)
    assert forecast(work, cpu, 1.0, 1.0).middle == pytest.approx(1 / (0.25 + 1 + 4 * 0.5))
    streamed = 0.25 + 1 + 1 * 0.5 + 3 * 2.0
    assert forecast(work, cpu, 0.5, 1.0).middle == pytest.approx(1 / streamed)
    assert forecast(work, cpu, 0.5, 0.4).middle == pytest.approx(1 / (streamed + 0.6 * 20 / (0.85 * 17)))
    gpu = replace(cpu, attention=UNLIMITED)
    assert forecast(work, gpu, 1.0, 1.0).middle == pytest.approx(1 / math.hypot(0.25 + 4 * 0.5, 1))
    assert forecast(work, gpu, 0.5, 1.0).middle == pytest.approx(1 / (math.hypot(0.25 + 0.5, 1) + 3 * 2.0))


def test_doctor_times_streamed_layers_that_wait():
    def queueing(*given):
        engine = open_demo(*given)
        engine.model.optimistic = OptimisticLayers
        return engine

    def seconds(model):
        timed.append(model.optimistic)
        return 1.0

    timed = []
    with mock.patch.multiple(rates, open_demo=queueing, token_seconds=seconds):
        measure_rates(1e9, 1e10)
    assert timed == [None] * 4


def test_a_gpu_reads_experts_from_the_hosts_memory():
    """397B-A17B's shape with a quarter of the experts on the card and all in host memory (docs/performance.md)."""
    work, rates = TokenWork(0, 283_000_000, 0, 4, 4), replace(H200, disk=1.8e9)
    assert forecast(work, rates, 0.25, 1.0, 0.73).middle == pytest.approx(134, rel=0.25)
    args = ModelArgs.from_variant("qwen3-30b-a3b")
    layout = ExpertLayout.from_args(args)
    made = plan_memory(args, layout, Figures(12 * GB), Demand(GB, itemsize=2, expert_io="pread"))
    both, share = replace(made, host=made.experts), share_of(made, work)
    assert expected(both, work, rates) == forecast(work, rates, share, 1.0, 1 - hits_in_texts(share))
    assert expected(both, work, rates).low > expected(made, work, rates).high
    assert in_memory(both, work) == 1 and in_memory(made, work) == share
    assert uniform(both, work, rates) == forecast(work, rates, share, 1.0, 1 - share)
    assert uniform(made, work, rates) == forecast(work, rates, share, share, 0.0)


def test_attention_takes_longer_where_it_computes():
    """On a CPU 32 heads of queries over 4 of keys compute for longer than they read; so do 128 over chosen latents."""
    args, latent = ModelArgs.from_variant("qwen3-30b-a3b"), ModelArgs.from_variant("deepseek-v3.2")
    work = TokenWork.of(args, 10**9, 10**9, 8192, 4)
    assert work.attended == 48 * 32 * 8192 * 256 == 8 * work.state / 4
    reads, computes = Rates(1e10, 1e9, 1e-9, 1e-9), Rates(1e10, 1e9, 1e-9, 1e-9, attention=1e10)
    assert forecast(work, reads, 1.0, 1.0).middle == pytest.approx(1 / (0.2 + work.state / 1e10), rel=1e-3)
    assert forecast(work, computes, 1.0, 1.0).middle == pytest.approx(1 / (0.2 + work.attended / 1e10), rel=1e-3)
    assert TokenWork.of(latent, 0, 0, 8192, 4).attended == 61 * 128 * 2048 * (2 * 512 + 64)


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("has_extension", [True, False])
def test_a_cpu_computes_attention_beside_its_reads(monkeypatch, has_extension):
    """Also before anything is measured, and without the extension: a CPU's forecast is never a GPU's."""
    if not has_extension:
        monkeypatch.setattr(native, "available", lambda: False)
    assert 1e8 < attention_rate() < UNLIMITED
    assert not Rates(1e10, 1e9, *TYPICAL["cpu"]).overlaps
    assert Rates(1e10, 1e9, *TYPICAL["cuda"]).overlaps and Rates(1e10, 1e9, *TYPICAL["metal"]).overlaps


def test_texts_find_more_experts_than_their_share():
    shares = [i / 20 for i in range(21)]
    assert all(hits_in_texts(share) >= share for share in shares) and hits_in_texts(0.5) == pytest.approx(0.86)
    assert hits_in_texts(0) == 0 and hits_in_texts(1) == 1


@pytest.mark.parametrize("positions", [512, 8192])
def test_a_forecast_has_the_pool_of_a_token(positions):
    """While tokens are computed, the pool takes the memory that is planned for prompts and the rest of the context."""
    args = ModelArgs.from_variant("qwen3-30b-a3b")
    layout, demand = ExpertLayout.from_args(args), Demand(GB, itemsize=4, native=True, expert_io="pread")
    made = plan_memory(args, layout, Figures(12 * GB), demand)
    work, used = TokenWork.of(args, GB, GB, positions, 4), GB + state_bytes(args, positions, 4)
    with mock.patch.multiple(mx, get_active_memory=lambda: used, get_cache_memory=lambda: 0):
        pool = Breath(args, layout, made, PoolLimit([], made.most))(1, 0)
    assert (share := share_of(made, work)) == pytest.approx(pool / made.experts, rel=0.03)
    assert expected(made, work, H200) == forecast(work, H200, share, hits_in_texts(share))
    whole = plan_memory(args, layout, Figures(60 * GB), demand)
    assert 0.9999 < share_of(whole, work) < 1, "a layer that is streamed takes longer, also where nothing is missing"
    assert share_of(replace(whole, pool=0, most=0), work) == 1


@pytest.fixture
def own_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moeflux"


def test_rates_are_kept_for_the_device(own_files):
    assert kept_rates() is None and rates_with(1.0, 2.0).layer in {one[0] for one in TYPICAL.values()}
    made = Rates(2e9, 1e9, 1e-3, 2e-3)
    keep_rates(made)
    assert kept_rates() == made and rates_with(5.0, 6.0) == Rates(5.0, 6.0, 1e-3, 2e-3)
    (own_files / kept.FILE).write_text(json.dumps({"version": 1, "found": [{**kept._key(), "products": "fast"}]}))
    assert kept_rates() is None
    row = {**kept._key(), **asdict(made), "mlx": "0"}
    (own_files / kept.FILE).write_text(json.dumps({"version": 1, "found": [row]}))
    assert kept_rates() is None, "another MLX is another speed"


def said(capsys, *options):
    assert plan.main(["--variant", "qwen3-30b-a3b", "--ram-gb", "12", "--dtype", "bfloat16", *options]) == 0
    return capsys.readouterr().out


def test_plan_shows_forecasts_once_doctor_has_measured(own_files, capsys):
    assert "forecast: moeflux doctor measures this machine first" in said(capsys)
    keep_rates(Rates(1e11, 5e9, 1e-4, 2e-4))
    out = said(capsys)
    assert "tokens/s in a text, " in out and "forecast if a router uses all experts equally often: " in out
    assert out.index("forecast") < out.index("hit rate")


def test_benchmark_writes_forecast_and_measurement(own_files, capsys):
    keep_rates(Rates(1e11, 5e9, 1e-4, 2e-4))
    assert benchmark.main(["--prompt-tokens", "8", "--max-tokens", "4", "--rounds", "1", "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("forecast after 8 tokens: ") and " of a text; measured " in line for line in lines)
    made = Forecast(**json.loads(last)["rows"][0]["forecast"]["of a text"])
    assert made.low < made.middle < made.high

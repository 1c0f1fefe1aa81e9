"""What a Mac should reach: the work of a token against figures from elsewhere, and the published table."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import play_queued
import pytest

from moeflux_mlx import plan
from moeflux_mlx.cli import chips as screen
from moeflux_mlx.errors import RequestError
from moeflux_mlx.opening.reach import Mac, Reach
from moeflux_mlx.ops import backend, gpu_time
from moeflux_mlx.ops.chips import CHIPS, gpu_limits

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


@pytest.fixture(scope="module")
def reach():
    return Reach("qwen3.6-35b-a3b")


@pytest.mark.usefixtures("cpu_device")
def test_the_table_of_the_page_is_what_the_command_prints(capsys):
    section = PAGE.read_text().partition("## What a Mac should reach\n")[2].partition("\n## ")[0]
    command, table = re.search(r"```bash\n(.*?)\n```\n\n```text\n(.*?)```", section, re.DOTALL).groups()
    assert plan.main(shlex.split(command)[2:]) == 0
    assert capsys.readouterr().out == table
    play_queued.main([])
    assert f"```text\n{capsys.readouterr().out}```" in section


def test_a_token_moves_the_weights_that_it_uses(reach):
    """The model has 2.94e9 parameters active for a token, lm_head included, stored in 4.5 bits each."""
    assert reach.dense + reach.routed == pytest.approx(2.94e9 * 4.5 / 8, rel=0.02)
    delta = 30 * 2 * 32 * 128 * 128 * 4  # layers, read and written, heads, float32
    keys = 10 * 4096 * 2 * 2 * 256 * 2  # layers, positions, keys and values, heads, bfloat16
    assert reach.state == pytest.approx(delta + keys, rel=0.02)


def test_a_token_takes_the_launches_of_its_layers(reach):
    """The delta rule 3, attention 4, experts 3 (4 if they are streamed), lm_head 1."""
    assert reach.launches(streamed=False) == 30 * 3 + 10 * 4 + 40 * 3 + 1
    assert reach.launches(streamed=True) == 30 * 3 + 10 * 4 + 40 * 4 + 1
    assert reach.waits == 40


def test_a_prompt_multiplies_every_active_weight_and_scores_every_pair(reach):
    matrices = 2 * (2.94e9 - 2048 * 248_320)  # lm_head computes one row
    assert reach.operations(512) == pytest.approx(512 * matrices, rel=0.03)
    pairs = reach.operations(4096) - 8 * reach.operations(512)
    head = 2 * 2048 * 248_320
    assert pairs == pytest.approx(10 * 16 * 2 * 256 * (4096**2 - 8 * 512**2) - 7 * head, rel=1e-6)


@pytest.mark.parametrize(("chip", "about"), [("M3 Pro", 59), ("M2 Max", 140), ("M4 Max", 185), ("M5 Max", 205)])
def test_decoding_is_about_what_an_estimate_by_hand_gave(reach, chip, about):
    speed = reach.decode(Mac.of(chip))
    assert speed.about == pytest.approx(about, rel=0.03) and speed.most > speed.about


def test_streaming_adds_misses_and_waits(reach):
    mac = replace(Mac.of("M1"), disk=2e9)
    seconds = 1 / reach.decode(mac, 0.25).about
    gpu = 1.8822e9 / 68e9 / 0.8 + 291 * 4.5e-6
    assert seconds == pytest.approx(gpu + 40 * 0.3e-3 + 0.75 * reach.routed / 2e9, rel=1e-3)
    assert 1 / reach.decode(mac, 0.25).most == pytest.approx(0.75 * reach.routed / 2e9)


def test_waiting_takes_a_wait_for_each_layer_and_the_token(reach):
    mac = Mac.of("M4 Max")
    gpu = 1.8822e9 / 546e9 / 0.8 + 291 * 4.5e-6
    assert 1 / play_queued.rates(reach, mac, 1.0)[0] == pytest.approx(gpu + 41 * 0.3e-3, rel=1e-3)


@pytest.mark.parametrize("chip", ["M1", "M3 Pro", "M4 Max"])
def test_queued_layers_take_the_gpus_time_and_never_more_than_waiting(reach, chip):
    mac = Mac.of(chip)
    speeds = [play_queued.rates(reach, mac, share) for share in (1.0, 0.99, 0.9, 0.6, 0.2)]
    gpu = reach.token / mac.bandwidth / 0.8 + 291 * 4.5e-6
    assert gpu < 1 / speeds[0][1] < 1.1 * gpu + 40 * 20e-6 + 2 * 0.3e-3
    assert all(queued >= 0.98 * waiting for waiting, queued in speeds)
    assert [queued for _, queued in speeds] == sorted((queued for _, queued in speeds), reverse=True)
    assert speeds[-1][0] == speeds[-1][1]


def test_a_prompt_is_bound_by_arithmetic_bytes_or_the_disk(reach):
    """A fast GPU waits for bytes in short prompts, and a streamed one for the disk."""
    mac = Mac.of("M5 Max")
    short = 64 / reach.prompt(mac, 64).most
    assert short == pytest.approx((reach.dense + reach.used(64)) / 614e9)
    assert 4096 / reach.prompt(mac, 4096).most == pytest.approx(reach.operations(4096) / 73.6e12)
    assert 512 / reach.prompt(mac, 512, 0.5).most == pytest.approx(0.5 * reach.used(512) / mac.disk)
    assert reach.used(1) == pytest.approx(reach.routed, rel=1e-6) and reach.used(512) < reach.layout.total_bytes


def test_memory_decides_what_is_streamed(reach):
    small, large = (reach.share(Mac.of("M4", gigabytes << 30)) for gigabytes in (16, 64))
    assert 0.2 < small < 0.6 and large == 1.0
    assert reach.share(Mac.of("M4", 2 << 30)) is None
    assert "does not fit" in screen.line_of(reach, Mac.of("M4", 2 << 30))


def test_limits_of_the_gpu_are_those_that_macs_report():
    """16, 36 and 64 GiB: llama.cpp's logs, exo#1048, wgpu#2502."""
    assert [round(limit / 2**30, 2) for limit in gpu_limits(16 << 30)] == [10.67, 8.0]
    assert [limit / 2**30 for limit in gpu_limits(48 << 30)] == [36, 27]
    assert [limit / 2**30 for limit in gpu_limits(64 << 30)] == [48, 36]


@pytest.mark.parametrize("name", ["m4 max", "Apple M4 Max", "M4 MAX"])
def test_chips_are_found_in_any_spelling(name):
    assert Mac.of(name).chip == CHIPS["Apple M4 Max"]


def test_a_chip_of_the_table_has_the_rate_of_the_plans():
    assert all(gpu_time.rate(name) == 1e12 * chip.tflops for name, chip in CHIPS.items())
    assert gpu_time.rate("Apple Paravirtual device") == 2.6e12


@pytest.mark.parametrize(
    ("chip", "like"),
    [
        ("Apple M9 Ultra", "Apple M1 Ultra"),
        ("Apple M10 Max", "Apple M1 Max"),
        ("Apple M7 Pro", "Apple M1 Pro"),
        ("Apple M9", "Apple M1"),
        ("Apple A18 Pro", "Apple M1"),
        ("AMD Radeon Pro", "Apple M1"),
    ],
)
def test_an_unknown_chip_counts_as_the_slowest_of_its_class(chip, like):
    assert gpu_time.rate(chip) == gpu_time.rate(like)


def test_an_ultra_is_two_of_the_max():
    for name, chip in CHIPS.items():
        if name.endswith("Ultra"):
            half = CHIPS[name.replace("Ultra", "Max")]
            assert chip.tflops == pytest.approx(2 * half.tflops) and chip.cores == 2 * half.cores
            assert chip.matrix_tflops == (half.matrix_tflops and 2 * half.matrix_tflops)


def test_macs_have_memory_of_the_sizes_that_are_sold():
    assert {chip.memory for chip in CHIPS.values()} <= {16, 18, 24, 32, 36, 48, 64, 96}


def test_an_unknown_chip_is_refused_with_the_known_ones(capsys):
    with pytest.raises(RequestError, match="give one of M1, M1 Pro"):
        Mac.of("M9")
    assert plan.main(["--variant", "qwen3-30b-a3b", "--chip", "Pentium"]) == 1


@pytest.mark.parametrize(
    "options", [["--model", "X"], ["--variant", "qwen3-30b-a3b", "--context", "512"], ["--measure-disk"]]
)
def test_options_without_effect_are_refused(options, capsys):
    assert plan.main(["--chip", "M1", *options]) == 1
    assert "--chip" in capsys.readouterr().err


def test_this_machine_stays_what_it_is(reach):
    before = backend.name()
    reach.share(Mac.of("M1"))
    assert backend.name() == before

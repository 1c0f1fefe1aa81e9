"""`doctor --soak`: what the file says of a run, of one that broke, and of one that ended with the machine."""

import re
import time

import pytest

from moeflux_mlx import doctor
from moeflux_mlx.cli import diagnosis, soak
from moeflux_mlx.cli.soak import FILE, Client, Soak
from moeflux_mlx.errors import DeviceError


class Clock:
    """As the module `time`, in which each look at the clock that does not stop takes a twentieth of a second, and at
    the one that measures a step 2 ms.
    """

    def __init__(self):
        self.now, self.strftime = 0.0, time.strftime

    def monotonic(self):
        self.now += 0.05
        return self.now

    def time(self):
        return 1e9 + self.now

    def perf_counter(self):
        self.now += 0.002
        return self.now


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(soak, "ANSWERS", (3, 4, 5))
    monkeypatch.setattr(soak, "LONGEST", 40)
    monkeypatch.setattr(soak, "EVERY", 0.2)
    monkeypatch.setattr(soak, "time", Clock())


def said(tmp_path):
    return (tmp_path / FILE).read_text()


def test_a_run_evicts_and_cuts_and_is_right(tmp_path):
    assert doctor.main(["--soak", "0.2"]) == 0
    text = said(tmp_path)
    assert text.endswith("nothing broke\n") and "OTHER TOKENS" not in text and "model     demo, wired: pool" in text
    count, of_rate = r"(\d+)", r"([\d.]+)"
    line = f"{count} tokens, {of_rate} tokens/s, the slowest step 2 ms, {count} conversations evicted, "
    line += f"a pool of {of_rate} to {of_rate} MB"
    tokens, rate, evicted, low, high = re.search(rf"minute 1, \d+ s: {line}", text).groups()
    assert int(tokens) > 10 and float(rate) == pytest.approx(int(tokens) / 12, rel=0.03)
    assert int(evicted) > 0 and 0 < float(low) < float(high) <= 2.2


def test_answers_with_other_tokens_are_found(tmp_path, monkeypatch):
    take = Client.take

    def confused(client, seen):
        take(client, seen)
        client.alone = [0]

    monkeypatch.setattr(Client, "take", confused)
    assert doctor.main(["--soak", "0.2"]) == 1
    assert "ANSWERS HAD OTHER TOKENS" in said(tmp_path) and said(tmp_path).endswith("an answer had other tokens\n")


def breaks_with(patch, error):
    def broken(run, count):
        raise error

    patch.setattr(Soak, "seconds", broken)


def test_the_file_says_what_broke(tmp_path, monkeypatch):
    breaks_with(monkeypatch, DeviceError("no memory at /Users/ann/models"))
    assert doctor.main(["--soak", "1"]) == 1
    assert said(tmp_path).endswith("BROKE OR WRONG: DeviceError: no memory at PATH\n")


def test_the_file_says_how_far_a_run_came_that_was_cut_off(tmp_path, monkeypatch):
    class PowerCut(BaseException):
        pass

    breaks_with(monkeypatch, PowerCut)
    with pytest.raises(PowerCut):
        doctor.main(["--soak", "1"])
    assert said(tmp_path).splitlines()[-2:] == [
        "each client's first answer alone: done",
        "then the program, or the machine, ended before the next line",
    ]


def test_a_machine_that_slept_is_noted():
    clock = soak.time
    assert soak.slept_since(clock.monotonic(), clock.time()) == 0
    start, wall = clock.monotonic(), clock.time()
    clock.time = lambda: wall + 3600
    assert soak.slept_since(start, wall) == pytest.approx(3600, abs=1)


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_minutes_must_be_possible(minutes, capsys):
    assert doctor.main([f"--soak={minutes}"]) == 1
    assert "give a number of minutes above 0" in capsys.readouterr().err


def test_pools_are_compared_in_processes_of_their_own():
    lines, is_right = soak.compared(0.5)
    assert is_right and [line.split(":")[0] for line in lines] == [f"{name} in the pool" for name in soak.DEMO_POOLS]
    assert all(float(re.search(r": ([\d.]+) tokens/s", line)[1]) > 0 for line in lines)


def test_on_a_mac_what_is_wired_is_compared(monkeypatch, backend_is):
    """With the variable by which MLX refreshes residency, in one of the processes."""
    asked = []
    backend_is("metal")
    monkeypatch.setattr(soak, "_in_a_process", lambda *given: asked.append(given[1:]) or "done")
    assert len(soak.compared(1.0)[0]) == 5
    assert [mode for mode, *_ in asked] == ["pool", "pool", "all", "off", "pool"]
    assert [environment for *_, environment in asked] == [{}] * 4 + [{soak.REFRESH: "500"}]


def test_an_old_macos_is_said():
    assert diagnosis.system_lines("15.1") == diagnosis.system_lines("") == []
    assert "from macOS 15 on" in diagnosis.system_lines("14.6.1")[0]

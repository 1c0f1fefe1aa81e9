"""What a server does to the machine while nobody asks it anything, and after the machine has slept."""

import pytest

from moeflux_mlx.server import worker
from moeflux_mlx.server.worker import REST_SECONDS, Idle


class Machine:
    """A clock, and what was done."""

    def __init__(self, monkeypatch):
        self.now, self.done = 1000.0, []
        for name in ("rest", "wake"):
            monkeypatch.setattr(worker, name, lambda name=name: self.done.append(name))
        monkeypatch.setattr(worker, "Awake", lambda: self)
        self.is_awake = False

    def __enter__(self):
        self.is_awake = True

    def __exit__(self, *_):
        self.is_awake = False

    def __call__(self):
        return self.now


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_memory_is_let_go_after_minutes_without_a_request(machine):
    server = Idle(machine)
    server.end()
    machine.done.clear()
    assert machine.is_awake
    assert server.patience(None) == REST_SECONDS and server.patience(1.0) == 1.0
    assert not machine.is_awake, "while nothing is computed, the machine may sleep"
    server.look()
    assert not machine.done
    machine.now += REST_SECONDS - 1
    server.look()
    assert server.patience(None) == 1 and not machine.done
    machine.now += 1
    server.look()
    assert machine.done == ["rest"] and server.patience(None) is None and server.patience(2.0) == 2.0
    server.end()
    assert machine.done == ["rest", "wake"] and machine.is_awake
    assert server.patience(None) == REST_SECONDS and not machine.is_awake


def test_a_clock_that_jumps_does_no_harm(machine):
    """A machine that slept for hours, and a clock that was set back."""
    server = Idle(machine)
    server.patience(None)
    machine.now += 1e5
    assert server.patience(None) is None
    server.look()
    assert machine.done == ["rest"]
    server.end()
    server.patience(None)
    machine.now -= 1e5
    server.look()
    assert machine.done == ["rest", "wake"] and server.patience(0.5) == 0.5

"""A Mac stays awake while something is computed: the command that is started, and when it ends."""

import os
import sys
from types import SimpleNamespace

import pytest

from moeflux_mlx import chat
from moeflux_mlx.planning import awake
from moeflux_mlx.planning.awake import Awake


class Caffeinate:
    """As subprocess.Popen. Attributes: started: the commands. running: how many have not ended."""

    started, running = [], 0

    def __init__(self, command, close_fds):
        if Caffeinate.is_missing:
            raise FileNotFoundError("caffeinate")
        Caffeinate.started.append(command)
        Caffeinate.running += 1

    def poll(self):
        return None

    def terminate(self):
        Caffeinate.running -= 1

    def wait(self):
        return 0


@pytest.fixture
def mac(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(awake.subprocess, "Popen", Caffeinate)
    Caffeinate.started, Caffeinate.running, Caffeinate.is_missing = [], 0, False


def test_a_child_runs_as_long_as_something_is_computed(mac):
    one = Awake()
    with pytest.raises(ZeroDivisionError), one:
        assert Caffeinate.started == [["caffeinate", "-i", "-w", str(os.getpid())]] and Caffeinate.running == 1
        one.__enter__()
        assert Caffeinate.running == 1, "it runs already"
        raise ZeroDivisionError
    assert Caffeinate.running == 0
    one.__exit__()
    with one:
        assert Caffeinate.running == 1
    assert Caffeinate.running == 0


def test_a_chat_stays_awake_for_its_answers_alone(mac, monkeypatch):
    class Talk:
        session = SimpleNamespace(last=None, save_error=None)

        def ask(self, *_, **__):
            assert Caffeinate.running == 1
            yield "Hello", False

    told = chat.Chat(Talk(), SimpleNamespace(), {})
    for count in (1, 2):
        told.answer("Hi")
        assert Caffeinate.running == 0 and len(Caffeinate.started) == count


def test_a_machine_without_it_may_sleep(mac, monkeypatch):
    Caffeinate.is_missing = True
    with Awake():
        pass
    monkeypatch.setattr(sys, "platform", "linux")
    Caffeinate.is_missing = False
    with Awake():
        assert not Caffeinate.started

"""Which group a process joins, and how long it waits for the others."""

import os
import signal
import threading
import time

import pytest
from rank_processes import ring, started

from moeflux_mlx.errors import RequestError
from moeflux_mlx.several.joining import LATE, Watchdog, backend_of

RANK = {"MLX_RANK": "0"}


@pytest.mark.parametrize(
    "environ, backend",
    [
        ({}, None),
        ({"MLX_HOSTFILE": "hosts"}, None),
        (RANK | {"MLX_HOSTFILE": "hosts"}, "ring"),
        (RANK | {"MLX_IBV_DEVICES": "devices"}, "jaccl"),
        (RANK | {"NCCL_HOST_IP": "10.0.0.1"}, "nccl"),
    ],
)
def test_the_environment_decides(environ, backend):
    assert backend_of(environ) == backend


@pytest.mark.parametrize(
    "environ, message",
    [
        (RANK, "no transport is: set one of MLX_HOSTFILE"),
        (RANK | {"MLX_HOSTFILE": "hosts", "NCCL_HOST_IP": "10.0.0.1"}, "MLX_HOSTFILE and NCCL_HOST_IP are set"),
    ],
)
def test_incomplete_or_several_settings_are_refused(environ, message):
    with pytest.raises(RequestError, match=message):
        backend_of(environ)


def test_when_the_watchdog_ends_the_process():
    said, barked = [], threading.Event()
    watchdog = Watchdog(lambda message: (said.append(message), barked.set()))
    with watchdog.within(5.0, "never"):
        pass
    with watchdog.within(0.05, "too late"):
        assert barked.wait(5.0)
    barked.clear()
    time.sleep(0.05)
    assert said == ["too late"] and not barked.is_set(), "once, and not while nothing is watched"


WORK = """
import os, sys, time
import numpy as np
from moeflux_mlx.several.joining import join
group = join(os.environ, limit=float(sys.argv[1]))
group.limit = 3.0
print("joined", flush=True)
for i in range(int(sys.argv[2])):
    gathered = group.gather(np.full(3, group.rank + i, np.uint32))
    assert (gathered == np.arange(group.size)[:, None] + i).all()
    time.sleep(float(sys.argv[3]))
"""


def start(tmp_path, ranks, hosts, *arguments):
    """Starts processes of these ranks of a ring."""
    file = ring(tmp_path, hosts)
    return [started(file, rank, WORK, *arguments) for rank in ranks]


def ended(processes):
    return [(process.communicate(timeout=60)[1], process.returncode) for process in processes]


def test_two_processes_gather(tmp_path):
    assert [code for _, code in ended(start(tmp_path, (0, 1), 2, 30, 20, 0))] == [0, 0]


def test_a_rank_that_never_joins_ends_the_others(tmp_path):
    ((said, code),) = ended(start(tmp_path, (0,), 2, 2, 1, 0))
    assert code == -signal.SIGKILL and "did not come within 2 s" in said


@pytest.mark.parametrize("number, said", [(signal.SIGKILL, "rank 1 is gone"), (signal.SIGSTOP, "has waited 3 s")])
def test_a_rank_that_dies_or_stops_ends_the_others(tmp_path, number, said):
    first, second = start(tmp_path, (0, 1), 2, 30, 1000, 0.01)
    assert second.stdout.readline() == "joined\n"
    time.sleep(0.2)
    os.kill(second.pid, number)
    try:
        ((message, code),) = ended([first])
        assert said in message and code in (1, LATE)
    finally:
        second.kill()
        second.communicate()

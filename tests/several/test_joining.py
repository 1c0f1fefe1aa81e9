"""Which group a process joins, and how long it waits for the others."""

import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from rank_processes import ring, started
from test_ranked_experts import together

from moeflux_mlx.errors import RankError, RequestError
from moeflux_mlx.several import handshake
from moeflux_mlx.several.handshake import REMEDIES, Settings, agree, greet
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


OWN = Settings(
    package=1,
    mlx=2,
    chip=3,
    model=4,
    dtype=5,
    rounding=8,
    kv_bits=0,
    context=777,
    span=512,
    block=256,
    shares_routing=0,
    slots=0,
)


def agreed(*settings):
    return together(len(settings), lambda rank, exchange: agree(exchange, settings[rank]))


@pytest.mark.parametrize("name", REMEDIES)
def test_a_difference_is_an_error_that_names_the_rank_and_the_remedy(name):
    errors = agreed(OWN, OWN, replace(OWN, **{name: 99}))
    assert all(isinstance(error, RankError) for error in errors) and len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(f"rank 2 has another {name} than rank 0") and REMEDIES[name] in str(errors[0])


@pytest.mark.parametrize("name, said", [("mlx", "different MLX versions"), ("chip", "different chips")])
def test_different_machines_use_the_choice_of_the_first(name, said):
    agreements = agreed(OWN, replace(OWN, **{name: 99}))
    assert all(one.shares_routing and said in one.note for one in agreements)


def test_all_take_the_smallest_span_and_block():
    one, other = agreed(replace(OWN, span=4096), replace(OWN, block=64))
    assert one == other and (one.span, one.block, one.shares_routing, one.note) == (512, 64, False, "")
    assert all(agreement.shares_routing for agreement in agreed(OWN, replace(OWN, shares_routing=1)))


def test_reads_are_assigned_if_every_rank_has_room_for_any_expert():
    assert {one.slots for one in agreed(replace(OWN, slots=7), replace(OWN, slots=9))} == {(7, 9)}
    assert {one.slots for one in agreed(replace(OWN, slots=7), OWN)} == {()}


def test_a_rank_that_cannot_take_part_is_named_to_all():
    assert all("rank 1 cannot take part" in str(error) for error in agreed(OWN, None))


def test_shares_are_exchanged_and_checked():
    assert together(2, lambda rank, exchange: greet(exchange, rank + 1)) == [(1, 2)] * 2
    assert all("asks for a share of 65" in str(error) for error in together(2, lambda rank, e: greet(e, 1 + 64 * rank)))


def test_another_protocol_is_refused(monkeypatch):
    """The second rank answers like a future version."""

    def work(rank, exchange):
        if rank == 0:
            return greet(exchange, 1)
        return exchange(handshake.HELLO, np.array([handshake.PROTOCOL + 1, len(handshake.NAMES), 1], np.uint32))

    assert "rank 1 speaks protocol 3, rank 0 2; install the same" in str(together(2, work)[0])

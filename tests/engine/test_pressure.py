"""The machine's signs of memory pressure, from files in a folder and stand-ins of a kernel, and the pool's reaction."""

import math
import random
from unittest import mock

import mlx.core as mx
import pytest
from tiny_models import tiny_directory

from moeflux_mlx.errors import DeviceError, RequestError
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.planning.memory_plan import headroom_bytes
from moeflux_mlx.planning.pressure import (
    CUT,
    DEEP_CUT,
    EVERY,
    MOST_FALL,
    PACE,
    PACE_OF_METAL,
    STEPS,
    Breath,
    ControlGroup,
    MacOS,
    PoolLimit,
    Process,
    Spare,
    Stalls,
)

GB = 10**9


class Clock:
    now = 100.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def write_group(folder, version, limit, used, files=0, high="max"):
    """Writes the files of a control group. `files` of the used bytes are pages that the kernel can drop."""
    folder.mkdir(exist_ok=True)
    if version == 2:
        texts = {"memory.max": limit, "memory.high": high, "memory.current": used}
        stat = f"anon {used - files}\nactive_file {files - 7}\ninactive_file 7\n"
    else:
        texts = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used}
        stat = f"active_file 1\ninactive_file 2\ntotal_active_file {files}\ntotal_inactive_file 0\n"
    for name, number in {**texts, "memory.stat": stat}.items():
        (folder / name).write_text(f"{number}\n")
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_keeps_half_of_the_headroom_and_counts_no_pages_of_files(tmp_path, version):
    folder = write_group(tmp_path, version, 4 * GB, 3 * GB, files=GB)
    assert ControlGroup(folder).spare(GB) == Spare(2 * GB - int(0.15 * 4 * GB) // 2, 2 * GB)
    write_group(tmp_path, version, 2 * GB, 3 * GB, files=GB)
    assert ControlGroup(folder).spare(GB) == Spare(-int(0.15 * 2 * GB) // 2, 0)


def test_a_throttle_is_a_limit_and_no_limit_says_nothing(tmp_path):
    assert ControlGroup(write_group(tmp_path, 2, 4 * GB, GB, high=2 * GB)).spare(0).hard == GB
    assert ControlGroup(write_group(tmp_path, 2, "max", GB)).spare(0) == Spare(math.inf, math.inf)
    assert ControlGroup(tmp_path / "none").spare(0) == Spare(math.inf, math.inf)


def stalls_file(folder, microseconds):
    (folder / "pressure").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={microseconds}\nfull total=9\n")
    return folder / "pressure"


def test_stalls_of_a_tenth_of_the_time_are_pressure(tmp_path, clock):
    stalls = Stalls(stalls_file(tmp_path, 5_000_000), clock=clock)
    for seconds, total, cut in [
        (0.5, 9_000_000, 0),  # too early for a statement
        (0.5, 5_090_000, 0),
        (2.0, 5_280_000, 0),
        (2.0, 5_490_000, CUT),
        (1.0, 5_490_000, 0),
    ]:
        clock.pass_by(seconds)
        stalls_file(tmp_path, total)
        assert stalls.spare(800) == Spare(cut=cut)
    clock.pass_by(5)
    (tmp_path / "pressure").unlink()
    assert stalls.spare(800) == Spare()


@pytest.mark.parametrize("available, cut", [(8_000_000, 0), (500_000, CUT)])
def test_stalls_of_a_machine_with_free_memory_are_ignored(tmp_path, clock, available, cut):
    (tmp_path / "meminfo").write_text(f"MemTotal: 16000000 kB\nMemAvailable: {available} kB\nHugePages_Total: 0\n")
    stalls = Stalls(stalls_file(tmp_path, 0), tmp_path / "meminfo", clock)
    clock.pass_by(1)
    stalls_file(tmp_path, 900_000)
    assert stalls.spare(800) == Spare(cut=cut)


def test_levels_of_a_mac_and_a_compressor_that_grows(clock):
    level, compressed = [1], [GB]
    mac = MacOS(lambda: level[0], lambda: compressed[0], 16 * GB, clock)
    for seconds, now, held, cut in [
        (1, 1, GB, 0),
        (1, 2, GB, CUT),
        (0.5, 4, GB, 0),  # the earlier cut has no effect yet
        (0.5, 4, GB, DEEP_CUT),
        (1, 1, GB + 100_000_000, 0),
        (1, 1, GB + 300_000_000, CUT),
        (1, 1, GB, 0),
    ]:
        clock.pass_by(seconds)
        level[0], compressed[0] = now, held
        assert mac.spare(800) == Spare(cut=cut)


def test_the_process_has_what_its_user_allows():
    assert Process(5 * GB, lambda: 4 * GB).spare(GB).nbytes == GB
    assert Process(5 * GB, lambda: 6 * GB).spare(GB).nbytes == -GB


class Machine:
    """A group in which other processes take memory, and a pool that fills what it may have."""

    def __init__(self, folder, version, most):
        self.folder, self.version, self.clock = folder, version, Clock()
        self.pool, self.most, self.limit, self.temporaries = most, most, 10 * GB, 0
        self.write()
        self.allowed = PoolLimit([ControlGroup(folder)], most, self.clock, self.used)

    def used(self):
        return GB + self.pool + self.temporaries

    def write(self):
        write_group(self.folder, self.version, self.limit, self.used())

    def pass_by(self, seconds, filled=1.0):
        """Lets time pass: the pool shrinks at once, and fills some of what it may have."""
        for _ in range(int(seconds / EVERY)):
            self.clock.pass_by(EVERY)
            self.write()
            allowed = self.allowed(self.pool)
            self.pool = min(allowed, max(self.pool, int(filled * allowed)))
        self.write()


@pytest.mark.parametrize("version", [1, 2])
def test_the_pool_shrinks_at_once_and_is_back_within_ten_seconds(tmp_path, version):
    machine = Machine(tmp_path, version, 6 * GB)
    machine.pass_by(5)
    assert machine.pool == 6 * GB
    machine.limit = 4 * GB
    machine.pass_by(2 * EVERY)
    assert machine.pool == 3 * GB - int(0.15 * 4 * GB) // 2
    machine.limit = 10 * GB
    machine.pass_by(2)
    assert machine.pool < 3 * GB, "growth waits"
    machine.pass_by(8)
    assert machine.pool == 6 * GB


def test_a_limit_that_falls_is_expected_to_fall_again(tmp_path):
    """The limit is expected to fall as much between two checks as before: a layer of a prompt is computed meanwhile."""
    machine = Machine(tmp_path, 2, 6 * GB)
    machine.limit = 6 * GB
    machine.pass_by(2 * EVERY)
    for fall in (GB // 4, GB // 2, GB // 8):
        before = machine.limit
        machine.limit -= fall
        machine.pass_by(EVERY)
        assert abs(machine.used() + headroom_bytes(machine.limit) // 2 + fall - machine.limit) < 8
        assert machine.used() < before - 2 * fall
    machine.temporaries = GB // 4  # memory that the call itself takes does not count as a fall
    machine.pass_by(2 * EVERY)
    assert machine.used() == machine.limit - headroom_bytes(machine.limit) // 2


def test_falls_between_two_looks_do_not_reach_what_is_used(tmp_path):
    """The limit falls a hundred times, each time at most by as much as before plus half of the headroom, and at most by
    a quarter of what it leaves to the pool. A computation between two checks is never killed.
    """
    rng, machine, last = random.Random(5), Machine(tmp_path, 2, 8 * GB), 0
    for _ in range(100):
        if machine.limit < 3 * GB:
            machine.limit, last = 10 * GB, 0
            machine.pass_by(PACE.patience + (STEPS + 2) * EVERY)
        expected = min(last, (machine.limit - GB) // MOST_FALL)
        last = rng.randint(0, expected + headroom_bytes(machine.limit) // 2)
        machine.limit -= last
        assert machine.used() <= machine.limit
        machine.pass_by(EVERY)


def test_a_pool_that_is_not_full_gets_no_more_than_there_is(tmp_path):
    """The pool's allowance is counted from the memory that it takes: its unfilled room is not free memory."""
    machine = Machine(tmp_path, 2, 6 * GB)
    machine.limit = 4 * GB
    machine.pass_by(2 * EVERY)
    machine.limit = 6 * GB
    for _ in range(40):
        machine.pass_by(EVERY, filled=0.5)
        assert GB + machine.allowed(machine.pool) <= 6 * GB


def test_the_pool_leaves_what_a_call_may_yet_take(tmp_path):
    """Temporaries appear between two checks. While they exist, they are not counted twice; afterwards the pool may grow
    at once, because memory was not short.
    """
    machine = Machine(tmp_path, 2, 6 * GB)
    machine.limit = 8 * GB
    machine.pass_by(1)
    assert machine.pool == 6 * GB
    machine.allowed.begin(2 * GB)
    machine.pool = machine.allowed(machine.pool)
    assert machine.pool == 8 * GB - int(0.15 * 8 * GB) // 2 - 3 * GB
    for taken in (GB, 2 * GB):
        before, machine.temporaries = machine.pool, taken
        machine.pass_by(EVERY)
        assert machine.pool == before and machine.used() <= machine.limit
    machine.temporaries = 0
    machine.write()
    machine.allowed.begin(1000)
    machine.pass_by(1)
    assert machine.pool == 6 * GB


def test_a_hundred_random_squeezes(tmp_path):
    """Whatever is squeezed and released, the group stays within its limit from the next look on, and the pool is
    never larger than wanted."""
    rng, machine = random.Random(7), Machine(tmp_path, 2, 6 * GB)
    for _ in range(100):
        machine.limit = rng.choice([rng.randint(2 * GB, 10 * GB), 10 * GB])
        machine.pass_by(rng.choice([2 * EVERY, 1, 5]), filled=rng.random())
        assert 0 <= machine.pool <= 6 * GB and GB + machine.pool <= machine.limit
    machine.limit = 10 * GB
    machine.pass_by(PACE.patience + (STEPS + 2) * EVERY)
    assert machine.pool == 6 * GB


def test_a_mac_cuts_an_eighth_of_the_full_pool_every_ten_seconds(clock):
    """Only a deeper cut comes sooner, and halves what is filled. Growth waits for a minute without any pressure."""
    source = mock.Mock()
    limit = PoolLimit([source], 800, clock, lambda: 0, PACE_OF_METAL)
    for seconds, pool, cut, eighths in [
        (0, 100, CUT, 7),
        (9, 100, CUT, 7),
        (1, 400, CUT, 6),
        (1, 300, DEEP_CUT, 1),
        (1, 300, DEEP_CUT, 1),
        (59, 100, 0, 1),
        (1, 100, 0, 2),
    ]:
        clock.pass_by(seconds)
        source.spare.return_value = Spare(cut=cut)
        assert limit(pool) // 100 == eighths


def test_the_sources_are_not_asked_at_every_call(clock):
    class Counting:
        asked = 0

        def spare(self, pool):
            self.asked += 1
            return Spare(-10)

    source = Counting()
    limit = PoolLimit([source], 100, clock)
    assert [limit(100), limit(100)] == [90, 90] and source.asked == 1
    clock.pass_by(EVERY)
    assert limit(90) == 80 and source.asked == 2


def test_a_call_for_which_there_is_no_memory_is_refused(tmp_path):
    """The error names the needed and the available memory; when there is memory again, the same call runs."""
    path = tiny_directory("qwen3_moe")
    engine = open_engine(path, dtype=mx.float32, expert_io="pread")
    folder = write_group(tmp_path, 2, 10 * GB, GB)
    clock = Clock()
    limit = PoolLimit([ControlGroup(folder)], engine.plan.most, clock)
    breath = Breath(engine.model.args, engine.experts.layout, engine.plan, limit)
    engine.experts.allowance, engine.experts.limit, engine.experts.prompt_check = breath, limit, breath.check_prompt
    tokens = mx.array([[3, 1, 4, 1, 5]])
    before = engine.model(tokens)
    write_group(folder, 2, GB, GB - 100)
    clock.pass_by(1)
    with pytest.raises(DeviceError, match=r"5 tokens need .* GB .* leaves 0.00 GB; raise the limit, end other"):
        engine.model(tokens)
    clock.pass_by(1)
    with pytest.raises(RequestError, match=r"900 tokens need .* GB .* leaves 0.00 GB; raise the limit, end other"):
        next(engine.session().answer([1] * 900).prompt_pieces())
    write_group(folder, 2, 10 * GB, GB)
    clock.pass_by(1)
    assert mx.array_equal(engine.model(tokens), before)
    engine.experts.close()

"""What the page is shown of the experts: where each is, what was requested, and for whom."""

import numpy as np
import pytest
from test_source import EXPERTS, opened, packed  # noqa: F401

from moeflux_mlx.experts.source import IN_MEMORY, ON_DISK, IoMode
from moeflux_mlx.server.live import HIT, MISSED, ExpertMap


def test_the_view_of_where_experts_are(packed):  # noqa: F811
    with_pool = opened(packed, IoMode.PREAD, cache_bytes=4 * packed.layout.record.stride, least_slots=2)
    layers = packed.layout.moe_layers

    def request(*ids):
        with with_pool.request(layers[0], np.array(ids)) as lease:
            lease.wait()

    seen = ExpertMap(with_pool)
    assert seen.states().tolist() == [[ON_DISK] * EXPERTS] * len(layers)
    seen.end()
    request(1, 2)
    assert seen.states()[0].tolist() == [ON_DISK, IN_MEMORY, IN_MEMORY, ON_DISK, ON_DISK, ON_DISK]
    seen = ExpertMap(with_pool)
    request(2, 3)
    assert seen.states()[0].tolist() == [ON_DISK, IN_MEMORY, HIT, MISSED, ON_DISK, ON_DISK]
    assert seen.states()[0].tolist() == [ON_DISK, IN_MEMORY, IN_MEMORY, IN_MEMORY, ON_DISK, ON_DISK]
    with_pool.close()


@pytest.mark.parametrize("mode", [IoMode.PREAD, IoMode.MMAP])
def test_the_view_of_who_requested_an_expert_last(packed, mode):  # noqa: F811
    options = {"cache_bytes": 4 * packed.layout.record.stride, "least_slots": 4} if mode is IoMode.PREAD else {}
    loader, layer = opened(packed, mode, **options), packed.layout.moe_layers[0]
    row, asking = loader.layout.moe_layers.index(layer), []
    seen = ExpertMap(loader, lambda: asking)

    def ask(numbers, *ids):
        asking[:] = numbers
        loader.request(layer, np.array(ids)).release()
        return seen.last_askers()[row].tolist()

    assert ask([7], [0, 1], [1, 2]) == [7, 7, 7, 0, 0, 0], "a prompt, or drafts"
    assert ask([8, 9], [1, 3], [2, 3]) == [7, 8, 9, 9, 0, 0]
    assert ask([8, 9], [0, 1]) == [7, 8, 9, 9, 0, 0], "of whom nobody knows"
    assert not seen.last_askers()[[i for i in range(len(loader.layout.moe_layers)) if i != row]].any()
    seen.end()
    assert ask([8], [0, 1]) == [7, 8, 9, 9, 0, 0], "nobody looks"
    loader.close()


@pytest.mark.usefixtures("cpu_device")
def test_the_view_of_mapped_experts(packed):  # noqa: F811
    mapped, layer = opened(packed, IoMode.MMAP), packed.layout.moe_layers[0]
    seen = ExpertMap(mapped)
    mapped.request(layer, np.array([4])).release()
    assert mapped.without_lease(layer, np.array([[5]])) is not None
    assert (seen.states() == HIT).sum() == 2 and (seen.states() == IN_MEMORY).all()
    mapped.close()

"""The replay of the caching allocator against answers derived by hand from its rules."""

import random

import headroom
import pytest
import torch
from headroom.planning.allocator import EMPTY_CACHE, Allocator, replay
from headroom.planning.allocator_settings import AllocatorSettings, settings_of
from torch import nn

MIB = 1 << 20
GROWS = AllocatorSettings(expandable=True)


def mean(model, batch):
    return model(batch).mean()


def grow(*sizes):
    return [(index, size) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([512, 513], 512 + 1024, 2 * MIB),
        # Two small requests of 1 MiB fill a small segment; a third byte needs another one.
        ([MIB, MIB], 2 * MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        # 512 bytes remain in a small segment, and are a block of their own.
        ([MIB, MIB - 512, 512], 2 * MIB, 2 * MIB),
        # Between 1 and 10 MiB: 20 MiB segments, split as long as more than 1 MiB remains.
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB, 20 * MIB),
        # 1 MiB would remain: the block is not split, all of it counts as allocated.
        ([9 * MIB, 10 * MIB - 512], 19 * MIB - 512, 20 * MIB),
        ([9 * MIB, 10 * MIB], 20 * MIB, 20 * MIB),
        ([9 * MIB, 12 * MIB], 21 * MIB, 32 * MIB),
        # From 10 MiB on: a segment of its own, in steps of 2 MiB, again not split for 1 MiB.
        ([10 * MIB], 10 * MIB, 10 * MIB),
        ([11 * MIB], 12 * MIB, 12 * MIB),
        ([11 * MIB - 512], 11 * MIB - 512, 12 * MIB),
        ([0, 0], 0, 0),
    ],
)
def test_growing(sizes, allocated, reserved):
    got = replay(grow(*sizes))
    assert (got.requested_peak, got.reserved) == (sum(sizes), reserved)
    assert got.allocated_peak == allocated
    assert got.rounding + got.fragmentation == reserved - sum(sizes)


def test_best_fit_takes_the_smallest_that_fits():
    events = [*grow(12 * MIB, 30 * MIB, 20 * MIB), (0, -1), (1, -1), (2, -1), (3, 15 * MIB)]
    allocator = Allocator()
    blocks = [allocator.allocate(size) for size in (12 * MIB, 30 * MIB, 20 * MIB)]
    starts = [block.address for block in blocks]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(15 * MIB).address == starts[2]
    assert allocator.allocate(15 * MIB).address == starts[1]
    assert replay(events).reserved == 62 * MIB


def test_freed_neighbors_merge_and_serve_a_larger_request():
    events = [*grow(6 * MIB, 6 * MIB, 6 * MIB), (0, -1), (1, -1), ("large", 9 * MIB)]
    assert replay(events).reserved == 20 * MIB
    apart = [*grow(6 * MIB, 6 * MIB, 6 * MIB), (0, -1), (2, -1), ("large", 9 * MIB)]
    assert replay(apart).reserved == 40 * MIB  # 6 and 8 MiB free, with a hole between


def test_small_requests_do_not_use_large_segments():
    assert replay([(0, 8 * MIB), (0, -1), (1, MIB)]).reserved == 22 * MIB


def test_peaks_are_of_different_moments():
    got = replay([(0, 40 * MIB), (0, -1), (1, 30 * MIB), (2, 31 * MIB)])
    # 40 MiB serve the 30 (10 remain), then 32 are reserved; 31 MiB are not split from 32.
    assert (got.requested_peak, got.allocated_peak) == (61 * MIB, 62 * MIB)
    assert (got.reserved, got.fragmentation) == (72 * MIB, 10 * MIB)


def test_expandable_segments():
    # Large requests share one range: it grows by pages of 20 MiB and nothing is lost between.
    assert replay(grow(30 * MIB, 9 * MIB, 21 * MIB), GROWS).reserved == 60 * MIB
    assert replay(grow(30 * MIB, 9 * MIB, 21 * MIB)).reserved == 72 * MIB
    assert replay(grow(*[MIB] * 5), GROWS).reserved == 6 * MIB
    # What is free at the end of the range is extended.
    got = replay([(0, 30 * MIB), (0, -1), (1, 50 * MIB)], GROWS)
    assert (got.reserved, got.allocated_peak) == (60 * MIB, 50 * MIB)
    assert replay([(0, 30 * MIB), (0, -1), (1, 50 * MIB)]).reserved == 80 * MIB
    # A cache that is emptied gives back whole pages, also between others, which get memory again.
    events = [*grow(30 * MIB, 50 * MIB, 10 * MIB), (1, -1), (EMPTY_CACHE, 0)]
    assert replay(events, GROWS).reserved == 60 * MIB
    assert replay([*events, (3, 45 * MIB)], GROWS).reserved == 100 * MIB


def test_settings(monkeypatch):
    model = nn.Linear(2000, 1000, device="meta")

    def plan(text):
        monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: text)
        return headroom.plan(model, None, torch.empty(3000, 2000, device="meta"), forward=mean)

    usual = plan("pinned_num_register_threads:4, garbage_collection_threshold:0.6")
    assert not usual.timeline.notes
    assert plan("expandable_segments:True").reserved_bytes < usual.reserved_bytes
    assert plan("roundup_power2_divisions:2").allocated_bytes > usual.allocated_bytes
    rare = plan("backend:cudaMallocAsync")
    assert rare.reserved_bytes == usual.reserved_bytes
    assert str(rare).endswith("backend:cudaMallocAsync.")
    collects = "garbage_collection_threshold:0.6,per_process_memory_fraction:0.5"
    assert str(plan(collects)).endswith("per_process_memory_fraction.")
    assert settings_of(collects, 100 * MIB).collects_from == 60 * MIB
    assert settings_of("large_segment_size_mb:40").max_excess == 40 * MIB


def test_segments_in_use_stay_when_the_cache_is_emptied():
    large = 6 << 20
    events = [("a", large), ("b", large), ("c", 30 << 20), ("a", -1), ("c", -1), (EMPTY_CACHE, 0)]
    found = replay(events)
    assert found.reserved == 20 << 20 and found.allocated_peak == found.requested_peak == large
    found = replay([*events, ("d", 8 << 20), ("e", large)])  # behind b, and before it
    assert found.reserved == 20 << 20
    assert replay([("a", 1), ("a", -1), (EMPTY_CACHE, 0), ("b", large)]).reserved == 20 << 20


def test_bad_events():
    with pytest.raises(ValueError, match=r"event 1 allocates 'a'"):
        replay([("a", 1), ("a", 2)])
    with pytest.raises(KeyError):
        replay([("a", -1)])


def blocks_of(first):
    while first is not None:
        yield first
        first = first.after


@pytest.mark.parametrize("expandable", [False, True])
def test_invariants(expandable):
    """Nothing overlaps, the sums agree, and all of it merges back."""
    draw = random.Random(0)
    allocator = Allocator(AllocatorSettings(expandable))
    live = []
    for _ in range(1500):
        if live and draw.random() < 0.48:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            size = draw.choice([draw.randint(1, 2 * MIB), draw.randint(1, 30 * MIB)])
            live.append(allocator.allocate(size))
        assert allocator.requested <= allocator.allocated <= allocator.reserved
    segments = [list(blocks_of(first)) for first in allocator.segments]
    spans = sorted((b.pool.small, b.address, b.size) for segment in segments for b in segment)
    for (pool, start, size), (other, after, _) in zip(spans, spans[1:], strict=False):
        assert start + size <= after or pool != other
    for segment in segments:
        for block, following in zip(segment, segment[1:], strict=False):
            assert block.used or following.used or block.mapped != following.mapped
            assert block.address + block.size == following.address
    mapped = [b.size for segment in segments for b in segment if b.mapped]
    assert sum(mapped) == allocator.reserved
    assert sum(block.size for block in live) == allocator.allocated
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == 0
    assert all(first.after is None and not first.used for first in allocator.segments)
    assert (allocator.allocated, allocator.requested) == (0, 0)

"""The replay of the caching allocator against answers derived by hand from its rules."""

import random

import pytest
from headroom.planning.allocator import Allocator, OutOfMemory
from headroom.planning.allocator_settings import AllocatorSettings
from headroom.planning.replay import replay

KIB, MIB = 1 << 10, 1 << 20


def grow(*sizes):
    return [(index, size) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved", "segments"),
    [
        ([1], 512, 2 * MIB, 1),
        ([512, 513], 512 + 1024, 2 * MIB, 1),
        # Two small requests of 1 MiB fill a small segment; a third byte needs another one.
        ([MIB, MIB], 2 * MIB, 2 * MIB, 1),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB, 2),
        # Between 1 and 10 MiB: 20 MiB segments, split as long as more than 1 MiB remains.
        ([MIB + 1], MIB + 512, 20 * MIB, 1),
        ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB, 20 * MIB, 1),
        # 1 MiB would remain: the block is not split, all of it counts as allocated.
        ([9 * MIB, 10 * MIB - 512], 19 * MIB - 512, 20 * MIB, 1),
        ([9 * MIB, 10 * MIB], 20 * MIB, 20 * MIB, 1),
        ([9 * MIB, 12 * MIB], 21 * MIB, 32 * MIB, 2),
        # From 10 MiB on: a segment of its own, in steps of 2 MiB, again not split for 1 MiB.
        ([10 * MIB], 10 * MIB, 10 * MIB, 1),
        ([11 * MIB], 12 * MIB, 12 * MIB, 1),
        ([11 * MIB - 512], 11 * MIB - 512, 12 * MIB, 1),
        ([0, 0], 0, 0, 0),
    ],
)
def test_growing(sizes, allocated, reserved, segments):
    got = replay(grow(*sizes))
    assert (got.requested_peak, got.reserved_peak) == (sum(sizes), reserved)
    assert (got.allocated_peak, got.segments) == (allocated, segments)
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
    assert replay(events).reserved_peak == 62 * MIB


def test_freed_neighbors_merge_and_serve_a_larger_request():
    events = [*grow(6 * MIB, 6 * MIB, 6 * MIB), (0, -1), (1, -1), ("large", 9 * MIB)]
    assert replay(events).reserved_peak == 20 * MIB
    apart = [*grow(6 * MIB, 6 * MIB, 6 * MIB), (0, -1), (2, -1), ("large", 9 * MIB)]
    assert replay(apart).reserved_peak == 40 * MIB  # 6 and 8 MiB free, with a hole between


def test_small_requests_do_not_use_large_segments():
    assert replay([(0, 8 * MIB), (0, -1), (1, MIB)]).reserved_peak == 22 * MIB


def test_peaks_are_of_different_moments():
    got = replay([(0, 40 * MIB), (0, -1), (1, 30 * MIB), (2, 31 * MIB)])
    # 40 MiB serve the 30 (10 remain), then 32 are reserved; 31 MiB are not split from 32.
    assert (got.requested_peak, got.allocated_peak) == (61 * MIB, 62 * MIB)
    assert (got.reserved_peak, got.fragmentation) == (72 * MIB, 10 * MIB)


def test_capacity_gives_back_unused_segments_and_then_fails():
    events = [(0, 40 * MIB), (0, -1), (1, 60 * MIB), (2, 40 * MIB)]
    free = replay(events)
    assert (free.reserved_peak, free.retries, free.failed) == (100 * MIB, 0, None)
    tight = replay(events[:3], capacity=64 * MIB)
    assert (tight.reserved_peak, tight.reserved, tight.retries) == (60 * MIB, 60 * MIB, 1)
    assert tight.failed is None
    assert replay(events, capacity=64 * MIB).failed == (3, 40 * MIB)
    allocator = Allocator(capacity=MIB)
    with pytest.raises(OutOfMemory, match=r"1 bytes more do not fit: 0 of 1048576 bytes"):
        allocator.allocate(1)


def test_a_split_segment_cannot_be_given_back():
    events = [(0, 30 * MIB), (0, -1), (1, 11 * MIB), (2, 48 * MIB)]
    assert replay(events, capacity=64 * MIB).failed == (3, 48 * MIB)


def test_max_split_size():
    settings = AllocatorSettings.parse("max_split_size_mb:24")
    keep = [(0, 40 * MIB), (0, -1)]
    # The large block is kept for large requests, and only up to 20 MiB smaller ones.
    assert replay([*keep, (1, 10 * MIB)], settings).reserved_peak == 50 * MIB
    assert replay([*keep, (1, 24 * MIB)], settings).reserved_peak == 40 * MIB
    assert replay([*keep, (1, 24 * MIB)], settings).allocated_peak == 40 * MIB
    assert replay([(0, 50 * MIB), (0, -1), (1, 24 * MIB)], settings).reserved_peak == 74 * MIB
    # Where the capacity is reached, the large block goes first, without a full release.
    small = [(2, 4 * MIB), (2, -1)]
    got = replay([*small, *keep, (1, 10 * MIB), (3, 20 * MIB)], settings, capacity=64 * MIB)
    assert (got.failed, got.retries, got.reserved) == (None, 0, 40 * MIB)


@pytest.mark.parametrize(
    ("setting", "size", "rounded"),
    [
        ("4", 1200 * KIB, 1280 * KIB),
        ("4", 1024 * KIB, 1024 * KIB),
        ("4", 1793 * KIB, 2048 * KIB),
        ("4", 1200, 1536),  # Not above 4 blocks of 512: rounded as ever.
        ("8", 33 * MIB, 36 * MIB),
        ("[64:8,256:4,>:1]", 33 * MIB, 36 * MIB),
        ("[64:8,256:4,>:1]", 65 * MIB, 72 * MIB),
        ("[64:8,256:4,>:1]", 129 * MIB, 129 * MIB),  # Between two sizes that are named.
        ("[64:8,256:4,>:2]", 257 * MIB, 384 * MIB),
    ],
)
def test_roundup_power2_divisions(setting, size, rounded):
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{setting}")
    assert settings.rounded(size) == rounded


def test_garbage_collection_gives_back_what_is_oldest():
    text = "garbage_collection_threshold:0.5"
    events = [("old", 30 * MIB), ("old", -1), ("new", 40 * MIB), ("new", -1), ("more", 50 * MIB)]
    assert replay(events, text, capacity=200 * MIB).reserved == 120 * MIB  # 70 <= 100: no need
    got = replay(events, text, capacity=120 * MIB)
    assert (got.reserved, got.retries) == (90 * MIB, 0)
    assert replay(events, capacity=120 * MIB).reserved == 120 * MIB


def test_expandable_segments():
    text = "expandable_segments:True"
    # Large requests share one range: it grows by pages of 20 MiB and nothing is lost between.
    assert replay(grow(30 * MIB, 9 * MIB, 21 * MIB), text).reserved_peak == 60 * MIB
    assert replay(grow(30 * MIB, 9 * MIB, 21 * MIB)).reserved_peak == 72 * MIB
    assert replay(grow(*[MIB] * 5), text).reserved_peak == 6 * MIB
    # What is free at the end of the range is extended.
    got = replay([(0, 30 * MIB), (0, -1), (1, 50 * MIB)], text)
    assert (got.reserved_peak, got.allocated_peak) == (60 * MIB, 50 * MIB)
    assert replay([(0, 30 * MIB), (0, -1), (1, 50 * MIB)]).reserved_peak == 80 * MIB


def test_expandable_segments_give_back_whole_pages():
    allocator = Allocator(AllocatorSettings(expandable_segments=True), capacity=100 * MIB)
    first = allocator.allocate(50 * MIB)
    second = allocator.allocate(15 * MIB)
    assert allocator.reserved == 80 * MIB
    allocator.free(first)
    allocator.release_unused()
    # 2 pages of 20 MiB below the 50 MiB; the tail of 15 MiB lies in a page with `second`.
    assert allocator.reserved == 40 * MIB
    allocator.free(second)
    allocator.release_unused()
    assert (allocator.reserved, allocator.blocks()) == (0, [])


def test_settings():
    text = "expandable_segments:True, max_split_size_mb:64,pinned_num_register_threads:4"
    settings = AllocatorSettings.parse(text)
    assert settings == AllocatorSettings(expandable_segments=True, max_split_size=64 * MIB)
    assert AllocatorSettings.parse("") == AllocatorSettings()
    with pytest.raises(ValueError, match=r"expected name:value, got 'max_split_size_mb'"):
        AllocatorSettings.parse("max_split_size_mb")
    with pytest.raises(ValueError, match=r"only the native backend"):
        AllocatorSettings.parse("backend:cudaMallocAsync")


def test_bad_events():
    with pytest.raises(ValueError, match=r"event 1 allocates 'a'"):
        replay([("a", 1), ("a", 2)])
    with pytest.raises(KeyError):
        replay([("a", -1)])


SETTINGS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "roundup_power2_divisions:4,garbage_collection_threshold:0.6",
]


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("capacity", [None, 300 * MIB])
def test_invariants(text, capacity):
    """Nothing overlaps, the sums agree, and all of it merges back and can be given back."""
    draw = random.Random(0)
    allocator = Allocator(AllocatorSettings.parse(text), capacity)
    live = []
    for _ in range(1500):
        if live and draw.random() < 0.48:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            size = draw.choice([draw.randint(1, 2 * MIB), draw.randint(1, 30 * MIB)])
            try:
                live.append(allocator.allocate(size))
            except OutOfMemory:
                assert capacity is not None
                while allocator.allocated > 100 * MIB:
                    allocator.free(live.pop())
        assert allocator.requested <= allocator.allocated <= allocator.reserved
        assert capacity is None or allocator.reserved <= capacity
    segments = allocator.blocks()
    spans = sorted(block for segment in segments for block in segment)
    for (start, size, _), (after, _, _) in zip(spans, spans[1:], strict=False):
        assert start + size <= after
    for segment in segments:
        for (_, _, state), (_, _, following) in zip(segment, segment[1:], strict=False):
            assert state == "used" or state != following
    total = {
        state: sum(size for _, size, what in spans if what == state) for state in ("used", "free")
    }
    assert total["used"] == allocator.allocated == sum(block.size for block in live)
    assert total["used"] + total["free"] == allocator.reserved
    for block in live:
        allocator.free(block)
    mapped = [[b for b in segment if b[2] != "unmapped"] for segment in allocator.blocks()]
    assert all(len(segment) <= 1 or "expandable" in text for segment in mapped)
    assert (allocator.allocated, allocator.requested) == (0, 0)
    allocator.release_unused()
    assert (allocator.reserved, allocator.blocks()) == (0, [])

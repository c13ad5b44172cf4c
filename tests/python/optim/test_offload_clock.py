"""The clock of an engine that takes so long for each copy and each step: what a simulation of a
paged step says is what the step does."""

import random
import sys
import time
from fractions import Fraction
from pathlib import Path

import headroom
import pytest
import torch
from headroom.host import HostArena, cutting
from headroom.host.schedule import paged_step
from headroom.host.simulation import Link
from headroom.optim import AdamW, offload
from torch import nn

from helpers.bits import assert_same_bits
from helpers.copies import POLICIES, adversary, copying_with

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks._link import Throttled  # noqa: E402


def optimizer_of(sizes, bucket_bytes, pages=True):
    params = [nn.Parameter(torch.arange(size).sin()) for size in sizes]
    optimizer = AdamW(params, lr=0.1)
    if pages:
        offload(optimizer, bucket_bytes=bucket_bytes, host=HostArena())
    for param in params:
        param.grad = torch.ones_like(param)
    return optimizer


def kinds(made):
    """The copies of a schedule, and the computation that takes time, with their times, by queue."""
    return sorted(
        (work.queue, begin, end, work.size)
        for work, begin, end in zip(made.works, *made.times())
        if work.size or work.seconds
    )


def seconds_of(bucket):
    """As many as the bytes of whole states, of float32 moments and a count each."""
    return sum(Fraction(8 * param.numel() + 64, 100) for param in bucket.params)


def random_link(seed, latency=1):
    rng = random.Random(seed)
    up, down = (Fraction(rng.randrange(1, 200)) for _ in range(2))
    return Link(up, down, Fraction(latency))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_step_of_whole_parameters_takes_what_the_simulation_says(seed, policy):
    """In pieces of one or more parameters, and whatever the order that copies really run in."""
    link, rng = random_link(seed), random.Random(seed)
    sizes = [16 * rng.randrange(1, 30) for _ in range(12)]
    with copying_with(adversary(policy), seconds_of) as engine:
        optimizer = optimizer_of(sizes, 4096)
        for _ in range(3):
            engine.restart_clock(link)
            optimizer.step()
            found = engine.schedule
    pieces = [size for queue, *_, size in kinds(found) if queue == "up"]
    assert len(pieces) > 4 and sum(pieces) == sum(8 * size + 64 for size in sizes)
    made = paged_step(pieces, Fraction(sum(pieces), 100), link)
    assert kinds(made) == kinds(found)
    assert (made.exposed, made.makespan) == (found.exposed, found.makespan)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_of_a_parameter_that_is_cut_does_too(seed, monkeypatch):
    monkeypatch.setattr(cutting, "CUT", 512)
    link = random_link(seed, latency=0)
    with copying_with(adversary("late"), lambda bucket: 40) as engine:
        optimizer = optimizer_of([512 * 7], 512 * 8 + 64)
        engine.restart_clock(link)
        optimizer.step()
    made = paged_step([512 * 8 + 8] * 7, Fraction(280), link)
    assert made.exposed == engine.schedule.exposed
    # All but the last leave the count of steps where it is.
    assert 0 <= made.makespan - engine.schedule.makespan <= 8 * 6 / link.down


def test_parts_of_a_parameter_are_equal(monkeypatch):
    """A small last part would wait in its slot for the large ones before it."""
    monkeypatch.setattr(cutting, "CUT", 512)
    with copying_with(adversary("late"), lambda bucket: bucket.params[0].numel()) as engine:
        optimizer = optimizer_of([512 * 7], 5 * 512 * 8 + 64)
        engine.restart_clock(Link(1, 1, 0))
        optimizer.step()
    sizes = [work.seconds for work in engine.schedule.works if work.seconds]
    assert sizes == [4 * 512, 3 * 512]


@pytest.mark.parametrize("seed", range(3))
def test_buckets_of_one_piece_take_turns_in_the_slots(seed):
    """Released gradients step one parameter after the other, and copies run beside that."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(9)))
    optimizer = AdamW(model.parameters(), lr=0.1)
    offload(optimizer, bucket_bytes=2048 + 64, host=HostArena())
    link = random_link(seed)
    with copying_with(adversary("late"), seconds_of) as engine:
        handle = headroom.release_gradients(model, optimizer, bucket_bytes=0)
        for _ in range(2):
            engine.restart_clock(link)
            model(torch.randn(2, 16)).sum().backward()
            optimizer.step()
            engine.finish_compute()
            found = engine.schedule
        handle.remove()
    made = paged_step([2048 + 64] * 9, 9 * Fraction(2048 + 64, 100), link)
    assert kinds(made) == kinds(found)


def test_the_ring_fills_while_the_device_still_computes_what_came_before():
    """The caller is ahead of the device: a step that is called in time begins to copy at once."""
    with copying_with(adversary("late"), seconds_of) as engine:
        optimizer = optimizer_of([256] * 5, 2048 + 64)
        optimizer.step()
        engine.restart_clock(Link(2112, 2112, 0))
        engine.compute(seconds=100)  # a backward pass
        optimizer.step()
    copies = [(begin, end) for queue, begin, end, _ in kinds(engine.schedule) if queue == "up"]
    assert copies[:3] == [(0, 1), (1, 2), (2, 3)] and copies[3][0] > 100


def test_copies_on_threads_have_the_same_bits_and_the_rate_of_a_link():
    ordinary, paged = (optimizer_of([4096] * 6, 4096 * 8 + 64, pages) for pages in (False, True))
    link = Throttled(20e6)
    with copying_with(link):
        for _ in range(3):
            ordinary.step()
            start = time.perf_counter()
            paged.step()
            paged.offload_handle.wait()
            taken = time.perf_counter() - start
        assert taken >= 6 * (4096 * 8 + 64) / link.rate
        assert link.bytes_up == link.bytes_down == 3 * 6 * (4096 * 8 + 64)
        for one, other in zip(
            *(optimizer.param_groups[0]["params"] for optimizer in (ordinary, paged))
        ):
            assert_same_bits([one], [other])
            assert_same_bits(ordinary.state[one].values(), paged.state[other].values())
        del paged
    link.close()

"""The simulation of a device's queues: as slow clocks and engines have it, and what it prices."""

import random
from fractions import Fraction

import pytest
import torch
from headroom.host import saved, schedule
from headroom.host.saved import saved_on_host, trim
from headroom.host.schedule import (
    blocks_step,
    exposed_seconds,
    hosted_step,
    measured_link,
    paged_step,
    paged_step_seconds,
)
from headroom.host.simulation import Link, Schedule
from headroom.host.slabs import Slabs

from helpers.copies import Adversary

CPU = torch.device("cpu")


def numbers(rng, count):
    return [Fraction(rng.randrange(9)) for _ in range(count)]


def random_schedule(rng, link, works):
    made = Schedule(link)
    for i in range(works):
        after = rng.sample(range(i), min(i, rng.randrange(3)))
        queue = rng.choice(["compute", "up", "down"])
        if queue == "compute":
            made.compute(Fraction(rng.randrange(5)), after)
        else:
            made.copy(queue, rng.randrange(9), after)
        if rng.random() < 0.1:
            made.sync(rng.randrange(i + 1))
    return made


def by_ticks(made, tick):
    """When each work of a schedule begins and ends, found by letting a clock tick."""
    works, link = made.works, made.link
    begins, ends, now = {}, {}, Fraction(0)
    left = {}
    while len(ends) < len(works):
        changed = True
        while changed:
            changed = False
            for i, work in enumerate(works):
                before = [j for j in range(i) if works[j].queue == work.queue]
                if i not in begins and all(j in ends for j in [*before, *work.after]):
                    begins[i] = now
                    left[i] = [work.seconds, Fraction(work.size)]
                    changed = True
                if i in begins and i not in ends and left[i] == [0, 0]:
                    ends[i] = now
                    changed = True
        running = {works[i].queue for i in begins if i not in ends}
        for i in begins:
            if i in ends:
                continue
            queue = works[i].queue
            if left[i][0]:
                left[i][0] -= tick
            else:
                left[i][1] -= tick * link.rate(queue, {"up", "down"} <= running)
        now += tick
    return [begins[i] for i in range(len(works))], [ends[i] for i in range(len(works))]


@pytest.mark.parametrize("seed", range(60))
def test_it_is_what_a_ticking_clock_shows(seed):
    """With rates that halve while both directions copy, events fall on fractions of a tick."""
    rng = random.Random(seed)
    half = Fraction(1, 2)
    link = Link(Fraction(1), Fraction(2), Fraction(rng.randrange(2)), True, half, Fraction(1))
    made = random_schedule(rng, link, 6)
    assert tuple(made.times()) == by_ticks(made, Fraction(1, 2**7))


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_recurrence_where_rates_stay(seed):
    rng = random.Random(seed)
    made = random_schedule(rng, Link(Fraction(3), Fraction(2), Fraction(1)), 200)
    begins, ends, free = [], [], dict.fromkeys(("compute", "up", "down"), 0)
    for work in made.works:
        begins.append(max([free[work.queue], *(ends[i] for i in work.after)]))
        seconds = work.seconds
        if work.queue != "compute":
            seconds += work.size / made.link.rate(work.queue, False)
        ends.append(begins[-1] + seconds)
        free[work.queue] = ends[-1]
    assert tuple(made.times()) == (begins, ends)
    assert made.makespan == max(ends)


def test_a_link_that_is_not_asynchronous_copies_in_the_order_of_the_computation():
    made = Schedule(Link(2, 4, 1, is_asynchronous=False))
    made.compute(5)
    made.copy("up", 8)
    made.copy("down", 8)
    assert made.times().begins == [0, 5, 10] and made.makespan == 13 and made.exposed == 8
    assert Schedule(Link(1, 1, 1)).makespan == Schedule(Link(1, 1, 1)).exposed == 0


# ---- a step whose states pass through a ring ----------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_equal_pieces_take_the_slowest_of_three_stages_and_a_fill(seed, slots):
    rng = random.Random(seed)
    pieces, size = rng.randrange(slots, 30), 64
    up, down, step = (Fraction(rng.randrange(1, 9)) for _ in range(3))
    link = Link(size / up, size / down, Fraction(0))
    made = paged_step([size] * pieces, pieces * step, link, slots)
    stages = up + step + down
    if slots >= 3:
        assert made.makespan == (pieces - 1) * max(up, step, down) + stages
        if max(up, step) >= down:
            assert made.exposed == made.makespan - down - pieces * step
    elif slots == 1:
        assert made.makespan == pieces * stages
    assert made.makespan >= (pieces - slots + 1) * stages / slots


@pytest.mark.parametrize("seed", range(40))
def test_bounds_of_a_paged_step(seed):
    rng = random.Random(seed)
    pieces = [rng.randrange(1, 200) for _ in range(rng.randrange(1, 40))]
    link = Link(Fraction(rng.randrange(1, 9)), Fraction(rng.randrange(1, 9)), Fraction(1))
    step = Fraction(rng.randrange(1, 500))
    up, down = (len(pieces) + sum(pieces) / rate for rate in (link.up, link.down))
    seconds = paged_step_seconds(pieces, step, link)
    assert max(up, step) <= seconds <= up + step + down
    made = paged_step(pieces, step, link)
    assert max(up, down, step) <= made.makespan <= up + step + down
    assert seconds <= paged_step_seconds(pieces, step, link, slots=2)
    inline = link._replace(is_asynchronous=False)
    assert paged_step_seconds(pieces, step, inline) == up + step + down
    more = paged_step_seconds([2 * size for size in pieces], step, link)
    assert more >= seconds
    slower = link._replace(up_beside=link.up / 2, down_beside=link.down / 2)
    assert seconds <= paged_step_seconds(pieces, step, slower) <= up + step + down
    assert paged_step_seconds(pieces, step, link, copies=3) >= seconds
    assert paged_step_seconds([], step, link) == step


@pytest.mark.parametrize("seed", range(20))
def test_a_step_within_a_backward_pass_hides_behind_it(seed):
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 200) for _ in range(rng.randrange(4, 40))]
    before = [Fraction(rng.randrange(99)) for _ in sizes]
    link = Link(Fraction(rng.randrange(1, 9)), Fraction(rng.randrange(1, 9)), Fraction(1))
    step = Fraction(rng.randrange(1, 500))
    made, alone = paged_step(sizes, step, link, before=before), paged_step(sizes, step, link)
    assert alone.makespan <= made.makespan <= alone.makespan + sum(before)
    assert 0 <= made.exposed <= alone.exposed
    # Where each piece has the time of its copies, only the first copy up is waited for.
    long = [2 * (1 + max(sizes) / min(link[:2]))] * len(sizes)
    assert paged_step(sizes, step, link, before=long).exposed == 0
    assert paged_step(sizes, step, link, before=[0, *long[1:]]).exposed == 1 + sizes[0] / link.up


# ---- blocks whose kept tensors leave ------------------------------------------------------------


def test_copies_that_are_shorter_than_blocks_are_hidden():
    link = Link(Fraction(10), Fraction(10), Fraction(0))
    for kept, wanted in ((100, 0), (110, 1), (200, 10)):
        found = exposed_seconds([kept] * 6 + [0], [10] * 7, [20] * 7, link)
        # A block waits until what the second before it kept has left: the first four of six may.
        assert found == 4 * wanted if kept <= 200 else found > 4 * wanted
    assert exposed_seconds([0] * 7, [10] * 7, [20] * 7, link) == 0
    assert exposed_seconds([1000, 1000], [10] * 2, [20] * 2, link) > 0
    inline = link._replace(is_asynchronous=False)
    assert exposed_seconds([100] * 6 + [0], [10] * 7, [20] * 7, inline) == 120


class Block(torch.autograd.Function):
    """Takes so long, and keeps its result."""

    @staticmethod
    def forward(ctx, x, engine, forward, backward):
        engine.compute(seconds=forward)
        y = x * 2
        ctx.engine, ctx.seconds = engine, backward
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        ctx.engine.compute(seconds=ctx.seconds)
        return grad * 2 + 0 * y, None, None, None


def copies_of(made):
    return [(work, *times) for work, *times in zip(made.works, *made.times()) if work.size]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_take_what_the_simulation_says(seed, monkeypatch):
    rng = random.Random(seed)
    link = Link(Fraction(rng.randrange(1, 9)), Fraction(rng.randrange(1, 9)), Fraction(1))
    leaves = [rng.random() < 0.8 for _ in range(8)]
    forward, backward = ([Fraction(rng.randrange(99)) for _ in range(8)] for _ in range(2))
    engine = Adversary("eager")
    monkeypatch.setattr(saved, "MIN_BYTES", 64)
    monkeypatch.setattr(saved, "_slabs", Slabs(saved._taken, lambda device: engine))
    x = torch.randn(20, requires_grad=True)
    engine.restart_clock(link)
    y = x
    for away, *seconds in zip(leaves, forward, backward):
        if away:
            with saved_on_host():
                y = Block.apply(y, engine, *seconds)
        else:
            y = Block.apply(y, engine, *seconds)
    loss = y.sum()
    del y
    loss.backward()
    trim()
    made = blocks_step([80 * away for away in leaves], forward, backward, link)
    found = engine.schedule
    assert [(work.queue, begin, end) for work, begin, end in copies_of(made)] == [
        (work.queue, begin, end) for work, begin, end in copies_of(found)
    ]
    assert (made.exposed, made.makespan) == (found.exposed, found.makespan)


# ---- what is measured ---------------------------------------------------------------------------


def test_a_link_is_measured_once():
    link = measured_link(CPU)
    assert link is measured_link(CPU)
    assert not link.is_asynchronous and min(link[:3]) > 0


@pytest.mark.parametrize("beside", [(25e9, 24e9), (11e9, 24e9), (12e9, 9e9)])
def test_a_measurement_finds_the_constants_of_a_link(beside, monkeypatch):
    wanted = Link(25e9, 24e9, 1e-8, True, *beside)
    engine = Adversary("eager")
    engine.restart_clock(wanted)

    def now():
        ends = engine.schedule.times().ends
        return max((ends[i] for i in engine.schedule._synced), default=0)

    monkeypatch.setattr(schedule, "PIECE", 32 << 10)
    monkeypatch.setattr(schedule, "SMALL", 4)
    monkeypatch.setattr(schedule.time, "perf_counter", now)
    found = schedule.measured(engine, CPU)
    for one, other in zip(found, wanted):
        assert one == pytest.approx(other, rel=0.02)


# ---- steps on the host --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_step_on_the_host_is_a_flow_shop(seed):
    """As the recurrence says: a bucket goes down when it is ready and its slot is free, is stepped
    when it has arrived and the one before is, and goes up."""
    rng, slots = random.Random(seed), 3
    count = rng.randrange(1, 12)
    buckets = [(rng.randrange(1, 90), rng.randrange(1, 90)) for _ in range(count)]
    seconds = [Fraction(rng.randrange(0, 9)) for _ in range(count)]
    ready = sorted(Fraction(rng.randrange(0, 30)) for _ in range(count))
    link = Link(Fraction(rng.randrange(1, 30)), Fraction(rng.randrange(1, 30)), Fraction(1))
    down = stepped = up = Fraction(0)
    ends = []
    for i, ((grads, weights), taken) in enumerate(zip(buckets, seconds)):
        free = ends[i - slots] if i >= slots else 0
        down = max(down, ready[i], free) + 1 + grads / link.down
        stepped = max(stepped, down) + taken
        ends.append(stepped)
        up = max(up, stepped) + 1 + weights / link.up
    made = hosted_step(buckets, seconds, link, ready)
    assert made.makespan == up and made.exposed == up - ready[-1]
    whole = hosted_step(buckets, seconds, link)
    assert whole.makespan == whole.exposed <= up


def test_a_step_where_host_and_device_are_one_hides_nothing():
    link = Link(10, 10, 0, is_asynchronous=False)
    made = hosted_step([(10, 10)] * 4, [1] * 4, link, ready=[1, 2, 3, 4])
    assert made.makespan == 4 + 4 * 3

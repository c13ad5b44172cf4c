"""What parts of a batch cost, and what a plan says of a step without its blocks: by hand."""

from dataclasses import replace

import pytest
from headroom.fitting import Choice
from headroom.fitting.costs.block_costs import BlockCosts, LevelCost, Measured
from headroom.fitting.costs.outline import Outline, settled
from headroom.fitting.search.candidate import Candidate, Frontiers, levels_of
from headroom.memory import Allocation, Span, Timeline
from headroom.planning.result import DeviceShare, Plan

from helpers.frozen import are_frozen

#                 held backward released forward kept seconds
MOST = LevelCost(100, 60, 40, 120, 8, 1.0, 2.0)
LEAST = LevelCost(10, 160, 130, 110, 4, 1.0, 3.0)


def block(name="a", gradients=30, largest=20, **levels):
    return BlockCosts(name, 0, levels or {"L0": MOST, "L5": LEAST}, gradients, largest)


def plan(states=50):
    """A step of parameters, an optimizer's state, gradients and an activation."""
    allocations = [
        Allocation(0, 1000, 0, None, "parameters"),
        Allocation(1, 300, 2, 5, "activations", phase="forward"),
        Allocation(2, 90, 4, 8, "gradients", phase="backward"),
        Allocation(3, states, 6, None, "optimizer_state", phase="optimizer"),
        Allocation(4, 7, 6, None, "master_weights", phase="optimizer"),
        Allocation(5, 5, 6, 7, "optimizer_state", phase="optimizer"),
    ]
    spans = [Span(1, 0, "forward"), Span(3, 0, "backward"), Span(6, 0, "optimizer")]
    return Plan(Timeline(allocations, spans), DeviceShare(context=5000))


def test_seconds_are_scaled_and_added():
    assert are_frozen(MOST, block(), Measured([block()]))
    assert MOST.seconds == 3 and MOST.scaled(2) == replace(
        MOST, forward_seconds=2.0, backward_seconds=4.0
    )
    assert block().scaled(0.5).levels["L5"].seconds == 2 and block().kept == 8


def test_what_a_block_costs_in_a_part_of_the_batch():
    """Gradients of parameters are not parted: all, or the largest where they do not stay."""
    found = Measured([block()]).part(3).blocks[0]
    assert found.levels["L0"] == LevelCost(34, 30 + 10, 20 + 7, 40, 8, 1 / 3, 2 / 3)
    assert found.levels["L5"] == LevelCost(4, 30 + 44, 20 + 37, 37, 4, 1 / 3, 1.0)
    assert (found.gradients, found.largest, found.name) == (30, 20, "a")
    small = block(gradients=70, largest=50).part(2).levels["L0"]
    assert (small.backward, small.backward_released) == (60, 40)  # less than the gradients


def test_the_peak_of_levels():
    """A step of two blocks, with each of the moments at which it may be."""
    measured = Measured([block(), block("b")])
    outline = Outline(1000, 0, 0, 0, 0, None)
    # Forward: the second block runs, and the first is held, with what it keeps.
    last = block("b", L0=replace(MOST, forward=500))
    assert outline.peak(Measured([block(), last]), ("L0", "L0")) == 1000 + 100 + 8 + 500
    # Backward: of the second block, or of the first, beside the gradients of the second.
    assert outline.peak(measured, ("L0", "L5")) == 1000 + 100 + 10 + 160
    assert outline.peak(measured, ("L5", "L5")) == 1000 + 10 + 30 + 160
    assert outline.peak(measured, ("L5", "L5"), gradients_stay=False) == 1000 + 20 + 130
    # Behind the blocks, while what they keep is there; and in the backward pass when it is not.
    behind = replace(outline, after_forward=500)
    assert behind.peak(measured, ("L0", "L5")) == 1000 + 110 + 12 + 500
    assert replace(outline, after_backward=500).peak(measured, ("L0", "L5")) == 1000 + 110 + 500
    # Gradients of what is behind the blocks stay while these run backward.
    assert replace(outline, gradients=50).peak(measured, ("L5", "L5")) == 1200 + 50
    assert replace(outline, floor=5000).peak(measured, ("L0", "L0")) == 5000
    with pytest.raises(ValueError):
        outline.peak(measured, ("L0",))


def test_the_outline_of_a_part():
    whole = Outline(1500, 40, 61, 30, 2000, plan())
    found = whole.part(4)
    assert are_frozen(found)
    standing, gradients = 1000, 90  # when the forward pass begins, and the most
    assert whole.standing["parameters"] == standing and whole.all_gradients == gradients
    assert found.base == standing + -(-500 // 4) + gradients
    assert (found.after_forward, found.after_backward, found.gradients) == (10, 16, 0)
    assert found.floor == standing + gradients + -(-(2000 - standing - gradients) // 4)
    small = replace(whole, floor=0, base=0).part(4)
    assert small.base == standing + gradients
    # At the least what the optimizer's step takes.
    assert replace(whole, plan=plan(states=9000), floor=0).part(4).floor == 1000 + 9000 + 7 + 5 + 90


def test_a_first_step_as_a_later_one():
    """The state of the optimizer is there from the beginning, but for what its step frees."""
    first = plan()
    found = settled(first).timeline
    assert found.bytes_over_events()[0] == 1000 + 50 + 7
    assert found.peak_bytes == 1000 + 57 + 300 + 90
    assert first.timeline.peak_bytes == 1390
    spans = [*first.timeline.spans, Span(8, 1, "forward")]
    later = replace(first, timeline=Timeline(first.timeline.allocations, spans))
    assert settled(later) is later


AS_IT_IS = Choice()


def candidate(choice=AS_IT_IS, planned=None, **options):
    measured = Measured([block(), block("b")])
    outline = Outline(1000, 0, 0, 0, 0, plan())
    given = dict(seconds=10.0, factor=1.5, is_timed=True, planned=planned, frontiers=Frontiers())
    return Candidate(choice, measured, outline, **given | options)


def test_a_candidate_adds_the_device_and_the_rest():
    found = candidate()
    assert are_frozen(found)
    assert found.keeping_all == ("L0", "L0")
    point = found.at(("L0", "L5"))
    assert (point.peak, point.levels) == (1000 + 270 + 5000, ("L0", "L5"))
    assert point.seconds == 10 + 1.5 * (3 + 4)
    assert candidate(Choice(micro_batches=2)).at(("L0", "L5")).seconds == 10 + 2 * 1.5 * 7
    peaks = [p.peak for p in found.points]
    assert peaks == sorted(set(peaks)) and all(
        a.seconds > b.seconds for a, b in zip(found.points, found.points[1:])
    )
    for p in found.points:
        assert p == found.at(p.levels)
    fastest = found.points[-1]
    assert found.within(fastest.peak) == fastest and found.within(fastest.peak - 1) != fastest
    assert found.within(0) is None
    assert found.choice_of(fastest) == Choice(fastest.levels)


def test_a_candidate_that_was_planned_is_off_by_as_much_as_its_plan():
    planned = candidate(planned=("L0", "L5"))
    assert planned.at(("L0", "L5")).peak == planned.outline.plan.peak_bytes + 5000
    other = candidate().at(("L5", "L5")).peak + 1390 - 1270
    assert planned.at(("L5", "L5")).peak == other


def test_gradients_do_not_stay_if_they_are_released_or_there_before():
    stay = candidate().at(("L5", "L5")).peak
    assert stay == 1000 + 200 + 5000
    for choice in (Choice(release=True), Choice(micro_batches=2)):
        assert candidate(choice).at(("L5", "L5")).peak == 1000 + 150 + 5000


def test_levels_that_a_block_can_be_set_to():
    """Blocks behind one run forward while what it keeps is there."""
    first, second = levels_of(Measured([block(), block("b", 31)]))
    assert are_frozen(first, *first.levels)
    assert [(x.name, x.held, x.backward, x.forward, x.seconds) for x in first.levels] == [
        ("L0", 100, 60, 120, 3.0), ("L5", 10, 160, 110, 4.0),
    ]  # fmt: skip
    assert [x.forward for x in second.levels] == [128, 118] and second.gradients == 31
    (first,) = levels_of(Measured([block()]), gradients_stay=False)
    assert [x.backward for x in first.levels] == [40, 130] and first.gradients == 0

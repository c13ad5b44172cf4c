"""The choice of levels, against every combination of them."""

import itertools
import time

import pytest
from headroom.fitting.search.knapsack import BlockOptions, Level, Point, choose, frontier
from hypothesis import given, settings
from hypothesis import strategies as st

every_case = settings(max_examples=500, derandomize=True, deadline=None, database=None)


@st.composite
def cases(draw):
    """Up to five blocks of up to four levels, in small numbers so that ties are frequent. Times
    are multiples of a power of two: their sums are exact in any order."""
    sizes = st.integers(0, 40)
    blocks = []
    for _ in range(draw(st.integers(1, 5))):
        levels = [
            Level(f"L{k}", draw(sizes), draw(sizes), draw(sizes), draw(st.integers(0, 30)) / 8)
            for k in range(draw(st.integers(1, 4)))
        ]
        blocks.append(BlockOptions(tuple(levels), draw(st.integers(0, 20))))
    return blocks, draw(sizes), draw(sizes)


budgets = st.integers(0, 400)


def peak_over_time(blocks, chosen, after, gradients):
    """Follows a step, and returns the most bytes that are live at any moment of it."""
    live, most = 0, 0
    for level in chosen:
        most = max(most, live + level.forward)
        live += level.held
    most = max(most, live + after)
    live += gradients
    for block, level in zip(reversed(blocks), reversed(chosen)):
        most = max(most, live + level.backward)
        live += block.gradients - level.held
    return most


def every_choice(blocks, *rest):
    for chosen in itertools.product(*(block.levels for block in blocks)):
        seconds = sum(level.seconds for level in chosen)
        names = tuple(level.name for level in chosen)
        yield peak_over_time(blocks, chosen, *rest), seconds, names


@every_case
@given(cases(), budgets)
def test_a_choice_is_never_above_the_budget(case, budget):
    blocks, *rest = case
    found = choose(frontier(blocks, *rest), budget)
    true = {names: (peak, seconds) for peak, seconds, names in every_choice(blocks, *rest)}
    if found is None:
        assert all(peak > budget for peak, _ in true.values())
    else:
        assert found.peak <= budget
        assert (found.peak, found.seconds) == true[found.levels]


@every_case
@given(cases(), budgets, budgets)
def test_more_budget_is_never_slower(case, one, other):
    points = frontier(*case)
    less, more = (choose(points, budget) for budget in sorted((one, other)))
    assert less is None or (more is not None and more.seconds <= less.seconds)
    peaks = [point.peak for point in points]
    seconds = [point.seconds for point in points]
    assert peaks == sorted(set(peaks)) and seconds == sorted(set(seconds), reverse=True)


@every_case
@given(cases(), budgets)
def test_nothing_within_the_budget_is_faster(case, budget):
    blocks, *rest = case
    found = choose(frontier(blocks, *rest), budget)
    fitting = [seconds for peak, seconds, _ in every_choice(blocks, *rest) if peak <= budget]
    assert (None if found is None else found.seconds) == min(fitting, default=None)


@every_case
@given(cases(), st.integers(2, 6))
def test_thinned_points_are_real_choices(case, states):
    blocks, *rest = case
    points = frontier(blocks, *rest, states=states)
    true = {names: (peak, seconds) for peak, seconds, names in every_choice(blocks, *rest)}
    assert 1 <= len(points) <= states
    assert all((point.peak, point.seconds) == true[point.levels] for point in points)
    assert points[0].peak == min(peak for peak, _ in true.values())  # what fits still fits
    assert points == sorted(points, key=lambda point: (point.peak, -point.seconds))


def test_no_blocks():
    assert frontier([], 7) == [Point(7, 0.0, ())]
    assert choose(frontier([], 7), 6) is None


def test_large_numbers_are_exact():
    tib = 1 << 40
    block = BlockOptions((Level("L0", tib + 1, 3, tib + 2, 1.0), Level("L5", 5, 9, 7, 1.5)), tib)
    points = frontier([block] * 40, 11)
    levels = {level.name: level for level in block.levels}
    for point in points:
        chosen = [levels[name] for name in point.levels]
        assert point.peak == peak_over_time([block] * 40, chosen, 11, 0)
    assert points[-1].levels == ("L0",) * 40 and points[-1].peak == 40 * tib + 51


def test_seconds_are_of_double_precision():
    block = BlockOptions((Level("L0", 9, 0, 0, 0.1), Level("L5", 1, 0, 0, 0.1 + 1e-12)), 0)
    assert [point.seconds for point in frontier([block], 0)] == [0.1 + 1e-12, 0.1]


def test_eighty_blocks_take_less_than_two_seconds():
    sizes = [94_344, 51_207, 37_003, 24_719, 16_511, 8_192]
    times = [1.0, 1.011, 1.187, 1.231, 1.259, 1.353]
    levels = tuple(
        Level(f"L{k}", 1024 * size, 1024 * (120_000 - size), 1024 * 130_000, seconds)
        for k, (size, seconds) in enumerate(zip(sizes, times))
    )
    start = time.process_time()
    points = frontier([BlockOptions(levels, 1 << 20)] * 80, 1 << 30)
    assert time.process_time() - start < 2
    assert len(points) > 100
    assert points[0].seconds == pytest.approx(80 * 1.353, rel=0.05)
    assert points[-1].levels == ("L0",) * 80

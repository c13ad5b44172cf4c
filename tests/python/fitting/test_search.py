"""In which order the search looks at candidates, and what it stops at: with candidates made by
hand, whose plans say what a test wants."""

from types import SimpleNamespace

import pytest
from headroom.fitting import Choice
from headroom.fitting.costs.block_costs import BlockCosts, LevelCost, Measured
from headroom.fitting.costs.outline import Outline
from headroom.fitting.search.candidate import Candidate, Frontiers
from headroom.fitting.search.search import PLANS, Search
from headroom.memory import Allocation, Timeline
from headroom.planning import Plan
from headroom.step.errors import PlanError

from helpers.frozen import are_frozen

GIVEN, OURS, EIGHT = (Choice(optimizer=name) for name in ("given", "headroom", "8bit"))
PARTS = Choice(micro_batches=2)
KEEPS, RUNS_AGAIN = ("L0",), ("L5",)


def cost(held, seconds):
    return LevelCost(held, 0, 0, 0, 0, seconds, 0.0)


class Made:
    """Candidates of one block, which holds 1000 bytes at L0, and 100 at L5, which takes 1 s more.

    Args:
        rows: bytes and seconds beside the block, by choice.
        off: by how much plans are above the estimates.
        fails: choices that cannot be planned.
        untimed: choices of parts that are not timed yet, with the seconds that they then take.
    """

    def __init__(self, rows, off=(), fails=(), untimed=(), agree=True):
        self.rows, self.off, self.fails = dict(rows), dict(off), set(fails)
        self.untimed, self.agree_really = dict(untimed), agree
        self.names, self.notes, self.agree = ["block"], [], None
        self.techniques, self.looked_at = self._techniques(), []
        self.planned, self.timed, self.gone, self.known, self.plans = [], [], [], {}, {}
        self.frontiers, self.host_room = Frontiers(), None

    def _techniques(self):
        return SimpleNamespace(formats=tuple(dict.fromkeys(c.frozen for c in self.rows)))

    def every(self, formats):
        self.looked_at += [name for name in formats if name not in self.looked_at]
        for choice, (base, seconds) in self.rows.items():
            if choice in self.gone or choice.frozen not in formats:
                continue
            levels = {"L0": cost(1000, 1.0), "L5": cost(100, 2.0)}
            measured = Measured([BlockCosts("block", 0, levels, 0, 0)])
            planned = self.known.get(choice)
            size = base + self.held(planned) + self.off.get(choice, 0) if planned else base
            plan = Plan(Timeline([Allocation(0, size)]))
            yield Candidate(
                choice, measured, Outline(base, 0, 0, 0, 0, plan), seconds,
                1 / choice.micro_batches, choice not in self.untimed, planned, self.frontiers,
            )  # fmt: skip

    @staticmethod
    def held(levels):
        return {KEEPS: 1000, RUNS_AGAIN: 100}[levels]

    def plan(self, choice):
        bare = choice.but(levels=())
        self.planned.append(choice)
        if bare in self.fails:
            raise PlanError(f"no plan of {choice}")
        self.known[bare] = choice.levels
        size = self.rows[bare][0] + self.held(choice.levels) + self.off.get(bare, 0)
        return Plan(Timeline([Allocation(0, size)]))

    def leave_out(self, choice, error):
        self.gone.append(choice.but(levels=()))
        self.notes.append(str(error))

    def time(self, choice):
        self.timed.append(choice)
        if choice in self.untimed:
            self.rows[choice] = self.rows[choice][0], self.untimed.pop(choice)

    def parts_agree(self):
        if self.agree is None:
            self.agree = self.agree_really
            if not self.agree:
                self.rows = {c: row for c, row in self.rows.items() if c.micro_batches == 1}
                self.techniques = self._techniques()
        return self.agree


def best(budget, *args, **options):
    made = Made(*args, **options)
    return Search(made).best(budget), made


def test_the_fastest_that_fits_is_planned_and_taken():
    rows = {GIVEN: (5000, 3.0), OURS: (5000, 2.0), EIGHT: (2000, 2.5)}
    found, made = best(10_000, rows)
    assert (found.choice, found.seconds) == (OURS.but(levels=KEEPS), 3.0) and are_frozen(found)
    assert found.plan.total_bytes == 6000 and found.blocks == ("block",)
    assert made.planned == [found.choice]  # all keep all: nothing can be faster
    found, made = best(5200, rows)  # of which 8-bit moments at L0 are the fastest
    assert (found.choice, found.seconds) == (EIGHT.but(levels=KEEPS), 3.5)
    found, _ = best(2200, rows)
    assert (found.choice, found.seconds) == (EIGHT.but(levels=RUNS_AGAIN), 4.5)
    assert best(2000, rows)[0] is None


def test_frozen_weights_stay_where_anything_else_fits():
    """However much faster fewer bits would be; then those of the first format come."""
    rows = {
        GIVEN: (5000, 3.0),
        PARTS: (3000, 30.0),
        Choice(frozen="int8"): (2000, 1.0),
        Choice(frozen="nf4"): (1000, 0.5),
    }
    for budget, frozen, looked_at in (
        (10_000, "given", ["given"]),
        (3200, "given", ["given"]),
        (3050, "int8", ["given", "int8"]),
        (2050, "nf4", ["given", "int8", "nf4"]),
        (1000, None, ["given", "int8", "nf4"]),
    ):
        found, made = best(budget, rows)
        assert (None if found is None else found.choice.frozen) == frozen
        assert made.looked_at == looked_at
    rows.pop(Choice(frozen="nf4"))
    made = Made(rows)
    made.gone.append(Choice(frozen="int8"))  # the model does not run with it
    assert Search(made).best(3050) is None
    rows[Choice(frozen="nf4")] = 1000, 0.5
    search = Search(Made(rows))
    search.time_all()  # of what is known, the same is chosen
    assert search.best(3200).choice.frozen == "given"
    assert {point.choice.frozen for point in search.frontier()} == {"nf4"}
    assert search.leanest("int8")[0].frozen == "int8" and search.leanest()[0].frozen == "nf4"


def test_of_equally_fast_ones_the_one_with_the_fewest_changes_is_taken():
    found, _ = best(10_000, {OURS: (5000, 2.0), GIVEN: (6000, 2.0)})
    assert found.choice == GIVEN.but(levels=KEEPS)


def test_estimates_leave_a_little_of_the_budget_free_until_they_are_planned():
    """3 of 1000 bytes."""
    rows = {GIVEN: (8970, 1.0)}
    assert best(10_000, rows)[1].planned == [GIVEN.but(levels=KEEPS)]
    assert best(9999, rows)[1].planned[0] == GIVEN.but(levels=RUNS_AGAIN)
    # A plan with as many bytes as the budget fits.
    found, _ = best(10_000, rows, off={GIVEN: 30})
    assert found.plan.total_bytes == 10_000 and found.choice.levels == KEEPS
    found, made = best(10_000, rows, off={GIVEN: 31})
    assert found.choice.levels == RUNS_AGAIN and len(made.planned) == 2
    assert found.plan.total_bytes == 8970 + 100 + 31


def test_a_plan_that_leaves_much_is_followed_by_faster_ones():
    """It says that estimates were too large by 500 bytes; what is nearly all of the budget is
    enough."""
    rows = {GIVEN: (9200, 1.0), EIGHT: (100, 50.0)}
    found, made = best(10_000, rows, off={GIVEN: -500})
    assert [choice.levels for choice in made.planned] == [RUNS_AGAIN, KEEPS]
    assert (found.choice, found.seconds) == (GIVEN.but(levels=KEEPS), 2.0)
    # With L0 it would be 997_900 bytes.
    found, made = best(1_000_000, {GIVEN: (996_900, 1.0)})
    assert made.planned == [GIVEN.but(levels=RUNS_AGAIN)] and found.plan.total_bytes == 997_000


def test_choices_that_cannot_be_planned_are_left_out():
    found, made = best(10_000, {OURS: (10, 1.0), GIVEN: (10, 2.0)}, fails=[OURS])
    assert found.choice == GIVEN.but(levels=KEEPS) and made.notes == [
        "no plan of all L0, headroom.optim"
    ]
    search = Search(Made({OURS: (10, 1.0)}, fails=[OURS]))
    with pytest.raises(PlanError, match="no plan of"):
        search.best(10_000)


def test_parts_are_compared_and_timed_before_they_are_planned():
    rows = {GIVEN: (5000, 3.0), PARTS: (1000, 3.0)}
    found, made = best(2500, rows, untimed={PARTS: 9.0})
    assert made.agree and made.timed == [PARTS] and made.planned == [PARTS.but(levels=KEEPS)]
    assert found.seconds == 9 + 1
    # They are taken to be slower until they are timed: 2 % of 2 parts.
    for seconds in (4.9, 4.8, 3.0):
        rows = {GIVEN: (10, 3.9), PARTS: (10, seconds - 1.0)}
        found, made = best(10_000, rows, untimed={PARTS: 0.1})
        assert (PARTS in made.timed) == (1.02 * seconds < 4.9), seconds
    found, made = best(2500, {GIVEN: (1400, 3.0), PARTS: (1000, 0.0)}, agree=False)
    assert found.choice == GIVEN.but(levels=KEEPS) and not made.timed
    assert best(2300, {GIVEN: (1400, 3.0), PARTS: (1000, 0.0)}, agree=False)[0].choice == (
        GIVEN.but(levels=RUNS_AGAIN)
    )


def test_no_more_plans_than_a_few():
    """All are larger than estimated, so that each is planned at both levels."""
    rows = {Choice(micro_batches=n): (8000, float(n)) for n in range(1, 30)}
    found, made = best(9500, rows, off=dict.fromkeys(rows, 5000))
    assert found is None and len(made.planned) <= PLANS + 3  # and the leanest three


def test_a_choice_that_is_above_the_budget_by_its_estimate_alone_is_found():
    found, made = best(5000, {GIVEN: (5000, 3.0)}, off={GIVEN: -200})
    assert found.choice == GIVEN.but(levels=RUNS_AGAIN) and found.plan.total_bytes == 4900
    assert found.seconds == 5 and made.timed == [GIVEN]
    assert best(4899, {GIVEN: (5000, 3.0)}, off={GIVEN: -200})[0] is None


def test_a_frontier_has_what_no_other_beats():
    rows = {GIVEN: (5000, 3.0), OURS: (5000, 2.0), PARTS: (3000, 6.0), EIGHT: (4900, 2.0)}
    search = Search(Made(rows, untimed={PARTS: 7.0}))

    def shown(of=None):
        return [(p.peak, p.seconds, p.choice) for p in search.frontier(of)]

    whole = [
        (5000, 4.0, EIGHT.but(levels=RUNS_AGAIN)), (5900, 3.0, EIGHT.but(levels=KEEPS)),
    ]  # fmt: skip
    assert shown() == whole
    search.time_all()
    parts = [(3100, 9.0, PARTS.but(levels=RUNS_AGAIN)), (4000, 8.0, PARTS.but(levels=KEEPS))]
    assert shown() == [*parts, *whole]
    assert shown(GIVEN.but(levels=KEEPS)) == [
        (5100, 5.0, GIVEN.but(levels=RUNS_AGAIN)), (6000, 4.0, GIVEN.but(levels=KEEPS)),
    ]  # fmt: skip
    choice, plan = search.leanest()
    assert choice == PARTS.but(levels=RUNS_AGAIN) and plan.total_bytes == 3100


def test_the_leanest_is_that_of_plans():
    """Of the three that are estimated to be the leanest."""
    rows = {GIVEN: (5000, 3.0), OURS: (5100, 2.0), EIGHT: (5200, 2.0)}
    search = Search(Made(rows, off={GIVEN: 500, EIGHT: -300}, fails=[OURS]))
    choice, plan = search.leanest()
    assert choice == EIGHT.but(levels=RUNS_AGAIN) and plan.total_bytes == 5000
    with pytest.raises(PlanError, match="no plan of"):
        Search(Made({OURS: (1, 1.0)}, fails=[OURS])).leanest()

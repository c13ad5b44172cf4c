"""What a loop that is resumed does with the choice of the run before it."""

from types import SimpleNamespace

import pytest
from headroom.fitting import DoesNotFit
from headroom.fitting.ranks import RankError
from headroom.integrations.loops import FitsLoop, fit_in_loop, kept_or_found
from headroom.step.description import Step
from torch import nn

KEPT = {"optimizer": "8bit", "weights": "given"}


@pytest.mark.parametrize(
    ("budget", "before", "is_taken"),
    [
        ("1 GiB", "1 GiB", True),
        ("1 GiB", 2**30, True),
        (None, None, True),
        ("1 GiB", "2 GiB", False),
        ("1 GiB", None, False),
        (None, "1 GiB", False),
    ],
)
def test_a_choice_is_of_one_budget(budget, before, is_taken):
    assert FitsLoop(budget)._again(KEPT, before) == (KEPT if is_taken else None)


@pytest.mark.parametrize(
    "error", [DoesNotFit("above", 1, {}), ValueError("none"), RankError("rank 1"), None]
)
def test_a_choice_that_is_not_possible_any_more_is_looked_for_again(error):
    seen = []

    def fitted(choice):
        seen.append(choice)
        if choice is not None and error is not None:
            raise error
        return SimpleNamespace(notes=[])

    found = kept_or_found(KEPT, fitted)
    if error is None:
        assert seen == [KEPT] and not found.notes
    else:
        assert seen == [KEPT, None]
        assert found.notes == [f"the choice of the run that is resumed is not taken again: {error}"]
    seen.clear()
    assert not kept_or_found(None, fitted).notes and seen == [None]


def test_other_errors_pass():
    def fitted(choice):
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        kept_or_found(KEPT, fitted)


def test_a_budget_that_is_none_is_named():
    with pytest.raises(ValueError, match="^budget is 'much', wanted a number of bytes"):
        fit_in_loop(
            Step(nn.Linear(2, 2), None, None), budget="much", extra=0, who="a loop", only={}
        )

"""The first rank chooses for all, and an error on one rank is raised on all."""

import time
from contextlib import ExitStack
from unittest import mock

import headroom
import pytest
import torch
from headroom.fitting import DoesNotFit
from headroom.fitting.ranks import RankError, from_first, gathered
from headroom.fitting.search import candidates

from helpers.fitting import samples, stack
from helpers.ranks import SECONDS


def the_first_chooses(rank):
    asked = []
    found = from_first(lambda: asked.append(rank) or {"rank": rank})
    assert found == {"rank": 0}
    assert asked == ([0] if rank == 0 else [])


def raises_on_all(rank, where):
    """Also where the rank that did not raise would go on to another exchange."""

    def fails():
        raise KeyError("the kernel is missing")

    exchange, broken = (from_first, 0) if where == "first" else (gathered, where)
    begin = time.monotonic()
    compute = fails if rank == broken else lambda: rank
    if rank == broken:
        with pytest.raises(KeyError, match="the kernel is missing"):
            exchange(compute)
    else:
        with pytest.raises(RankError, match=rf"rank {broken}: KeyError: 'the kernel is missing'"):
            exchange(compute)
    assert time.monotonic() - begin < SECONDS / 2  # no rank waits until it is given up
    assert gathered(lambda: rank) == [0, 1]  # the exchanges of the ranks are still in step


def batch_of(rows):
    return {name: torch.stack([row[name] for row in samples(rows)]) for name in samples(1)[0]}


def fit_on_each(rank, budgets):
    with ExitStack() as mocks:
        for name in ("measure_blocks", "optimizer_seconds") if rank else ():
            mocks.enter_context(mock.patch.object(candidates, name, None))  # not used
        fitted = headroom.fit(
            stack(2), batch_of(3), budget=budgets[rank], optimizer=torch.optim.SGD
        )
    assert gathered(lambda: fitted.choice) == [fitted.choice] * 2
    assert gathered(lambda: fitted.predicted_seconds)[1 - rank] == fitted.predicted_seconds
    assert gathered(lambda: fitted.to_json()["frontier"])[1 - rank] == fitted.to_json()["frontier"]
    assert fitted.predicted_peak <= min(budgets) < fitted.before_peak
    steps = 0
    while fitted.reduce_memory():  # the same on all ranks
        steps += 1
    assert gathered(lambda: [steps, fitted.choice.to_json()])[1 - rank] == [
        steps,
        fitted.choice.to_json(),
    ]


def fit_fails_on_one(rank):
    """Before it has anything to exchange."""
    batch = samples(1)[0]
    model = stack(2) if rank else stack(2).eval()
    with pytest.raises(RankError if rank else ValueError, match="the model is in eval"):
        headroom.fit(model, batch, budget="1 GiB")
    assert gathered(lambda: rank) == [0, 1]


def a_longer_batch_does_not_fit(rank):
    """The choice of the first rank is planned with the batch of each."""
    batch = batch_of(12 if rank else 3)
    with pytest.raises(DoesNotFit if rank else RankError, match="takes .* and the budget leaves"):
        headroom.fit(
            stack(2),
            batch,
            budget=1_200_000,
            optimizer=torch.optim.SGD,
            only={"micro_batches": [1]},
        )
    assert gathered(lambda: rank) == [0, 1]


@pytest.mark.gloo
@pytest.mark.slow
def test_fit_takes_one_choice_on_all_ranks(ranks):
    ranks(fit_on_each, (900_000, 1 << 30))
    ranks(fit_on_each, (1 << 30, 900_000))
    ranks(fit_fails_on_one)
    ranks(a_longer_batch_does_not_fit)


@pytest.mark.gloo
@pytest.mark.parametrize("where", ["first", 0, 1])
def test_an_error_on_one_rank_raises_on_all(ranks, where):
    ranks(raises_on_all, where)


@pytest.mark.gloo
def test_the_first_chooses(ranks):
    ranks(the_first_chooses)


def test_one_process_takes_what_it_chooses():
    assert from_first(lambda: 3) == 3 and gathered(lambda: (1, 2)) == [(1, 2)]
    with pytest.raises(KeyError):
        from_first(lambda: {}["missing"])

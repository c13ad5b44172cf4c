"""All ranks take one plan, and an error on one rank is raised on all."""

import itertools
import json
import time
from dataclasses import asdict

import headroom
import pytest
import torch
import torch.distributed as dist
from headroom.fitting.agree import NoAgreement, RankError, agreed, gathered

from helpers.fitting import samples, stack
from helpers.ranks import SECONDS

LEVELS = {"L0": (90, 1.0), "L2": (50, 1.4), "L5": (20, 2.1)}  # bytes and seconds of a block
BLOCKS = 3
CHOICES = [list(levels) for levels in itertools.product(LEVELS, repeat=BLOCKS)]


class Costs:
    """A device with blocks of its own speed each, and batches of its own length."""

    def __init__(self, speeds, length=1.0):
        self.speeds, self.length = speeds, length
        self.asked = []

    def price(self, levels):
        peak = sum(LEVELS[level][0] for level in levels) * self.length
        seconds = sum(LEVELS[level][1] * s for level, s in zip(levels, self.speeds, strict=True))
        return int(peak), seconds

    def propose(self, budget):
        self.asked.append(budget)
        fits = [levels for levels in CHOICES if self.price(levels)[0] <= budget]
        if not fits:
            raise ValueError(f"nothing fits into {budget}")
        return min(fits, key=lambda levels: self.price(levels)[1])


DEVICES = [Costs((1.0, 1.3, 0.2)), Costs((2.0, 1.0, 3.0))]


def different_budgets_and_speeds(rank, budgets):
    mine = Costs(DEVICES[rank].speeds)
    found = agreed(mine.propose, mine.price, budgets[rank])
    every = [None, None]
    dist.all_gather_object(every, found)
    assert every[0] == every[1] == found
    proposals = [device.propose(min(budgets)) for device in DEVICES]
    assert proposals[0] != proposals[1]  # else the ranks would have had nothing to agree on
    slowest = [max(device.price(levels)[1] for device in DEVICES) for levels in proposals]
    assert found.choice == proposals[slowest.index(min(slowest))]
    assert max(found.seconds) == min(slowest)
    assert mine.asked == [min(budgets)]
    for device, peak, seconds in zip(DEVICES, found.peaks, found.seconds, strict=True):
        assert (peak, seconds) == device.price(found.choice)


def longer_batches_on_one_rank(rank):
    """No rank proposes what fits into the memory of another whose batches are longer."""
    lengths = (1.0, 1.5)
    mine = Costs((1.0, 1.1, 1.2) if rank else (1.2, 1.1, 1.0), lengths[rank])
    found = agreed(mine.propose, mine.price, 200 if rank else 120)
    assert mine.asked[0] == 120 and all(peak <= b for peak, b in zip(found.peaks, (120, 200)))
    assert found.choice in gathered(lambda: found.choice)
    assert gathered(lambda: found.choice) == [found.choice] * 2


def propose_again_within_less(rank):
    """Each rank likes what is 10 bytes too large for the other, until the limit excludes both."""
    peaks = {"A": (100, 130), "B": (130, 100), "C": (95, 95)}
    asked = []

    def propose(limit):
        asked.append(limit)
        mine = "AB"[rank]
        return mine if peaks[mine][rank] <= limit else "C"

    found = agreed(propose, lambda choice: (peaks[choice][rank], 1.0), 120)
    assert found.choice == "C" and found.peaks == (95, 95)
    assert asked == [120, 110, 100, 90]


def nothing_fits_everywhere(rank):
    mine = Costs((1.0,) * BLOCKS)
    expensive = (lambda levels: (10_000, 1.0)) if rank else mine.price
    with pytest.raises(NoAgreement, match=r"no choice fits on all 2 ranks.* 300 B, 400 B"):
        agreed(lambda budget: ["L5"] * BLOCKS, expensive, 400 if rank else 300)


def raises_on_all(rank, broken, where):
    """Also where the rank that did not raise would go on to another exchange."""
    mine = Costs((1.0,) * BLOCKS)

    def fails(*_):
        raise KeyError("the kernel is missing")

    propose = fails if rank == broken and where == "propose" else mine.propose
    price = fails if rank == broken and where == "price" else mine.price
    begin = time.monotonic()
    if rank == broken:
        with pytest.raises(KeyError, match="the kernel is missing"):
            agreed(propose, price, 300)
    else:
        with pytest.raises(RankError, match=rf"rank {broken}: KeyError: 'the kernel is missing'"):
            agreed(propose, price, 300)
    assert time.monotonic() - begin < SECONDS / 2  # no rank waits until it is given up
    assert gathered(lambda: rank) == [0, 1]  # the exchanges of the ranks are still in step


def what_json_does_not_carry_raises_on_all(rank):
    values = [1.5, object()]
    with pytest.raises(RankError if rank == 0 else TypeError, match="not JSON serializable"):
        gathered(lambda: values[rank])


def fit_on_each(rank, budgets):
    batch = {name: torch.stack([row[name] for row in samples(3)]) for name in samples(1)[0]}
    fitted = headroom.fit(stack(2), batch, budget=budgets[rank], optimizer=torch.optim.SGD)
    choices = gathered(lambda: asdict(fitted.choice))
    assert choices[0] == choices[1] == json.loads(json.dumps(asdict(fitted.choice)))
    assert gathered(lambda: fitted.predicted_seconds)[1 - rank] == fitted.predicted_seconds
    assert fitted.predicted_peak <= min(budgets) < fitted.before_peak


def fit_fails_on_one(rank):
    """Before it has anything to exchange."""
    batch = samples(1)[0]
    model = stack(2) if rank else stack(2).eval()
    with pytest.raises(RankError if rank else ValueError, match="the model is in eval"):
        headroom.fit(model, batch, budget="1 GiB")
    assert gathered(lambda: rank) == [0, 1]


@pytest.mark.gloo
@pytest.mark.slow
def test_fit_takes_one_choice_on_all_ranks(ranks):
    ranks(fit_on_each, (900_000, 1 << 30))
    ranks(fit_fails_on_one)


@pytest.mark.gloo
@pytest.mark.parametrize("budgets", [(200, 300), (220, 160)])
def test_ranks_agree(ranks, budgets):
    ranks(different_budgets_and_speeds, budgets)


@pytest.mark.gloo
@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("where", ["propose", "price"])
def test_an_error_on_one_rank_raises_on_all(ranks, broken, where):
    ranks(raises_on_all, broken, where)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "scenario",
    [
        longer_batches_on_one_rank,
        propose_again_within_less,
        nothing_fits_everywhere,
        what_json_does_not_carry_raises_on_all,
    ],
)
def test_ranks(ranks, scenario):
    ranks(scenario)


def test_one_process_takes_what_it_proposes():
    mine = DEVICES[1]
    found = agreed(mine.propose, mine.price, 200)
    assert found.choice == mine.propose(200)
    assert (found.peaks, found.seconds) == tuple((x,) for x in mine.price(found.choice))
    with pytest.raises(ValueError, match="nothing fits into 10"):
        agreed(mine.propose, mine.price, 10)

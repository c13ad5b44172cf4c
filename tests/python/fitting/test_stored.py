"""A choice that was made before: it goes through JSON, and is taken again without measuring."""

import copy
import json
import random

import headroom
import pytest
import torch
from headroom.fitting import Choice, DoesNotFit
from headroom.fitting.ranks import gathered
from headroom.fitting.search import candidates
from torch import nn

from helpers.fitting import cross_entropy, ours, samples, stack

EVERY = [
    Choice(("L0", "L5"), 4, "8bit", "bf16", False, True),
    Choice(release=True, optimizer="headroom"),
    Choice(),
]


def fitted_again(model, batch, choice, budget="1 GiB", **options):
    return headroom.fit(model, batch, budget=budget, loss=cross_entropy, choice=choice, **options)


@pytest.fixture
def unmeasured(monkeypatch):
    """Nothing may be measured from now on."""

    def refuse(*args, **kwargs):
        raise AssertionError("something is measured")

    def forbid():
        for name in ("measure_blocks", "seconds_at_leanest", "optimizer_seconds"):
            monkeypatch.setattr(candidates, name, refuse)

    return forbid


@pytest.mark.parametrize("choice", EVERY)
def test_a_choice_goes_through_json(choice):
    assert Choice.from_json(json.loads(json.dumps(choice.to_json()))) == choice


def test_choices_of_earlier_versions_say_whether_the_state_is_on_the_host():
    for before, now in ((True, "state"), (False, "")):
        assert Choice.from_json({"offload": before, "state_budget": 7}).offload == now


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"level": ["L0"]}, "'level', wanted some of levels"),
        ({"levels": "L0"}, "levels='L0', wanted a list of names"),
        ({"levels": ["L0", 5]}, "levels="),
        ({"micro_batches": True}, "micro_batches=True, wanted one of type int"),
        ({"micro_batches": 2.0}, "micro_batches=2.0"),
        ({"release": 1}, "release=1, wanted one of type bool"),
        ({"offload": "weights"}, r"offload='weights', wanted one of \('', 'state', 'step'\)"),
        (["L0"], "choice is list, wanted a Choice"),
    ],
)
def test_what_is_no_choice_is_refused(value, error):
    with pytest.raises((TypeError, ValueError), match=error):
        Choice.from_json(value)


@pytest.mark.parametrize("allow", [pytest.param((), marks=pytest.mark.slow), ("8bit", "bf16")])
def test_a_resumed_run_takes_the_same_bits(allow, unmeasured):
    """Two steps, then two in another process's objects, are four in one."""
    model, batch = ours()
    start = copy.deepcopy(model.state_dict())
    plan = headroom.plan(model, torch.optim.AdamW, batch, loss=cross_entropy)
    budget = int(0.6 * plan.peak_bytes)
    one = fitted_again(model, batch, None, budget, allow=allow)
    unmeasured()
    text = json.dumps(one.choice.to_json())

    whole, _ = ours()
    whole.load_state_dict(start)
    run = fitted_again(whole, batch, json.loads(text), budget)
    assert run.choice == one.choice and run.predicted_peak == one.predicted_peak
    assert run.blocks == one.blocks and run.is_given and run.predicted_seconds is None
    expected = [run.step(batch) for _ in range(4)]

    losses = [one.step(batch) for _ in range(2)]
    saved = copy.deepcopy((model.state_dict(), one.optimizer.state_dict()))
    model, _ = ours()
    model.load_state_dict(saved[0])
    two = fitted_again(model, batch, json.loads(text), budget)
    two.optimizer.load_state_dict(saved[1])
    losses += [two.step(batch) for _ in range(2)]
    assert all(map(torch.equal, losses, expected))
    for x, y in zip(two.model.parameters(), run.model.parameters()):
        assert torch.equal(x, y)
    assert two.measured_peak <= budget
    lines = str(two).splitlines()
    assert all(len(line) <= 80 for line in lines) and any("chosen before" in x for x in lines)
    assert json.loads(json.dumps(two.to_json()))["choice"] == json.loads(text)


def test_a_choice_above_the_budget_is_refused_and_changes_nothing(unmeasured):
    unmeasured()
    model, batch = ours()
    choice = Choice(("L0",) * 4)
    need = headroom.plan(model, torch.optim.AdamW, batch, loss=cross_entropy).total_bytes
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(DoesNotFit, match=r"that was given \(all L0\) takes") as raised:
        fitted_again(model, batch, choice, int(0.9 * need))
    assert raised.value.least == need
    assert [block.save for block in model.blocks] == ["L0"] * 4
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("choice", "options", "error"),
    [
        (Choice(("L0",) * 3), {}, "choice has 3 levels, wanted 4"),
        (Choice(("L0",) * 4, 4), {}, "choice has micro_batches=4, wanted one of 1, 2, 6"),
        (Choice(("L0",) * 4, fused_loss=True), {}, "choice has fused_loss=True"),
        (
            Choice(("L0",) * 4, optimizer="headroom"),
            {"optimizer": torch.optim.SGD},
            "SGD without momentum",
        ),
        (Choice(("L0",) * 4, release=True), {}, "choice has release=True, wanted one of False"),
        (Choice(("L0",) * 4, optimizer="lion"), {}, "choice has optimizer='lion'"),
        (
            Choice(("L0",) * 4),
            {"only": {"micro_batches": (2,)}},
            "micro_batches=1, wanted one of 2",
        ),
        ("L0", {}, "choice is str"),
    ],
)
def test_a_choice_that_the_model_cannot_have_is_refused(choice, options, error, unmeasured):
    unmeasured()
    model, batch = ours()
    with pytest.raises((TypeError, ValueError), match=error):
        fitted_again(model, batch, choice, **options)


class Shuffled(nn.Module):
    """Calls its blocks in an order of its own, and one of them never."""

    ORDER = (3, 0, 4, 1)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 40), nn.GELU(), nn.Linear(40, 9))
                                    for _ in range(5))  # fmt: skip

    def forward(self, x, target):
        for number in self.ORDER:
            x = x + self.blocks[number](x)
        return (x - target).square().mean()


def test_levels_are_those_of_the_blocks_in_the_order_of_their_calls():
    torch.manual_seed(0)
    batch = torch.randn(211, 9), torch.randn(211, 9)
    model = Shuffled()
    least = headroom.ladder(model, batch).points[0].peak
    one = headroom.fit(model, batch, budget=int(1.02 * least) + (64 << 10))
    assert one.blocks == [f"blocks.{number}" for number in Shuffled.ORDER]
    levels = random.Random(1).choice([("L5", "L0", "L0", "L5"), ("L0", "L5", "L0", "L0")])
    one.set_levels(levels)
    two = headroom.fit(Shuffled(), batch, budget="1 GiB", choice=one.choice)
    assert two.blocks == one.blocks
    for second, first in zip(two.model.blocks, one.model.blocks):
        assert ("forward" in vars(second)) == ("forward" in vars(first))
    assert "forward" in vars(two.model.blocks[Shuffled.ORDER[levels.index("L5")]])
    with pytest.raises(ValueError, match="has 5 levels, wanted 4"):
        headroom.fit(Shuffled(), batch, budget="1 GiB", choice=Choice(("L0",) * 5))


def resumed_on_each(rank, levels):
    """Ranks that stored different choices take one of them."""
    batch = {name: torch.stack([row[name] for row in samples(3)]) for name in samples(1)[0]}
    choice = Choice(tuple(levels[rank]))
    fitted = headroom.fit(stack(2), batch, budget="1 GiB", optimizer=torch.optim.SGD, choice=choice)
    choices = gathered(lambda: fitted.choice.to_json())
    assert choices[0] == choices[1] and choices[0]["levels"] in [list(each) for each in levels]
    assert fitted.predicted_seconds is None and len(fitted.blocks) == 2
    batch["x"] = batch["x"].contiguous()
    assert fitted.step(batch).isfinite()


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("levels", [[("L0", "L5")] * 2, [("L0", "L5"), ("L5", "L5")]])
def test_ranks_agree_on_a_stored_choice(ranks, levels):
    ranks(resumed_on_each, levels)

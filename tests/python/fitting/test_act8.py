"""``allow=("act8",)``: inputs of blocks in 8 bits, where gradients may have that error."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import headroom
import pytest
import torch
from headroom.fitting import Choice, DoesNotFit
from headroom.fitting.costs import measure
from headroom.fitting.costs.block_costs import BlockCosts, LevelCost, is_exact
from headroom.fitting.costs.measure import measure_blocks
from headroom.fitting.search import candidates
from headroom.fitting.search.candidate import OnHost
from headroom.nn import Transformer, TransformerConfig
from headroom.nn.steps import LEVELS, save_level
from headroom.step.pass_seconds import PassSeconds
from headroom.techniques.technique import allowable, change_of

from helpers.fitting import cross_entropy, stack, step_of

ACT8 = ("act8",)
SAVED = round(1024 * 64 * (4 - 17 / 16))  # by a block


def model_of():
    """Blocks whose inputs take more than their gradients: else these decide the peak."""
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=48, hidden_size=64, layers=4, heads=4, features=32)
    return Transformer(config)


def batch_of():
    """One sample, which cannot be parted."""
    tokens = torch.randint(0, 48, (1, 1025), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def seconds_of(levels):
    """Returns costs of levels with seconds of a machine whose times are known: a step from one
    level to the next takes 0.4 ms, and codes 0.1 ms in each pass."""
    found = {}
    for name, cost in levels.items():
        level = save_level(name)
        found[name] = replace(
            cost,
            forward_seconds=2e-3 + 1e-4 * level.in_8_bits + cost.moved / 1e10,
            backward_seconds=4e-3 + 4e-4 * level.number + 1e-4 * level.in_8_bits,
        )
    return found


@pytest.fixture(scope="module", autouse=True)
def known_seconds():
    def measured(step, **options):
        found = measure.measure_blocks(step, repeats=0, **options)
        blocks = [replace(block, levels=seconds_of(block.levels)) for block in found.blocks]
        alone = sum(block.levels[block.leanest].seconds for block in blocks)
        return replace(found, blocks=blocks, whole=PassSeconds(alone, 2e-3), seconds_of_rest=2e-3)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(candidates, "measure_blocks", measured)
        patched.setattr(candidates, "optimizer_seconds", lambda *args, **options: 2e-3)
        patched.setattr(
            candidates, "seconds_at_leanest", lambda *args, **options: PassSeconds(args[1], 1e-3)
        )
        yield


def sgd(params):
    return torch.optim.SGD(params, lr=1e-3)


def fit(model, batch, budget, **options):
    return headroom.fit(
        model, batch, budget=int(budget), loss=cross_entropy, optimizer=sgd, **options
    )


def ladder(model, batch, **options):
    return headroom.ladder(model, batch, loss=cross_entropy, optimizer=sgd, **options)


@pytest.fixture(scope="module")
def ladders():
    model, batch = model_of(), batch_of()
    return model, batch, ladder(model, batch), ladder(model, batch, allow=ACT8)


def least(made):
    """The least peak, of all points and not of the distinct ones alone."""
    return made._search.frontier()[0].peak


def levels_in(made):
    return {level for point in made.points for level in point.choice.levels}


def test_nothing_is_rounded_that_is_not_allowed(ladders):
    *_, exact, rounded = ladders
    assert levels_in(exact) <= {*LEVELS}
    assert "L5:8bit" in levels_in(rounded) <= {*LEVELS, "L5:8bit"}
    for point in rounded.points:
        assert point.choice.needs == ACT8 * ("L5:8bit" in point.choice.levels)
    assert least(rounded) < least(exact) - 1.25 * SAVED


def test_nothing_is_slower_that_takes_no_more(ladders):
    """All of what is exact is still there, and some of it is beaten."""
    *_, exact, rounded = ladders
    for point in exact.points:
        assert any(
            p.peak <= 1.003 * point.peak and p.seconds <= 1.003 * point.seconds
            for p in rounded.points
        )


def test_a_budget_between_is_met_with_it_alone(ladders):
    model, batch, exact, rounded = ladders
    peaks = [
        fit(model, batch, 1 << 30, choice={"levels": [*[name] * 3, "L1"]}, dry_run=True)
        for name in ("L5", "L5:8bit")
    ]
    # Between both plans, with what is left free beside a plan.
    budget = sum(fitted.predicted_peak for fitted in peaks) / 2 + 50_000
    with pytest.raises(DoesNotFit, match=r'allow=\("act8",\)'):
        fit(model, batch, budget, ladder=exact, dry_run=True)
    fitted = fit(model, batch, budget, ladder=rounded, allow="act8")
    assert "L5:8bit" in fitted.choice.levels and fitted.choice.needs == ACT8
    assert fitted.choice.levels[-1] in LEVELS  # its input is wanted at once
    assert [block.save for block in fitted.model.blocks] == [*fitted.choice.levels]
    assert "L5:8bit" in str(fitted) and "L5:8bit" in json.dumps(fitted.to_json())
    for _ in range(2):
        fitted.step(batch)
    assert fitted.predicted_peak <= budget
    assert abs(fitted.measured_peak - fitted.predicted_peak) <= 0.002 * fitted.predicted_peak
    told = Choice.from_json(json.loads(json.dumps(fitted.to_json()))["choice"])
    fitted.undo()
    assert {block.save for block in fitted.model.blocks} == {"L0"}
    # A run that is resumed need not allow it again.
    again = fit(model, batch, budget, choice=told, dry_run=True)
    assert again.choice == told and again.predicted_peak == fitted.predicted_peak


def test_seconds_at_equal_budgets_are_never_more(ladders):
    model, batch, exact, rounded = ladders
    most = exact.points[-1].peak
    for share in (0.03, 1.1):
        budget = 1.02 * least(exact) + share * (most - least(exact))
        without = fit(model, batch, budget, ladder=exact, dry_run=True)
        found = fit(model, batch, budget, ladder=rounded, allow=ACT8, dry_run=True)
        assert found.predicted_seconds <= without.predicted_seconds


def test_a_ladder_is_of_what_was_allowed(ladders):
    model, batch, exact, rounded = ladders
    with pytest.raises(ValueError, match="ladder was made with another allow"):
        fit(model, batch, 1 << 30, ladder=exact, allow=ACT8, dry_run=True)
    with pytest.raises(ValueError, match="ladder was made with another allow"):
        fit(model, batch, 1 << 30, ladder=rounded, dry_run=True)


def test_blocks_of_any_class_are_measured_with_it():
    model, x = stack(3, dropout=0.0), torch.randn(16, 151, 32)
    step = step_of(model, {"x": x, "target": torch.randn(16, 151, 3)})
    found = measure_blocks(step, in_8_bits=True, on_host=True, repeats=0)
    for block in found.blocks:
        assert [*block.levels] == [
            "L0", "L5", "L5:8bit", "L0@host", "L5@host", "L5:8bit@host"
        ]  # fmt: skip
        assert block.leanest == "L5"
    saved = [b.levels["L5"].held - b.levels["L5:8bit"].held for b in found.blocks]
    # Of the first the input is the model's, which stays; what torch notes beside it is small.
    assert saved[1] == saved[2] == pytest.approx(x.nbytes * (1 - 17 / 64), rel=0.01)
    # On the host are the codes; scales are too few to leave.
    moved = [b.levels["L5:8bit@host"].moved for b in found.blocks]
    assert moved[1] == moved[2] == x.numel()
    for block in found.blocks:
        cost, stays = block.levels["L5:8bit"], block.levels["L5"]
        assert cost.kept == stays.kept
        assert cost.forward_seconds >= stays.forward_seconds
        assert cost.backward_seconds >= stays.backward_seconds


def test_the_order_of_what_is_kept_on_the_host():
    names = ["L0@host", "L4@host", "L5@host", "L5:8bit@host"]
    for (i, most), (k, level) in itertools.product(enumerate(names), repeat=2):
        assert OnHost(1, most).has(0, level) == (k >= i)
    assert sorted(names[::-1], key=save_level) == names
    cost = LevelCost(1, 2, 2, 3, 0, 1.0, 1.0)
    block = BlockCosts("0", 0, dict.fromkeys(["L0", "L5", "L5:8bit", *names], cost), 0, 0)
    assert block.leanest == "L5"
    assert [name for name in block.levels if is_exact(name)] == ["L0", "L5"]


def test_the_words():
    assert allowable().index("act8") < allowable().index("int8")  # which is for good
    assert "8 bits" in change_of("act8")
    assert str(Choice(("L5:8bit", "L5"))) == "1 L5, 1 L5:8bit"
    assert Choice(("L5:8bit@host", "L5")).needs == ACT8
    assert Choice(("L5", "L0@host")).needs == ()

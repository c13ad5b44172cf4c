"""A technique that one class defines is planned, chosen, refused, applied, taken back, advised and
offered by the command line, without another edit."""

import json
import sys
from types import SimpleNamespace

import headroom
import pytest
import torch
from headroom._core.module_copies import copied_modules
from headroom.cli import main
from headroom.fitting import Choice, DoesNotFit
from headroom.techniques.technique import TECHNIQUES, Technique
from torch import nn

ROWS, COLS, EXTRA = 64, 16, 64
KEPT = EXTRA * ROWS * COLS * 4
"""Bytes that the backward pass needs of the iterations of :class:`Refined`, at the least."""


class Refined(nn.Module):
    """Refines the result of a layer, and keeps each iteration for the backward pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.iterations = nn.Linear(COLS, COLS), EXTRA

    def forward(self, x):
        y = self.layer(x)
        for _ in range(self.iterations):
            y = y + 1e-3 * y.sin()
        return y


class Coarse(Technique):
    """Refines once."""

    field, default = "coarse", False
    allowed = {"coarse": 9}
    in_words, in_row = "refined once", ("iterations", "all", "one")

    def values(self, request, choice):
        if not isinstance(request.step.model, Refined):
            request.note("coarse: the model refines nothing")
            return (False,)
        return (False, True) if "coarse" in request.allowed else (False,)

    def on_copy(self, target, choice):
        target.model.iterations = 1

    def apply(self, target, choice):
        model, before = target.model, target.model.iterations
        model.iterations = 1
        return lambda: setattr(model, "iterations", before)

    def advice(self, step):
        model = copied_modules(step.model, lambda x: x)
        model.iterations = 1
        yield "one iteration", step.but(model=model), "faster", "this test", "model.iterations = 1"


@pytest.fixture(autouse=True)
def added():
    TECHNIQUES.append(Coarse())
    yield
    TECHNIQUES.pop()


def batch():
    return torch.randn(ROWS, COLS), torch.randn(ROWS, COLS)


def fitted(model, budget, **options):
    options = {"loss": nn.functional.mse_loss, "only": {"micro_batches": (1,)}} | options
    return headroom.fit(model, batch(), budget=budget, **options)


def test_it_is_chosen_applied_and_taken_back():
    torch.manual_seed(0)
    model, twin = Refined(), Refined()
    twin.load_state_dict(model.state_dict())
    twin.iterations = 1
    found = fitted(model, KEPT, allow=("coarse",))
    assert found.choice.coarse and found.choice.needs == ("coarse",) and found.choice.changes >= 1
    assert model.iterations == 1 and "refined once" in str(found.choice)
    row = next(change for change in found.changes if change.technique == "iterations")
    assert (row.before, row.after) == ("all", "one") and row.bytes < -KEPT // 2
    # The plan is that of a model which was made so.
    wanted = headroom.plan(twin, found.optimizer.__class__, batch(), loss=nn.functional.mse_loss)
    assert found.predicted_peak <= wanted.total_bytes < KEPT
    for _ in range(2):
        found.step(batch())
    assert found.measured_peak <= found.predicted_peak
    found.undo()
    assert model.iterations == EXTRA


def test_it_is_not_chosen_unless_it_is_allowed():
    model = Refined()
    assert not fitted(model, "1 GiB").choice.coarse and model.iterations == EXTRA
    only = {"coarse": (False,), "micro_batches": (1,)}
    assert not fitted(model, "1 GiB", allow=("coarse",), only=only).choice.coarse


def test_a_choice_with_it_is_stored():
    choice = Choice(optimizer="headroom").but(coarse=True)
    told = json.loads(json.dumps(choice.to_json()))
    assert told["coarse"] is True and "others" not in told and Choice.from_json(told) == choice
    assert choice.but(coarse=False) == Choice(optimizer="headroom")
    model = Refined()
    found = fitted(model, "1 GiB", choice=told, only=None)  # which needs not be allowed again
    assert found.choice == choice and model.iterations == 1
    with pytest.raises(ValueError, match="choice has coarse=1, wanted one of type bool"):
        Choice.from_json({"coarse": 1})


def test_its_own_sentence_refuses_it():
    only = {"coarse": (True,), "micro_batches": (1,)}
    with pytest.raises(ValueError, match='one of False for coarse; "coarse" is not in allow'):
        fitted(Refined(), "1 GiB", only=only)
    with pytest.raises(ValueError, match="for coarse; coarse: the model refines nothing"):
        fitted(nn.Sequential(nn.Linear(COLS, COLS)), "1 GiB", allow=("coarse",), only=only)
    with pytest.raises(TypeError, match="only has 1 for coarse, wanted values of type bool"):
        fitted(Refined(), "1 GiB", only={"coarse": (1,)})


def test_it_is_named_where_nothing_fits():
    model = Refined()
    with pytest.raises(DoesNotFit, match=r'allow=\("coarse",\)'):
        fitted(model, KEPT)
    assert model.iterations == EXTRA


def test_a_failure_behind_it_takes_it_back(monkeypatch):
    class Fails(Coarse):
        def apply(self, target, choice):
            raise MemoryError("no memory")

    monkeypatch.setattr(Fails, "field", "fails")
    TECHNIQUES.append(Fails())
    try:
        monkeypatch.setattr(Fails, "is_used", lambda self, choice: choice.coarse)
        model = Refined()
        with pytest.raises(MemoryError, match="no memory"):
            fitted(model, "1 GiB", choice=Choice().but(coarse=True), only=None)
        assert model.iterations == EXTRA
    finally:
        TECHNIQUES.pop()


def test_it_is_advised():
    plan = headroom.plan(Refined(), torch.optim.AdamW, batch(), loss=nn.functional.mse_loss)
    advice = next(one for one in plan.advice() if one.name == "one iteration")
    assert advice.bytes > KEPT // 2 and advice.code == "model.iterations = 1"


def test_the_command_line_offers_it(monkeypatch, capsys):
    module = SimpleNamespace(model=Refined, batch=batch)
    monkeypatch.setitem(sys.modules, "refined_model", module)
    words = ["fit", "refined_model:model", "--batch", "refined_model:batch", "--loss", "mse_loss"]
    words += ["--device", "cpu", "--measure", "--budget", str(KEPT), "--allow", "coarse", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)["fitted"]
    assert told["choice"]["coarse"] is True

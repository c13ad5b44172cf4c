"""The report of what was chosen, to the letter and for JSON; choices in words; budgets in bytes."""

import dataclasses
import json

import pytest
import torch
from headroom.fitting import Change, Choice, Fitted, FrontierPoint, arguments
from headroom.fitting.arguments import allowed_of, budget_of, check_margin, checked, within
from headroom.fitting.ladder import Ladder, Rung
from headroom.fitting.search.knapsack import Point, choose
from headroom.step.description import Step
from headroom.techniques.technique import allowable
from torch import nn

from helpers.frozen import are_frozen

MIB = 1 << 20
CPU = torch.device("cpu")

CHOICES = {
    "as it is": Choice(),
    "all L2": Choice(("L2", "L2")),
    "1 L0, 2 L5": Choice(("L5", "L0", "L5")),
    "2 micro-batches": Choice(micro_batches=2),
    "headroom.optim": Choice(optimizer="headroom"),
    "8-bit moments, bf16 weights": Choice(optimizer="8bit", weights="bf16"),
    "Adafactor": Choice(optimizer="adafactor"),
    "fused loss, release": Choice(release=True, fused_loss=True),
    "all L1, 4 micro-batches, 8-bit moments, bf16 weights, fused loss, release": Choice(
        ("L1",), 4, "8bit", "bf16", True, True
    ),
}


def test_a_choice_in_words():
    assert {str(choice): choice for choice in CHOICES.values()} == CHOICES
    assert are_frozen(*CHOICES.values())
    assert [c.changes for c in CHOICES.values()] == [0, 0, 0, 1, 1, 2, 1, 2, 5]
    assert [c.needs for c in CHOICES.values()] == [
        (), (), (), (), (), ("8bit", "bf16"), ("adafactor",), (), ("8bit", "bf16"),
    ]  # fmt: skip
    assert {c.dtype for c in CHOICES.values() if c.weights == "given"} == {None}
    assert Choice(weights="bf16").dtype == torch.bfloat16


def made(**options):
    """A report of two blocks, with points on both sides of what was chosen."""
    choice = Choice(("L1", "L5"), 2, "headroom")
    points = [
        FrontierPoint(60 * MIB, 0.5, choice.but(levels=("L5", "L5"))),
        FrontierPoint(80 * MIB, 0.25, choice),
        FrontierPoint(96 * MIB, 0.2, choice.but(levels=("L0", "L0"))),
    ]
    changes = [
        Change("optimizer", 0, -0.05, "AdamW", "Headroom's"),
        Change("release", 2048, 0.0004, "gradients stay", "released"),
        Change("levels", -48 * MIB, 0.1004, "2 L0", "1 L1, 1 L5"),
    ]
    given = dict(
        model=nn.Linear(2, 2), optimizer=None, choice=choice, budget=100 * MIB, plan=None,
        predicted_peak=80 * MIB, predicted_seconds=0.25, before_peak=128 * MIB,
        before_seconds=0.2, changes=changes, frontier=points, reachable=points,
        blocks=["a", "b"], notes=["bf16: " + "why not " * 12],
        _step=Step(nn.Linear(2, 2), None, None, device=CPU),
    )  # fmt: skip
    return Fitted(**given | options)


def test_the_report():
    assert (
        str(made())
        == repr(made())
        == "\n".join(
            [
                "Linear in 100 MiB, not applied",
                "",
                "                        peak      a step",
                "as given             128 MiB      200 ms",
                "predicted           80.0 MiB      250 ms",
                "measured                   -           -",
                "",
                "technique              bytes        time  before -> after",
                "optimizer                0 B    -50.0 ms  AdamW -> Headroom's",
                "release            +2.00 KiB     +0.4 ms  gradients stay -> released",
                "levels             -48.0 MiB     +100 ms  2 L0 -> 1 L1, 1 L5",
                "levels are what blocks keep for the backward pass: L0 the most, L5 the least",
                "",
                "next faster: 96.0 MiB (+16.0 MiB), -50.0 ms a step",
                "next leaner: 60.0 MiB (-20.0 MiB), +250 ms a step",
                "note: bf16: why not why not why not why not why not why not why not why not why",
                "  not why not why not why not",
            ]
        )
    )


def test_a_report_of_little():
    plain = made(changes=(), notes=[], frontier=(), before_peak=None, before_seconds=None)
    assert str(plain).splitlines()[3:] == [
        "as given                   -           -",
        "predicted           80.0 MiB      250 ms",
        "measured                   -           -",
        "",
        "nothing had to be changed",
        "",
        "next faster: none was found",
        "next leaner: none was found",
    ]
    given = made(changes=(), notes=[], is_given=True, predicted_seconds=None)
    given.choice = given.choice.but(micro_batches=4)
    assert str(given).splitlines()[4:] == [
        "predicted           80.0 MiB           -",
        "measured                   -           -",
        "",
        "as was chosen before: 1 L1, 1 L5, 2 micro-batches, headroom.optim",
        "changed since then to: 1 L1, 1 L5, 4 micro-batches, headroom.optim",
    ]
    wide = made(changes=[Change("weights", 1, 0.0, "x" * 40, "y" * 40)])
    assert max(map(len, str(wide).splitlines())) == 80
    assert "levels are" not in str(wide)


def test_the_report_for_json():
    fitted = made()
    assert are_frozen(*fitted.changes, *fitted.frontier)
    found = json.loads(json.dumps(fitted.to_json()))
    assert found == {
        "format": "headroom.fitted/1", "model": "Linear", "budget_bytes": 100 * MIB,
        "choice": {
            "levels": ["L1", "L5"], "micro_batches": 2, "optimizer": "headroom",
            "weights": "given", "release": False, "fused_loss": False, "offload": "",
            "state_budget": 0, "frozen": "given", "weights_host": 0,
        },
        "host_budget_bytes": None,
        "blocks": ["a", "b"], "applied": False,
        "before": {"peak_bytes": 128 * MIB, "seconds": 0.2},
        "predicted": {"peak_bytes": 80 * MIB, "seconds": 0.25, "host_bytes": 0},
        "measured": {"peak_bytes": None, "seconds": None, "host_bytes": None},
        "changes": [dataclasses.asdict(change) for change in fitted.changes],
        "frontier": [
            {
                "peak_bytes": p.peak, "seconds": p.seconds, "host_bytes": 0,
                "choice": p.choice.to_json(),
            }
            for p in fitted.frontier
        ],
        "notes": fitted.notes,
    }  # fmt: skip


def test_neighbors_of_a_choice():
    """Those that differ by more than 0.2 % alone."""
    fitted = made()
    low, here, high = fitted.frontier
    assert (fitted.next_down, fitted.next_up) == (low, high)
    near = [
        FrontierPoint(int(0.9985 * 80 * MIB), 0.26, here.choice),
        here,
        FrontierPoint(81 * MIB, 0.2496, here.choice),
    ]
    fitted.frontier = [low, *near, high]
    assert (fitted.next_down, fitted.next_up) == (low, high)
    fitted.predicted_peak = 96 * MIB  # what is as large is not taken for more
    assert fitted.next_up is None
    fitted.predicted_seconds = None
    assert fitted.next_up is None


def test_what_a_ladder_shows():
    choice = Choice(("L0", "L0"), 2)
    first = Rung("as it is", 200 * MIB, 0.2, None, {"parameters": 50 * MIB})
    points = [
        Rung(str(choice.but(levels=(level, level))), peak * MIB, seconds, choice)
        for level, peak, seconds in (("L5", 50, 0.5), ("L2", 100, 0.3), ("L0", 150, 0.21))
    ]
    found = Ladder("GPT", "cpu", first, points)
    assert (
        str(found)
        == repr(found)
        == "\n".join(
            [
                "GPT on cpu: 3 choices, all with 2 micro-batches",
                "L0 keeps the most, L5 the least                      peak        ms a step",
                "as it is                                          200 MiB  100%      200.0  100%",
                "all L0                                            150 MiB   75%      210.0  105%",
                "all L2                                            100 MiB   50%      300.0  150%",
                "all L5                                           50.0 MiB   25%      500.0  250%",
            ]
        )
    )
    assert are_frozen(first) and found.rungs(2) == [first, points[2], points[0]]
    bare = Ladder("GPT", "cuda:0", first, [Rung("as it is", 10, 0.0)])
    assert str(bare).splitlines()[:2] == [
        "GPT on cuda:0: 1 choices",
        "                                                     peak        ms a step",
    ]
    assert found.to_json()["versions"]["torch"] == torch.__version__
    assert found.to_json()["rungs"][0] == {
        "title": "as it is", "peak_bytes": 200 * MIB, "step_seconds": 0.2, "host_bytes": 0,
        "bytes": {"parameters": 50 * MIB},
    }  # fmt: skip
    about = {key: found.to_json()[key] for key in ("format", "model", "device", "peaks")}
    assert about == {
        "format": "headroom.ladder/1",
        "model": "GPT",
        "device": "cpu",
        "peaks": "predicted",
    }
    with pytest.raises(ValueError, match="ladder was not made by headroom.ladder"):
        found._search_for(None)


# ---- arguments ----------------------------------------------------------------------------------


def test_a_budget_in_bytes(monkeypatch):
    assert budget_of("1 KiB", None, CPU) == budget_of(1024, None, CPU) == 1024
    with pytest.raises(ValueError, match="budget is 6, which is 6 bytes; write the unit"):
        budget_of(6, None, CPU)
    with pytest.raises(ValueError, match="budget is 1023"):
        budget_of(1023, None, CPU)
    for given in ((None, None), ("1 GiB", "speed")):
        with pytest.raises(ValueError, match="wanted one of them"):
            budget_of(*given, CPU)
    with pytest.raises(ValueError, match="target is 'size', wanted \"speed\""):
        budget_of(None, "size", CPU)
    asked = []

    def available(device, held):
        asked.append((device.type, held))
        return 1000

    monkeypatch.setattr(arguments, "available", available)
    assert budget_of(None, "speed", CPU, 7) == 800
    assert budget_of(None, "speed", torch.device("cuda"), 9) == 950
    assert asked == [("cpu", 7), ("cuda", 9)]


def test_what_a_plan_may_take_of_a_budget():
    """The margin is that of the device, and the rest is what plans do not see."""
    unseen = 16 * 1024
    assert within(MIB, 0.0, CPU, 0) == MIB - unseen
    assert within(MIB, 0.0, CPU, 3) == MIB - unseen - 3 * 5056
    assert within(MIB, 0.5, CPU, 0) == MIB // 2 - unseen
    assert within(1000 * MIB, None, CPU, 0) == int(998 * MIB) - unseen
    assert within(1000 * MIB, None, torch.device("cuda"), 0) == int(980 * MIB) - unseen
    assert within(1024, None, CPU, 1) == 0
    for margin in (None, 0, 0.999):
        check_margin(margin)
    for margin in (-0.01, 1, 1.0):
        with pytest.raises(ValueError, match=f"margin is {margin}, wanted a share"):
            check_margin(margin)
    with pytest.raises(TypeError, match="margin must be a share of the budget.* got 'a'"):
        check_margin("a")


def test_what_is_allowed():
    assert allowed_of(()) == () and allowed_of("8bit") == ("8bit",)
    assert allowed_of(["bf16", "8bit", "bf16"], ("adafactor", "8bit")) == (
        "bf16", "8bit", "adafactor",
    )  # fmt: skip
    assert set(allowed_of(frozenset(allowable()))) == set(allowable())
    with pytest.raises(TypeError, match="allow is 8, wanted names"):
        allowed_of(8)
    with pytest.raises(ValueError, match="allow has 'x', wanted some of 8bit, bf16, adafactor"):
        allowed_of(("8bit", "x"))


def test_a_step_of_arguments():
    model, x = nn.Linear(3, 1), torch.ones(2, 3)
    step = checked(Step(model, None, x))
    assert step.device == CPU and type(step.optimizer) is torch.optim.AdamW
    assert step.optimizer.param_groups[0]["params"] == list(model.parameters())
    off = torch.amp.GradScaler("cpu", enabled=False)
    on = torch.amp.GradScaler("cpu")
    assert checked(Step(model, None, x, scaler=off)).scaler is False
    assert checked(Step(model, None, x, scaler=None)).scaler is False
    assert checked(Step(model, None, x, scaler=on)).scaler is on
    with pytest.raises(ValueError, match="a tensor on meta, but the model is on cpu"):
        checked(Step(model, None, x.to("meta")))


def test_the_fastest_point_within_a_budget():
    assert are_frozen(Point(10, 3.0, ("L5",)))
    points = [Point(10, 3.0, ("L5",)), Point(20, 2.0, ("L2",)), Point(30, 1.0, ("L0",))]
    for budget, wanted in ((9, None), (10, 0), (19, 0), (20, 1), (29, 1), (30, 2), (99, 2)):
        assert choose(points, budget) is (None if wanted is None else points[wanted])

"""Which changes are advised for which steps, and what is planned for each."""

import functools

import headroom
import pytest
import torch
from headroom.functional.linear import SLOW_ON_CPU
from headroom.memory import Allocation, Timeline
from headroom.planning import DDP, FSDP, Plan
from headroom.planning.advice import advise
from headroom.planning.sharding import sharding_of
from headroom.step.description import Step
from headroom.step.errors import PlanError
from torch import nn

from helpers.frozen import are_frozen

CPU = torch.device("cpu")
EVERY = {"checkpoint_every(model, 1)", "checkpoint_every(model, 2)"}
HALVES = "two micro-batches of half the size"
REMAINDER = "parameters in bfloat16 with a 16-bit remainder"
OPTIMIZERS = {"headroom.optim.AdamW8bit", "headroom.optim.Adafactor"}
LEVELS = {level: f"save={level!r} in all blocks" for level in ("L1", "L2", "L3", "L4", "L5")}


def plan_of(size):
    return Plan(Timeline([Allocation(0, size)]))


def advised(step, top=None, before=1000):
    """The advice for a step, whose n-th change saves n bytes; and the steps that were planned."""
    planned = []

    def again(changed):
        planned.append(changed)
        return plan_of(1000 - len(planned))

    found = advise(step, plan_of(before), again, top)
    by_name = {advice.name: advice for advice in found}
    return by_name, {a.name: planned[1000 - a.plan.total_bytes - 1] for a in found}


def step_of(optimizer=torch.optim.AdamW, model=None, rows=6, **options):
    model = nn.Linear(3, 3) if model is None else model
    return Step(model, optimizer, torch.ones(rows, 3), **{"device": CPU} | options)


def test_advice_for_adam():
    given = functools.partial(torch.optim.AdamW, lr=0.5, eps=1e-8, betas=(0.5, 0.6), amsgrad=True)
    found, planned = advised(step_of(given, amp=torch.float16))
    assert set(found) == {"headroom.optim.AdamW", *OPTIMIZERS, REMAINDER, HALVES, *EVERY}
    param = nn.Parameter(torch.ones(2))
    for name, kind, master in (
        ("headroom.optim.AdamW", headroom.optim.AdamW, None),
        ("headroom.optim.AdamW8bit", headroom.optim.AdamW8bit, None),
        (REMAINDER, headroom.optim.AdamW, "remainder16"),
    ):
        made = planned[name].optimizer([param])
        group = made.param_groups[0]
        assert type(made) is kind and (group["lr"], group["betas"]) == (0.5, (0.5, 0.6))
        assert group.get("master", made.defaults.get("master")) == master
        assert "model.parameters(), " in found[name].code and "lr=0.5, betas=(0.5, 0.6))" in (
            found[name].code
        )
        assert "eps" not in found[name].code and "amsgrad" not in found[name].code
        assert planned[name].described()["optimizer"] == f"headroom.{kind.__name__}"
    assert planned[REMAINDER].dtype == torch.bfloat16 and planned[REMAINDER].amp is None
    factored = planned["headroom.optim.Adafactor"].optimizer([param])
    assert factored.param_groups[0]["lr"] != 0.5  # is to be found again
    assert planned[HALVES].batch.shape == (3, 3) and planned[HALVES].accumulation == 2
    every = [planned[name].checkpoint_every for name in sorted(EVERY)]
    assert every == [1, 2] and all(a.time and a.source and a.code for a in found.values())
    made = torch.optim.Adam([param], lr=1e-3, weight_decay=0.25)
    code = advised(step_of(made))[0]["headroom.optim.Adam8bit"].code
    assert code == "optimizer = headroom.optim.Adam8bit(model.parameters(), weight_decay=0.25)"


def test_advice_for_other_optimizers():
    ours = advised(step_of(headroom.optim.AdamW))[0]
    assert set(ours) == {*OPTIMIZERS, REMAINDER, "release gradients", HALVES, *EVERY}
    eight, planned = advised(step_of(headroom.optim.AdamW8bit))
    assert set(eight) == {REMAINDER, "release gradients", HALVES, *EVERY}
    assert "AdamW8bit(" in eight[REMAINDER].code and planned["release gradients"].release is True
    assert planned[REMAINDER].described()["optimizer"] == "headroom.AdamW8bit"
    assert set(advised(step_of(torch.optim.NAdam))[0]) == {HALVES, *EVERY}
    assert set(advised(step_of(None))[0]) == {HALVES, *EVERY}


def test_advice_for_sgd_and_lion():
    given = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.25, nesterov=True)
    found, planned = advised(step_of(given))
    names = {"headroom.optim.SGD", "headroom.optim.SGD8bit"}
    assert set(found) == {*names, REMAINDER, HALVES, *EVERY}
    for name, master in ((sorted(names)[0], None), (sorted(names)[1], None), (REMAINDER, True)):
        (group,) = planned[name].optimizer([nn.Parameter(torch.ones(2))]).param_groups
        assert (group["lr"], group["momentum"], group["nesterov"]) == (0.5, 0.25, True)
        assert bool(group.get("master")) == bool(master)
        assert "lr=0.5, momentum=0.25, nesterov=True)" in found[name].code
    ours = advised(step_of(functools.partial(headroom.optim.Lion, lr=1e-3)))[0]
    assert set(ours) == {"headroom.optim.Lion8bit", REMAINDER, "release gradients", HALVES, *EVERY}
    assert ours["headroom.optim.Lion8bit"].code.endswith("Lion8bit(model.parameters(), lr=0.001)")


def test_advice_for_sgd_of_bitsandbytes_has_its_momentum():
    """Which it keeps among its betas."""
    optim = pytest.importorskip("bitsandbytes").optim
    model = nn.Linear(3, 3)
    given = optim.SGD(model.parameters(), lr=0.5, momentum=0.25)
    found, planned = advised(step_of(given, model))
    for name in ("headroom.optim.SGD", "headroom.optim.SGD8bit"):
        assert found[name].code.endswith("(model.parameters(), lr=0.5, momentum=0.25)")
        (group,) = planned[name].optimizer([nn.Parameter(torch.ones(2))]).param_groups
        assert (group["lr"], group["momentum"]) == (0.5, 0.25)


def total(model, batch):
    return model(*batch).sum()


def test_advice_for_muon():
    """Made of the model, whose matrices the rule finds; torch's has some of its matrices alone."""
    model = nn.ModuleDict({"inner": nn.Linear(9, 9), "lm_head": nn.Linear(9, 5)})
    own = {"lr": 0.5, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw", "split": {"inner": 3}}
    made = headroom.optim.Muon(model, adamw={"lr": 0.25, "betas": (0.9, 0.999)}, **own)
    partial = functools.partial(headroom.optim.Muon, adamw={"lr": 0.25}, **own)
    for given in (made, partial):
        found, planned = advised(step_of(given, model))
        code = "(model, lr=0.5, adamw={'lr': 0.25}, split={'inner': 3}, ns_steps=3, adjust_lr_fn="
        for name, start in (("headroom.optim.Muon8bit", code), (REMAINDER, "(model, master=")):
            assert start in found[name].code
            new = planned[name].optimizer(model)
            groups = {group["use_muon"]: group for group in new.param_groups}
            assert (groups[True]["lr"], groups[False]["lr"], groups[True]["split"]) == (
                0.5,
                0.25,
                3,
            )
            assert planned[name].optimizer.takes_model
        assert "headroom.optim.Muon" not in found and "headroom.optim.Adafactor" not in found
    assert advised(step_of(headroom.optim.Muon8bit(model), model))[0].keys() >= {REMAINDER}
    theirs = torch.optim.Muon([model["inner"].weight])
    batch = torch.ones(6, 9)
    plan = headroom.plan(model["inner"], theirs, (batch,), device="cpu", forward=total)
    assert not [one.name for one in plan.advice() if "optim.Muon" in one.name]


def test_what_is_advised_climbs_where_the_given_optimizer_does():
    sgd = functools.partial(torch.optim.SGD, momentum=0.25)
    for given, name in ((sgd, "SGD8bit"), (torch.optim.AdamW, "AdamW8bit")):
        found, planned = advised(step_of(functools.partial(given, maximize=True)))
        name = f"headroom.optim.{name}"
        (group,) = planned[name].optimizer([nn.Parameter(torch.ones(2))]).param_groups
        assert group["maximize"] and found[name].code.endswith(", maximize=True)")


def test_what_a_step_has_is_not_advised():
    def names(optimizer=headroom.optim.AdamW, **options):
        return set(advised(step_of(optimizer, **options))[0])

    every = names()
    for name, options in {
        "release gradients": [{"release": True}, {"max_grad_norm": 1.0}],
        HALVES: [{"accumulation": 2}, {"rows": 5}],
        REMAINDER: [{"scaler": True}, {"model": nn.Linear(3, 3).bfloat16()}],
    }.items():
        for each in options:
            # patch() replaces products for which the processor has no instructions.
            is_slow = "model" in each and torch.bfloat16 in SLOW_ON_CPU
            patch = {"headroom.patch(model)"} if is_slow else set()
            assert names(**each) == every - {name} | patch
    assert names(checkpoint_every=2) == every - EVERY
    frozen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16().requires_grad_(False))
    assert REMAINDER in names(model=frozen)  # of what is trained


def test_levels_above_those_that_blocks_have():
    config = headroom.nn.TransformerConfig(9, 8, 2, 1, 8)
    model = headroom.nn.Transformer(config, save=["L2", "L1"])
    for step, first in (
        (step_of(None, model), 3),
        (step_of(None, model, save="L3"), 4),
        (step_of(None, model, save="L0"), 1),
    ):
        found, planned = advised(step)
        wanted = [LEVELS[f"L{n}"] for n in range(first, 6)]
        assert [name for name in LEVELS.values() if name in found] == wanted
        assert all(planned[name].save == name[6:8] for name in wanted)
        exec(found[wanted[0]].code, {"model": model})
        assert model.save == [f"L{first}"] * 2
        model.save = ["L2", "L1"]
        assert not any(name.startswith("headroom.patch") for name in found)
    assert not set(advised(step_of(None, model, checkpoint_every=1))[0]) & {*LEVELS.values()}


def test_models_that_can_be_patched():
    model = nn.Sequential(nn.RMSNorm(3), nn.Linear(3, 3))
    found, planned = advised(step_of(None, model))
    changed = planned["headroom.patch(model)"].model
    assert changed is not model and "forward" in vars(changed[0])
    assert "forward" not in vars(model[0]) and changed[1].weight is model[1].weight
    assert "headroom.patch(model)" not in advised(step_of(None, model, checkpoint_every=1))[0]


def test_changes_of_ranks():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))

    def of_ranks(shard):
        sharding = sharding_of(model, 4, shard)[1]
        found, planned = advised(step_of(headroom.optim.AdamW, model, sharding=sharding))
        assert "release gradients" not in found
        return found, planned

    found, planned = of_ranks("ddp")
    view, sharded = "gradient_as_bucket_view=True", "fully_shard instead of DDP"
    assert planned[view].sharding.how == DDP(gradient_as_bucket_view=True)
    units = planned[sharded].sharding.units
    assert [(u.module, u.reshards) for u in units] == [
        ("", False),
        ("0", True),
        ("1", True),
        ("2", True),
    ]
    assert (
        "for name in ['0', '1', '2']:\n    fully_shard(model.get_submodule(name))\nfully_shard("
        in (found[sharded].code)
    )
    assert view not in of_ranks(DDP(gradient_as_bucket_view=True))[0]
    single = advised(
        step_of(None, nn.Linear(3, 3), sharding=sharding_of(nn.Linear(3, 3), 2, "ddp")[1])
    )[0]
    assert "get_submodule" not in single[sharded].code
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight  # which cannot be sharded in units of their own
    found = advised(step_of(None, tied, sharding=sharding_of(tied, 2, "ddp")[1]))[0]
    assert sharded not in found and view in found
    again = "reshard_after_forward=True"
    found, planned = of_ranks("fsdp-no-reshard")
    assert [u.reshards for u in planned[again].sharding.units] == [False, True, True, True]
    assert view not in found and sharded not in found
    assert again not in of_ranks("fsdp")[0]
    assert again not in of_ranks(FSDP(wrap=[]))[0]


def test_advice_is_sorted_cut_and_shown():
    step = step_of(torch.optim.NAdam)
    found = advise(
        step, plan_of(1000), lambda changed: plan_of(900 if changed.checkpoint_every == 2 else 950)
    )
    assert [(a.name, a.bytes) for a in found] == [
        ("checkpoint_every(model, 2)", 100), ("checkpoint_every(model, 1)", 50), (HALVES, 50)
    ]  # fmt: skip
    assert str(found[0]) == (
        "checkpoint_every(model, 2): 100 B less, about 17 % slower\n"
        "    headroom.checkpoint_every(model, 2)"
    )
    assert are_frozen(*found) and repr(found) == str(found) == "\n".join(map(str, found))
    assert [a.name for a in advise(step, plan_of(1000), lambda changed: plan_of(900), 2)] == sorted(
        EVERY
    )
    assert list(advise(step, plan_of(1000), lambda changed: plan_of(900), 0)) == []
    nothing = advise(step, plan_of(900), lambda changed: plan_of(900))
    assert list(nothing) == [] and str(nothing) == "Nothing known would make the peak smaller."


@pytest.mark.parametrize("error", [PlanError, ValueError, TypeError])
def test_changes_that_cannot_be_planned_are_left_out(error):
    def again(changed):
        if changed.checkpoint_every is None:
            raise error("no")
        return plan_of(1)

    assert {a.name for a in advise(step_of(), plan_of(2), again)} == EVERY


def test_the_most_samples_up_to_a_limit():
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    options = {"forward": lambda m, x: m(x).mean(), "budget": "1 GiB"}
    for limit in (1, 5, 8):
        assert headroom.max_batch(model, None, x, limit=limit, **options) == limit
    assert headroom.max_batch(model, None, x, limit=0, **options) == 0


def test_what_can_be_on_the_host():
    """On a GPU, with the seconds of the copies; on a CPU there is nothing to gain."""
    layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]  # states of whole segments
    model = torch.nn.Sequential(*layers).to("meta")
    optimizer, x = headroom.optim.AdamW(model.parameters()), torch.randn(4, 1024)
    options = {"forward": lambda model, x: model(x).square().mean()}
    found = {
        a.name: a for a in headroom.plan(model, optimizer, x, device="cuda", **options).advice()
    }
    names = ["optimizer state on the host", "the optimizer's step on the host"]
    for name in [*names, "weights of blocks on the host"]:
        assert found[name].plan.host_peak_bytes > 0 and "at 25 GB/s" in found[name].time
    state = 8 * 4 * (1024 * 1024 + 1024)
    assert found[names[0]].bytes == pytest.approx(state, rel=0.7)
    on_cpu = headroom.plan(model, optimizer, x, device="cpu", **options).advice()
    assert not [advice for advice in on_cpu if "on the host" in advice.name]

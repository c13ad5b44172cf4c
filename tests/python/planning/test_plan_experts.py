"""Plans of mixtures of experts, against the counter of real bytes."""

import headroom
import pytest
import torch
from headroom.functional.linear import SLOW_ON_CPU
from headroom.memory import track
from headroom.patching.levels import Blocks

from helpers.moe_models import experts_of, moe_of, tokens_of


def measured(model, batch):
    with track(model, batch=batch, stacks=False) as tracked:
        for _ in range(2):
            model(**batch).loss.backward()
            model.zero_grad()
    return tracked.peak_bytes


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("level", ["L0", "L1", "L2", "L5"])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_a_plan_is_what_a_step_takes(name, level, frozen):
    model, batch = moe_of(name), tokens_of(64)
    model.set_experts_implementation("eager")  # of which there is no plan
    for module in experts_of(model).values():
        module.requires_grad_(not frozen)
    headroom.patch(model, level, norms=False)
    plan = headroom.plan(model, None, batch)
    assert plan.total_bytes == pytest.approx(measured(model, batch), rel=1e-4)


@pytest.mark.parametrize("to", [None, "nf4"])
@pytest.mark.parametrize("size", [32, 256])
@pytest.mark.parametrize("level", ["L1", "L5"])
def test_in_16_bits(level, size, to):
    """With what oneDNN takes for products of experts, which on some processors depends on how many
    rows each has: the plan is of the routing that takes most."""
    batch = tokens_of(64)
    model = moe_of("Qwen3Moe", hidden_size=size, moe_intermediate_size=size).bfloat16()
    if to is not None:
        headroom.quantize(model, to)
    headroom.patch(model, level)
    plan = headroom.plan(model, None, batch)
    real = measured(model, batch)
    assert 0.98 * real <= plan.total_bytes <= 1.1 * real
    if torch.bfloat16 in SLOW_ON_CPU:  # where Headroom multiplies
        assert plan.total_bytes == pytest.approx(real, rel=1e-3)


@pytest.mark.parametrize("level", ["L0", "L2", "L5"])
def test_any_routing_takes_as_much(level):
    found = []
    for is_even in (True, False):
        model, batch = moe_of("Qwen3Moe"), tokens_of(64)
        for layer in model.model.layers:
            with torch.no_grad():
                weight = layer.mlp.gate.weight
                weight[2:].mul_(1.0 if is_even else 0.0)
                if not is_even:
                    weight[:2].mul_(100.0)
        headroom.patch(model, level, norms=False)
        peak = measured(model, batch)
        assert headroom.plan(model, None, batch).total_bytes == pytest.approx(peak, rel=1e-4)
        found.append(peak)
    assert found[0] == found[1]


@pytest.mark.parametrize("level", [None, "L0", "L2", "L5"])
@pytest.mark.parametrize(("name", "to"), [("Mixtral", "nf4"), ("GptOss", "int8")])
def test_in_few_bits_and_on_the_meta_device(name, to, level):
    batch = tokens_of(64)
    model, on_meta = moe_of(name), moe_of(name).to("meta")
    for one in (model, on_meta):
        headroom.quantize(one, to)
        if level is not None:
            headroom.patch(one, level, norms=False)
    plan = headroom.plan(model, None, batch)
    assert plan.total_bytes == pytest.approx(measured(model, batch), rel=1e-4)
    assert headroom.plan(on_meta, None, batch, device="cpu").total_bytes == plan.total_bytes


def test_levels_that_fit_chooses_from():
    model, batch = moe_of("Mixtral"), tokens_of(64)
    blocks = Blocks(model)
    assert {blocks.levels(name) for name in blocks.names} == {("L0", "L1", "L2", "L5")}
    assert set(blocks.leanest.values()) == {"L5"} and blocks.now is None
    peaks = []
    for level in ("L0", "L1", "L2", "L5"):
        blocks.set(dict.fromkeys(blocks.names, level))
        peaks.append(headroom.plan(model, None, batch).total_bytes)
    assert sorted(peaks, reverse=True) == peaks and len(set(peaks)) == 4


@pytest.mark.slow
def test_advice():
    model, batch = moe_of("Mixtral"), tokens_of(64)
    plan = headroom.plan(model, None, batch)
    advice = {one.name: one for one in plan.advice() if one.name.startswith("headroom.patch")}
    wanted = {"headroom.patch(model)"} | {
        f"headroom.patch(model, save='{k}')" for k in ("L2", "L5")
    }
    assert advice.keys() == wanted
    for one in advice.values():
        exec(one.code, {"headroom": headroom, "model": model})
        real = headroom.plan(model, None, batch).total_bytes
        assert one.plan.peak_bytes == pytest.approx(real, rel=0.01)
        headroom.unpatch(model)

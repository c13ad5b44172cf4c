"""Mixtures whose experts bitsandbytes has put into 4 bits: patch() computes them from the codes."""

import copy

import headroom
import pytest
import torch
from headroom.memory import track

from helpers.bits import assert_same_bits
from helpers.few_bits import error
from helpers.kept import kept_bytes
from helpers.moe_models import experts_of, moe_of, step, tokens_of

parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
OURS = "headroom.functional.experts"
WIDE = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=64)


def theirs(name, nested=False, kind="nf4"):
    """Experts alone are in few bits."""
    model = moe_of(name, **WIDE)
    for module in experts_of(model).values():
        for stack in ("gate_up_proj", "up_proj", "down_proj"):
            if stack in module._parameters:
                parametrize.replace_parameter_4bit(
                    module, stack, compress_statistics=nested, quant_type=kind
                )
    return model


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss", "NemotronH"])
def test_gradients_are_theirs_and_no_stack_is_made(name, nested, monkeypatch):
    model, inputs = theirs(name, nested), tokens_of()
    ids = {key: x for key, x in inputs.items() if key != "labels"}
    want, state = step(model, inputs), model.state_dict()
    held = kept_bytes(lambda: model(**ids).logits, list(model.parameters()))
    forwards = {path: dict(vars(m)) for path, m in experts_of(model).items()}
    monkeypatch.setattr(
        parametrize.Bnb4bitParametrization, "forward", lambda *_: pytest.fail("it was decoded")
    )
    first = None
    for level in ("L0", "L1", "L2", "L5"):
        report = headroom.patch(model, level, norms=False)
        assert {k for k, (one,) in report.swapped.items() if one.now == OURS} == {
            *experts_of(model)
        }
        got = step(model, inputs)
        first = first or got
        assert_same_bits(got.values(), first.values())
        assert got.keys() == want.keys() and error(got, want) < 1e-5
    headroom.patch(model, "L1", norms=False)
    kept = kept_bytes(lambda: model(**ids).logits, list(model.parameters()))
    stacks = sum(
        steps[0].quant_state.shape.numel() * 4
        for module in experts_of(model).values()
        for steps in module.parametrizations.values()
    )
    assert held - kept > stacks
    assert_same_bits(model.state_dict().values(), state.values())
    monkeypatch.undo()
    headroom.unpatch(model)
    assert {path: vars(m).keys() for path, m in experts_of(model).items()} == {
        path: attributes.keys() for path, attributes in forwards.items()
    }
    assert_same_bits(step(model, inputs).values(), want.values())


def test_some_stacks_in_few_bits_are_left():
    model, inputs = moe_of("Qwen3Moe", **WIDE), tokens_of()
    for module in experts_of(model).values():
        parametrize.replace_parameter_4bit(module, "down_proj")
    want = step(model, inputs)
    report = headroom.patch(model, norms=False)
    assert "some of its stacks into 4 bits, not all" in str(report)
    assert_same_bits(step(model, inputs).values(), want.values())


def test_copies_and_stacks_that_were_replaced():
    model, inputs = theirs("Mixtral", nested=True), tokens_of()
    headroom.patch(model, "L2", norms=False)
    want = step(model, inputs)
    copied = copy.deepcopy(model)
    other = theirs("Mixtral", nested=True)
    with torch.no_grad():
        for module in experts_of(model).values():
            steps = module.parametrizations.down_proj
            steps.original.data = steps.original.data.flip(0)
    changed = step(model, inputs)
    assert error(changed, want) > 1e-2
    assert_same_bits(step(copied, inputs).values(), want.values())
    assert error(step(other, inputs), want) < 1e-5


@pytest.mark.parametrize("level", ["L1", "L5"])
def test_plans(level):
    model, batch = theirs("Mixtral", nested=True), tokens_of(64)
    headroom.patch(model, level, norms=False)
    with track(model, batch=batch, stacks=False) as tracked:
        for _ in range(2):
            model(**batch).loss.backward()
            model.zero_grad()
    for one in (model, copy.deepcopy(model)):
        plan = headroom.plan(one, None, batch)
        assert plan.total_bytes == pytest.approx(tracked.peak_bytes, rel=1e-2)


def test_adapters_around_them():
    model, inputs = theirs("Qwen3Moe"), tokens_of()
    headroom.lora(model, 2)
    want = step(model, inputs)
    report = headroom.patch(model, "L2", norms=False)
    assert OURS in str(report)
    got = step(model, inputs)
    assert got.keys() == want.keys() and error(got, want) < 1e-5

"""Parameters and levels that change between the passes of a block, or during one."""

from __future__ import annotations

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits
from helpers.blocks import DROPS, block_and_input, model_of


def changed_afterwards(block, inputs, how):
    """The gradients when parameters differ in the backward pass, or None where that raises."""
    named = dict(block.named_parameters())
    given = {name: (p * 1.5).detach().requires_grad_() for name, p in named.items()}
    if how == "functional_call":
        y = torch.func.functional_call(block, given, inputs)
        leaves = [inputs[0], *given.values()]
    else:
        y = block(*inputs)
        leaves = [inputs[0], *named.values()]
    with torch.no_grad():
        for name, p in named.items():
            if how == "data":
                p.data = p.data * 1.5
            elif how in name:
                p.add_(1)
    try:
        return torch.autograd.grad(y.square().sum(), leaves)
    except RuntimeError as error:
        own = "modified by an inplace operation" in str(error)  # torch's, of what it keeps
        assert own or "since the forward pass, parameter" in str(error)
        return None


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma"])
@pytest.mark.parametrize("how", ["functional_call", "data", "qkv.bias", "first.bias", "out.bias"])
def test_parameters_that_change_between_the_passes(name, how):
    def run(level):
        block, inputs = block_and_input(name, save=level, qkv_bias=True, out_bias=True)
        return changed_afterwards(block, inputs, how.replace("first", "up"))

    wanted, raised = run("L0"), []
    for level in DROPS:
        got = run(level)
        raised.append(got is None)
        if got is not None:
            assert_same_bits(got, wanted)
    assert (wanted is None) == (how == "first.bias" and name == "gpt2")
    if wanted is not None:
        assert raised[0] == (how in ("functional_call", "data"))
    if how in ("functional_call", "data", "qkv.bias"):
        assert raised[-1]


def gradients_of(model, ids):
    model.zero_grad()
    model(ids).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_levels_may_differ_and_change():
    model = model_of(layers=3, head=True, final_norm=True, tied=True)
    ids = torch.randint(40, (2, 5))

    wanted = gradients_of(model, ids)
    model.save = ["L1", "L5", "L0"]
    assert model.save == ["L1", "L5", "L0"]
    assert_same_bits(gradients_of(model, ids), wanted)
    with pytest.raises(ValueError, match="save has 2 levels, wanted one, or one for each of the 3"):
        model.save = ["L1", "L5"]
    with pytest.raises(ValueError, match="save is 'L6', wanted one of L0, L1"):
        model.save = "L6"


@pytest.mark.parametrize("counted", [False, True])  # whether the version tells of the change
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma", "phi"])
def test_weights_may_change_in_the_backward_pass(name, counted):
    """As with optimizers that step as soon as a gradient is there: nothing is computed again from
    weights that have been changed."""

    def step(p):
        with torch.no_grad():
            (p if counted else p.data).sub_(p.grad, alpha=0.1)

    def run(level):
        block, inputs = block_and_input(name, save=level)
        for p in block.parameters():
            p.register_post_accumulate_grad_hook(step)
        x = inputs[0]
        (block(*inputs) ** 2).sum().backward()
        return [x.grad, *block.parameters()]

    wanted = run("L0")
    for level in DROPS:
        assert_same_bits(run(level), wanted)


def test_checkpoint_every_and_levels():
    model = model_of(layers=2)
    ids = torch.randint(40, (2, 5))

    wanted = gradients_of(model, ids)
    model.save = "L3"
    handle = headroom.checkpoint_every(model, verify=True)
    assert_same_bits(gradients_of(model, ids), wanted)
    handle.remove()
    assert_same_bits(gradients_of(model, ids), wanted)

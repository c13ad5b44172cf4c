"""A block at every level: the same gradients, whatever it keeps and however it is run."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from headroom.nn import LEVELS, Block
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.bits import assert_same_bits
from helpers.blocks import DROPS, SHAPES, block_and_input, gradients, taken


@pytest.mark.parametrize("name", SHAPES)
def test_levels_give_the_same_bits(name):
    block, inputs = block_and_input(name)
    wanted = gradients(block, inputs, "L0")
    assert len(wanted) == 2 + sum(1 for _ in block.parameters())
    for level in DROPS:
        assert_same_bits(gradients(block, inputs, level), wanted)
    other = gradients(block, inputs, "L5", seed=4)
    assert ("dropout" in name) != torch.equal(other[0], wanted[0])


def test_the_choice_of_a_backend_holds_in_the_backward_pass():
    block, inputs = block_and_input("qwen3")
    flash = gradients(block, inputs, "L0")

    def run(level):
        block.save = level
        with sdpa_kernel(SDPBackend.MATH):
            y = block(*inputs)
        (y**2).sum().backward()
        return [y.detach(), *taken(block, inputs)]

    wanted = run("L0")
    assert not all(map(torch.equal, wanted, flash))  # else this shows nothing
    for level in DROPS:
        assert_same_bits(run(level), wanted)


@pytest.mark.parametrize("level", DROPS)
def test_sixteen_bits_and_autocast(level):
    block, inputs = block_and_input("qwen3", torch.bfloat16)
    wanted = gradients(block, inputs, "L0")
    assert_same_bits(gradients(block, inputs, level), wanted)

    block, inputs = block_and_input("qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        wanted = gradients(block, inputs, "L0")
        assert_same_bits(gradients(block, inputs, level), wanted)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(*inputs)
    (y.float() ** 2).sum().backward()  # outside of autocast
    assert_same_bits([y.detach(), *taken(block, inputs)], wanted)


@pytest.mark.parametrize("level", ["L1", "L5"])
def test_offloading_gets_what_is_kept(level):
    block, inputs = block_and_input()
    wanted = gradients(block, inputs, "L0")
    block.save = level
    with save_on_cpu():
        y = block(*inputs)
    (y**2).sum().backward()
    assert_same_bits([y.detach(), *taken(block, inputs)], wanted)


@pytest.mark.parametrize("which", ["qkv", "adapters"])
def test_frozen_weights(which):
    block, inputs = block_and_input("qwen3")
    if which == "adapters":
        block.requires_grad_(False)
        block.attention.qkv = Adapter(block.attention.qkv)
        block.mlp.gate_up = Adapter(block.mlp.gate_up)
    else:
        block.attention.qkv.requires_grad_(False)
        inputs = (inputs[0].detach(), *inputs[1:])  # as behind frozen embeddings
    wanted = gradients(block, inputs, "L0")
    for level in DROPS:
        assert_same_bits(gradients(block, inputs, level), wanted)


class Adapter(nn.Module):
    """A frozen Linear with trained matrices of low rank beside it."""

    def __init__(self, linear):
        super().__init__()
        self.linear, rank = linear, 3
        self.out_features = linear.out_features
        self.a = nn.Linear(linear.in_features, rank, bias=False)
        self.b = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.b(self.a(x))


class Dropped(Adapter):
    """An adapter that draws random numbers."""

    def forward(self, x):
        return self.linear(x) + self.b(self.a(nn.functional.dropout(x, 0.5)))


class Noise(nn.Module):
    def forward(self, weight):
        return nn.functional.dropout(weight, 0.5)


@pytest.mark.parametrize("name", ["llama", "gemma", "bert", "dropout"])
@pytest.mark.parametrize("what", ["adapters", "parametrization", "hook"])
def test_modules_that_draw_random_numbers(name, what):
    block, inputs = block_and_input(name)
    attention, mlp = block.attention, block.mlp
    if what == "adapters":
        attention.qkv, attention.out = Dropped(attention.qkv), Dropped(attention.out)
        setattr(mlp, "gate_up" if mlp.gated else "up", Dropped(mlp.first))
        mlp.down = Dropped(mlp.down)
    for module in (attention.qkv, attention.out, mlp.first, mlp.down, block.attention_norm):
        if what == "parametrization":
            nn.utils.parametrize.register_parametrization(module, "weight", Noise())
        elif what == "hook":
            module.register_forward_hook(lambda module, args, y: nn.functional.dropout(y, 0.5))
    wanted = gradients(block, inputs, "L0")
    for level in DROPS:
        assert_same_bits(gradients(block, inputs, level), wanted)
    assert not torch.equal(gradients(block, inputs, "L5", seed=4)[0], wanted[0])


def test_functional_gradients():
    block, inputs = block_and_input()
    named = {name: p.detach() for name, p in block.named_parameters()}

    def loss(named):
        return torch.func.functional_call(block, named, inputs).square().sum()

    wanted = dict(zip(named, gradients(block, inputs, "L0")[2:]))
    for block.save in LEVELS:
        got = torch.func.grad(loss)(named)
        for name, grad in wanted.items():
            torch.testing.assert_close(got[name], grad)


def test_one_block_used_twice_and_a_graph_used_twice():
    block, inputs = block_and_input("dropout")

    def run(level):
        block.save = level
        torch.manual_seed(2)
        y = block(block(*inputs), *inputs[1:]).square().sum()
        y.backward(retain_graph=True)
        first = taken(block, inputs)
        y.backward()
        assert_same_bits(taken(block, inputs), first)
        return first

    wanted = run("L0")
    for level in DROPS:
        assert_same_bits(run(level), wanted)


def test_a_backward_that_raises_leaves_nothing():
    block, inputs = block_and_input()
    wanted = gradients(block, inputs, "L0")

    class Fails(Exception):
        pass

    def fail(*_):
        raise Fails

    def live():
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    gc.collect()
    gc.freeze()
    for block.save in DROPS:
        gradients(block, inputs)
        before = live()
        handle = block.attention.qkv.weight.register_hook(fail)
        with pytest.raises(Fails):
            (block(*inputs) ** 2).sum().backward()
        handle.remove()
        taken(block, inputs)
        assert_same_bits(gradients(block, inputs), wanted)
        gc.collect()  # the exception's traceback; and torch keeps the graph until the next pass
        assert live() == before, block.save


@pytest.mark.parametrize("level", ["L2", "L5"])
def test_compile(level):
    block, inputs = block_and_input()
    wanted = gradients(block, inputs, "L0")
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = gradients(compiled, inputs, level)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_deep_copies_and_the_state_are_as_usual():
    block, inputs = block_and_input(save="L4")
    assert copy.deepcopy(block).save == "L4"
    assert not any("save" in name for name in block.state_dict())
    assert isinstance(block, Block) and "save=L4" in repr(block)

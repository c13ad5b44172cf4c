"""What a block keeps at each level, in bytes, and what it multiplies again for it."""

from __future__ import annotations

import functools

import pytest
import torch
from headroom.nn import LEVELS
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers.bits import assert_same_bits
from helpers.blocks import DROPS, block_and_input, gradients, taken
from helpers.kept import kept_bytes


def formula(block, level):
    """Bytes per token, in 16 bits, beyond what the statistics of norms take."""
    attention, mlp = block.attention, block.mlp
    h, a = attention.out.out_features, attention.heads * attention.head_dim
    k, g = attention.kv_heads * attention.head_dim, mlp.first.out_features
    behind = {"pre": 0, "parallel": 0, "post": 2 * h, "sandwich": 2 * h}[block.layout]
    x2 = 0 if block.layout in ("parallel", "post") else h
    elements = {
        "L1": h + (a + 2 * k) + a + x2 + g + behind,
        "L2": h + (a + 2 * k) + a + x2 + behind,
        "L3": h + a + x2 + behind,
        "L4": h + a + (behind // 2 if block.layout != "parallel" else 0),
        "L5": h,
    }[level]
    return 2 * elements + (4 * attention.heads if level != "L5" else 0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert", "gemma", "phi"])
def test_kept_bytes_are_those_of_the_formula(name):
    tokens = 64
    sizes = dict(hidden_size=256, features=384, head_dim=64)
    block, inputs = block_and_input(name, torch.bfloat16, 1, tokens, dropout=0.1, **sizes)
    x, rotation, pattern = inputs
    spared = [*block.parameters(), *(t for t in (rotation or ()) if t is not None)]
    spared += [pattern.mask] if pattern.mask is not None else []
    found = {}
    for block.save in LEVELS:
        found[block.save] = kept_bytes(lambda: block(*inputs), spared) / tokens
    for level in DROPS:
        assert found[level] == pytest.approx(formula(block, level), rel=0.01), (level, found)
    assert found["L0"] > found["L1"]


@pytest.mark.parametrize("level", ["L1", "L5"])
def test_memory_that_is_in_use_after_the_forward_pass(level):
    """By the allocator, of two blocks: nothing else holds what is dropped."""
    sizes = dict(hidden_size=256, features=384, head_dim=64, save=level)
    block, inputs = block_and_input("llama", torch.bfloat16, 1, 128, **sizes)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        y = block(block(*inputs), *inputs[1:])
    grown = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    assert grown / 128 / 2 == pytest.approx(formula(block, level), rel=0.01)
    del y


def test_kept_bytes_with_autocast():
    """Of two numbers of tokens, so that the copies of weights do not count."""
    found = []
    for tokens in (32, 64):
        sizes = dict(hidden_size=64, features=96, head_dim=16, save="L1")
        block, inputs = block_and_input("llama", torch.float32, 1, tokens, **sizes)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(kept_bytes(functools.partial(block, *inputs), inputs[1][:2]))
    # Both inputs of halves in 32 bits.
    assert (found[1] - found[0]) / 32 == pytest.approx(formula(block, "L1") + 2 * 2 * 64, rel=0.01)


def test_without_gradients_nothing_is_kept():
    block, inputs = block_and_input(save="L2")
    with torch.no_grad():
        assert kept_bytes(lambda: block(*inputs)) == 0
    frozen = (inputs[0].detach(), *inputs[1:])
    for p in block.parameters():
        p.requires_grad_(False)
    assert kept_bytes(lambda: block(*frozen)) == 0


def multiplied(block, inputs, run):
    """Multiplications of matrices in both passes, attention aside, per token."""
    with FlopCounterMode(display=False) as counter:
        run(*inputs).sum().backward()
    taken(block, inputs)
    counts = counter.get_flop_counts()["Global"]
    of_attention = sum(n for op, n in counts.items() if "attention" in str(op))
    return (sum(counts.values()) - of_attention) / 2 / inputs[0].shape[:-1].numel()


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_multiplied_again(fused):
    block, inputs = block_and_input()
    if not fused:
        block.mlp.down.register_forward_hook(lambda *_: None)
    full = multiplied(block, inputs, block)
    linears = block.attention.qkv, block.attention.out, block.mlp.first, block.mlp.down
    qkv, out, first, down = (linear.weight.numel() for linear in linears)
    assert full == 3 * (qkv + out + first + down)
    for level, again in {
        "L1": 0,
        "L2": first,
        "L3": first + qkv,
        "L4": first + qkv + out,
        "L5": first + qkv + out,
    }.items():
        block.save = level
        assert multiplied(block, inputs, block) - full == again, level


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "dropout"])
def test_a_checkpoint_computes_twice_and_not_thrice(name, reentrant):
    def run(*inputs):
        return checkpoint(block, *inputs, use_reentrant=reentrant)

    block, inputs = block_and_input()
    full = multiplied(block, inputs, block)
    wanted = multiplied(block, inputs, run)
    assert full < wanted <= full * 4 / 3
    for block.save in ("L2", "L5"):
        assert multiplied(block, inputs, run) == wanted
    block, inputs = block_and_input(name)
    wanted = gradients(block, inputs, "L0")
    block.save = "L5"
    torch.manual_seed(3)
    y = run(*inputs)
    (y**2).sum().backward()
    assert_same_bits([y.detach(), *taken(block, inputs)], wanted)

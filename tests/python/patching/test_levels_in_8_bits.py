"""Models that exist, with blocks that keep their inputs in 8 bits."""

from __future__ import annotations

import copy

import headroom
import pytest
import torch
from headroom.checkpointing import RecomputeError, checkpoint_every
from headroom.functional import dequantize_blocks, quantize_blocks
from headroom.patching.blocks import verified_blocks
from headroom.patching.patch import patch_call
from headroom.techniques.levels import RaisedLevels
from torch import nn

from helpers.bits import assert_same_bits
from helpers.kept import kept_bytes


class Layer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x, scale=1.0, mask=None):
        inner = torch.tanh(self.up(self.norm(x)))
        if mask is not None:
            inner = inner.masked_fill(mask, 0.0)
        return x + scale * self.down(inner)


class Stack(nn.Module):
    def __init__(self, layers=4, width=64):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x, **options):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, **options)
        return x


def stack():
    torch.manual_seed(0)
    return Stack(), torch.randn(30, 64)


def gradients(model, x, **options):
    model.zero_grad()
    model(x, **options).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def rounded(x):
    codes, scales = quantize_blocks(x, is_signed=True, block_size=64)
    return dequantize_blocks(codes, scales, is_signed=True, block_size=64)


class Rounded(torch.autograd.Function):
    """The result for x, and the gradients for x rounded: the rule, in torch's own terms."""

    @staticmethod
    def forward(ctx, x, layer, options):
        ctx.x, ctx.layer, ctx.options = rounded(x), layer, options
        return layer(x, **options)

    @staticmethod
    def backward(ctx, dy):
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            ctx.layer(x, **ctx.options).backward(dy)
        return x.grad, None, None


@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "mask": torch.arange(192) % 3 == 0}])
def test_blocks_of_any_class(options):
    model, x = stack()
    other = copy.deepcopy(model)
    for layer in other.layers[:-1]:
        layer.forward = lambda x, layer=layer, **options: Rounded.apply(
            x, lambda x, **options: Layer.forward(layer, x, **options), options
        )
    wanted = gradients(other, x, **options)
    report = headroom.patch(model, save="L5:8bit", norms=False)
    assert report.levels == {**{f"layers.{k}": "L5:8bit" for k in range(3)}, "layers.3": "L5"}
    assert "3 blocks (Layer) at L5:8bit: layers.0 to layers.2" in str(report)
    assert_same_bits(gradients(model, x, **options), wanted)
    headroom.unpatch(model)
    exact = gradients(model, x, **options)
    assert not all(map(torch.equal, wanted, exact))
    for a, b in zip(wanted, exact):
        assert (a - b).norm() < 0.05 * b.norm()


def test_kept_bytes_of_blocks_of_any_class():
    model, x = stack()
    headroom.patch(model, save={k: "L5:8bit" for k in range(4)}, norms=False)
    found = kept_bytes(lambda: model(x), [*model.parameters(), x])
    assert found == pytest.approx(4 * x.numel() * 17 / 16, rel=0.01)


def test_inputs_that_require_no_gradient_stay():
    """Masks and the like, of which the blocks share one."""
    model, x = stack()
    layer = model.layers[0]
    bias = torch.full((30, 64), float("-inf"))
    seen = []

    def forward(x, bias):
        seen.append(bias)
        return Layer.forward(layer, x) + bias.exp()

    y = headroom.checkpoint(forward, model.first(x), bias, in_8_bits=True)
    y.sum().backward()
    assert len(seen) == 2 and torch.equal(seen[1], bias)


@pytest.mark.parametrize("level", ["L5:8bit", "L5:8bit@host"])
def test_layers_of_transformers(level, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("headroom.host.saved.MIN_BYTES", 64)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(50, (2, 19), generator=torch.Generator().manual_seed(1))

    def run(save):
        headroom.patch(model, save=save)
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        return [out.loss.detach(), *(p.grad.clone() for p in model.parameters())]

    exact = run("L5")
    found = run(level)
    assert_same_bits(found[:1], exact[:1])
    a, b = (torch.cat([g.flatten() for g in grads[1:]]) for grads in (found, exact))
    assert 0 < (a - b).norm() < 0.03 * b.norm()
    assert_same_bits(found, run("L5:8bit"))
    headroom.unpatch(model)


def test_verifying_is_refused():
    model, x = stack()
    with pytest.raises(ValueError, match="layers.0, and verify is in checkpoint_options, but what"):
        headroom.patch(model, save="L5:8bit", checkpoint_options={"verify": True})
    assert "forward" not in vars(model.layers[0])  # as it was
    with pytest.raises(ValueError, match="verify and in_8_bits are both set"):
        headroom.checkpoint(model, x.requires_grad_(), verify=True, in_8_bits=True)
    with pytest.raises(RuntimeError, match="create_graph=True reached a block that keeps its inpu"):
        headroom.patch(model, save="L5:8bit", norms=False)
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_what_verifies_others_leaves_them_alone():
    model, x = stack()
    headroom.patch(model, save=["L5:8bit", "L5", "L5:8bit", "L0"], norms=False)
    with verified_blocks():
        found = gradients(model, x)
    assert_same_bits(gradients(model, x), found)
    calls = []
    model.layers[1].norm.register_forward_hook(lambda *_: calls.append(1) or _[2] * len(calls))
    with verified_blocks(), pytest.raises(RecomputeError):
        gradients(model, x)


def test_combinations_that_are_none():
    model, _ = stack()
    for save in ("L0:8bit", {1: "L2:8bit"}, [*["L5"] * 3, "L1:8bit"]):
        with pytest.raises(
            ValueError, match=r"headroom.patch: save is 'L.:8bit' for layers\.\d, b"
        ):
            headroom.patch(model, save=save)
    with pytest.raises(ValueError, match="save is 5 for layers.2, wanted one of L0"):
        headroom.patch(model, save={2: 5})


def test_a_retry_raises_no_block_to_8_bits():
    model, _ = stack()
    raised = RaisedLevels(model)
    assert "4 blocks raised from L0 to L5" in raised.reduce_memory()
    assert raised.reduce_memory() is None
    headroom.patch(model, save=["L5:8bit", "L0", "L5:8bit@host", "L0@host"], norms=False)
    raised = RaisedLevels(model)
    assert "2 blocks raised" in raised.reduce_memory()
    levels = patch_call(model)["save"]
    assert [*levels.values()] == ["L5:8bit", "L5", "L5:8bit@host", "L5@host"]
    assert raised.reduce_memory() is None


def test_checkpoint_every_leaves_the_last_block():
    model, x = stack()
    handle = checkpoint_every(model, in_8_bits=True)
    found = kept_bytes(lambda: model(x), [*model.parameters(), x])
    handle.remove()
    assert found == pytest.approx((3 * 17 / 16 + 4) * x.numel(), rel=0.01)

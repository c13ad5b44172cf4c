"""What is saved for backward is listed to the byte, and nothing is left changed."""

import functools

import headroom
import pytest
import torch
from headroom.memory import saved, track
from headroom.step import PlanError
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _model(blocks=2):
    return nn.Sequential(*(Block() for _ in range(blocks)))


def _tracked(model, run):
    """Bytes of activations at the end of the forward pass, which is measured another way."""
    with track(model) as tracked:
        run().backward()
    timeline = tracked.timeline
    start = next(span.start for span in timeline.spans if span.phase == "backward")
    return timeline.by_kind(start - 1)["activations"]


def test_rows_of_a_block():
    model, x = _model(1), torch.randn(8, 32)
    table = saved(model, x)
    rows = {(t.module, t.op): (t.shape, t.bytes) for t in table.tensors}
    assert rows == {
        ("0.norm", "NativeLayerNormBackward0.result1"): ((8, 1), 32),
        ("0.norm", "NativeLayerNormBackward0.result2"): ((8, 1), 32),
        ("0.up", "AddmmBackward0.mat1"): ((8, 32), 1024),
        ("0", "GeluBackward0.self"): ((8, 128), 4096),
        ("0.down", "AddmmBackward0.mat1"): ((8, 128), 4096),
    }
    assert table.by_module(1) == {"0": 9280}


def test_views_and_shared_storages_count_once():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x):
            y = (x * self.weight).exp()
            return (y[:, :8] * y[:, 8:]).sum() + y.sin().sum()

    x = torch.randn(4, 16)
    table = saved(Shared(), x)
    assert [t.bytes for t in table.tensors] == [4 * 64]
    assert table.tensors[0].uses == 4
    assert table.tensors[0].op == "ExpBackward0.result, MulBackward0.other, MulBackward0.self" or {
        *table.tensors[0].op.split(", ")
    } == {"ExpBackward0.result", "MulBackward0.self", "MulBackward0.other", "SinBackward0.self"}


@pytest.mark.parametrize("way", ["plain", "checkpoint", "every", "blocks L0", "blocks L2"])
def test_the_sum_is_what_the_tracker_sees(way):
    if way.startswith("blocks"):
        config = headroom.nn.TransformerConfig(
            vocab_size=32, hidden_size=32, layers=2, heads=2, features=64
        )
        model = headroom.nn.Transformer(config, save=way.split()[1])
        x = torch.randint(32, (2, 8))
    else:
        model, x = _model(4), torch.randn(8, 32)
        if way == "checkpoint":
            for block in model:
                block.forward = functools.partial(headroom.checkpoint, block.forward)
        if way == "every":
            headroom.checkpoint_every(model, n=2)
    table = saved(model, x)
    seen = _tracked(model, lambda: model(x).sum())
    # Statistics of norms that a block dropped may wait for Python's collector of cycles.
    waiting = {0, 2 * 4 * x.numel()} if way == "blocks L2" else {0}
    assert table.bytes > 0 and seen - table.bytes in waiting
    if way in ("checkpoint", "every"):
        assert any(t.op == "held by a hook" for t in table.tensors)


def test_losses_and_batches():
    model, x, y = _model(1), torch.randn(8, 32), torch.randint(32, (8,))
    alone = saved(model, x).bytes
    with_loss = saved(model, (x, y), F.cross_entropy)
    assert with_loss.bytes - alone == 4 * 8 * 32 + 4  # log-softmax, and the total weight
    assert saved(model, {"input": x}).bytes == alone
    assert saved(model, [x]).bytes == alone
    assert saved(model, x, lambda out: out.square().mean()).bytes == alone + 4 * 8 * 32


def test_table_fits_a_terminal():
    text = str(saved(_model(12), torch.randn(8, 32)))
    assert max(map(len, text.splitlines())) <= 80
    assert "12  *.down" in text
    assert "more rows" in saved(_model(12), torch.randn(8, 32)).table(top=2)


def _bits(model):
    tensors = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    return [t.detach().clone() for t in [*tensors, *(p.grad for p in model.parameters())]]


def _hooks(model):
    return [
        {key: dict(value) for key, value in vars(m).items() if "hook" in key and value}
        for m in model.modules()
    ] + [torch._C._autograd._top_saved_tensors_default_hooks(True)]


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_as_before(raises):
    class Failing(nn.Module):
        def forward(self, x):
            if raises:
                raise KeyboardInterrupt
            return x

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Failing())
    plain = model[:3](torch.randn(4, 8))
    plain.sum().backward()
    before, hooks = _bits(model), _hooks(model)
    if raises:
        with pytest.raises(KeyboardInterrupt):
            saved(model, torch.randn(4, 8))
    else:
        x = torch.randn(4, 8)
        before[-1 - sum(1 for _ in model.parameters())] = torch.get_rng_state()
        saved(model, x)
    after = _bits(model)
    assert len(before) == len(after)
    random = len(before) - 1 - sum(1 for _ in model.parameters())
    for k, (a, b) in enumerate(zip(before, after)):
        assert torch.equal(a, b) or (raises and k == random)  # the batch was drawn since
    assert _hooks(model) == hooks


def test_bad_inputs():
    model, x = _model(1), torch.randn(8, 32)
    model(x).sum().backward()  # gradients that must stay
    on_meta = _model(1).to("meta")
    before = _bits(model), _hooks(model)
    with pytest.raises(TypeError, match="model is function, wanted a torch.nn.Module"):
        saved(lambda x: x, x)
    with pytest.raises(TypeError, match="loss is int, wanted a function"):
        saved(model, x, 3)
    with pytest.raises(PlanError, match=r"the loss has shape \[8, 32\], wanted a tensor of one"):
        saved(model, x, lambda y: y)
    with pytest.raises(PlanError, match="the loss is a float, wanted a tensor of one element"):
        saved(model, x, lambda y: 1.0)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        saved(model, torch.zeros(8, 33))
    with pytest.raises(ValueError, match="on the meta device"):
        saved(on_meta, x)
    state = _bits(model), _hooks(model)
    assert all(map(torch.equal, before[0], state[0])) and before[1] == state[1]
    with pytest.raises(ValueError, match="requires no gradient"):
        saved(model.requires_grad_(False), x)

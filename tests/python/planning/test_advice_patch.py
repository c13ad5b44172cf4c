"""Advice to patch a model: the bytes are those of the model patched for real, and the user's model
stays as it was."""

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.memory import track
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(48, 1e-6)
        self.w1, self.w3 = nn.Linear(48, 112, bias=False), nn.Linear(48, 112, bias=False)
        self.w2 = nn.Linear(112, 48, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def summed(model, x):
    return model(x).float().square().mean()


def own_loss(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def peak_of_steps(model, x, loss):
    optimizer = headroom.optim.AdamW(model.parameters())
    with track(model, optimizer, batch=x, stacks=False) as tracked:
        for _ in range(2):
            loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracked.peak_bytes


def check(model, x, loss):
    optimizer = headroom.optim.AdamW(model.parameters())
    before = [sorted(vars(module)) for module in model.modules()]
    values = [p.detach().clone() for p in model.parameters()]
    seed = torch.get_rng_state()
    plan = headroom.plan(model, optimizer, x, forward=loss)
    advice = {a.name: a for a in plan.advice() if a.name.startswith("headroom.patch")}
    assert before == [sorted(vars(module)) for module in model.modules()]
    assert all(map(torch.equal, values, model.parameters()))
    assert torch.equal(seed, torch.get_rng_state())
    for found in advice.values():
        exec(found.code, {"headroom": headroom, "model": model})
        assert found.plan.peak_bytes == plan.total_bytes - found.bytes
        real = min(peak_of_steps(model, x, loss) for _ in range(2))
        assert found.plan.peak_bytes == pytest.approx(real, rel=0.01), found.name
        headroom.unpatch(model)
    return advice


def test_norms():
    model = nn.Sequential(*(Gated() for _ in range(3)))
    assert list(check(model, torch.randn(200, 48), summed)) == ["headroom.patch(model)"]


def test_nothing_to_patch():
    assert not check(nn.Linear(48, 48), torch.randn(20, 48), summed)
    model = nn.Sequential(*(Gated() for _ in range(2)))
    headroom.patch(model)  # once is enough
    plan = headroom.plan(model, None, torch.randn(200, 48), forward=summed)
    assert not any(a.name.startswith("headroom.patch") for a in plan.advice())


@pytest.mark.slow
def test_levels_of_a_model_of_transformers():
    tf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "intermediate_size": 112, "num_attention_heads": 3}
    config = tf.LlamaConfig(**sizes, vocab_size=89, num_hidden_layers=3)
    advice = check(tf.LlamaForCausalLM(config), torch.randint(89, (3, 70)), own_loss)
    assert {"headroom.patch(model)", "headroom.patch(model, save='L3')"} <= set(advice)
    ids = torch.randint(89, (3, 70))
    plan = headroom.plan(config, headroom.optim.AdamW, ids, forward=own_loss, device="cpu")
    names = {a.name for a in plan.advice()}  # on the meta device
    assert "headroom.patch(model, save='L3')" in names

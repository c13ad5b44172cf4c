"""LoRA+ of PEFT."""

import sys

import headroom
import pytest
import torch
from torch import nn


@pytest.fixture
def no_bitsandbytes(monkeypatch):
    for module in [module for module in sys.modules if module.startswith("bitsandbytes")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit"])
def test_lora_plus_needs_no_bitsandbytes(name, no_bitsandbytes):
    """PEFT imports it for classes with the names of bitsandbytes' own."""
    peft = pytest.importorskip("peft")
    from peft.optimizers import create_loraplus_optimizer

    cls = getattr(headroom.optim, name)
    base = nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 3))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], r=8))
    options = {"lr": 1e-3, "loraplus_lr_ratio": 16.0}

    def make(params, **options):
        return cls(params, **options)

    optimizer = create_loraplus_optimizer(model, make, **options, nonfinite="skip_element")
    assert type(optimizer) is cls and optimizer.defaults["nonfinite"] == "skip_element"
    x = torch.randn(8, 600)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    rates = {
        name: group["lr"]
        for name, p in model.named_parameters()
        for group in optimizer.param_groups
        if any(p is other for other in group["params"])
    }
    assert {"lora_B" in name: lr for name, lr in rates.items()} == {True: 16e-3, False: 1e-3}
    assert {v["exp_avg"].dtype for v in optimizer.state.values()} == {torch.uint8}
    with pytest.raises(ImportError, match="bitsandbytes"):  # what it is for
        create_loraplus_optimizer(model, cls, **options)


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit"])
def test_classes_are_called_what_users_call_them(name):
    cls = getattr(headroom.optim, name)
    optimizer = cls([nn.Parameter(torch.ones(3))])
    assert cls.__name__ == name and repr(optimizer).startswith(f"{name} (")
    with pytest.raises(ValueError, match=f"^{name} takes parameters in"):
        cls([nn.Parameter(torch.ones(3, dtype=torch.float64))])

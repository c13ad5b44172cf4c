"""What fit() has changed of a model is taken back."""

import headroom
import pytest
import torch
from torch import nn

mse_loss = nn.functional.mse_loss


class Mixed(nn.Module):
    """Trains one layer; others are frozen, in several dtypes, with a buffer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.frozen, self.trained = nn.Linear(16, 16), nn.Linear(16, 16)
        self.frozen.requires_grad_(False).to(dtype)
        self.register_buffer("shift", torch.randn(16, dtype=dtype))

    def forward(self, x):
        x = self.frozen(x.to(self.frozen.weight.dtype)) + self.shift
        return self.trained(x.to(self.trained.weight.dtype)).float()


def fitted(model, **options):
    torch.manual_seed(1)
    batch = torch.randn(7, 16), torch.randn(7, 16)
    params = [p for p in model.parameters() if p.requires_grad]
    found = headroom.fit(
        model,
        batch,
        budget="1 GiB",
        loss=mse_loss,
        optimizer=torch.optim.AdamW(params),
        choice={"optimizer": "headroom", "weights": "bf16", "levels": []},
        **options,
    )
    return found, batch


def test_states_that_hold_bits_of_weights_are_planned_before_the_first_step():
    found, _ = fitted(Mixed())
    assert found.optimizer.state  # the fitted optimizer has them
    begins = found.plan.timeline.spans[0].start
    kinds = ("optimizer_state", "master_weights")
    states = [a for a in found.plan.timeline.allocations if a.kind in kinds]
    held = sum(x.nbytes for state in found.optimizer.state.values() for x in state.values())
    assert sum(a.bytes for a in states if a.start < begins) == held


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_weights_in_bfloat16_get_their_dtypes_back(dtype):
    """Frozen ones are rounded, which is said."""
    torch.manual_seed(0)
    model = Mixed(dtype)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found, batch = fitted(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert any("lacks are rounded" in note for note in found.notes) == (dtype.itemsize > 2)
    loss = found.step(batch)
    assert found.measured_peak <= found.predicted_peak + 16 and loss.isfinite()  # of losses
    found.undo()
    for name, x in model.state_dict().items():
        assert x.dtype == before[name].dtype, name
        if not name.startswith("trained"):
            assert torch.equal(x, before[name].bfloat16().to(x.dtype)), name


def test_a_weight_that_only_others_train_keeps_its_gradient():
    torch.manual_seed(0)
    model = Mixed(torch.float64)
    params = list(model.trained.parameters())
    model.frozen.requires_grad_(True)
    found = headroom.fit(
        model,
        (torch.randn(7, 16), torch.randn(7, 16)),
        budget="1 GiB",
        loss=mse_loss,
        optimizer=torch.optim.AdamW(params),
        choice={"optimizer": "headroom", "weights": "bf16"},
    )
    model(torch.randn(7, 16)).square().mean().backward()
    gradient = model.frozen.weight.grad
    found.undo()
    assert gradient.dtype == torch.bfloat16
    assert model.frozen.weight.grad.dtype == torch.float64
    assert torch.equal(model.frozen.weight.grad, gradient.double())

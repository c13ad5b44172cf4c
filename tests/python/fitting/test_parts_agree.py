"""Batches are parted only where a step of the parts is a step of the batch."""

import pytest
import torch
import torch.nn.functional as F
from headroom.fitting.setting import Setting
from headroom.fitting.shares import rule_of, rules_of
from torch import nn

WIDTH = 5


class Model(nn.Module):
    """A Linear, with what a kind of model does besides in training.

    Args:
        does: is called with the model and the hidden states.
        draws: there is dropout.
    """

    def __init__(self, does=None, draws=False):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.dropout = nn.Dropout(0.5 if draws else 0.0)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self._does = does

    def forward(self, x, y, *others):
        x = self.dropout(self.first(x))
        if self._does is not None:
            x = self._does(self, x, *others)
        return F.mse_loss(self.last(x), y)


def averages(model, x):
    if model.training:
        model.mean.lerp_(x.detach().mean(0), 0.1)
    return x - model.mean


def averages_unused(model, x):
    if model.training:
        model.mean.lerp_(x.detach().mean(0), 0.1)
    return x


def counts(model, x):
    model.calls += int(model.training)
    return x


def centers(model, x):
    return x - x.mean(0) if model.training else x


def centers_a_little(model, x):
    return x - 1e-4 * x.mean(0)


def constant(model, x):
    model.mean = torch.ones_like(model.mean)  # the same each time
    return x + model.mean


def scaled_in_training(model, x):
    return x * (2.0 if model.training else 1.0)


def masked(model, x, mask):
    return mask @ x  # of as many rows and columns as there are samples


def rule_for(does, draws=False, dtype=torch.float32):
    torch.manual_seed(3)
    batch = torch.randn(6, WIDTH, dtype=dtype) + 1, torch.randn(6, 1, dtype=dtype)
    if does is masked:
        batch = *batch, torch.randn(6, 6, dtype=dtype)
    setting = Setting(Model(does, draws).to(dtype), batch)
    state = [x.clone() for x in setting.model.state_dict().values()]
    random = torch.get_rng_state()
    found = rule_of(setting, 3, rules_of(setting))
    assert all(map(torch.equal, state, setting.model.state_dict().values()))
    assert torch.equal(random, torch.get_rng_state()) and setting.model.training
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("does", [None, constant, scaled_in_training])
@pytest.mark.parametrize("draws", [False, True])
def test_models_whose_batches_can_be_parted(does, draws, dtype):
    assert rule_for(does, draws, dtype) == "samples"


def penalized(model, batch):
    """A loss with a gradient in it, such as a force."""
    x = batch[0].clone().requires_grad_()
    loss = model(x, batch[1])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + len(x) * slope.square().sum()


def test_a_loss_with_a_gradient_in_it():
    batch = torch.randn(6, WIDTH), torch.randn(6, 1)
    setting = Setting(Model(draws=True), batch, forward=penalized)
    assert rule_of(setting, 2, rules_of(setting)) == "samples"


@pytest.mark.slow  # imports transformers
def test_the_loss_of_a_router_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    tokens = torch.randint(50, (6, 5))
    setting = Setting(model, {"input_ids": tokens, "labels": tokens})
    assert rule_of(setting, 2, rules_of(setting)) == "next tokens"
    asked = setting.but(batch={**setting.batch, "output_router_logits": True})
    assert rule_of(asked, 2, rules_of(asked)) is None
    config.output_router_logits = True
    assert rule_of(setting, 2, rules_of(setting)) is None


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("does", [averages, averages_unused, counts, centers_a_little, masked])
def test_models_whose_batches_cannot(does, draws):
    assert rule_for(does, draws) is None


def test_a_loss_that_is_another_in_training():
    assert rule_for(centers) is None


def test_modules_that_are_in_evaluation_mode_stay_so():
    """A frozen norm moves no statistics."""
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    setting = Setting(model, (torch.randn(6, WIDTH), torch.randn(6, 1)), F.mse_loss)
    assert rule_of(setting, 2, rules_of(setting)) == "samples"
    model[1].train()
    assert rule_of(setting, 2, rules_of(setting)) is None


def test_an_error_of_the_batch_itself_is_raised():
    setting = Setting(Model(), (torch.randn(6, WIDTH + 1), torch.randn(6, 1)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        rule_of(setting, 2, rules_of(setting))

"""Batches are parted only where a step of the parts is a step of the batch."""

import dataclasses
import random
from types import SimpleNamespace

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.step.constant_rng import ConstantRandom
from headroom.step.rules import rule_of, rules_of
from torch import nn

from helpers.fitting import step_of

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
        self.register_buffer("calls", torch.tensor(10**6))
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


def keeps_a_row_of_each_sample(model, x):
    model.mean = torch.zeros(len(x))
    return x


def keeps_what_is_rounded(model, x):
    model.mean = 1 + 1e-9 * torch.full((2,), len(x), dtype=torch.float64)
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
    step = step_of(Model(does, draws).to(dtype), batch)
    state = [x.clone() for x in step.model.state_dict().values()]
    random = torch.get_rng_state()
    found = rule_of(step, rules_of(step))
    assert all(map(torch.equal, state, step.model.state_dict().values()))
    assert torch.equal(random, torch.get_rng_state()) and step.model.training
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("does", [None, constant, scaled_in_training, keeps_what_is_rounded])
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
    step = step_of(Model(draws=True), batch, forward=penalized)
    assert rule_of(step, rules_of(step)) == "samples"


@pytest.mark.slow  # imports transformers
def test_the_loss_of_a_router_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    tokens = torch.randint(50, (6, 5))
    step = step_of(model, {"input_ids": tokens, "labels": tokens})
    assert rule_of(step, rules_of(step)) == "next tokens"
    asked = step.but(batch={**step.batch, "output_router_logits": True})
    assert rule_of(asked, rules_of(asked)) is None
    config.output_router_logits = True
    assert rule_of(step, rules_of(step)) is None


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize(
    "does",
    [averages, averages_unused, counts, keeps_a_row_of_each_sample, centers_a_little, masked],
)
def test_models_whose_batches_cannot(does, draws):
    assert rule_for(does, draws) is None


def test_at_most_8_samples_in_uneven_parts_are_compared():
    seen = []

    def notes(model, x):
        seen.append(len(x))
        return x

    for rows, each in ((40, [8, 1, 2, 2, 3]), (7, [7, *[1] * 7]), (1, [1, 1])):
        step = step_of(Model(notes), (torch.randn(rows, WIDTH), torch.randn(rows, 1)))
        assert rule_of(step, rules_of(step)) == "samples" and seen == each
        seen.clear()


def ranks_neighbors(model, batch):
    """A loss of preferences, whose rows are chosen and rejected in turn."""
    scores = model.last(batch[0])
    return -F.logsigmoid(scores[0::2] - scores[1::2]).mean()


@pytest.mark.parametrize("rows", [2, 4, 8, 12, 16])
def test_a_loss_over_neighbors_is_not_parted(rows):
    batch = torch.randn(rows, WIDTH), torch.randn(rows, 1)
    step = step_of(Model(), batch, forward=ranks_neighbors)
    assert rule_of(step, rules_of(step)) is None  # a third of 12 rows would end within a pair


def test_gradients_that_vanish_without_a_scale():
    model = nn.Linear(WIDTH, 1).half()
    x = torch.randn(6, WIDTH).half()
    step = step_of(model, x, forward=lambda m, x: 3e-8 * m(x).float().square().mean())
    scaled = step.but(scaler=torch.amp.GradScaler("cpu"))
    assert rule_of(step, rules_of(step)) is None
    assert rule_of(scaled, rules_of(scaled)) == "samples"


class Routed(Model):
    """A model whose configuration may ask for the loss of a router."""

    def __init__(self, asks, coefficient):
        super().__init__()
        self.config = SimpleNamespace(output_router_logits=asks, router_aux_loss_coef=coefficient)

    def forward(self, x, y, output_router_logits=False):
        return super().forward(x, y)


def test_a_loss_of_a_router_is_not_parted():
    batch = {"x": torch.randn(6, WIDTH), "y": torch.randn(6, 1)}
    asked = batch | {"output_router_logits": True}
    for asks, coefficient, given, rule in (
        (True, 1e-3, batch, None),
        (False, 1e-3, asked, None),
        (False, 1e-3, batch, "samples"),
        (True, 0.0, asked, "samples"),
    ):
        step = step_of(Routed(asks, coefficient), given)
        assert rule_of(step, rules_of(step)) == rule


class OfTransformers(nn.Module):
    __module__ = "transformers.models.any"


def test_the_likeliest_rule_comes_first():
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    named = {
        name: type(name, (OfTransformers,), {"__module__": OfTransformers.__module__})()
        for name in ("AnyForCausalLM", "AnyLMHeadModel", "AnyForMaskedLM")
    }
    config = headroom.nn.TransformerConfig(
        vocab_size=9, hidden_size=8, layers=1, heads=1, features=8
    )
    causal = headroom.nn.Transformer(config)
    both = headroom.nn.Transformer(dataclasses.replace(config, causal=False))
    shifted, plain = ("next tokens", "tokens", "samples"), ("tokens", "samples", "next tokens")
    for model, rules in (
        (named["AnyForCausalLM"], shifted), (named["AnyLMHeadModel"], shifted), (causal, shifted),
        (nn.Sequential(causal), shifted), (named["AnyForMaskedLM"], plain), (both, plain),
        (Model(), plain), (type("AnyForCausalLM", (nn.Module,), {})(), plain),
    ):  # fmt: skip
        step = step_of(model, {"x": tokens, "labels": tokens})
        assert rules_of(step) == rules
        assert rules_of(step.but(loss=len)) == rules_of(step.but(forward=len)) == plain
        assert rules_of(step.but(batch={"x": tokens})) == ("samples",)


def test_a_loss_that_is_another_in_training():
    assert rule_for(centers) is None


def test_modules_that_are_in_evaluation_mode_stay_so():
    """A frozen norm moves no statistics."""
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    step = step_of(model, (torch.randn(6, WIDTH), torch.randn(6, 1)), F.mse_loss)
    assert rule_of(step, rules_of(step)) == "samples"
    model[1].train()
    assert rule_of(step, rules_of(step)) is None


def test_a_batch_that_cannot_be_run_is_not_parted():
    """What measures it next says why."""
    assert rule_of(step_of(Model(), (torch.randn(6, 4), torch.randn(6, 1))), ("samples",)) is None


class Policy(nn.Module):
    """A loss that is 0 in value, for the batch and every part, as where a policy is the one that
    has acted.

    Args:
        normalizes: advantages over the batch.
    """

    def __init__(self, normalizes):
        super().__init__()
        self.net, self._normalizes = nn.Linear(WIDTH, 3), normalizes

    def forward(self, x, acted, advantage):
        if self._normalizes:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-4)
        log = self.net(x).log_softmax(-1).gather(1, acted[:, None])[:, 0]
        ratio = (log - log.detach()).exp()
        return -(ratio * advantage).mean() + advantage.mean()


@pytest.mark.parametrize("rows", [8, 40])
def test_losses_that_are_zero_are_compared_by_their_gradients(rows):
    batch = torch.randn(rows, WIDTH), torch.randint(3, (rows,)), torch.rand(rows) + 1
    for normalizes, rule in ((True, None), (False, "samples")):
        step = step_of(Policy(normalizes), batch)
        loss = float(step.loss_of(step.model, batch).detach())
        assert abs(loss) < 1e-6
        assert rule_of(step, rules_of(step)) == rule


def test_a_sum_that_is_next_to_nothing_is_no_mean():
    model, batch = nn.Linear(WIDTH, 1).double(), torch.randn(8, WIDTH).double()
    step = step_of(model, batch, forward=lambda m, x: 1e-9 * m(x).square().sum())
    assert rule_of(step, rules_of(step)) is None
    assert rule_of(step, ("samples", "sum")) == "sum"


def test_a_loss_without_a_gradient_tells_nothing():
    step = step_of(Model(), (torch.randn(6, WIDTH), torch.randn(6, 1)))
    for scale in (0.0, float("inf")):
        nothing = step.but(forward=lambda m, b, scale=scale: scale * m(*b))
        assert rule_of(nothing, ("samples",)) is None


def standardized(model, x):
    return (x - x.mean(0)) / (x.std(0) + 1e-5) if model.training else x


@pytest.mark.parametrize("rows", [6, 33])
def test_a_batch_that_is_standardized_besides_dropout(rows):
    """Random numbers hide nothing: all samples get the same."""
    for does, rule in ((standardized, None), (None, "samples")):
        step = step_of(Model(does, draws=True), (torch.randn(rows, WIDTH), torch.randn(rows, 1)))
        assert rule_of(step, rules_of(step)) == rule


class Beside(nn.Module):
    """A small loss over pairs of samples, beside a large one, on a head of its own."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head, self.pairs = (nn.Linear(WIDTH, n) for n in (WIDTH, 1, 3))

    def forward(self, x, y):
        x = self.trunk(x).tanh()
        pairs = self.pairs(x)
        near = F.cross_entropy(pairs @ pairs.mT, torch.arange(len(x)))
        return 1e3 * F.mse_loss(self.head(x), y) + near


def test_each_parameter_is_compared_at_its_own_scale():
    step = step_of(Beside(), (torch.randn(8, WIDTH), torch.randn(8, 1)), amp=torch.bfloat16)
    assert rule_of(step, rules_of(step)) is None


class Shifted(nn.Module):
    """Has a parameter that a norm takes away, whose gradient is what rounding leaves of zero."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(64, 1))
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 10)

    def forward(self, x, y):
        x = self.norm(x + 8 * self.shift)
        return F.cross_entropy(self.head(x.tanh().mean(1)), y)


def test_what_rounding_leaves_of_zero_is_no_difference():
    torch.manual_seed(0)
    step = step_of(Shifted(), (torch.randn(8, 64, 256), torch.randint(10, (8,))))
    assert rule_of(step, rules_of(step)) == "tokens"


def noise(model, x):
    return x + torch.randn_like(x)


def noise_of_transposed(model, x):
    return F.dropout(x.mT, 0.3).mT


def one_number(model, x):
    return x * (1 + torch.rand(()))


def given_mask(model, x):
    kept, mask = torch.native_dropout(x, 0.4, True)
    return kept


def flattened(model, x):
    return F.dropout(x[:, None].expand(-1, 3, -1).reshape(-1, WIDTH), 0.5).view(-1, 3, WIDTH).sum(1)


def with_its_own(model, x):
    made = vars(model).setdefault("generator", torch.Generator().manual_seed(3))
    return x + torch.rand(x.shape, generator=made)


def chosen(model, x):
    return x * torch.arange(1, 4)[torch.randint(3, (len(x), 1))]


@pytest.mark.parametrize(
    "does",
    [noise, noise_of_transposed, one_number, given_mask, flattened, with_its_own, chosen],
)
@pytest.mark.parametrize("rows", [7, 33])
def test_random_numbers_that_are_the_same_for_all_samples(does, rows):
    step = step_of(Model(does, draws=True), (torch.randn(rows, WIDTH), torch.randn(rows, 1)))
    assert rule_of(step, rules_of(step)) == "samples"


def test_dropout_keeps_all_and_scales_it_in_training_alone():
    x = torch.arange(6.0)
    with ConstantRandom():
        for train, factor in ((True, 4), (None, 4), (False, 1)):
            kept, mask = torch.native_dropout(x, 0.75, train)
            assert torch.equal(kept, factor * x) and mask.all()


def weighed_by_chance(model, x):
    return x * torch.bernoulli(torch.sigmoid(x.detach()))  # depends on values


def permuted(model, x):
    return x[torch.randperm(len(x))].cumsum(0)


def with_numpy(model, x):
    np = pytest.importorskip("numpy")
    return x + torch.from_numpy(np.random.rand(*x.shape)).to(x)


def with_python(model, x):
    return x + torch.tensor([random.random() for _ in range(len(x))])[:, None]


@pytest.mark.parametrize("does", [weighed_by_chance, permuted, with_numpy, with_python])
def test_random_numbers_that_parts_cannot_get(does):
    step = step_of(Model(does), (torch.randn(6, WIDTH), torch.randn(6, 1)))
    assert rule_of(step, rules_of(step)) is None


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_blocks_that_drop_again_what_they_dropped(amp):
    """At the level at which they run twice."""
    config = headroom.nn.TransformerConfig(
        vocab_size=50, hidden_size=16, layers=2, heads=2, features=24, dropout=0.1,
        attention_dropout=0.1, embedding_dropout=0.1,
    )  # fmt: skip
    encoder = [nn.TransformerEncoderLayer(16, 2, 24, batch_first=True) for _ in range(2)]
    tokens = torch.randint(50, (6, 9))
    models = headroom.nn.Transformer(config), nn.Sequential(nn.Embedding(50, 16), *encoder)
    for model in models:
        step = step_of(model, tokens, forward=lambda m, x: m(x).sin().mean(), amp=amp)
        assert rule_of(step, ("samples",)) == "samples"

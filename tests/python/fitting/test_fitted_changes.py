"""A Fitted whose choice is changed later: batches are cut only where parts add up, and what it says
is of the choice that it has."""

import json

import headroom
import pytest
import torch
from headroom.fitting import Choice
from torch import nn
from torch.nn import functional as F

WIDTH = 16


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def sgd(params):
    return torch.optim.SGD(params, lr=1e-2)


def contrastive(output):
    output = F.normalize(output, dim=-1)
    return F.cross_entropy(5 * output @ output.T, torch.arange(len(output)))


def mean(output):
    return output.square().mean()


def fitted_to(loss, batch=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(4)))
    batch = torch.randn(32, WIDTH) if batch is None else batch
    options = {"budget": "1 GiB", "optimizer": sgd, **options}
    return headroom.fit(model, batch, loss=loss, **options), batch


def leanest(fitted):
    seen = 0
    while fitted.reduce_memory():
        seen += 1
        assert seen < 30
    return fitted


@pytest.mark.parametrize("choice", [None, {}])
def test_losses_that_do_not_add_up_are_not_cut(choice):
    """The search need not have looked at micro-batches: the budget has room for the whole batch."""
    fitted, batch = fitted_to(contrastive, choice=choice)
    before = [x.clone() for x in fitted.model.state_dict().values()]
    random = torch.get_rng_state()
    assert leanest(fitted).choice.micro_batches == 1
    assert torch.equal(random, torch.get_rng_state()) and fitted.model.training
    assert all(map(torch.equal, before, fitted.model.state_dict().values()))
    assert all(p.grad is None for p in fitted.model.parameters())
    assert sum("do not add up" in note for note in fitted.notes) == 1
    assert not fitted.reduce_memory()  # and the batch is not compared again
    with torch.no_grad():
        expected = contrastive(fitted.model(batch))
    assert torch.equal(fitted.step(batch), expected)


def test_a_step_that_is_repeated_does_not_cut_them_either():
    fails = [False]

    def loss(output):
        if fails[0] and torch.is_grad_enabled():
            raise MemoryError("no room")
        return contrastive(output)

    fitted, batch = fitted_to(loss)
    fails[0] = True
    with pytest.raises(MemoryError, match="no leaner setting"), pytest.warns(UserWarning):
        headroom.retry_on_oom(fitted.step)(batch)
    assert fitted.choice.micro_batches == 1


def mean_of_sentences(output, labels):
    """Each sentence counts the same, whatever its length: labels alone do not say so."""
    each = F.cross_entropy(output.transpose(1, 2), labels, reduction="none")
    counted = labels.ne(-100)
    return ((each * counted).sum(1) / counted.sum(1)).mean()


@pytest.mark.parametrize("choice", [None, {}])
def test_batches_that_are_cut_later_have_the_loss_of_the_whole(choice):
    torch.manual_seed(0)
    labels = torch.randint(0, WIDTH, (8, 6))
    labels[:3, 2:] = -100
    batch = torch.randn(8, 6, WIDTH), labels
    fitted, _ = fitted_to(mean_of_sentences, batch, choice=choice)
    assert leanest(fitted).choice.micro_batches == 8
    with torch.no_grad():
        expected = mean_of_sentences(fitted.model(batch[0]), labels)
    assert fitted.rule == "samples"
    torch.testing.assert_close(fitted.step(batch), expected)


def test_no_memory_to_compare_parts_is_no_answer():
    fails = [True]

    def loss(output):
        if fails[0]:
            raise MemoryError("no room")
        return mean(output)

    fitted, _ = fitted_to(mean, choice={})
    fitted._step = fitted._step.but(loss=loss)
    assert not fitted.reduce_memory() and fitted.choice.micro_batches == 1
    fails[0] = False
    assert fitted.reduce_memory() and fitted.choice.micro_batches == 2


def says(fitted):
    return fitted.plan, fitted.predicted_peak, fitted.predicted_seconds, fitted.measured_peak


@pytest.mark.parametrize("choice", [None, {}])
def test_nothing_is_said_of_a_choice_that_nothing_is_known_of(choice):
    fitted, batch = fitted_to(mean, choice=choice)
    for _ in range(3):
        fitted.step(batch)
    assert fitted.plan.total_bytes == fitted.predicted_peak and fitted.measured_peak > 0
    assert fitted.measured_seconds > 0
    leanest(fitted)
    assert fitted.choice.micro_batches == 32
    assert says(fitted) == (None,) * 4 and fitted.measured_seconds is None
    assert fitted.next_up is None and fitted.next_down is None
    assert fitted.is_given == (choice is not None)
    lines = str(fitted).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert sum("changed since then to" in line for line in lines) == 1
    assert "next leaner" not in str(fitted)
    assert ("as was chosen before: as it is" in lines) == (choice is not None)
    told = json.loads(json.dumps(fitted.to_json()))
    nothing = {"peak_bytes": None, "seconds": None, "host_bytes": None}
    assert told["predicted"] == told["measured"] == nothing
    fitted.step(batch)
    assert fitted.measured_peak is not None


def test_levels_that_are_set_have_their_own_predictions():
    fitted, batch = fitted_to(mean)
    for _ in range(3):
        fitted.step(batch)
    levels = ("L5", "L0", "L5", "L5")
    fitted.set_levels(levels)
    assert fitted.plan is None and fitted.measured_peak is fitted.measured_seconds is None
    same, _ = fitted_to(mean, choice=fitted.choice)
    assert fitted.predicted_peak == pytest.approx(same.predicted_peak, rel=0.005)
    assert fitted.predicted_seconds > 0
    assert str(fitted).count("changed since then to: 1 L0, 3 L5") == 1


def test_leaner_levels_have_the_predictions_of_the_frontier():
    fitted, _ = fitted_to(mean)
    top = max(fitted.reachable, key=lambda point: point.peak)
    fitted._take(top)
    assert (fitted.predicted_peak, fitted.predicted_seconds) == (top.peak, top.seconds)
    if len(fitted.reachable) > 1:
        assert fitted.reduce_memory() and fitted.plan is None
        point = next(p for p in fitted.reachable if p.choice == fitted.choice)
        assert fitted.predicted_peak == point.peak < top.peak
        assert fitted.predicted_seconds == point.seconds


def released(**options):
    choice = Choice(("L0",) * 4, optimizer="headroom", release=True)
    return fitted_to(mean, optimizer=torch.optim.AdamW, choice=choice, **options)[0]


def test_the_bucket_is_the_one_that_gradients_are_released_in():
    fitted = released()
    bucket = sum(p.nbytes for p in fitted.model.parameters()) // 8
    assert fitted.bucket_bytes == bucket
    for param in fitted.model[0].parameters():
        param.requires_grad_(False)
    assert fitted.bucket_bytes == bucket  # what the hooks were registered with
    fitted.undo()
    assert fitted.bucket_bytes is None
    assert released(dry_run=True).bucket_bytes == bucket
    assert fitted_to(mean)[0].bucket_bytes is None

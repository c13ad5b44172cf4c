"""What is said where nothing fits: the batch that would."""

import pickle
import re
from types import SimpleNamespace

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom._core.sizes import format_bytes, parse_bytes
from headroom.fitting import Choice, DoesNotFit
from headroom.fitting.search.refusal import SMALLER, most_samples
from headroom.planning import PlanError
from torch import nn

from helpers.fitted_models import Images


def images(samples, *, trains_statistics=True):
    torch.manual_seed(0)
    model = Images(channels=12, depth=2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not trains_statistics:
            module.eval()
    return model, (torch.randn(samples, 3, 9, 9), torch.randint(5, (samples,)))


def total(output, target):
    return F.cross_entropy(output, target, reduction="sum")


def fitted(samples, budget, *, loss=F.cross_entropy, **options):
    model, batch = images(samples, **options)
    return headroom.fit(model, batch, budget=budget, loss=loss, dry_run=True)


class Line:
    """The candidates of a model whose plans are a line over samples, from which they are a little
    off; batches of fewer than ``least`` samples cannot be planned."""

    def __init__(self, samples, unit=1, slope=100, least=1):
        self.slope, self.least, self.asked = slope, least, []
        self.techniques = SimpleNamespace(
            micro_batches=(unit,),
            step=SimpleNamespace(batch=torch.zeros(samples, 1)),
            optimizer_of=lambda choice: None,
            choices=(Choice((), unit, release=True),),
        )
        whole = SimpleNamespace(peak=self.size(samples))
        self.every = [
            SimpleNamespace(
                choice=Choice((), unit), points=[whole], choice_of=lambda point: Choice((), unit)
            )
        ]

    def size(self, samples):
        return 1000 + self.slope * samples + samples * samples % 37

    def planned_with(self, choice, optimizer, samples):
        assert choice.release and samples % choice.micro_batches == 0
        self.asked.append(samples)
        if samples < self.least:
            raise PlanError("too few samples")
        return SimpleNamespace(total_bytes=self.size(samples))


@pytest.mark.parametrize("unit", [1, 3])
@pytest.mark.parametrize("samples", [6, 60, 6000])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.98])
def test_a_few_plans_find_the_most_samples(unit, samples, share):
    search = Line(samples, unit)
    within = int(search.size(unit) + share * (search.size(samples - 1) - search.size(unit)))
    found = most_samples(search, search.every, within)
    fits = [n for n in range(unit, samples, unit) if search.size(n) <= within]
    assert found == max(fits) and len(search.asked) <= SMALLER + 1
    assert len({*search.asked}) == len(search.asked)


def test_a_bent_line_is_halved_in_the_end():
    """Where the next guess along a line is always too small."""
    search = Line(6000)
    search.size = lambda samples: 1000 + samples**8
    within = search.size(3000)
    found = most_samples(search, search.every, within)
    assert 3000 - 6000 / 2 ** (SMALLER // 2) <= found <= 3000 and max(search.asked) < 6000


def test_no_batch_fits_a_budget_below_that_of_a_sample():
    search = Line(50)
    assert most_samples(search, search.every, search.size(1) - 1) is None and search.asked == [1]
    assert most_samples(Line(1), Line(1).every, 1 << 30) is None
    search = Line(50, least=2)  # a BatchNorm takes no single sample
    assert most_samples(search, search.every, search.size(2)) == 2


@pytest.mark.slow
def test_a_model_with_batch_norm_is_told_which_batch_fits():
    with pytest.raises(DoesNotFit) as raised:
        fitted(24, 2048)
    assert raised.value.samples is None and "batch of" not in str(raised.value)
    words = r"or a batch of \d+ samples, not 24 .*micro-batches: "
    budget = raised.value.least // 2
    with pytest.raises(DoesNotFit, match=words) as raised:
        fitted(24, budget)
    found = raised.value
    assert 1 < found.samples < 24
    assert fitted(found.samples, budget).predicted_peak <= budget
    assert pickle.loads(pickle.dumps(found)).samples == found.samples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "trains_statistics"), [(F.cross_entropy, True), (total, False)], ids=["norm", "sum"]
)
def test_one_sample_more_than_the_batch_that_would_fit_does_not(loss, trains_statistics):
    options = {"loss": loss, "trains_statistics": trains_statistics}
    with pytest.raises(DoesNotFit) as raised:
        fitted(24, 2048, **options)
    budget = raised.value.least // 2
    with pytest.raises(DoesNotFit) as raised:
        fitted(24, budget, **options)
    samples = raised.value.samples
    assert fitted(samples, budget, **options).predicted_peak <= budget
    with pytest.raises(DoesNotFit):
        fitted(samples + 1, budget, **options)


def test_a_loss_that_is_no_mean_is_offered_no_micro_batches():
    with pytest.raises(DoesNotFit, match="gradients of parts of a batch do not add up") as raised:
        fitted(24, 2048, loss=total, trains_statistics=False)
    assert "24 micro-batches" not in str(raised.value)


def test_the_error_says_what_would_fit():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(160, 160) for _ in range(6)))
    batch, mse_loss = (torch.randn(12, 160), torch.randn(12, 160)), F.mse_loss
    held = 3 * sum(p.nbytes for p in model.parameters())  # and the states of AdamW

    def fitted(budget, **options):
        return headroom.fit(model, batch, budget=budget, loss=mse_loss, dry_run=True, **options)

    with pytest.raises(DoesNotFit) as raised:
        fitted(held)
    error, text = raised.value, str(raised.value)
    assert f"nothing trains the model within {format_bytes(held)}, of which" in text
    assert sum(error.by_kind.values()) == error.least
    budget = parse_bytes(re.search(r"What would fit: a budget of ([\d.]+ [KM]iB)", text)[1])
    assert fitted(budget).predicted_peak <= budget
    allow = eval(re.search(r"allow=(\(.*?\))", text)[1])
    assert fitted(held, allow=allow).predicted_peak <= held
    with pytest.raises(DoesNotFit):
        fitted(int(0.97 * error.least))

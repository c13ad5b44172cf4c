"""The values that fields of a choice may have: checked, kept to, and no reason to trust a loss."""

import headroom
import pytest
import torch
from headroom.fitting import Choice, DoesNotFit
from headroom.fitting.api import fit_step
from headroom.fitting.arguments import checked
from headroom.fitting.search.techniques import techniques_of
from headroom.step.description import Step
from torch import nn

mse_loss = nn.functional.mse_loss
SAMPLES = 8


def contrastive(x):
    """A loss that compares samples with one another."""
    return nn.functional.cross_entropy(x @ x.T, torch.arange(len(x)))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def chain(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), *layers)


def fitted(model, batch=None, **options):
    if batch is None:
        batch = torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 16)
        options = {"loss": mse_loss, **options}
    return headroom.fit(model, batch, **{"budget": "1 GiB", "dry_run": True, **options})


def techniques(**options):
    """What is possible in a loop, before anything is measured."""
    batch = torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 16)
    return techniques_of(checked(Step(chain(), None, batch, mse_loss, scaler=None)), **options)


@pytest.mark.parametrize(
    ("only", "error", "text"),
    [
        ({"micro_batches": (0,)}, ValueError, "only has 0 for micro_batches, wanted whole numbers"),
        ({"micro_batches": (-2,)}, ValueError, "only has -2 for micro_batches, wanted whole"),
        ({"micro_batches": ("2",)}, TypeError, "only has '2' for micro_batches, .* of type int"),
        ({"micro_batches": (2.0,)}, TypeError, "only has 2.0 for micro_batches, .* of type int"),
        ({"micro_batches": (True,)}, TypeError, "only has True for micro_batches, .* type int"),
        ({"release": (1,)}, TypeError, "only has 1 for release, wanted values of type bool"),
        ({"weights": (None,)}, TypeError, "only has None for weights, wanted values of type str"),
        ({"release": ()}, ValueError, r"only has release=\(\), wanted one value or more"),
        ({"levels": (("L0",),)}, ValueError, "only has 'levels', wanted some of frozen, "),
        (
            {"micro_batches": (3,)},
            ValueError,
            r"only has micro_batches=\(3,\), wanted one of 1, 2, 4, 8 for micro_batches",
        ),
        (
            {"weights": ("bf16",)},
            ValueError,
            r"only has weights=\('bf16',\), wanted one of given for weights; "
            '"bf16" is not in allow',
        ),
        (
            {"optimizer": ("lion",), "weights": ("given",)},
            ValueError,
            r"only has optimizer=\('lion',\), weights=\('given',\), wanted one of",
        ),
        ({"fused_loss": (True,)}, ValueError, r"only has fused_loss=\(True,\), wanted one of F"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_named(only, error, text):
    with pytest.raises(error, match=text):
        fitted(chain(), only=only)


def test_a_number_of_micro_batches_counts_once():
    assert techniques(only={"micro_batches": [4, 1, 4]}).micro_batches == (1, 4)


@pytest.mark.parametrize("numbers", [(4,), (2, 4)])
def test_a_loss_that_compares_samples_is_not_parted(numbers):
    """Although the numbers of parts are named: the step of what is returned would have it."""
    x = torch.randn(SAMPLES, 16)
    for budget in ("1 GiB", "2 KiB"):  # which is refused before anything is measured
        with pytest.raises(
            ValueError, match=r"wanted one of 1 for micro_batches.*do not add up"
        ) as raised:
            fitted(
                chain(), x, loss=contrastive, optimizer=sgd, budget=budget,
                only={"micro_batches": numbers},
            )  # fmt: skip
        assert not isinstance(raised.value, DoesNotFit)
        assert f"only has micro_batches={numbers}" in str(raised.value)


def test_a_loss_that_compares_samples_has_whole_batches_if_it_can():
    x = torch.randn(SAMPLES, 16)
    only = {"micro_batches": (1, 4)}
    with pytest.raises(DoesNotFit, match="gradients of parts of a batch do not add up"):
        fitted(chain(), x, loss=contrastive, optimizer=sgd, only=only, budget="2 KiB")


def test_loops_of_other_libraries_weigh_losses_themselves():
    x = torch.randn(SAMPLES, 16)
    only = {"micro_batches": (4,)}

    def choice_of(model, batch, loss):
        step = Step(model, sgd, batch, loss, scaler=None)
        options = {"only": only, "parts_add_up": True, "dry_run": True}
        return fit_step(step, budget="1 GiB", **options).choice

    assert choice_of(chain(), x, contrastive).micro_batches == 4
    model = chain(nn.BatchNorm1d(16))
    assert choice_of(model, (x, x), mse_loss).micro_batches == 4
    with pytest.raises(
        ValueError, match="wanted one of 1 for micro_batches.*not with a BatchNorm in training"
    ):
        fitted(model, only=only)


def test_gradients_that_are_to_be_released():
    only = {"release": (True,)}
    found = techniques(only=only)
    assert [choice.release for choice in found.choices] == [True]
    assert found.micro_batches == (1,)
    assert fitted(chain(), only=only).choice.release
    for choice in (Choice(optimizer="headroom"), Choice(("L0",) * 3, optimizer="headroom")):
        with pytest.raises(ValueError, match="choice has release=False, wanted one of True"):
            fitted(chain(), choice=choice, only=only)
    with pytest.raises(ValueError, match="choice has release=True, wanted one of False"):
        fitted(
            chain(), choice=Choice(optimizer="headroom", release=True), only={"release": (False,)}
        )


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"max_grad_norm": 1.0}, {}),
        ({"optimizer": sgd}, {}),
        ({}, {"micro_batches": (2, 4)}),
        ({}, {"optimizer": ("given",)}),
    ],
)
def test_gradients_that_cannot_be_released(options, more):
    with pytest.raises(
        ValueError,
        match=r"only has release=\(True,\).*wanted one of False for release: gradients can",
    ):
        fitted(chain(), only={"release": (True,), **more}, **options)


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (Choice("L0"), "choice has levels='L0', wanted a list of names"),
        (Choice(micro_batches=2.0), "choice has micro_batches=2.0, wanted one of type int"),
        (Choice(release=1), "choice has release=1, wanted one of type bool"),
        (Choice(weights=None), "choice has weights=None, wanted one of type str"),
    ],
)
def test_a_choice_that_was_made_by_hand_is_checked(choice, text):
    with pytest.raises(ValueError, match=text):
        fitted(chain(), choice=choice)


def test_levels_of_a_choice_may_be_a_list():
    model = chain()
    found = fitted(model, choice=Choice(["L5"] * 3))
    assert found.choice == Choice(("L5",) * 3)

"""The passes and the update of a step, and random numbers that it leaves as they were."""

import random
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest
import torch
from headroom._core.randomness import generators_kept
from headroom.step.micro_batches import parts, resized
from headroom.step.run import Total, passes, train, update, weighed
from torch import nn

from helpers.fitting import step_of


def test_the_order_of_passes():
    said, x = [], torch.ones((), requires_grad=True)

    @contextmanager
    def around(index):
        said.append(f"enter {index}")
        yield
        said.append(f"leave {index}")

    passes(
        lambda part: x * part,
        [(6, Fraction(1, 3)), (4, 1)],
        backward=lambda loss: said.append(("backward", loss.item())),
        around=around,
        begin=said.append,
        seen=lambda loss: said.append(("seen", loss.item())),
    )
    each = [["forward", ("seen", n), "backward", ("backward", n)] for n in (2.0, 4.0)]
    assert said == ["enter 0", *each[0], "leave 0", "enter 1", *each[1], "leave 1"]
    passes(lambda part: x * part, [(6, Fraction(1, 3)), (4, 1)])
    assert x.grad == 6  # gradients add up


def test_a_share_of_a_loss():
    loss = torch.tensor(10.0)
    assert weighed(loss, 1) is loss and weighed(loss, Fraction(2, 5)) == 4
    assert weighed(loss, 3) == 30 and weighed(loss, Fraction(1, 4)) == 2.5


def test_a_total_has_no_graph():
    total, x = Total(), torch.ones((), requires_grad=True)
    assert total.loss is None
    for factor in (2, 3):
        total.add(x * factor)
    assert total.loss == 5 and not total.loss.requires_grad


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("norm", [None, 0.5])
def test_an_update(scale, norm):
    """Gradients are clipped as they are without a scale, which is then looked at anew."""
    param = nn.Parameter(torch.zeros(2))
    model = nn.ParameterList([param])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = None
    if scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
        scaler.scale(torch.ones(()))
    param.grad = torch.tensor([3.0, 4.0]) * (scale or 1)
    update(model, optimizer, scaler, norm)
    wanted = torch.tensor([3.0, 4.0]) * (1 if norm is None else norm / 5)
    assert torch.allclose(-param.detach(), wanted, atol=1e-5)
    assert param.grad is not None and (scale is None or scaler.get_scale() == 2 * scale)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_of_parts(set_to_none):
    """Parts in which nothing counts are left out: their mean is nan."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    x = torch.tensor([[1.0], [2.0], [3.0], [6.0]])
    labels = torch.tensor([[1], [2], [-100], [-100]])

    def forward(model, batch):
        called.append(len(batch[0]))
        return (model(batch[0])[batch[1] != -100]).mean()

    called = []
    step = step_of(model, (x, labels), forward=forward).but(
        optimizer=torch.optim.SGD(model.parameters(), 0.5), rule="tokens", set_to_none=set_to_none,
        max_grad_norm=0.1, scaler=torch.amp.GradScaler("cpu", init_scale=4.0),
    )  # fmt: skip
    loss = train(step, parts(step.batch, 2))
    assert called == [2] and loss == 1.5 and not loss.requires_grad
    assert float(model.weight.detach()) == pytest.approx(1 - 0.5 * 0.1, abs=1e-6)
    assert (model.weight.grad is None) == set_to_none
    assert set_to_none or not model.weight.grad.any()


def test_random_numbers_go_on_as_if_nothing_had_run():
    for _ in range(2):
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        with pytest.raises(KeyError), generators_kept(torch.device("cpu")):
            random.random(), np.random.rand(), torch.rand(1)
            raise KeyError
        assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])


def test_a_batch_of_another_size_takes_no_memory():
    """What is no sample of it stays: scalars, and tables of another length."""
    scale, table = torch.tensor(2.0), torch.ones(7, 3)
    ids, kept, same, mask = resized([torch.ones(4, 5).int(), scale, table, torch.ones(4)], 1000)
    assert (ids.shape, ids.dtype, mask.shape) == ((1000, 5), torch.int32, (1000,))
    assert ids.is_meta and mask.is_meta
    assert kept is scale and same is table
    with pytest.raises(ValueError, match="no tensor with a dimension"):
        resized([scale], 3)

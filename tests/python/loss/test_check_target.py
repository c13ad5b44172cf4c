"""Targets that are no class: the error that the CPU gives, and CUDA if it is asked to."""

import headroom
import pytest
import torch

ROWS, FEATURES, CLASSES = 37, 5, 23


def sample(device, dtype=torch.int64):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, FEATURES, generator=generator) for n in (ROWS, CLASSES))
    target = torch.randint(0, CLASSES, (ROWS,), generator=generator, dtype=dtype)
    target[::4] = -100
    leaves = [t.to(device).requires_grad_() for t in (hidden, weight)]
    return *leaves, target.to(device)


def message(row, value):
    return (
        rf"hr_linear_cross_entropy: target\[{row}\] is {value}, wanted a class from 0 to "
        rf"{CLASSES - 1}, or ignore_index, -100"
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("value", [CLASSES, -1, 2**31 - 1])
def test_the_first_that_is_no_class_is_named(value, dtype, device):
    hidden, weight, target = sample(device, dtype)
    target[[5, 30]] = torch.tensor([value, CLASSES + 1], dtype=dtype, device=device)
    for options in (
        {},
        {"reduction": "none"},
        {"accumulate_into_grad": True},
        {"mode": "vocabulary", "workspace": 1},
    ):
        with pytest.raises(RuntimeError, match=message(5, value)):
            headroom.linear_cross_entropy(hidden, weight, target, check_target=True, **options)
    assert weight.grad is None


def test_rows_are_counted_over_all_sequences(device):
    hidden, weight, target = sample(device)
    target[20] = -7
    rows = slice(0, 36)
    with pytest.raises(RuntimeError, match=message(20, -7)):
        headroom.linear_cross_entropy(
            *(hidden[rows].view(4, 9, -1), weight, target[rows].view(4, 9)),
            **{"shift": True, "check_target": True},
        )


def test_under_compile(device):
    hidden, weight, target = sample(device)

    def loss(target):
        return headroom.linear_cross_entropy(hidden, weight, target, check_target=True)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(target), loss(target))
    target[0] = CLASSES
    with pytest.raises(RuntimeError, match=message(0, CLASSES)):
        compiled(target)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=["mean", "none"])
def test_good_targets_change_nothing(options, device):
    hidden, weight, target = sample(device)
    found = []
    for check in (False, True):
        loss = headroom.linear_cross_entropy(
            hidden, weight, target, check_target=check, **options
        ).sum()
        found.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    assert all(map(torch.equal, *found))


def test_without_it_the_cpu_says_the_same():
    hidden, weight, target = sample("cpu")
    target[9] = CLASSES
    said = []
    for check in (False, True):
        with pytest.raises(RuntimeError, match=message(9, CLASSES)) as caught:
            headroom.linear_cross_entropy(hidden, weight, target, check_target=check)
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_without_it_cuda_has_nan():
    hidden, weight, target = sample("cuda")
    target[9] = CLASSES
    losses = headroom.linear_cross_entropy(hidden, weight, target, reduction="none")
    assert losses.isnan().nonzero().flatten().tolist() == [9]

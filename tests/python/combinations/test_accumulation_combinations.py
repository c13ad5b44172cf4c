"""Accumulated gradients in loops that freeze, unfreeze and add parameters, against the gradients of
the whole batch in float64."""

import threading
from functools import partial

import headroom
import torch
from torch import nn

from helpers.combined import combinations, distance, gradients, in_float64

ROWS, SIZE = 12, 6


def build(dtype):
    torch.manual_seed(0)
    layers = [
        nn.Linear(SIZE, SIZE),
        nn.Tanh(),
        nn.Linear(SIZE, SIZE),
        nn.Tanh(),
        nn.Linear(SIZE, 1),
    ]
    return nn.Sequential(*layers).to(dtype)


def change(model, changes, step):
    """What a loop does to its model before a step."""
    if changes == "unfreeze":
        model[0].requires_grad_(step > 0)
    elif changes == "freeze":
        model[0].requires_grad_(step == 0)
    elif changes == "alternate":
        model[0].requires_grad_(step % 2 == 1)
        model[2].requires_grad_(step % 2 == 0)


def loss_of(model, x, reduction="mean"):
    return getattr(model(x).square(), reduction)()


def backward(loss, thread):
    if not thread:
        loss.backward()
        return
    other = threading.Thread(target=loss.backward)
    other.start()
    other.join()


SOURCES = {
    "module": lambda model, optimizer: model,
    "optimizer": lambda model, optimizer: optimizer,
    "parameters": lambda model, optimizer: model.parameters(),
}


@combinations(
    {
        "changes": ["none", "unfreeze", "freeze", "alternate"],
        "source": [*SOURCES],
        "loop": ["micro_batch", "add"],
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
        "parts": [(12,), (6, 6), (5, 4, 3), (1, 11)],
        "compensated": [False, True],
        "thread": [False, True],
        "clear": ["set_to_none", "zeros"],
    },
    # To add(), a gradient that finish() set and that was filled with zeros is one that was not.
    possible=lambda loop, clear, **_: loop == "micro_batch" or clear == "set_to_none",
)
def test_the_mean_of_micro_batches_is_that_of_the_batch(case):
    model = build(case["dtype"])
    change(model, case["changes"], 0)
    # Frozen parameters are in the optimizer too: torch passes over those without a gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    source = SOURCES[case["source"]](model, optimizer)
    accumulator = headroom.GradAccumulator(source, compensated=case["compensated"])
    for step in range(3):
        change(model, case["changes"], step)
        x = torch.randn(ROWS, SIZE).to(case["dtype"])
        right = in_float64(model)
        right.zero_grad()
        loss_of(right, x.double()).backward()
        plain = build(case["dtype"])
        change(plain, case["changes"], step)
        loss_of(plain, x).backward()

        parts = x.split(case["parts"])
        for part in parts:
            run = partial(backward, thread=case["thread"])
            if case["loop"] == "micro_batch":
                with accumulator.micro_batch(weight=len(part)):
                    run(loss_of(model, part))
            else:
                run(loss_of(model, part))
                accumulator.add(weight=len(part))
        accumulator.finish()
        wanted = gradients(right)
        # Parts round apart from one another: twice torch's error, and an ulp of the dtype.
        allowed = 2 * distance(gradients(plain), wanted) + torch.finfo(case["dtype"]).eps
        assert distance(gradients(model), wanted) <= allowed, f"step {step}"
        for p, q in zip(model.parameters(), right.parameters()):
            assert (p.grad is None or not p.grad.any()) == (q.grad is None or not q.grad.any())
        optimizer.step()
        optimizer.zero_grad(set_to_none=case["clear"] == "set_to_none")

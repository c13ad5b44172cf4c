"""The tensor lists of a call of the op with float moments, dtypes, and options."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import headroom
import torch
from headroom._core.table import table_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DEFAULTS = dict(
    lr=1e-2,
    beta1=0.9,
    beta2=0.999,
    weight_decay=0.1,
    eps=1e-8,
    amsgrad=False,
    maximize=False,
    decoupled=True,
)
MIXES = list(itertools.product(FLOATS, FLOATS, FLOATS))  # of parameters, gradients and moments


def name_of(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def mix_name(mix):
    return "-".join(map(name_of, mix))


def scalar(value, device="cpu", dtype=torch.float32):
    return torch.tensor(value, device=device, dtype=dtype)


@dataclass
class Sample:
    """The tensor lists of one call. Moments are those of a run that has had `steps` steps."""

    params: list = field(default_factory=list)
    grads: list = field(default_factory=list)
    exp_avgs: list = field(default_factory=list)
    exp_avg_sqs: list = field(default_factory=list)
    max_exp_avg_sqs: list = field(default_factory=list)
    steps: list = field(default_factory=list)

    def lists(self):
        """In the order of the op's arguments."""
        return [
            self.params,
            self.grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.max_exp_avg_sqs,
            self.steps,
        ]

    def tensors(self):
        return [tensor for column in self.lists() for tensor in column]

    def clone(self):
        return self.map(lambda tensor: tensor.clone())

    def map(self, function):
        return Sample(*([function(tensor) for tensor in column] for column in self.lists()))

    def to(self, dtype):
        """A copy with all but the counters converted."""
        columns = [
            [tensor.to(dtype, copy=True) for tensor in column] for column in self.lists()[:-1]
        ]
        return Sample(*columns, [step.clone() for step in self.steps])


def sample(
    shapes=((37, 5), (1,), (64,)),
    param=torch.float32,
    grad=torch.float32,
    state=torch.float32,
    device="cpu",
    amsgrad=False,
    steps=3,
    step_dtype=torch.float64,
    seed=0,
):
    """Values of ordinary size. Gradients and moments spread over three powers of ten, and second
    moments are at least the squares of the first, as those of a real run are."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(shape):
        return torch.rand(shape, generator=generator)

    def spread(shape):
        return torch.randn(shape, generator=generator) * 10 ** (uniform(shape) * 3 - 2)

    lists = Sample()
    for k, shape in enumerate(shapes):
        moment = spread(shape)
        square = (moment * (1 + 3 * uniform(shape))).square()
        lists.params.append(torch.randn(shape, generator=generator).to(device, param))
        lists.grads.append(spread(shape).to(device, grad))
        lists.exp_avgs.append(moment.to(device, state))
        lists.exp_avg_sqs.append(square.to(device, state))
        if amsgrad:
            lists.max_exp_avg_sqs.append((square * (0.5 + uniform(shape))).to(device, state))
        lists.steps.append(torch.tensor(float(steps + k), dtype=step_dtype, device=device))
    return lists


def table(lists):
    """The table of a sample, as the optimizer makes it of its states."""
    columns = {"exp_avg": lists.exp_avgs, "exp_avg_sq": lists.exp_avg_sqs}
    if lists.max_exp_avg_sqs:
        columns["max_exp_avg_sq"] = lists.max_exp_avg_sqs
    state = {
        p: {name: column[k] for name, column in columns.items()} | {"step": lists.steps[k]}
        for k, p in enumerate(lists.params)
    }
    return table_of((lists.params, lists.grads), state, tuple(columns), ("step",))


def run(lists, **options):
    """One step of the op, in place; returns the lists."""
    headroom.functional.adamw_(*lists.lists(), **(DEFAULTS | options))
    return lists

"""AdamW in float64, and what tests need around it: samples, calls, bits, ulps."""

from __future__ import annotations

import itertools
import math
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


def adamw64(
    p,
    g,
    m,
    v,
    x,
    t,
    *,
    lr,
    beta1,
    beta2,
    weight_decay,
    eps,
    amsgrad,
    maximize,
    decoupled,
    factor=1.0,
):
    """Step t of AdamW in float64: the new (param, exp_avg, exp_avg_sq, max_exp_avg_sq)."""
    p, g, m, v, x = (a.double() for a in (p, g, m, v, x))
    g = g * (-factor if maximize else factor) + (0 if decoupled else weight_decay * p)
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    x = torch.maximum(x, v) if amsgrad else x
    denominator = ((x if amsgrad else v) / (1 - beta2**t)).sqrt() + eps
    p = p * (1 - lr * weight_decay if decoupled else 1) - lr / (1 - beta1**t) * m / denominator
    return p, m, v, x


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


def reference_step(lists, *, factor=1.0, **options):
    """A float64 `Sample` after one step; `lists` is left alone."""
    options = DEFAULTS | options
    maxima = lists.max_exp_avg_sqs or lists.exp_avg_sqs
    rows = zip(lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, maxima, lists.steps)
    out = Sample()
    for p, g, m, v, x, step in rows:
        t = step.item() + 1
        p, m, v, x = adamw64(p, g, m, v, x, t, factor=factor, **options)
        out.params.append(p)
        out.grads.append(g.double())
        out.exp_avgs.append(m)
        out.exp_avg_sqs.append(v)
        if options["amsgrad"]:
            out.max_exp_avg_sqs.append(x)
        out.steps.append(torch.tensor(t, dtype=torch.float64))
    return out


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    """The bits of the elements, in logical order, as integers on the CPU."""
    return tensor.detach().cpu().contiguous().view(_INTEGERS[tensor.element_size()])


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def assert_same_bits(left, right):
    """Two samples or lists of tensors, element by element."""
    left, right = (x.tensors() if isinstance(x, Sample) else list(x) for x in (left, right))
    assert len(left) == len(right)
    for k, (a, b) in enumerate(zip(left, right)):
        assert same_bits(a, b), f"tensor {k} of {len(left)}: {a} is not {b}"


def ulps(left, right):
    """How many representable numbers lie between two tensors of one 16-bit dtype, elementwise."""

    def order(tensor):
        raw = bits(tensor).int()
        return torch.where(raw < 0, -(raw & 0x7FFF), raw)

    assert left.dtype == right.dtype and left.element_size() == 2
    return (order(left) - order(right)).abs()


def error(lists, exact):
    """The root mean square error of each kind of result, relative to that of the exact values."""
    worst = {}
    for name in ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        if not getattr(exact, name):
            continue
        got, want = (
            torch.cat([tensor.double().flatten() for tensor in getattr(of, name)])
            for of in (lists, exact)
        )
        worst[name] = ((got - want).norm() / want.norm()).item()
        assert math.isfinite(worst[name])
    return worst


def name_of(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def mix_name(mix):
    return "-".join(map(name_of, mix))


def run(lists, **options):
    """One step of the op, in place; returns the lists."""
    headroom.functional.adamw_(*lists.lists(), **(DEFAULTS | options))
    return lists


def scalar(value, device="cpu", dtype=torch.float32):
    return torch.tensor(value, device=device, dtype=dtype)


def torch_fused(lists, **options):
    """The same step by torch's fused op: the comparison for accuracy."""
    options = DEFAULTS | options
    op = torch._fused_adamw_ if options.pop("decoupled") else torch._fused_adam_
    lists.steps = [step.float() + 1 for step in lists.steps]  # torch wants it counted already
    op(*lists.lists(), **options)
    return lists

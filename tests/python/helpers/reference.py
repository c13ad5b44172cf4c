"""AdamW in float64, torch's fused op beside it, and the error of a result."""

from __future__ import annotations

import math

import torch

from helpers.samples import DEFAULTS, Sample


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


def torch_fused(lists, **options):
    """The same step by torch's fused op: the comparison for accuracy."""
    options = DEFAULTS | options
    op = torch._fused_adamw_ if options.pop("decoupled") else torch._fused_adam_
    lists.steps = [step.float() + 1 for step in lists.steps]  # torch wants it counted already
    op(*lists.lists(), **options)
    return lists


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

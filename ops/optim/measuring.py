"""Measures the gradients before a step: whether all are finite, and the factor that clips them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._core.dtensor import local_part
from ..grad.norm import measure
from ..param_states.errors import explained
from ..param_states.plan import Plan, StepScalars, like_param, table_of_grads


def with_measured(
    optimizer: Any, scalars: StepScalars, max_grad_norm: float | None, plans: list[Plan]
) -> StepScalars:
    """Returns the scalars of a step that is skipped if a gradient is not finite, and clipped if
    ``max_grad_norm`` is a number. Sets the optimizer's attributes that show the results."""
    if torch.compiler.is_compiling():
        everyone = (param for group in optimizer.param_groups for param in group["params"])
        optimizer._measured_params = [param for param in everyone if param.grad is not None]
        grads = [param.grad for param in optimizer._measured_params]
    else:
        optimizer._measured_params = [param for plan in plans for param in plan.params]
        grads = [grad for plan in plans for grad in plan.grads]
    table = table_of_grads(plans)
    if table is None:
        grads = [like_param(grad, param) for grad, param in zip(grads, optimizer._measured_params)]
    try:
        optimizer._measured = measured = measure(
            grads,
            max_norm=math.inf if max_grad_norm is None else max_grad_norm,
            grad_scale=scalars.grad_scale,
            table=table,
        )
    except (RuntimeError, NotImplementedError) as error:
        raise explained(optimizer, error, optimizer._measured_params, grads) from error
    optimizer.grad_norm = measured.norm
    coef = None if max_grad_norm is None else measured.clip_coef
    return scalars.joined(measured.found_inf, coef)


def first_nonfinite(optimizer: Any) -> Tensor | None:
    """Returns the parameter with the first gradient that was not finite in the last step that
    measured, or is not finite now. Waits for the device."""
    measured = optimizer._measured
    if measured is not None and (place := measured.culprit()) is not None:
        return optimizer._measured_params[place]
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.layout == torch.strided:
                if not local_part(param.grad).isfinite().all():
                    return param
    return None

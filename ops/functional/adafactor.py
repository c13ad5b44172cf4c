"""Steps Adafactor on lists of tensors: the op ``headroom::adafactor_``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_list
from .._core.registration import complete, require
from .weights import check_step, op_arguments

SUMS, STATES, NORM, APPLY, ALL = 1, 2, 4, 8, 15  # phases: hr_adafactor_phases


def adafactor_(
    params: list[Tensor],
    grads: list[Tensor],
    row_vars: list[Tensor],
    col_vars: list[Tensor],
    variances: list[Tensor],
    exp_avgs: list[Tensor],
    rms_values: list[Tensor],
    state_steps: list[Tensor],
    *,
    semantics: str = "torch",
    lr: float | Tensor = 0.0,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    clip_threshold: float = 1.0,
    weight_decay: float = 0.0,
    beta1: float = 0.0,
    scale_parameter: bool = True,
    relative_step: bool = True,
    warmup_init: bool = False,
    maximize: bool = False,
    residuals: Sequence[Tensor] = (),
    **step: Any,
) -> None:
    """Steps Adafactor on a list of parameters, in place.

    The functional form of :class:`headroom.optim.Adafactor`. Entry k of every list belongs to
    parameter k; all lie on one device. A parameter ``[..., rows, cols]`` of two dimensions or more
    has a variance for each row and each column, any other one a variance per element.

    Args:
        params: float32, bfloat16 or float16 tensors; updated. A parameter that is not contiguous
            is copied for the step.
        grads: tensors of the same shapes, each float32, bfloat16 or float16; not changed.
        row_vars, col_vars: float32 tensors of ``numel / cols`` and ``numel / rows`` elements, empty
            for a parameter that is not factored; updated. Zeros before the first step. An empty
            list if no parameter is factored.
        variances: float32 tensors shaped like params, empty for a factored parameter; updated. An
            empty list if all parameters are factored.
        exp_avgs: float32 tensors shaped like params, the momentum of ``beta1``; updated. An empty
            list for no momentum.
        rms_values: float32 tensors of one element that receive the root mean square of the
            parameter before the step, if the rule needs it. An empty list to leave it out.
        state_steps: float32 or float64 tensors of one element, the steps before this one; each
            grows by 1.
        semantics: ``"torch"`` or ``"hf"``: the implementation whose rule is used.
        lr: learning rate; a tensor of one element is read on its device.
        eps: the two regularizers. The first may be None in torch's rule: the epsilon of the
            parameter's dtype.
        scale_parameter, relative_step, warmup_init: options of ``"hf"`` only.
        residuals, step: ``grad_scale``, ``found_inf``, ``clip_coef``, ``master``, ``rounding``,
            ``weight_seeds``, ``places`` and ``stalled``, as in :func:`adamw_`.

    Raises:
        RuntimeError: shapes, devices or dtypes do not fit, an option is out of range, or a tensor
            requires grad outside ``torch.no_grad()`` (the op has no derivative). The message names
            the argument. Nothing has been written then.

    The two rules, their source and their rounding are documented at ``hr_adafactor`` in
    ``headroom.h``.
    """
    if not params:
        return
    torch.ops.headroom.adafactor_(
        params,
        grads,
        row_vars,
        col_vars,
        variances,
        exp_avgs,
        rms_values,
        state_steps,
        list(residuals),
        hf=is_hf(semantics),
        **op_arguments(params, lr, **step),
        beta2_decay=beta2_decay,
        eps1=-1.0 if eps[0] is None else eps[0],
        eps2=eps[1],
        clip_threshold=clip_threshold,
        weight_decay=weight_decay,
        beta1=beta1,
        scale_parameter=scale_parameter,
        relative_step=relative_step,
        warmup_init=warmup_init,
        maximize=maximize,
    )


def is_hf(semantics: str) -> bool:
    """Returns whether the rule is that of transformers. Refuses names of no rule."""
    if semantics not in ("torch", "hf"):
        raise ValueError(f"semantics must be 'torch' or 'hf', got {semantics!r}")
    return semantics == "hf"


@torch.library.register_fake("headroom::adafactor_")
def _(
    params,
    grads,
    row_vars,
    col_vars,
    variances,
    exp_avgs,
    rms_values,
    state_steps,
    residuals,
    *,
    phases=ALL,
    workspace=None,
    **options,
):
    f32 = (torch.float32,)
    check_step(params, grads, state_steps, residuals, options)
    lines = [lines_of(param.shape) for param in params]
    vectors = [param.numel() if param.dim() < 2 else 0 for param in params]
    for name, tensors, numels in (
        ("row_vars", row_vars, [rows for rows, _ in lines]),
        ("col_vars", col_vars, [cols for _, cols in lines]),
        ("variances", variances, vectors),
    ):
        if tensors or any(numels):
            check_list(name, tensors, params, f32, numels)
    if exp_avgs:
        check_list("exp_avgs", exp_avgs, params, f32)
    if rms_values:
        check_list("rms_values", rms_values, params, f32, [1] * len(params))
    require(
        workspace is None or not params or workspace.device == params[0].device,
        "workspace must be on the device of params[0]",
    )
    require(phases == ALL or workspace is not None, f"phases is {phases}, which needs a workspace")


def lines_of(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the numbers of row and of column variances."""
    if len(shape) < 2:
        return 0, 0
    batch = math.prod(shape[:-2])
    return batch * shape[-2], batch * shape[-1]


complete("adafactor_")

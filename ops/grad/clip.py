"""Clips gradients, with the arguments and results of :mod:`torch.nn.utils`."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_  # even if it is replaced later
from torch.nn.utils import clip_grad_value_ as clip_grad_value_

from .._core.dtensor import local_part
from .._core.grouping import by_device
from .._core.table import table_of
from ..functional.unscale_norm import multiply_
from .norm import is_ours, listed, measure, with_values, zero_norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients down so that their norm, as one vector, is at most ``max_norm``.

    Takes the arguments of :func:`torch.nn.utils.clip_grad_norm_`, and reads the gradients in one
    pass to measure and one to scale; the second writes nothing if the norm is within the limit. To
    clip without writing the gradients at all, give ``max_grad_norm=`` to the optimizer. Gradients
    that the kernels do not support (float64, sparse, complex) and norms of order 0 or below are
    passed on to torch.

    Args:
        parameters: tensors with gradients; DTensors count with all their shards on all ranks. A
            gradient given twice counts once.
        max_norm: the largest norm allowed.
        norm_type: order of the norm, ``"inf"`` and ``math.inf`` included.
        error_if_nonfinite: raise RuntimeError, before anything is written, if the norm is infinite
            or NaN. Waits for the device.
        foreach: accepted for compatibility, without effect.

    Returns:
        The norm before clipping: 0-dim, on the device of the gradients, never a DTensor, and
        float32 (torch's norm has the dtype of the gradients).
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    parameters = listed(parameters, "no gradient clipping will occur", stacklevel=4)
    max_norm, norm_type = float(max_norm), float(norm_type)
    grads = [grad for grad in map(attrgetter("grad"), parameters) if grad is not None]
    if len(set(map(id, grads))) < len(grads):
        grads = list({id(grad): grad for grad in grads}.values())
    ours = norm_type > 0 and max_norm >= 0
    table = table_of((grads,)) if ours and grads else None
    if table is None and not (ours and all(map(is_ours, grads))):
        valued = with_values(grads)
        if grads and not valued:
            return zero_norm(grads[0])
        owners = {id(param.grad): param for param in parameters}
        parameters = [owners[id(grad)] for grad in valued]
        return torch_clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    measured = measure(grads, p=norm_type, max_norm=max_norm, table=table)
    if error_if_nonfinite and not measured.norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    if table is not None:
        multiply_(grads, measured.clip_coef, table)
        return measured.norm
    for device, members in by_device(grads).items():
        multiply_(list(map(local_part, members)), measured.clip_coef.to(device))
    return measured.norm

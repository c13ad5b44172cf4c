"""SGD and Lion with 8-bit moments."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._core.weight_modes import Master, Rounding
from ..param_states.plan import Bucket, Call, Options, States, table_call
from .eight_bit import EIGHT_BIT, EightBit, Nonfinite, in_code_order
from .momentum import SGD, Lion, OneMoment
from .options import own_arguments


class OneMoment8bit(EightBit, OneMoment):
    """Base of the 8-bit forms of SGD and Lion."""

    def __init__(self, params: ParamsT, given: dict[str, Any]) -> None:
        self._overrides = {}
        OneMoment.__init__(self, params, {"optim_bits": 8} | given)

    def _layout_index(self, param: Tensor, group: dict[str, Any]) -> int:
        return super()._layout_index(param, group) if self._has_moment(group) else 0

    def _layout_indices(self, params: list[Tensor], group: dict[str, Any]) -> list[int]:
        has_moment = self._has_moment(group)
        return super()._layout_indices(params, group) if has_moment else [0] * len(params)

    def _prepared(self, group: Options, bucket: Bucket, states: States, options: Options) -> Call:
        if bucket.layout.index != EIGHT_BIT:
            return super()._prepared(group, bucket, states, options)
        options |= {"block_size": group["block_size"]}
        if isinstance(states, Tensor):
            options |= {"codes": True, "counted": True}
            return table_call(torch.ops.headroom._momentum_table_, bucket, states, options)
        moments, *residuals, absmaxs, steps = states
        lists, scales, put_back = in_code_order(
            [bucket.params, bucket.grads, moments, *residuals], 2, [absmaxs], group["block_size"]
        )
        params, grads, moments, *residuals = lists
        run = partial(
            torch.ops.headroom.momentum_,
            params,
            grads,
            moments,
            scales[0],
            steps,
            residuals[0] if residuals else [],
            **options,
        )

        def call() -> None:
            run()
            put_back()

        return call


class SGD8bit(OneMoment8bit, SGD):
    r"""SGD with momentum buffers of one byte: :class:`SGD` with 1 byte of state per parameter
    instead of 4.

    A buffer is a code of the dynamic map per element and a float32 scale per block of consecutive
    elements (Dettmers et al., arXiv:2110.02861), as the first moment of :class:`Adam8bit`.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in :class:`SGD`.
        foreach, differentiable, fused, max_grad_norm: as in :class:`SGD`.
        master, rounding, seed, count_stalled, offload, budget: as in :class:`SGD`. A bfloat16
            parameter with ``master="remainder16"`` takes 5 bytes with its state.
        min_8bit_size, block_size, nonfinite: as in :class:`Adam8bit`.

    The state of a parameter is ``momentum_buffer``, uint8 of its shape; ``momentum_buffer_absmax``,
    float32, the scales of the blocks; and ``step``. ``optim_bits=32`` in a parameter group, or
    ``override()``, chooses float32 buffers. A checkpoint of :class:`torch.optim.SGD` loads; torch's
    takes the codes for numbers without an error: do not load such a checkpoint into it.

    Example::

        optimizer = headroom.optim.SGD8bit(model.parameters(), lr=0.1, momentum=0.9)
    """

    _code_names = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        master: Master | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        count_stalled: bool = False,
        offload: Literal["state", "step"] | None = None,
        budget: int | str | None = None,
        min_8bit_size: int = 4096,
        block_size: int = 256,
        nonfinite: Nonfinite = "propagate",
    ) -> None:
        OneMoment8bit.__init__(self, params, own_arguments(locals()))


class Lion8bit(OneMoment8bit, Lion):
    r"""Lion with moments of one byte: :class:`Lion` with 1 byte of state per parameter instead of
    4, as in :class:`SGD8bit`.

    Args:
        params, lr, betas, weight_decay, maximize: as in :class:`Lion`.
        foreach, differentiable, fused, max_grad_norm: as in :class:`Lion`.
        master, rounding, seed, count_stalled, offload, budget: as in :class:`Lion`.
        min_8bit_size, block_size, nonfinite: as in :class:`Adam8bit`.

    The state of a parameter is ``exp_avg``, uint8 of its shape; ``exp_avg_absmax``, float32; and
    ``step``.

    Example::

        optimizer = headroom.optim.Lion8bit(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    _code_names = ("exp_avg",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        master: Master | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        count_stalled: bool = False,
        offload: Literal["state", "step"] | None = None,
        budget: int | str | None = None,
        min_8bit_size: int = 4096,
        block_size: int = 256,
        nonfinite: Nonfinite = "propagate",
    ) -> None:
        OneMoment8bit.__init__(self, params, own_arguments(locals()))

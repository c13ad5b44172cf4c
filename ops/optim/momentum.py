"""SGD and Lion, fused: optimizers with one moment or none."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._core.checks import check_number
from .._core.names import name_of
from .._core.registration import FLOATS
from .._core.weight_modes import Master, Rounding, mode_of
from ..functional.momentum import lion_options, sgd_options
from ..param_states.plan import Bucket, Call, Options, States, table_call
from ..param_states.states import STEP, Layout, Slot
from .base import Optimizer
from .options import check_betas, check_fused, check_lr, of_groups, own_arguments


class OneMoment(Optimizer):
    """Base of SGD and Lion, whose op has one moment for each parameter."""

    _moment = ""  # its name in a state

    def __init__(self, params: ParamsT, given: dict[str, Any]) -> None:
        """Takes the arguments of a constructor; all but those of every optimizer are options of
        groups."""
        own = {name: given.pop(name) for name in ("count_stalled", "offload", "budget")}
        del given["params"]
        defaults = of_groups(given)
        self._check_options(defaults)
        super().__init__(params, defaults, **own)

    def _check_options(self, options: dict[str, Any]) -> None:
        check_lr(options["lr"], "Invalid learning rate")
        check_fused(options, type(self).__qualname__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:  # of other libraries
            group.setdefault("maximize", False)
            group.setdefault("differentiable", False)
            group.setdefault("foreach", None)
            group.setdefault("fused", None)
        super().__setstate__(state)

    def _has_moment(self, group: dict[str, Any]) -> bool:
        """Returns whether the parameters of a group have a moment."""
        return True

    def _layouts(self, group: dict[str, Any]) -> tuple[Layout, ...]:
        dtype = group.get("state_dtype") or (torch.float32 if group.get("master") else None)
        if self._has_moment(group):
            return (Layout((Slot(self._moment, dtype=dtype, loads=FLOATS), STEP)),)
        # Random numbers depend on the step, and nothing else does.
        return (Layout((STEP,) if mode_of(group).is_random else ()),)

    def _translated(
        self, param: Tensor, entry: dict[str, Any], group: dict[str, Any]
    ) -> dict[str, Any]:
        """Counts the step of a state of torch's SGD, or of a Lion that does not count: there is a
        moment after the first step. It is kept without a momentum, too, which may return."""
        entry = {name: value for name, value in entry.items() if value is not None}
        names = self._layout(param, group, self._layout_index_of_state(entry)).names
        if self._moment in entry:
            entry.setdefault("step", 1.0)
        elif "step" in names:
            entry.setdefault("step", 0.0)
        count = entry.get("step")
        is_refused = isinstance(count, Tensor) and count.numel() != 1  # later, with the others
        if self._moment in names and not is_refused and not count:
            entry.setdefault(
                self._moment, self._layout(param, group, 0).slot(self._moment).new(param)
            )
        return entry

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"weight_decay": group["weight_decay"], "maximize": group["maximize"]}

    def _prepared(self, group: Options, bucket: Bucket, states: States, options: Options) -> Call:
        if isinstance(states, Tensor):
            options |= {"codes": False, "counted": "step" in bucket.layout.names}
            return table_call(torch.ops.headroom._momentum_table_, bucket, states, options)
        lists = dict(zip(bucket.layout.names, states))
        return partial(
            torch.ops.headroom.momentum_,
            bucket.params,
            bucket.grads,
            lists.get(self._moment, []),
            [],
            lists.get("step", []),
            lists.get(bucket.layout.weights.residual, []),
            **options,
        )


class SGD(OneMoment):
    r"""SGD, fused: a drop-in for :class:`torch.optim.SGD`.

    One op per parameter group and device reads and writes each byte once, on CPU and CUDA, with the
    same bits on both; where all is float32 they are the bits of ``torch.optim.SGD`` with
    ``foreach=True`` or ``False``. Parameters, gradients and buffers may each be float32, bfloat16
    or float16; arithmetic is float32.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in
            :class:`torch.optim.SGD`. ``lr`` may be a tensor of one element; on the parameter's
            device it is read when the step runs, so that a CUDA graph sees later changes.
        foreach, fused: accepted for compatibility, without effect. The step is always fused, and
            always capturable on CUDA.
        differentiable: must be False.
        state_dtype: dtype of the buffers. None: the parameter's, as in torch, or float32 with
            ``master``.
        max_grad_norm, master, rounding, seed, count_stalled, offload, budget: as in :class:`Adam`.
            A bfloat16 model whose steps are too small for 16 bits stands still with torch's SGD;
            with ``master="remainder16"`` it trains as in float32, for 2 bytes more per parameter.

    The state of a parameter is ``momentum_buffer`` and ``step`` (float64: the first step's buffer
    is the gradient, whatever the dampening); with ``momentum=0`` there is none, but for ``step``
    where weights are rounded at random. ``master`` and ``rounding`` add what they add in
    :class:`Adam`. A checkpoint of :class:`torch.optim.SGD` loads, and torch's loads this one.

    Example::

        optimizer = headroom.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    """

    _moment = "momentum_buffer"

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
        state_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        master: Master | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        count_stalled: bool = False,
        offload: Literal["state", "step"] | None = None,
        budget: int | str | None = None,
    ) -> None:
        super().__init__(params, own_arguments(locals()))

    def _check_options(self, options: dict[str, Any]) -> None:
        """Refuses what torch's constructor refuses, with its messages, and what torch refuses
        later."""
        super()._check_options(options)
        check_number("momentum", options["momentum"])
        if not 0.0 <= options["momentum"] < math.inf:
            raise ValueError(f"Invalid momentum value: {options['momentum']}")
        check_number("dampening", options["dampening"])
        if not math.isfinite(options["dampening"]):
            raise ValueError(f"Invalid dampening value: {options['dampening']}")
        if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    def _has_moment(self, group: dict[str, Any]) -> bool:
        return group["momentum"] != 0

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        own = sgd_options(group["momentum"], group["dampening"], group["nesterov"])
        return super()._options(group) | own


class Lion(OneMoment):
    r"""Lion, fused (Chen et al., arXiv:2302.06675): the sign of an interpolated gradient, with half
    the state of AdamW.

    One op per parameter group and device, as in :class:`SGD`.

    Args:
        params: as in :class:`torch.optim.Optimizer`.
        lr: learning rate. Every weight moves by it in every step; Lion's authors take 3 to 10 times
            less than for AdamW, and as many times more ``weight_decay``.
        betas: of the interpolation whose sign is taken, and of the moment.
        weight_decay: decoupled, as in AdamW.
        maximize: go up the gradient.
        foreach, fused, differentiable, state_dtype, max_grad_norm: as in :class:`SGD`.
        master, rounding, seed, count_stalled, offload, budget: as in :class:`SGD`.

    The state of a parameter is ``exp_avg`` and ``step`` (float64), and what ``master`` and
    ``rounding`` add in :class:`Adam`.

    Example::

        optimizer = headroom.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    _moment = "exp_avg"

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
        state_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        master: Master | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        count_stalled: bool = False,
        offload: Literal["state", "step"] | None = None,
        budget: int | str | None = None,
    ) -> None:
        super().__init__(params, own_arguments(locals()))

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        check_betas(options["betas"])

    def _translated(
        self, param: Tensor, entry: dict[str, Any], group: dict[str, Any]
    ) -> dict[str, Any]:
        if "exp_avg_sq" in entry:  # a group of Adam's has all options of Lion's
            raise ValueError(
                f"the loaded state of {name_of(self.param_groups, param)} has an 'exp_avg_sq': it "
                f"is Adam's, whose learning rate is many times that of {type(self).__name__}"
            )
        return super()._translated(param, entry, group)

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return super()._options(group) | lion_options(*group["betas"])

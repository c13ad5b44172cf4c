"""Fused Adam and AdamW: the op ``headroom::adamw_`` and the optimizers on top of it."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from . import _binaries  # noqa: F401  (registers the ops)
from ._registration import complete
from .optimizer import FLOATS, Kind, Optimizer

__all__ = ["Adam", "AdamW", "adamw_"]

COUNTERS = (torch.float32, torch.float64)  # of step counts and learning rates


def adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled: bool = True,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    clip_coef: Tensor | None = None,
) -> None:
    """One step of AdamW, or of Adam, on a list of parameters, in place and in one pass.

    The functional form of :class:`headroom.optim.AdamW`, with the argument order of
    ``torch._fused_adamw_``. Entry k of every list belongs to parameter k; all lie on one device.

    Args:
        params: float32, bfloat16 or float16 tensors of any shape and strides; updated.
        grads: tensors of the same shapes, each float32, bfloat16 or float16; not changed.
        exp_avgs, exp_avg_sqs: first and second moments, shaped like params, float32, bfloat16 or
            float16, one dtype per parameter; updated. Zeros before the first step.
        max_exp_avg_sqs: like exp_avg_sqs if ``amsgrad``, else empty; updated.
        state_steps: float32 or float64 tensors of one element, steps done so far; each grows by 1.
        lr: learning rate; a tensor of one element is read on its device.
        decoupled: weight decay as AdamW has it; False adds it to the gradient, as Adam does.
        grad_scale: float32 tensor of one element; gradients are divided by it.
        found_inf: float32 tensor of one element; if it is not 0, nothing changes, steps included.
        clip_coef: float32 tensor of one element; gradients are multiplied by it.

    Raises:
        RuntimeError: shapes, devices or dtypes do not fit, an option is out of range, or a tensor
            requires grad outside ``torch.no_grad()`` (the op has no derivative). The message names
            the argument. Nothing has been written then.

    The update, its source and its rounding are documented at ``hr_adamw`` in ``headroom.h``.
    """
    if not params:
        return
    torch.ops.headroom.adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        **_lr_arguments(lr, params[0].device),
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
        decoupled=decoupled,
        grad_scale=grad_scale,
        found_inf=found_inf,
        clip_coef=clip_coef,
    )


def _lr_arguments(lr: float | Tensor, device: torch.device) -> dict[str, Any]:
    if torch.compiler.is_compiling() and not isinstance(lr, Tensor):
        # A float in the call of an op is a constant of the graph, and a schedule would compile anew
        # every step. A product with a tensor lets torch.compile make it an input.
        lr = torch.ones((), dtype=torch.float64, device=device) * lr
    return {"lr": 0.0, "lr_tensor": lr} if isinstance(lr, Tensor) else {"lr": lr}


@torch.library.register_fake("headroom::adamw_")
def _(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, *, amsgrad, **options):
    # What the op refuses for its tensors when it runs is refused already when it is traced.
    def check(condition: bool, message: str) -> None:
        if not condition:
            raise RuntimeError(message)

    lists = {
        "params": params,
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "max_exp_avg_sqs": max_exp_avg_sqs,
        "state_steps": state_steps,
    }
    for name, tensors in lists.items():
        wanted = 0 if name == "max_exp_avg_sqs" and not amsgrad else len(params)
        check(len(tensors) == wanted, f"{name} has {len(tensors)} tensors, wanted {wanted}")
        for k, (tensor, param) in enumerate(zip(tensors, params)):
            one, device = f"{name}[{k}]", params[0].device
            check(tensor.device == device, f"{one} is on {tensor.device}, params[0] on {device}")
            if name == "state_steps":
                check(tensor.numel() == 1, f"{one} has {tensor.numel()} elements, wanted 1")
                check(tensor.dtype in COUNTERS, f"{one} is {tensor.dtype}, not among {COUNTERS}")
            else:
                check(tensor.shape == param.shape, f"{one} has another shape than params[{k}]")
                check(tensor.dtype in FLOATS, f"{one} is {tensor.dtype}, not among {FLOATS}")
            if name in ("exp_avg_sqs", "max_exp_avg_sqs"):
                like = exp_avgs[k].dtype
                check(tensor.dtype == like, f"{one} is {tensor.dtype}, exp_avgs[{k}] {like}")
    for name in ("lr_tensor", "grad_scale", "found_inf", "clip_coef"):
        if (tensor := options.get(name)) is None:
            continue
        dtypes = COUNTERS if name == "lr_tensor" else (torch.float32,)
        check(
            tensor.numel() == 1 and tensor.dtype in dtypes,
            f"{name} must be a tensor of one element with a dtype among {dtypes}",
        )


complete("adamw_")


class Adam(Optimizer):
    r"""Adam, fused: a drop-in for :class:`torch.optim.Adam`.

    One op per parameter group and device reads and writes each byte once, on CPU and CUDA, with the
    same bits on both. Parameters, gradients and moments may each be float32, bfloat16 or float16;
    arithmetic is float32. Parameters and gradients of any strides, empty tensors, DTensors and
    parameters on several devices are handled.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in :class:`torch.optim.Adam`.
            ``lr`` may be a tensor of one element; on the parameter's device it is read when the
            step runs, so that a CUDA graph sees later changes.
        foreach, fused, capturable: accepted for compatibility, without effect. The step is always
            fused, and always capturable on CUDA: its counters live on the parameter's device.
        differentiable: must be False.
        decoupled_weight_decay: weight decay as in AdamW.
        state_dtype: dtype of the moments. None: the parameter's, as in torch.
        max_grad_norm: clip all gradients, as one vector, to this L2 norm; see :meth:`step`.

    The state of a parameter is ``step`` (float64, counts past 2^24), ``exp_avg``, ``exp_avg_sq``
    and with ``amsgrad`` ``max_exp_avg_sq``: the keys of torch, so a checkpoint of one resumes the
    other. Loading never casts a state.

    If ``grad_scale``, ``found_inf`` or ``clip_coef`` is set as an attribute (tensors of one
    element), the step divides gradients by the first, changes nothing if
    the second is not 0, and multiplies gradients by the third, without waiting for the device.
    Gradients themselves are not written.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(map(_number, betas)),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        if state_dtype is not None:  # else the groups have torch's keys and no other
            defaults["state_dtype"] = state_dtype
        if max_grad_norm is not None:
            defaults["max_grad_norm"] = max_grad_norm
        _check_options(type(self).__name__, defaults)
        if {isinstance(beta, Tensor) for beta in betas} == {True, False}:
            raise ValueError("betas must be either both floats or both Tensors")
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            _check_options(type(self).__name__, self.defaults | param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:  # of older checkpoints
            for key in ("amsgrad", "maximize", "capturable", "differentiable"):
                group.setdefault(key, False)
            group.setdefault("decoupled_weight_decay", False)
            group.setdefault("foreach", None)
            group.setdefault("fused", None)
            if "state_dtype" in self.__dict__.get("defaults", ()):  # which torch's do not have
                group.setdefault("state_dtype", self.defaults["state_dtype"])
        super().__setstate__(state)

    def _kinds(self, group: dict[str, Any]) -> tuple[Kind, ...]:
        maximum = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return (Kind(("exp_avg", "exp_avg_sq", *maximum), ("step",)),)

    def _update(
        self,
        group: dict[str, Any],
        kind: int,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]] | Tensor,
    ) -> None:
        beta1, beta2 = group["betas"]
        device = params[0].device
        lr = group["lr"]
        if isinstance(lr, Tensor) and not lr.is_cpu:
            lr = lr.to(device)
        options = dict(
            **_lr_arguments(lr, device),
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            decoupled=group["decoupled_weight_decay"],
            grad_scale=_scalar_on(device, self.grad_scale),
            found_inf=_scalar_on(device, self.found_inf),
            clip_coef=_scalar_on(device, self.clip_coef),
        )
        if isinstance(states, Tensor):
            torch.autograd.graph.increment_version(params)
            torch.ops.headroom._adamw_table_(params[0], states, **options)
            return
        exp_avgs, exp_avg_sqs, *maxima, steps = states
        torch.ops.headroom.adamw_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            maxima[0] if maxima else [],
            steps,
            **options,
        )


class AdamW(Adam):
    r"""AdamW, fused: a drop-in for :class:`torch.optim.AdamW`.

    :class:`Adam` with decoupled weight decay; arguments, states and behaviour are described there.

    Example::

        optimizer = headroom.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            state_dtype=state_dtype,
            max_grad_norm=max_grad_norm,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # whatever a checkpoint of Adam says
            group["decoupled_weight_decay"] = True


def _scalar_on(device: torch.device, scalar: Tensor | None) -> Tensor | None:
    return None if scalar is None else scalar.to(device, torch.float32)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Refuses what torch's constructor refuses, in its words, and what fails later in torch."""
    lr, betas = options["lr"], options["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if lr.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"Tensor lr must be float32 or float64, got {lr.dtype}")
    elif not isinstance(lr, Real):
        raise TypeError(f"lr must be a number or a Tensor, got {type(lr).__name__}")
    if not 0.0 <= lr < math.inf:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not 0.0 <= options["eps"] < math.inf:
        raise ValueError(f"Invalid epsilon value: {options['eps']}")
    for index in (0, 1):
        if not 0.0 <= betas[index] < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {betas[index]}")
    if not 0.0 <= options["weight_decay"] < math.inf:
        raise ValueError(f"Invalid weight_decay value: {options['weight_decay']}")
    if options["differentiable"]:
        raise RuntimeError(f"{name} does not support differentiable=True: its step is one fused op")
    limit = options.get("max_grad_norm")
    if limit is not None and not 0.0 <= limit < math.inf:
        raise ValueError(f"max_grad_norm must be a finite number >= 0, got {limit}")
    if options.get("state_dtype") not in (None, *FLOATS):
        raise ValueError(f"state_dtype must be one of {FLOATS}, got {options['state_dtype']}")

"""Adam and AdamW, fused: drop-ins for torch's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._core.checks import check_number
from .._core.registration import FLOATS
from .._core.weight_modes import Master, Rounding
from ..param_states.plan import Bucket, Call, Options, States, table_call
from ..param_states.states import STEP, Layout, Slot
from .base import Optimizer
from .options import check_betas, check_fused, check_lr, of_groups, own_arguments

P = ParamSpec("P")


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
            fused, and always capturable on CUDA: its counters are on the parameter's device.
        differentiable: must be False.
        decoupled_weight_decay: weight decay as in AdamW.
        state_dtype: dtype of the moments. None: the parameter's, as in torch, or float32 with
            ``master``.
        max_grad_norm: clip the gradients of all groups, as one vector, to this L2 norm; see
            :meth:`step`. All parameter groups have the same.
        master: master weights beside bfloat16 or float16 parameters, so that updates too small for
            16 bits add up. ``"f32"``: a float32 copy. ``"remainder16"``: the 16 bits that bfloat16
            lacks, so that the weights are those of a float32 run with the same gradients, bit for
            bit, in 4 bytes instead of 6. ``"remainder8"``: 8 of these bits, a relative error up to
            2^-16. None: no master weights. Float32 parameters need none, so a model may be mixed.
        rounding: how parameters are rounded without master weights, or with ``"remainder8"``.
            ``"nearest"``; ``"stochastic"``, up or down at random, without bias; or ``"kahan"``,
            which keeps the rounding error, as a second tensor of the parameter's dtype, for the
            next step.
        seed: the seed of stochastic rounding, from 0 to 2^32 - 1. The random numbers depend on it,
            step, parameter and element alone, not on device, threads or sharding.
        count_stalled: count the weights that each step is too small to move, for
            :meth:`stalled_fraction`.
        offload, budget: ``"state"`` keeps the state on the host, but for as much as the budget has
            room for; ``"step"`` also steps there; see :func:`headroom.optim.offload`.

    The state of a parameter is ``step`` (float64, counts past 2^24), ``exp_avg``, ``exp_avg_sq``
    and with ``amsgrad`` ``max_exp_avg_sq``: the keys of torch, so a checkpoint of one resumes the
    other (but do not load 8-bit moments into torch's: see :class:`Adam8bit`). ``master`` adds
    ``master`` or ``remainder``, ``"kahan"`` adds ``compensation``. Loading never casts a state.

    Parameters may be written between two steps, in every mode: by pruning masks, by
    ``load_state_dict`` of the model, by clamping, by averages that are swapped in. ``"f32"`` takes
    the parameter where it is not the rounding of its copy; to compare them, a step reads 2 bytes
    more for each weight. ``"kahan"`` and the remainders may start up to half a unit in the last
    place from the value that was written, but exactly from 0 at a weight set to 0 (a remainder
    below 2^-134 stays). ``load_master_weights`` sets weights exactly. If only the optimizer's state
    is loaded, the weights are those of the model.

    If ``grad_scale``, ``found_inf`` or ``clip_coef`` is set as an attribute (tensors of one
    element), the step divides gradients by the first, changes nothing if the second is not 0, and
    multiplies gradients by the third, without waiting for the device. Gradients themselves are not
    written. :attr:`skipped_steps` counts the skipped steps.
    """

    _more_defaults: dict[str, Any] = {}  # options of a subclass, set before this constructor runs
    _always_decoupled = False  # whether weight decay is AdamW's even if a checkpoint has Adam's

    def __init__(
        self,
        params: ParamsT,
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
        master: Master | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        count_stalled: bool = False,
        offload: Literal["state", "step"] | None = None,
        budget: int | str | None = None,
    ) -> None:
        defaults = own_arguments(locals()) | {"betas": _numbers(betas)}
        for name in ("params", "count_stalled", "offload", "budget"):
            del defaults[name]
        defaults = of_groups(defaults) | self._more_defaults
        self._check_options(defaults)
        if len({isinstance(beta, Tensor) for beta in betas}) > 1:
            raise ValueError("betas must be either both floats or both Tensors")
        own = {"count_stalled": count_stalled, "offload": offload, "budget": budget}
        super().__init__(params, defaults, **own)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Refuses what torch's constructor refuses, with its messages, and what torch refuses
        later."""
        check_lr(options["lr"], "Invalid learning rate")
        check_number("eps", options["eps"])
        if not 0.0 <= options["eps"] < math.inf:
            raise ValueError(f"Invalid epsilon value: {options['eps']}")
        check_betas(options["betas"])
        check_fused(options, type(self).__qualname__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:  # of older checkpoints
            for key in ("amsgrad", "maximize", "capturable", "differentiable"):
                group.setdefault(key, False)
            group.setdefault("decoupled_weight_decay", False)
            group.setdefault("foreach", None)
            group.setdefault("fused", None)
            if self._always_decoupled:
                group["decoupled_weight_decay"] = True
        super().__setstate__(state)

    def _layouts(self, group: dict[str, Any]) -> tuple[Layout, ...]:
        dtype = group.get("state_dtype") or (torch.float32 if group.get("master") else None)
        names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
        moments = (Slot(name, dtype=dtype, loads=FLOATS) for name in names)
        return (Layout((*moments, STEP)),)

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "amsgrad": group["amsgrad"],
            "maximize": group["maximize"],
            "decoupled": group["decoupled_weight_decay"],
        }

    def _prepared(self, group: Options, bucket: Bucket, states: States, options: Options) -> Call:
        if isinstance(states, Tensor):
            return table_call(torch.ops.headroom._adamw_table_, bucket, states, options)
        lists = dict(zip(bucket.layout.names, states))
        return partial(
            torch.ops.headroom.adamw_,
            bucket.params,
            bucket.grads,
            lists["exp_avg"],
            lists["exp_avg_sq"],
            lists.get("max_exp_avg_sq", []),
            lists["step"],
            lists.get(bucket.layout.weights.residual, []),
            **options,
        )


def decoupling(adam: Callable[P, None]) -> Callable[P, None]:
    """Returns the constructor of an AdamW, from that of its Adam: weight decay is decoupled, and
    0.01 by default."""
    params = dict(inspect.signature(adam).parameters)
    del params["decoupled_weight_decay"]
    params["weight_decay"] = params["weight_decay"].replace(default=1e-2)
    place = list(params).index("weight_decay")

    @wraps(adam)
    def init(*args: P.args, **options: P.kwargs) -> None:
        if len(args) <= place:
            options.setdefault("weight_decay", 1e-2)
        adam(*args, **options, decoupled_weight_decay=True)

    init.__signature__ = inspect.Signature(list(params.values()), return_annotation=None)
    return init


class AdamW(Adam):
    r"""AdamW, fused: a drop-in for :class:`torch.optim.AdamW`.

    This is :class:`Adam` with decoupled weight decay, with its arguments and states.

    Example::

        optimizer = headroom.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    """

    _always_decoupled = True
    __init__ = decoupling(Adam.__init__)


def _numbers(betas: Any) -> Any:
    """Returns betas as numbers: they may be tensors of one element, as in torch. Returns a value
    that is not a sequence as it is; it is refused later."""
    if not isinstance(betas, Sequence) or isinstance(betas, str):
        return betas
    return tuple(beta.item() if isinstance(beta, Tensor) else beta for beta in betas)

"""Adafactor, by the rule of torch or of transformers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from .._core.checks import check_number, check_pair
from .._core.names import name_of
from .._core.registration import FLOATS
from .._core.weight_modes import NEAREST, RESIDUALS, Master, Rounding, weights_mode
from ..functional.adafactor import is_hf
from ..param_states.plan import Bucket, Call, Options, States, table_call
from ..param_states.states import STEP, Layout
from .adafactor_sharding import prepared_sharded, sharding_of
from .adafactor_state import LINES, NAMES, RMS, float32_slot, shape_of, zero_scalar
from .base import Optimizer
from .options import check_lr, own_arguments

FACTORED, VECTOR = 0, 1  # the layouts of states

# The options of each rule with their defaults, named as in the original. None stands for them.
DEFAULTS: dict[str, dict[str, Any]] = {
    "torch": {
        "lr": 1e-2,
        "beta2_decay": -0.8,
        "eps": (None, 1e-3),
        "d": 1.0,
        "weight_decay": 0.0,
        "foreach": None,
        "maximize": False,
    },
    "hf": {
        "lr": None,
        "eps": (1e-30, 1e-3),
        "clip_threshold": 1.0,
        "decay_rate": -0.8,
        "beta1": None,
        "weight_decay": 0.0,
        "scale_parameter": True,
        "relative_step": True,
        "warmup_init": False,
    },
}


class Adafactor(Optimizer):
    r"""Adafactor, fused, following torch or transformers: a drop-in for
    :class:`torch.optim.Adafactor` (``semantics="torch"``) and for ``transformers``' Adafactor
    (``semantics="hf"``).

    The second moment of a parameter of two dimensions or more is stored as one number for each row
    and each column, so that the state takes almost no memory. One op steps the factored parameters
    of a group and one the others; no step waits for the device, while both originals wait twice for
    each parameter. Parameters and gradients may each be float32, bfloat16 or float16; statistics
    are always float32. (torch keeps the statistics of bfloat16 gradients in bfloat16, and computes
    in it.) Sums over a DTensor include all ranks that hold a part.

    Args:
        params: parameters, or groups of them, as in every optimizer of torch.
            Options that are not given have the defaults of the rule.
        lr: learning rate. In ``"torch"``, the upper bound of the relative step, 1e-2 by default; it
            may be a tensor of one element, which is read on its device when the step runs. In
            ``"hf"``, None with ``relative_step``, else the step.
        beta2_decay, d: options of ``"torch"``: the exponent with which beta2 approaches 1 (-0.8),
            and the threshold of clipping (1).
        decay_rate, clip_threshold: the names of these two options in ``"hf"``.
        eps: the regularizers of the second moment and of the parameter scale. In ``"torch"``
            ``(None, 1e-3)``, where None is the epsilon of the parameter's dtype (of float32 with
            ``master`` or a ``rounding`` other than nearest); in ``"hf"`` ``(1e-30, 1e-3)``.
        weight_decay: decoupled; times ``lr`` in torch's rule, times the scaled step in the other.
        maximize: an option of ``"torch"``.
        beta1, scale_parameter, relative_step, warmup_init: options of ``"hf"``: momentum (None: no
            momentum), the step times the root mean square of the parameter, the step by the
            schedule of the paper, and its warm-up.
        foreach: accepted for compatibility, without effect.
        semantics: the implementation whose rule, options, defaults and state keys are used.
        max_grad_norm: clip the gradients of all groups, as one vector, to this L2 norm; see
            :meth:`step`. All parameter groups have the same.
        master, rounding, seed, count_stalled: the storage of 16-bit parameters, as in
            :class:`Adam`.

    The state of a parameter is that of the original: ``step``, and ``row_var`` and ``col_var``, or
    ``variance`` (``"torch"``); ``exp_avg_sq_row`` and ``exp_avg_sq_col``, or ``exp_avg_sq``, with
    ``exp_avg`` if there is momentum and ``RMS``, which only ``scale_parameter`` updates (``"hf"``).
    Checkpoints of one resume the other.

    The attributes ``grad_scale``, ``found_inf`` and ``clip_coef`` mean what they mean in
    :class:`Adam`.

    Raises:
        ValueError: an option is out of range, or belongs to the other rule.

    Adafactor: adaptive learning rates with sublinear memory cost, arXiv:1804.04235.

    Example::

        optimizer = headroom.optim.Adafactor(model.parameters(), lr=1e-2)
        optimizer = headroom.optim.Adafactor(
            model.parameters(), lr=1e-3, semantics="hf", scale_parameter=False, relative_step=False
        )
    """

    _refuses_offload = (
        "Adafactor's state is not offloaded: factored, it is a thousandth of the weights"
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        beta2_decay: float | None = None,
        eps: tuple[float | None, float] | None = None,
        d: float | None = None,
        weight_decay: float | None = None,
        *,
        semantics: Literal["torch", "hf"] = "torch",
        foreach: bool | None = None,
        maximize: bool | None = None,
        clip_threshold: float | None = None,
        decay_rate: float | None = None,
        beta1: float | None = None,
        scale_parameter: bool | None = None,
        relative_step: bool | None = None,
        warmup_init: bool | None = None,
        max_grad_norm: float | None = None,
        master: Master | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        count_stalled: bool = False,
    ) -> None:
        arguments = own_arguments(locals())
        is_hf(semantics)
        self.semantics = semantics
        options = set().union(*DEFAULTS.values())
        given = {
            name: value
            for name, value in arguments.items()
            if name in options and value is not None
        }
        for name in given:
            if name not in DEFAULTS[semantics]:
                raise ValueError(f"{name} is not an option of semantics={semantics!r}")
        defaults = DEFAULTS[semantics] | given
        if max_grad_norm is not None:
            defaults["max_grad_norm"] = max_grad_norm
        if weights_mode(master, rounding) is not NEAREST:
            defaults |= {"master": master, "rounding": rounding, "seed": seed}
        self._check_options(defaults)
        super().__init__(params, defaults, count_stalled=count_stalled)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Refuses what the original refuses, with its messages, and what it refuses later."""
        hf, lr = self.semantics == "hf", options["lr"]
        check_pair("eps", options["eps"])
        eps1, eps2 = options["eps"]
        if hf and lr is not None and options["relative_step"]:
            raise ValueError("Cannot combine manual `lr` and `relative_step=True` options")
        if hf and options["warmup_init"] and not options["relative_step"]:
            raise ValueError("`warmup_init=True` requires `relative_step=True`")
        if lr is None:
            if not hf or not options["relative_step"]:
                raise ValueError("lr is None, which needs semantics='hf' and relative_step=True")
        else:
            check_lr(lr, "Learning rate should be >= 0 but is")
        decay, threshold = ("decay_rate", "clip_threshold") if hf else ("beta2_decay", "d")
        for name in (decay, threshold, "weight_decay"):
            check_number(name, options[name])
        if hf or eps1 is not None:
            check_number("eps[0]", eps1, "a number" if hf else "a number or None")
        check_number("eps[1]", eps2)
        if hf and options["beta1"] is not None:
            check_number("beta1", options["beta1"], "a number or None")
        if not -math.inf < options[decay] <= 0.0:
            raise ValueError(f"{decay} should be <= 0 but is: {options[decay]}")
        if (hf or eps1 is not None) and not 0.0 <= eps1 < math.inf:
            raise ValueError(f"epsilon1 should be >= 0 but is: {eps1}")
        if not 0.0 <= eps2 < math.inf:
            raise ValueError(f"epsilon2 should be >= 0 but is: {eps2}")
        if not hf and not 1.0 <= options["d"]:
            raise ValueError(f"Clipping threshold d should be >= 1 but is: {options['d']}")
        if hf and not 0.0 < options["clip_threshold"]:
            raise ValueError(f"clip_threshold should be > 0 but is: {options['clip_threshold']}")
        if not 0.0 <= options["weight_decay"] < math.inf:
            raise ValueError(f"weight_decay should be >= 0 but is: {options['weight_decay']}")
        if hf and options["beta1"] is not None and not 0.0 <= options["beta1"] < 1.0:
            raise ValueError(f"beta1 should be in [0, 1) but is: {options['beta1']}")

    # ---- states ---------------------------------------------------------------------------------

    def _layouts(self, group: dict[str, Any]) -> tuple[Layout, ...]:
        hf = self.semantics == "hf"
        row, col, variance = NAMES[self.semantics]
        momentum = (float32_slot("exp_avg"),) if hf and group["beta1"] is not None else ()
        extra = (RMS, STEP) if hf else (STEP,)
        factored = Layout((*momentum, LINES[row], LINES[col], *extra))
        return factored, Layout((float32_slot(variance), *momentum, *extra))

    def _layout_index(self, param: Tensor, group: dict[str, Any]) -> int:
        return FACTORED if param.dim() >= 2 else VECTOR

    def _layout_index_of_state(self, entry: dict[str, Any]) -> int:
        return VECTOR if NAMES[self.semantics][2] in entry else FACTORED

    def _translated(
        self, param: Tensor, entry: dict[str, Any], group: dict[str, Any]
    ) -> dict[str, Any]:
        # torch's statistics have the gradient's dtype, and ours are always float32.
        widened = {
            name: value.float()
            if name not in ("step", *RESIDUALS)
            and isinstance(value, Tensor)
            and value.dtype in FLOATS
            else value
            for name, value in entry.items()
        }
        if "RMS" in widened and not isinstance(widened["RMS"], DTensor):
            rms = torch.as_tensor(widened["RMS"], dtype=torch.float32).detach()
            is_number = rms.numel() == 1 and rms.layout == torch.strided and not rms.is_meta
            widened["RMS"] = zero_scalar(param).copy_(rms.reshape(())) if is_number else rms
        return widened

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"semantics": self.semantics}

    def __setstate__(self, state: dict[str, Any]) -> None:
        semantics = state.get("semantics") or self.semantics
        for group in state["param_groups"]:
            foreign = set(DEFAULTS["hf"]) ^ set(DEFAULTS["torch"])
            foreign -= set(DEFAULTS[semantics])
            if (found := foreign & set(group)) and "decay" not in group:
                raise ValueError(
                    f"the loaded state belongs to another rule than semantics={semantics!r}: its "
                    f"groups have {sorted(found)}"
                )
            if semantics == "torch":
                group.setdefault("foreach", None)  # as torch's loader does
        super().__setstate__(state)

    @staticmethod
    def _get_lr(group: dict[str, Any], state: dict[str, Any]) -> Any:
        """Returns the step before clipping, for transformers' AdafactorSchedule."""
        lr = group["lr"]
        if group["relative_step"]:
            first = 1e-6 * state["step"] if group["warmup_init"] else 1e-2
            lr = min(first, 1 / math.sqrt(state["step"]))
        return lr * max(group["eps"][1], state["RMS"]) if group["scale_parameter"] else lr

    def _check_shapes(self, params: Sequence[Tensor]) -> None:
        """Refuses statistics of a shape that a parameter had before its data was replaced. The op
        checks numbers of elements only."""
        wanted: dict[torch.Size, tuple[tuple[str, torch.Size | None], ...]] = {}
        for param in params:
            entry, shape = self.state.get(param), param.shape
            if not entry:
                continue
            if shape not in wanted:
                row, col, variance = NAMES[self.semantics]
                own = (row, col) if param.dim() >= 2 else (variance,)
                wanted[shape] = tuple(
                    (name, shape_of(name, param) if name in own else None)
                    for name in (row, col, variance)
                )
            for name, size in wanted[shape]:
                value = entry.get(name)
                if isinstance(value, Tensor) and value.shape != size:
                    raise RuntimeError(
                        f"the state of {name_of(self.param_groups, param)} is that of another "
                        f"shape: its '{name}' has shape {tuple(value.shape)}, but the parameter "
                        f"now has shape {tuple(shape)}; delete optimizer.state[parameter] to "
                        "start its statistics anew"
                    )

    def _entry(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        self._check_shapes([param])
        return super()._entry(param, group)

    # ---- one step -------------------------------------------------------------------------------

    def _table(self, bucket: Bucket) -> Tensor | None:
        self._check_shapes(bucket.params)
        if bucket.layout.index == FACTORED and not all(map(Tensor.is_contiguous, bucket.params)):
            return None
        return super()._table(bucket)

    def _list_key(self, param: Tensor) -> Hashable:
        return param.device, sharding_of(param)

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        hf = self.semantics == "hf"
        eps1, eps2 = group["eps"]
        return {
            "hf": hf,
            "beta2_decay": group["decay_rate" if hf else "beta2_decay"],
            "eps1": -1.0 if eps1 is None else eps1,
            "eps2": eps2,
            "clip_threshold": group["clip_threshold" if hf else "d"],
            "weight_decay": group["weight_decay"],
            "beta1": group.get("beta1") or 0.0,
            "scale_parameter": group.get("scale_parameter", True),
            "relative_step": group.get("relative_step", True),
            "warmup_init": group.get("warmup_init", False),
            "maximize": group.get("maximize", False),
        }

    def _prepared(self, group: Options, bucket: Bucket, states: States, options: Options) -> Call:
        layout, names = bucket.layout, bucket.layout.names
        space = {"dtype": torch.float64, "device": bucket.params[0].device}
        if isinstance(states, Tensor):
            shape = dict(
                factored=layout.index == FACTORED,
                momentum="exp_avg" in names,
                with_rms="RMS" in names,
                weights_mode=options.pop("weights_mode"),
            )
            size = torch.ops.headroom._adafactor_table_workspace(states, **shape)
            options |= shape | {"workspace": torch.empty(size, **space)}
            return table_call(torch.ops.headroom._adafactor_table_, bucket, states, options)
        columns = dict(zip(names, states))
        keys = *NAMES[self.semantics], "exp_avg", "RMS", "step", layout.weights.residual
        lists = [bucket.params, bucket.grads, *(columns.get(name, []) for name in keys)]
        sharding = sharding_of(bucket.owners[0])
        if sharding is not None:
            return prepared_sharded(bucket.owners, *sharding, lists, options)
        # A traced op, or one that a mode looks at, makes its workspace by itself.
        if not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()):
            size = torch.ops.headroom._adafactor_workspace(bucket.params)
            options["workspace"] = torch.empty(size, **space)
        return partial(torch.ops.headroom.adafactor_, *lists, **options)

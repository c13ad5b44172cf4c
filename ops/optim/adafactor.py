"""Adafactor, by the rule of torch or of transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import ParamsT

from .._core.checks import check_number, check_pair, lr_arguments
from .._core.dtensor import moved_shard, sharded_dim
from .._core.grouping import grouped
from .._core.registration import FLOATS
from .._core.weight_modes import NEAREST, RESIDUALS, Master, Rounding, weights_mode
from ..functional.adafactor import APPLY, NORM, STATES, SUMS, is_hf, lines_of
from .base import Optimizer
from .options import own_arguments
from .plan import Bucket
from .scalars import StepScalars
from .states import STEP, Layout, Slot

__all__ = ["Adafactor"]

FACTORED, VECTOR = 0, 1  # the layouts of states
ROWS, COLS, ELEMENTS = "rows", "cols", "elements"  # what a dimension of a mesh shards

# The options of each rule, as its original names them, and their defaults.
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
# The states of each: row, column and element variances.
NAMES = {
    "torch": ("row_var", "col_var", "variance"),
    "hf": ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"),
}


class _Default:
    """Stands for the default that an option has in each rule, and shows it in the signature."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        of = (f"{rule}: {own[self.name]}" for rule, own in DEFAULTS.items() if self.name in own)
        return f"<{', '.join(of)}>"


BY_RULE: dict[str, Any] = {name: _Default(name) for own in DEFAULTS.values() for name in own}


class Adafactor(Optimizer):
    r"""Adafactor, fused, by the rule of either implementation that is in use: a drop-in for
    :class:`torch.optim.Adafactor` (``semantics="torch"``) and for ``transformers``' Adafactor
    (``semantics="hf"``).

    The second moment of a parameter of two dimensions or more is kept as one number for each row
    and each column, so that the state takes almost nothing. One op for the factored parameters of a
    group and one for the others; nothing waits for the device, where both originals wait twice for
    each parameter. Parameters and gradients may each be float32, bfloat16 or float16; statistics
    are float32 whatever they are. (torch keeps the statistics of bfloat16 gradients in bfloat16,
    and computes in it.) DTensors are summed over all ranks that hold a part.

    Args:
        params: as in every optimizer.
        lr: learning rate. ``"torch"``: the most that the relative step may be, 1e-2 by default; may
            be a tensor of one element, which is read on its device when the step runs. ``"hf"``:
            None with ``relative_step``, else the step.
        beta2_decay, d: of ``"torch"``, -0.8 and 1: the exponent that beta2 approaches 1 with, and
            the threshold of clipping.
        decay_rate, clip_threshold: the same of ``"hf"``.
        eps: the regularizers of the second moment and of the parameter scale: ``(None, 1e-3)``,
            where None is the epsilon of the parameter's dtype (of float32 with ``master`` or a
            ``rounding`` that is not to the nearest), and ``(1e-30, 1e-3)``.
        weight_decay: decoupled; times ``lr`` in torch's rule, times the scaled step in the other.
        maximize: of ``"torch"``.
        beta1, scale_parameter, relative_step, warmup_init: of ``"hf"``: momentum (None: none), the
            step times the root mean square of the parameter, the step by the schedule of the paper,
            and its warm-up.
        foreach: accepted for compatibility, without effect.
        semantics: whose rule, options, defaults and state keys.
        max_grad_norm: clip the gradients of all groups, as one vector, to this L2 norm; see
            :meth:`step`. It is the same in all parameter groups.
        master, rounding, seed, count_stalled: how 16-bit parameters are stored, as in
            :class:`Adam`.

    The state of a parameter is that of the original: ``step``, and ``row_var`` and ``col_var``, or
    ``variance`` (``"torch"``); ``exp_avg_sq_row`` and ``exp_avg_sq_col``, or ``exp_avg_sq``, with
    ``exp_avg`` if there is momentum and ``RMS``, which only ``scale_parameter`` updates (``"hf"``).
    Checkpoints of one resume the other.

    If ``grad_scale``, ``found_inf`` or ``clip_coef`` is set as an attribute, it does what it does
    in :class:`Adam`.

    Raises:
        ValueError: an option is out of range, or belongs to the other rule.

    Adafactor: adaptive learning rates with sublinear memory cost, arXiv:1804.04235.

    Example::

        optimizer = headroom.optim.Adafactor(model.parameters(), lr=1e-2)
        optimizer = headroom.optim.Adafactor(
            model.parameters(), lr=1e-3, semantics="hf", scale_parameter=False, relative_step=False
        )
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = BY_RULE["lr"],
        beta2_decay: float = BY_RULE["beta2_decay"],
        eps: tuple[float | None, float] = BY_RULE["eps"],
        d: float = BY_RULE["d"],
        weight_decay: float = BY_RULE["weight_decay"],
        *,
        semantics: Literal["torch", "hf"] = "torch",
        foreach: bool | None = None,
        maximize: bool = BY_RULE["maximize"],
        clip_threshold: float = BY_RULE["clip_threshold"],
        decay_rate: float = BY_RULE["decay_rate"],
        beta1: float | None = None,
        scale_parameter: bool = BY_RULE["scale_parameter"],
        relative_step: bool = BY_RULE["relative_step"],
        warmup_init: bool = BY_RULE["warmup_init"],
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
            if name in options and value is not None and not isinstance(value, _Default)
        }
        for name in given:
            if name not in DEFAULTS[semantics]:
                raise ValueError(f"{name} is no option of semantics={semantics!r}")
        defaults = DEFAULTS[semantics] | given
        if max_grad_norm is not None:
            defaults["max_grad_norm"] = max_grad_norm
        if weights_mode(master, rounding) is not NEAREST:
            defaults |= {"master": master, "rounding": rounding, "seed": seed}
        self._check_options(defaults)
        super().__init__(params, defaults, count_stalled=count_stalled)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Refuses what the original refuses, in its words, and what fails later in it."""
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
        elif isinstance(lr, Tensor):
            if lr.numel() != 1:
                raise ValueError("Tensor lr must be 1-element")
            if lr.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"Tensor lr must be float32 or float64, got {lr.dtype}")
        elif not isinstance(lr, Real):
            raise TypeError(f"lr must be a number or a Tensor, got {type(lr).__name__}")
        if lr is not None and not 0.0 <= lr < math.inf:
            raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
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
        momentum = (_float32("exp_avg"),) if hf and group["beta1"] is not None else ()
        extra = (RMS, STEP) if hf else (STEP,)
        factored = Layout((*momentum, LINES[row], LINES[col], *extra))
        return factored, Layout((_float32(variance), *momentum, *extra))

    def _layout_index(self, param: Tensor, group: dict[str, Any]) -> int:
        return FACTORED if param.dim() >= 2 else VECTOR

    def _layout_index_of_state(self, entry: dict[str, Any]) -> int:
        return VECTOR if NAMES[self.semantics][2] in entry else FACTORED

    def _translated(
        self, param: Tensor, entry: dict[str, Any], group: dict[str, Any]
    ) -> dict[str, Any]:
        # torch's statistics have the gradient's dtype, and ours are float32 always.
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
            widened["RMS"] = _zero_scalar(param).copy_(rms.reshape(())) if is_number else rms
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
                    f"the loaded state is that of another rule than semantics={semantics!r}: its "
                    f"groups have {sorted(found)}"
                )
            if semantics == "torch":
                group.setdefault("foreach", None)  # as torch's loader does
        super().__setstate__(state)

    @staticmethod
    def _get_lr(group: dict[str, Any], state: dict[str, Any]) -> Any:
        """What transformers' AdafactorSchedule asks for: the step before clipping."""
        lr = group["lr"]
        if group["relative_step"]:
            first = 1e-6 * state["step"] if group["warmup_init"] else 1e-2
            lr = min(first, 1 / math.sqrt(state["step"]))
        return lr * max(group["eps"][1], state["RMS"]) if group["scale_parameter"] else lr

    def _check_shapes(self, params: Sequence[Tensor]) -> None:
        """Refuses statistics of a shape that a parameter had before its data was replaced. The op
        asks for numbers of elements alone."""
        wanted: dict[torch.Size, tuple[tuple[str, torch.Size | None], ...]] = {}
        for param in params:
            entry, shape = self.state.get(param), param.shape
            if not entry:
                continue
            if shape not in wanted:
                row, col, variance = NAMES[self.semantics]
                own = (row, col) if param.dim() >= 2 else (variance,)
                wanted[shape] = tuple(
                    (name, _shape_of(name, param) if name in own else None)
                    for name in (row, col, variance)
                )
            for name, size in wanted[shape]:
                value = entry.get(name)
                if isinstance(value, Tensor) and value.shape != size:
                    raise RuntimeError(
                        f"the state of {self._name_of(param)} is that of another shape: its "
                        f"'{name}' has shape {tuple(value.shape)}, but the parameter now has shape "
                        f"{tuple(shape)}; delete optimizer.state[parameter] to start its "
                        "statistics anew"
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

    def _update(
        self,
        group: dict[str, Any],
        bucket: Bucket,
        states: list[list[Tensor]] | Tensor,
        scalars: StepScalars,
    ) -> None:
        options = self._options(group, bucket.device, scalars)
        layout, names = bucket.layout, bucket.layout.names
        if isinstance(states, Tensor):
            options |= self._weights_options(group, bucket)
            torch.autograd.graph.increment_version(bucket.params)
            torch.ops.headroom._adafactor_table_(
                bucket.params[0],
                states,
                factored=layout.index == FACTORED,
                momentum="exp_avg" in names,
                with_rms="RMS" in names,
                **options,
            )
            return
        columns = dict(zip(names, states))
        row, col, variance = NAMES[self.semantics]
        lists = [bucket.params, bucket.grads]
        keys = row, col, variance, "exp_avg", "RMS", "step", layout.weights.residual
        lists += [columns.get(name, []) for name in keys]
        positions = range(len(bucket.owners))
        for sharding, where in grouped(positions, lambda k: _sharding(bucket.owners[k])).items():
            chosen = [[column[k] for k in where] if column else [] for column in lists]
            some = bucket._replace(owners=[bucket.owners[k] for k in where])
            more = options | self._weights_options(group, some)
            if sharding is None:
                torch.ops.headroom.adafactor_(*chosen, **more)
            else:
                _step_sharded(some.owners, *sharding, chosen, more)

    def _options(
        self, group: dict[str, Any], device: torch.device, scalars: StepScalars
    ) -> dict[str, Any]:
        """The op's arguments that are not lists."""
        hf = self.semantics == "hf"
        lr = 0.0 if group["lr"] is None else group["lr"]
        if isinstance(lr, Tensor) and not lr.is_cpu:
            lr = lr.to(device)
        eps1, eps2 = group["eps"]
        return dict(
            hf=hf,
            **lr_arguments(lr, device),
            beta2_decay=group["decay_rate" if hf else "beta2_decay"],
            eps1=-1.0 if eps1 is None else eps1,
            eps2=eps2,
            clip_threshold=group["clip_threshold" if hf else "d"],
            weight_decay=group["weight_decay"],
            beta1=group.get("beta1") or 0.0,
            scale_parameter=group.get("scale_parameter", True),
            relative_step=group.get("relative_step", True),
            warmup_init=group.get("warmup_init", False),
            maximize=group.get("maximize", False),
            **scalars.on(device),
        )


# ---- DTensors -----------------------------------------------------------------------------------


def _sharding(param: Tensor) -> tuple[Any, tuple[str | None, ...]] | None:
    """The mesh of a DTensor and what each dimension of it shards; None if every rank has it all."""
    if not isinstance(param, DTensor):
        return None
    roles = []
    for placement in param.placements:
        dim = sharded_dim(placement)
        from_end = None if dim is None or param.dim() < 2 else param.dim() - dim
        role = {1: COLS, 2: ROWS}.get(from_end, ELEMENTS)
        roles.append(None if dim is None else role)
    return (param.device_mesh, tuple(roles)) if any(roles) else None


def _step_sharded(
    owners: list[Tensor],
    mesh: Any,
    roles: tuple[str | None, ...],
    lists: list[list[Tensor]],
    options: dict[str, Any],
) -> None:
    """A step whose sums are added over the ranks between its phases. Where they lie in the
    workspace is documented at ``hr_adafactor`` in ``headroom.h``."""
    params = lists[0]
    wholes = []
    for owner in owners:
        rows, cols = owner.shape[-2:] if owner.dim() >= 2 else (0, 0)
        wholes += [rows * (ROWS in roles), cols * (COLS in roles), owner.numel()]
    size = torch.ops.headroom._adafactor_workspace(params, wholes)
    workspace = torch.empty(size, dtype=torch.float64, device=params[0].device)
    counts = [len(params)] * 2 + [0, 0, 0]
    if ROWS in roles or COLS in roles:
        counts[2] = sum(math.prod(param.shape[:-2]) for param in params)
        counts[3], counts[4] = map(sum, zip(*(lines_of(param.shape) for param in params)))
    squared_params, squared_updates, row_vars, row_sums, col_sums = workspace[: sum(counts)].split(
        counts
    )

    def run(phases: int) -> None:
        torch.ops.headroom.adafactor_(
            *lists, **options, phases=phases, wholes=wholes, workspace=workspace
        )

    def add(sums: Tensor, *over: str) -> None:
        for dim, role in enumerate(roles):
            if role in over and sums.numel() > 0:
                torch.distributed.all_reduce(sums, group=mesh.get_group(dim))

    run(SUMS)
    add(squared_params, ROWS, COLS, ELEMENTS)
    add(row_sums, COLS)
    add(col_sums, ROWS)
    run(STATES)
    add(row_vars, ROWS)
    run(NORM)
    add(squared_updates, ROWS, COLS, ELEMENTS)
    run(APPLY)


def _zero_scalar(param: Tensor) -> Tensor:
    """On every rank the same."""
    zero = torch.zeros((), dtype=torch.float32, device=param.device)
    if not isinstance(param, DTensor):
        return zero
    mesh = param.device_mesh
    return DTensor.from_local(zero, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _zero_lines(name: str, param: Tensor) -> Tensor:
    """The variances of rows or columns, sharded as the parameter is in the dimensions they keep."""
    shape = _shape_of(name, param)
    if not isinstance(param, DTensor):
        return torch.zeros(shape, dtype=torch.float32, device=param.device)
    summed = param.dim() - (1 if "row" in name else 2)  # the dimension that is no more
    is_kept = len(shape) == param.dim()  # with size 1
    local, placements = list(param.to_local().shape), []
    local[summed : summed + 1] = [1] if is_kept else []
    for placement in param.placements:
        dim = sharded_dim(placement)
        if dim == summed:
            placement = Replicate()
        elif dim is not None and dim > summed and not is_kept:
            placement = moved_shard(placement, dim - 1)
        placements.append(placement)
    zeros = torch.zeros(local, dtype=torch.float32, device=param.to_local().device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, param.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


# ---- the tensors of a state ---------------------------------------------------------------------


def _shape_of(name: str, param: Tensor) -> torch.Size:
    shape = param.shape
    shapes = {
        "row_var": (*shape[:-1], 1),
        "col_var": (*shape[:-2], 1, *shape[-1:]),
        "exp_avg_sq_row": shape[:-1],
        "exp_avg_sq_col": (*shape[:-2], *shape[-1:]),
    }
    return torch.Size(shapes.get(name, shape))


def _no_dimensions(param: Tensor) -> tuple[int, ...]:
    return ()


def _float32(name: str) -> Slot:
    return Slot(name, dtype=torch.float32)


LINES = {
    name: Slot(name, partial(_shape_of, name), torch.float32, first=partial(_zero_lines, name))
    for names in NAMES.values()
    for name in names[:2]
}
RMS = Slot("RMS", _no_dimensions, torch.float32, first=_zero_scalar)

"""What Headroom's optimizers share: loading without casting, DTensors, and steps over whole groups.

A subclass names its states and runs one op for the parameters of a group that lie on one device.
This class creates the states, carries them through save and load, and hands them to the op: as a
table of addresses, read afresh every step, where all is plain, else as lists.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from numbers import Real
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from .._core.dtensor import local_part, place_of
from .._core.overlap import overlapping, place_in_memory
from .._core.registration import FLOATS
from .._core.skips import LateCounts, count_step, new_counts
from .._core.table import joined, table_of
from .._core.weight_modes import (
    NEAREST,
    RESIDUALS,
    WeightsMode,
    check_weight_options,
    mode_of,
    weight_seeds,
)
from ..grad.norm import Measured, measure

__all__ = ["Kind", "Optimizer", "Part"]


STATE_DTYPES = {str(dtype): dtype for dtype in FLOATS}
KEPT = (  # attributes that copies and pickles have, beside torch's
    "_count_stalled",
    "_stalled",
    "_skips",
    "_warned",
    "check_finite",
    "clip_coef",
    "found_inf",
    "grad_norm",
    "grad_scale",
    "max_consecutive_skips",
    "measured",
    "measured_params",
)
NONNEGATIVE = (  # states that are means of squares, or magnitudes
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_avg_absmax",
    "exp_avg_sq_absmax",
    "row_var",
    "col_var",
    "variance",
    "exp_avg_sq_row",
    "exp_avg_sq_col",
    "RMS",
)


def _like(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient of a DTensor, sharded as the DTensor is."""
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        return grad.redistribute(placements=param.placements)
    return grad


def _check_max_grad_norm(limit: Any) -> None:
    if limit is not None and not isinstance(limit, Real):
        raise TypeError(f"max_grad_norm must be a number or None, got {type(limit).__name__}")
    if limit is not None and not limit >= 0:
        raise ValueError(f"max_grad_norm must be a number >= 0, got {limit}")


def _common_max_grad_norm(groups: Sequence[dict[str, Any]]) -> float | None:
    """The limit that all parameter groups have."""
    limits = [group.get("max_grad_norm") for group in groups]
    for index, limit in enumerate(limits):
        if limit != limits[0]:
            raise ValueError(
                "max_grad_norm clips the gradients of all parameter groups as one vector, so all "
                f"groups must have the same, but group 0 has {limits[0]} and group {index} has "
                f"{limit}; to clip groups one by one, leave it out and call "
                "headroom.clip_grad_norm_ for each"
            )
    return limits[0] if limits else None


class _Kept:
    """Carries a state through torch's loader, which would cast a bare tensor to the dtype of its
    parameter (``Optimizer._process_value_according_to_param_policy``)."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Kind(NamedTuple):
    """The keys of a parameter's state that one op takes, in its order."""

    alike: tuple[str, ...]  # of the parameter's shape
    others: tuple[str, ...]  # of other shapes, "step" among them
    weights: WeightsMode = NEAREST  # how the parameters are stored
    index: int = 0  # among the optimizer's kinds

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.alike, *self.others)


class Part(NamedTuple):
    """The parameters of a group that one op takes."""

    kind: Kind
    owners: list[Tensor]  # the optimizer's parameters
    params: list[Tensor]  # what of them is on this rank: but for DTensors, the owners
    grads: list[Tensor]
    places: Tensor | None = None  # among the group's parameters with gradients; None: all of them

    @property
    def device(self) -> torch.device:
        return self.params[0].device


class _Plan(NamedTuple):
    """What a step does with a group: its parameters with gradients, in parts, with a table of
    everything for each, or None where not all is plain or there yet."""

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    parts: list[Part]
    tables: list[Tensor | None]


def _table_of_grads(plans: list[_Plan]) -> Tensor | None:
    """Of all gradients in their order, if all are plain and on one device."""
    tables = [table for plan in plans for table in plan.tables]
    devices = {part.device for plan in plans for part in plan.parts}
    if len(devices) != 1 or any(table is None for table in tables):
        return None
    places, first = [], 0
    for plan in plans:
        for part in plan.parts:
            own = (
                torch.arange(len(part.params), device="cpu") if part.places is None else part.places
            )
            places.append(first + own)
        first += len(plan.params)
    return joined([table[1:2] for table in tables], places)


@dataclass
class StateMemory:
    """The state of the parameters that have one kind of it."""

    dtypes: tuple[str, ...]  # of its parts
    names: list[str] = field(default_factory=list)  # of the parameters
    numel: int = 0  # of the parameters, on this rank
    bytes: dict[str, int] = field(default_factory=dict)  # by part

    @property
    def bytes_per_parameter(self) -> float:
        return sum(self.bytes.values()) / max(self.numel, 1)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size:,}" for name, size in self.bytes.items())
        shown = ", ".join(self.names[:6]) + (", ..." if len(self.names) > 6 else "")
        return (
            f"State in {' + '.join(self.dtypes)}: {self.bytes_per_parameter:.2f} bytes for each of "
            f"{self.numel:,} parameters in {len(self.names):,} tensors ({shown})\n"
            f"    bytes: {parts}"
        )


class Optimizer(torch.optim.Optimizer):
    """Base of Headroom's optimizers. A subclass defines the two methods that raise here, and
    :meth:`_kind_of` and :meth:`_zeros` if its parameters are not all of one kind."""

    # Tensors of one element, or None: a step divides gradients by the first, changes nothing if the
    # second is not 0, and multiplies gradients by the third. torch.amp.GradScaler sets the first
    # two on instances and deletes them.
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    clip_coef: Tensor | None = None
    check_finite = False  # whether a step looks for gradients that are not finite by itself
    grad_norm: Tensor | None = None  # of the last step that measured it
    measured: Measured | None = None
    _count_stalled = False
    measured_params: Sequence[Tensor] = ()
    max_consecutive_skips = 10  # skipped steps in a row before a warning
    _steps_unseen = 0  # that could have been skipped, since the count was last sent to the host
    _release: Any = None  # the ReleaseHandle that steps parameters inside backward, if there is one

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, count_stalled: bool = False
    ) -> None:
        self._count_stalled = count_stalled
        self._stalled: dict[torch.device, Tensor] = {}  # in the last step, by device
        self._skips: dict[torch.device, Tensor] = {}  # new_counts() by device
        self._warned: set[str] = set()  # what of
        self._late_skips = LateCounts()
        self._places: list[Any] = []  # where the parameters lay at the last step
        _check_max_grad_norm(defaults.get("max_grad_norm"))
        super().__init__(params, defaults)

    @property
    def _class_name(self) -> str:
        """As users know it. ``__name__`` is another one for 8-bit moments: see adamw8bit.py."""
        return type(self).__qualname__.rpartition(".")[2]

    @property
    def _skips_steps(self) -> bool:
        """Whether a step with gradients that are not finite changes nothing, whoever calls it."""
        return False

    def _kinds(self, group: dict[str, Any]) -> tuple[Kind, ...]:
        """What the states of a group's parameters may consist of."""
        raise NotImplementedError

    def _kind_of(self, param: Tensor, group: dict[str, Any]) -> int:
        """The position in ``_kinds`` of what the state of this parameter consists of."""
        return 0

    def _kinds_of(self, params: list[Tensor], group: dict[str, Any]) -> list[int]:
        """The same of many."""
        return [self._kind_of(param, group) for param in params]

    def _kind_of_state(self, entry: dict[str, Any]) -> int:
        """The same of a state that there is."""
        return 0

    def _every_kind(self, group: dict[str, Any]) -> tuple[Kind, ...]:
        """``_kinds``, and, if the group has a mode for weights of 16 bits, those with it."""
        kinds = tuple(kind._replace(index=i) for i, kind in enumerate(self._kinds(group)))
        mode = mode_of(group)
        if mode is NEAREST:
            return kinds
        residual = (mode.residual,) if mode.residual else ()
        more = (kind._replace(alike=(*kind.alike, *residual), weights=mode) for kind in kinds)
        return *kinds, *more

    def _weights_mode(self, param: Tensor, group: dict[str, Any]) -> WeightsMode:
        mode = mode_of(group)
        return mode if param.dtype in mode.params else NEAREST

    def _whole_kind(self, param: Tensor, group: dict[str, Any], index: int) -> Kind:
        mode = self._weights_mode(param, group)
        return next(
            kind for kind in self._every_kind(group) if kind.index == index and kind.weights is mode
        )

    def _weights_options(self, group: dict[str, Any], part: Part) -> dict[str, Any]:
        """The op's arguments that say how parameters are stored."""
        mode, owners = part.kind.weights, part.owners
        options: dict[str, Any] = {"weights_mode": mode.number}
        if mode.is_random:
            everyone = (param for group in self.param_groups for param in group["params"])
            places = {param: place for place, param in enumerate(everyone)}
            seeds = weight_seeds(group.get("seed", 0), (places[param] for param in owners))
            options["weight_seeds"] = seeds
            if any(isinstance(param, DTensor) for param in owners):
                options["places"] = [number for param in owners for number in place_of(param)]
        if self._count_stalled:
            options["stalled"] = self._stalled_on(part.device)
        return options

    def _stalled_on(self, device: torch.device) -> Tensor:
        if device not in self._stalled:
            self._stalled[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._stalled[device]

    def stalled_fraction(self) -> float:
        """The share of weights that the last step was too small to move: float32 would have moved
        them, but rounding left what is stored of them as it was. Of DTensors, on this rank.

        Waits for the device.

        Raises:
            RuntimeError: the optimizer was made without ``count_stalled=True``, or has not stepped.
        """
        if not self._count_stalled:
            raise RuntimeError(
                "stalled_fraction() needs an optimizer that counts: make it with count_stalled=True"
            )
        stepped = sum(
            local_part(param).numel()
            for param, entry in self.state.items()
            if entry and isinstance(param, Tensor)
        )
        if not stepped:
            raise RuntimeError("stalled_fraction() comes after a step that updated parameters")
        return sum(int(count) for count in self._stalled.values()) / stepped

    def _zeros(self, name: str, param: Tensor, group: dict[str, Any], kind: int) -> Tensor:
        """A part of a parameter's state before its first step, except "step"."""
        dtype = group.get("state_dtype") or (torch.float32 if group.get("master") else param.dtype)
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    def _update(
        self, group: dict[str, Any], part: Part, states: list[list[Tensor]] | Tensor
    ) -> None:
        """Runs the op on parameters of one kind, on one device. ``states`` are the lists of what
        the kind names, or a table of everything: parameters, gradients, what the kind names."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as :meth:`torch.optim.Optimizer.add_param_group` does. A parameter given
        twice in it is kept once, and a group without ``max_grad_norm`` gets that of the others.

        Raises:
            TypeError, ValueError: an option or a parameter does not fit. No group is added then.
        """
        if isinstance(param_group, dict):
            if not isinstance(param_group.get("params"), (Tensor, set, type(None))):
                param_group["params"] = list(param_group["params"])  # checked, then taken
            if self.param_groups and "max_grad_norm" in self.param_groups[0]:
                param_group.setdefault("max_grad_norm", self.param_groups[0]["max_grad_norm"])
            options = self.defaults | param_group
            self._check_options(options)
            check_weight_options(options)
            _check_max_grad_norm(options.get("max_grad_norm"))
            _common_max_grad_norm([*self.param_groups, options])
            self._check_params(options.get("params"))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        unique = list(dict.fromkeys(group["params"]))
        if len(unique) < len(group["params"]):
            if "param_names" in group:
                names = dict(zip(reversed(group["params"]), reversed(group["param_names"])))
                group["param_names"] = [names[param] for param in unique]
            group["params"] = unique
        for device in {param.device for param in unique}:  # before a step is traced or captured
            if self._count_stalled:
                self._stalled_on(device)
            if device.type != "meta":
                self._skips_on(device)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Refuses options of a group that are out of range, or do not fit each other."""

    def _check_params(self, params: Any) -> None:
        params = [params] if isinstance(params, Tensor) else params
        for i, param in enumerate(params if isinstance(params, list) else ()):
            name = f"parameter {i} of its group"
            if isinstance(param, tuple) and len(param) == 2:
                name, param = f"parameter '{param[0]}'", param[1]
            # Tensors that take no gradient, such as quantized weights, may come along.
            if isinstance(param, Tensor) and param.requires_grad:
                if (words := self._refusal(param, name)) is not None:
                    raise ValueError(words)

    def _refusal(self, param: Tensor, name: str) -> str | None:
        """Why no parameter of this dtype can be stepped, or None."""
        if param.is_complex():
            return (
                f"{self._class_name} does not support complex parameters, but {name} is complex; "
                "optimize torch.view_as_real of it"
            )
        if param.dtype in FLOATS:
            return None
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        return (
            f"{self._class_name} takes parameters in {kinds}, but {name} is in {param.dtype}; "
            "convert it, for instance with model.float(), or give it to an optimizer of torch.optim"
        )

    # ---- one step -------------------------------------------------------------------------------

    def step(
        self, closure: Callable[[], Any] | None = None, *, max_grad_norm: float | None = None
    ) -> Any:
        """Performs one optimization step.

        Args:
            closure: reevaluates the model and returns the loss; called with gradients enabled.
            max_grad_norm: clip the gradients of all groups, as one vector, to this L2 norm. They
                are read twice and not written; a step with an infinite or NaN gradient changes
                nothing. ``optimizer.grad_norm`` is the norm before clipping. 0 makes all gradients
                0, as :func:`torch.nn.utils.clip_grad_norm_` does (some trainers mean by it that
                nothing is clipped); infinity measures and clips nothing. None: what the parameter
                groups have, all of them the same.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: the groups have different ``max_grad_norm``. Nothing has been written then.
            RuntimeError: an op refuses its tensors or options. It has written nothing then; those
                before it are done: a group takes one op for each kind of state and device.
        """
        if self._release is not None and self._release.finish(closure, max_grad_norm):
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if max_grad_norm is None:
            max_grad_norm = self._max_grad_norm
        for count in self._stalled.values():
            count.zero_()
        with torch.no_grad():
            if torch.compiler.is_compiling():
                with self._measured_grads(max_grad_norm, []):
                    for group in self.param_groups:
                        self._step_gathered(group)
                    self._count_step(self.found_inf)
                return loss
            plans = [self._plan(group) for group in self.param_groups]
            self._check_memory(plans)
            with self._measured_grads(max_grad_norm, plans):
                for plan in plans:
                    self._follow(plan)
                self._count_step(self.found_inf)
        return loss

    # ---- skipped steps --------------------------------------------------------------------------

    @property
    def skipped_steps(self) -> int:
        """How many steps changed nothing because a gradient was infinite or NaN: of those that
        looked, since they clip, have a scaler, or were told to. The count is kept on the device;
        reading it waits for the device. The first time that it is not 0, a warning names the first
        parameter whose gradient is not finite, if the last step was skipped or gradients are there
        still; on this rank, if they are sharded.

        A step that a scaler does not call does not count. Without waiting, a warning comes after
        about ``max_consecutive_skips`` skipped steps in a row (10, an attribute to set).
        """
        skipped = sum(int(counts[0]) for counts in self._skips.values())
        if skipped:
            self._warn_of_skips("read", f"{skipped:,} steps were", stacklevel=3)
        return skipped

    def _skips_on(self, device: torch.device) -> Tensor:
        if device not in self._skips:
            self._skips[device] = new_counts(device)
        return self._skips[device]

    def _count_step(self, found_inf: Tensor | None) -> None:
        if found_inf is None:
            return
        counts = self._skips_on(found_inf.device)
        count_step(counts, found_inf)
        if torch.compiler.is_compiling():
            return
        self._steps_unseen += 1
        if self._steps_unseen >= self.max_consecutive_skips:
            self._steps_unseen = 0
            self._late_skips.send(counts[1])
        for skipped in self._late_skips.arrived():
            if skipped >= self.max_consecutive_skips:
                self._warn_of_skips(
                    "in a row", f"the last {skipped:,} steps were all", stacklevel=5
                )

    def _warn_of_skips(self, occasion: str, words: str, stacklevel: int) -> None:
        if occasion in self._warned:
            return
        self._warned.add(occasion)
        name = self._culprit()
        culprit = f"; the first that is not finite now is that of {name}" if name else ""
        warnings.warn(
            f"{words} skipped because gradients were infinite or NaN{culprit}. A skipped step "
            "changes nothing. Look for a NaN in the data or the forward pass, or lower the "
            "learning rate",
            stacklevel=stacklevel,
        )

    def _culprit(self) -> str | None:
        """The parameter with the first gradient that is not finite: in the last step, or now."""
        if self.measured is not None and (place := self.measured.culprit()) is not None:
            return self._name_of(self.measured_params[place])
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.grad.layout == torch.strided:
                    if not local_part(param.grad).isfinite().all():
                        return self._name_of(param)
        return None

    # ---- one step, in parts ---------------------------------------------------------------------

    @contextlib.contextmanager
    def _measured_grads(self, max_grad_norm: float | None, plans: list[_Plan]) -> Iterator[None]:
        """Lends the step an overflow flag and a clip coefficient, where one is asked for."""
        self.measured = None
        checks = self.check_finite or (self._skips_steps and self.found_inf is None)
        if max_grad_norm is None and not checks:
            yield
            return
        if torch.compiler.is_compiling():
            everyone = (param for group in self.param_groups for param in group["params"])
            self.measured_params = [param for param in everyone if param.grad is not None]
            grads = [param.grad for param in self.measured_params]
        else:
            self.measured_params = [param for plan in plans for param in plan.params]
            grads = [grad for plan in plans for grad in plan.grads]
        table = _table_of_grads(plans)
        if table is None:
            grads = [_like(grad, param) for grad, param in zip(grads, self.measured_params)]
        try:
            self.measured = measured = measure(
                grads,
                max_norm=math.inf if max_grad_norm is None else max_grad_norm,
                grad_scale=self.grad_scale,
                table=table,
            )
        except (RuntimeError, NotImplementedError) as error:
            raise self._explained(error, self.measured_params, grads) from error
        self.grad_norm = measured.norm
        given = self.found_inf, self.clip_coef
        flag, coef = measured.found_inf, measured.clip_coef
        self.found_inf = flag if given[0] is None else torch.maximum(flag, given[0].to(flag.device))
        if max_grad_norm is not None:
            self.clip_coef = coef if given[1] is None else coef * given[1].to(coef.device)
        try:
            yield
        finally:
            self.found_inf, self.clip_coef = given

    @property
    def _max_grad_norm(self) -> float | None:
        """What a step clips to, if it is not told otherwise."""
        return _common_max_grad_norm(self.param_groups)

    def _init_group(self, group: dict[str, Any], *columns: list[Tensor]) -> None:
        # torch.compile knows this method by name: it runs it, does not trace it, and takes the
        # tensors that the lists then hold as inputs of the graph. The lists are, for each kind,
        # parameters, gradients and what the kind names.
        kinds = self._every_kind(group)
        rest = iter(columns)
        lists = {kind: list(islice(rest, 2 + len(kind.names))) for kind in kinds}
        for param in group["params"]:
            if param.grad is None:
                continue
            kind = self._whole_kind(param, group, self._kind_of(param, group))
            entry = self._entry(param, group)
            values = (param, param.grad, *(entry[name] for name in kind.names))
            for value, column in zip(values, lists[kind]):
                column.append(value)

    def _step_gathered(self, group: dict[str, Any]) -> None:
        """A step that hands the op lists of tensors: traced, or of tensors that are not plain."""
        kinds = self._every_kind(group)
        lists: list[list[list[Tensor]]] = [[[] for _ in range(2 + len(k.names))] for k in kinds]
        self._init_group(group, *(column for columns in lists for column in columns))
        for params, grads, *_ in lists:
            if any(param.device.type not in ("cpu", "cuda") for param in params):
                raise self._explained(NotImplementedError(), params, grads)
        for kind, (owners, grads, *states) in zip(kinds, lists):
            grads = [_like(grad, param) for grad, param in zip(grads, owners)]
            columns = [list(map(local_part, column)) for column in (owners, grads, *states)]
            where = [param.device for param in owners]
            for device in dict.fromkeys(where):
                chosen = [i for i, d in enumerate(where) if d == device]
                bucket = [[column[i] for i in chosen] for column in (owners, *columns)]
                self._apply(group, Part(kind, *bucket[:3]), bucket[3:])

    def step_part(self, index: int, params: list[Tensor]) -> None:
        """A step of some parameters of group ``index``, with gradients, and of no other. Measures
        nothing: skips, unscales and clips by the attributes ``found_inf``, ``grad_scale`` and
        ``clip_coef`` alone."""
        with torch.no_grad():
            self._follow(self._plan(self.param_groups[index] | {"params": params}))

    def _plan(self, group: dict[str, Any]) -> _Plan:
        params = group["params"]
        grads = list(map(attrgetter("grad"), params))
        found = [grad for grad in grads if grad is not None]
        if len(found) < len(grads):
            params = [param for param, grad in zip(params, grads) if grad is not None]
            grads = found
        parts = self._parts(group, params, grads) if params else []
        return _Plan(group, params, grads, parts, [self._table(part) for part in parts])

    def _follow(self, plan: _Plan) -> None:
        group, params, grads, parts, tables = plan
        try:
            tables = [
                self._table_with_states(group, part) if table is None else table
                for part, table in zip(parts, tables)
            ]
        except (RuntimeError, NotImplementedError) as error:
            raise self._explained(error, params, grads) from error
        if any(table is None for table in tables):
            self._step_gathered(group)
            return
        for part, table in zip(parts, tables):
            self._apply(group, part, table)

    def _apply(
        self, group: dict[str, Any], part: Part, states: list[list[Tensor]] | Tensor
    ) -> None:
        if torch.compiler.is_compiling():
            self._update(group, part, states)
            return
        try:
            self._update(group, part, states)
        except (RuntimeError, NotImplementedError) as error:
            raise self._explained(error, part.owners, part.grads) from error

    def _parts(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Part]:
        """The parameters and gradients of each kind that there is."""
        every = self._every_kind(group)
        if len(every) == 1:
            return [Part(every[0], params, params, grads)]
        mode = every[-1].weights
        dtypes = () if mode is NEAREST else mode.params
        found = [
            2 * index + (param.dtype in dtypes)
            for index, param in zip(self._kinds_of(params, group), params)
        ]
        numbers = {2 * kind.index + (kind.weights is not NEAREST): kind for kind in every}
        present = set(found)
        if len(present) == 1:
            return [Part(numbers[found[0]], params, params, grads)]
        masks = [(numbers[n], [one == n for one in found]) for n in sorted(present)]
        parts = []
        for kind, mask in masks:
            chosen = list(compress(params, mask))
            places = torch.tensor(list(compress(range(len(mask)), mask)), device="cpu")
            parts.append(Part(kind, chosen, chosen, list(compress(grads, mask)), places))
        return parts

    def _table(self, part: Part) -> Tensor | None:
        try:
            return table_of((part.params, part.grads), self.state, *part.kind[:2])
        except (RuntimeError, NotImplementedError):  # the op's own words are better
            return None

    def _table_with_states(self, group: dict[str, Any], part: Part) -> Tensor | None:
        """The table, after states are made for those without."""
        if all(param in self.state for param in part.params):
            return None
        for param in part.params:
            self._entry(param, group)
        return self._table(part)

    def _check_memory(self, plans: list[_Plan]) -> None:
        """Refuses parameters that share memory, if they lie elsewhere than at the last step."""
        places: list[Any] = []
        for plan in plans:
            if any(table is None for table in plan.tables):
                places.append(list(map(place_in_memory, plan.params)))
            else:  # addresses and sizes
                places += [table[0, :2] for table in plan.tables]
        before = self._places
        same = len(places) == len(before) and all(
            torch.equal(now, then)
            if isinstance(now, Tensor) and isinstance(then, Tensor)
            else type(now) is type(then) and now == then
            for now, then in zip(places, before)
        )
        if not same:
            self._check_overlap([param for plan in plans for param in plan.params])
            self._places = places

    def _check_overlap(self, params: list[Tensor]) -> None:
        # Such parameters would be updated twice, and on CUDA at the same time.
        if (pair := overlapping(params)) is not None:
            first, second = (self._name_of(params[i]) for i in pair)
            raise ValueError(
                f"{first} and {second} share memory; give the optimizer one of them, or the same "
                "Parameter for both"
            )

    def _explained(
        self, error: Exception, params: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Exception:
        """The error of an op on these parameters, with the name of the one that it speaks of."""
        name = self._class_name
        for param, grad in zip(params, grads):
            if grad.layout != torch.strided or param.layout != torch.strided:
                return RuntimeError(
                    f"{name} does not support sparse gradients, but {self._name_of(param)} has "
                    "one; use sparse=False in its module, or torch.optim.SparseAdam for it"
                )
            if (words := self._refusal(param, self._name_of(param))) is not None:
                return RuntimeError(words)
            if param.device.type not in ("cpu", "cuda"):
                return RuntimeError(
                    f"{name} runs on the CPU and on CUDA devices, but {self._name_of(param)} is on "
                    f"{param.device}"
                )
        place = re.search(r"\[(\d+)\]", str(error))
        if type(error) is not RuntimeError or place is None or int(place[1]) >= len(params):
            return error
        return RuntimeError(f"{error}; index {place[1]} is {self._name_of(params[int(place[1])])}")

    # ---- states ---------------------------------------------------------------------------------

    def _entry(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, made of zeros where it has none."""
        kind = self._whole_kind(param, group, self._kind_of(param, group))
        if not self.state.get(param) and self._refusal(param, "") is not None:
            raise RuntimeError(self._refusal(param, self._name_of(param)))
        entry = self.state[param]
        for name in kind.names:
            if name not in entry:
                entry[name] = self._part(name, param, group, kind.index)
        return entry

    def _part(self, name: str, param: Tensor, group: dict[str, Any], kind: int) -> Tensor:
        if name == "step":
            return torch.zeros((), dtype=torch.float64, device=param.device)
        if name == "master":
            return param.detach().to(torch.float32, copy=True)
        if name in RESIDUALS:
            dtype = mode_of(group).dtype or param.dtype
            return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        return self._zeros(name, param, group, kind)

    def memory(self) -> list[StateMemory]:
        """What the state takes on this rank, by kind of state. Parameters that have not had a step
        count with what they will have; those that have no state and require no gradient, and those
        of lazy modules before their first forward, do not count."""
        kinds: dict[tuple[str, ...], StateMemory] = {}
        for group in self.param_groups:
            for param in group["params"]:
                will_step = param.requires_grad or param.grad is not None
                if is_lazy(param) or not (self.state.get(param) or will_step):
                    continue
                kind = self._whole_kind(param, group, self._kind_of(param, group))
                entry, local = self.state.get(param, {}), local_part(param)
                parts = {
                    name: local_part(entry[name])
                    if name in entry
                    else self._part(name, torch.empty_like(local, device="meta"), group, kind.index)
                    for name in kind.names
                }
                dtypes = tuple(dict.fromkeys(str(part.dtype)[6:] for part in parts.values()))
                row = kinds.setdefault(dtypes, StateMemory(dtypes))
                row.names.append(self._name_of(param).removeprefix("parameter "))
                row.numel += local.numel()
                for name, part in parts.items():
                    row.bytes[name] = row.bytes.get(name, 0) + local_part(part).nbytes
        return list(kinds.values())

    def __repr__(self) -> str:
        options = super().__repr__().removeprefix(type(self).__name__)
        return "\n".join([self._class_name + options, *map(str, self.memory())])

    def _name_of(self, param: Tensor) -> str:
        for i, group in enumerate(self.param_groups):
            for j, other in enumerate(group["params"]):
                if other is param:
                    named = group.get("param_names")
                    return f"parameter '{named[j]}'" if named else f"parameter {j} of group {i}"
        return "a parameter"

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """The state, as :meth:`torch.optim.Optimizer.state_dict` gives it.

        Collectives have no 16-bit integers, so remainders that are DTensors are given as the
        bfloat16 numbers with their bits. They mean nothing as numbers, and load as what they are.
        ``state_dtype`` is given by name: to gather states torch goes through options, and knows no
        dtypes there.
        """
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            if isinstance(group.get("state_dtype"), torch.dtype):
                group["state_dtype"] = str(group["state_dtype"])
        for key, entry in state_dict["state"].items():
            remainder = entry.get("remainder") if isinstance(entry, dict) else None
            if isinstance(remainder, DTensor) and remainder.dtype == torch.int16:
                viewed = _viewed(remainder, torch.bfloat16)
                state_dict["state"][key] = entry | {"remainder": viewed}
        return state_dict

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state made by ``state_dict()`` of this optimizer or of its torch counterpart.

        States keep the dtype they were saved in, whatever the dtype of the parameters, and move to
        the parameter's device. If something does not fit, the error says which parameter and what,
        and the optimizer stays as it was.

        Raises:
            TypeError, ValueError: an option of a group is missing or out of range; or a state is
                missing, has another shape or dtype, or values that no training gives: a second
                moment below 0, or a scale of 8-bit codes below 0, infinite or NaN.
        """

        def keep_states(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            entries = {
                key: {name: _Kept(value) for name, value in entry.items()}
                if isinstance(entry, dict)
                else entry
                for key, entry in loaded["state"].items()
            }
            return loaded | {"state": entries}

        # Registered last, so that the user's own hooks see plain tensors.
        hook = self.register_load_state_dict_pre_hook(keep_states)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: self.__dict__[name] for name in KEPT if name in self.__dict__}
        return super().__getstate__() | kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = self.__dict__.get("defaults", {})
        for group in state["param_groups"]:
            # Torch's do not have these.
            for key in ("state_dtype", "master", "rounding", "seed", "max_grad_norm"):
                if key in defaults:
                    group.setdefault(key, defaults[key])
            if isinstance(named := group.get("state_dtype"), str):
                if named not in STATE_DTYPES:
                    raise ValueError(f"state_dtype must be one of {FLOATS}, got {named!r}")
                group["state_dtype"] = STATE_DTYPES[named]
        if "defaults" not in state:  # of a checkpoint
            for index, group in enumerate(state["param_groups"]):
                self._check_loaded(index, group)
        restored: defaultdict[Any, Any] = defaultdict(dict)
        groups = {id(p): group for group in state["param_groups"] for p in group["params"]}
        for param, entry in state["state"].items():
            if not isinstance(entry, dict):  # of no parameter, as others may keep there
                restored[param] = entry
                continue
            values = {k: v.value if isinstance(v, _Kept) else v for k, v in entry.items()}
            loading = any(isinstance(value, _Kept) for value in entry.values())
            if loading and id(param) in groups:
                values = self._restored(param, values, groups[id(param)])
            restored[param] = values
        if "defaults" not in state:  # after states, which say more of modes that do not fit
            for group in state["param_groups"]:
                check_weight_options(group)
                _check_max_grad_norm(group.get("max_grad_norm"))
            _common_max_grad_norm(state["param_groups"])
        self._places, self._late_skips = [], LateCounts()
        for name, value in (("_stalled", {}), ("_skips", {}), ("_warned", set())):
            self.__dict__.setdefault(name, value)
        super().__setstate__(state | {"state": restored})

    def _check_loaded(self, index: int, group: dict[str, Any]) -> None:
        """Refuses a group of a checkpoint whose options a step could not use."""
        place = f"param_groups[{index}] of the loaded state"
        # Torch's groups lack the first, and torch itself adds the second to the defaults.
        wanted = self.defaults.keys() - {"max_grad_norm", "differentiable"}
        missing = sorted(wanted - group.keys())
        if missing:
            raise ValueError(f"{place} has no {', '.join(map(repr, missing))}")
        try:
            self._check_options(group)
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"{place}: {error}") from error

    def _restored(
        self, param: Tensor, entry: dict[str, Any], group: dict[str, Any]
    ) -> dict[str, Any]:
        """A loaded state on the device and in the memory order of its parameter, or an error."""
        if not entry:
            return entry
        name, restored = self._name_of(param), dict(entry)
        wanted = self._whole_kind(param, group, self._kind_of_state(entry))
        unknown = [key for key in RESIDUALS if key in entry and key not in wanted.names]
        if unknown:
            raise ValueError(
                f"the loaded state of {name} has a '{unknown[0]}', which completes weights that "
                f"were stored in another way than these, in {param.dtype} with "
                f"master={group.get('master')!r}; carry weights over with master_weights() and "
                "load_master_weights()"
            )
        for key in wanted.names:
            if key not in entry and key in RESIDUALS:
                continue  # of an optimizer without: the weights are what they are
            if key not in entry:
                raise ValueError(
                    f"the loaded state of {name} has no '{key}'; it has {sorted(entry)}"
                )
            value = entry[key]
            if key == "step":
                restored[key] = _counter(value, param, name)
                continue
            if key in RESIDUALS:
                shape, dtypes = param.shape, (wanted.weights.dtype or param.dtype,)
            else:
                shape, dtypes = self._form(key, param, group, wanted.index)
            if not isinstance(value, Tensor) or value.shape != shape:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                hint = ""
                if key.endswith("absmax") and max(len(shape), getattr(value, "ndim", 0)) > 2:
                    hint = (
                        "; these 8-bit blocks are local to shards: headroom.optim.load_sharded() "
                        "loads what another number of ranks saved"
                    )
                raise ValueError(
                    f"the loaded '{key}' of {name} is {got}, wanted a tensor of shape "
                    f"{tuple(shape)}{hint}"
                )
            if isinstance(value, DTensor) != isinstance(param, DTensor):
                raise ValueError(
                    f"the loaded '{key}' of {name} is a {type(value).__name__}, but the parameter "
                    f"is a {type(param).__name__}; load sharded states with "
                    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
                )
            if key == "remainder" and value.dtype == torch.bfloat16:  # see state_dict()
                value = _viewed(value, wanted.weights.dtype)
            if value.dtype not in dtypes:
                raise ValueError(
                    f"the loaded '{key}' of {name} has dtype {value.dtype}, wanted one of {dtypes}"
                )
            if key in NONNEGATIVE and value.dtype != torch.uint8:
                _check_values(key, value, name)
            value = value.detach().to(param.device)
            # Codes stay in the order in which their scales were made.
            ordered = key in wanted.alike and value.dtype != torch.uint8
            restored[key] = _ordered(value, param) if ordered else value
        return restored

    def _form(
        self, name: str, param: Tensor, group: dict[str, Any], kind: int
    ) -> tuple[torch.Size, tuple[torch.dtype, ...]]:
        """The shape that a part of a state must have, except "step", and the dtypes it may have."""
        return param.shape, FLOATS


def _counter(value: Any, param: Tensor, name: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"the loaded 'step' of {name} has {value.numel()} elements, wanted 1")
    count = torch.as_tensor(value).detach().reshape(()).to(param.device, torch.float64)
    if not 0 <= count.item() < 2**53:
        raise ValueError(f"the loaded 'step' of {name} is {count.item()}, wanted 0 or more")
    return count


def _check_values(key: str, value: Tensor, name: str) -> None:
    """Refuses what would make the weights NaN: the step takes square roots and products of it."""
    local = local_part(value).detach()
    if local.is_meta:
        return
    bad, wanted = local < 0, "0 or more"
    if key.endswith("absmax"):  # an infinite one makes zeros NaN
        bad, wanted = bad | ~local.isfinite(), "0 or more, and finite"
    if bad.any():
        raise ValueError(
            f"the loaded '{key}' of {name} has {int(bad.sum()):,} elements such as "
            f"{local[bad][0].item():g}, wanted {wanted}"
        )


def _viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of a tensor as numbers of another type of the same size."""
    if not isinstance(tensor, DTensor):
        return tensor.view(dtype)
    return DTensor.from_local(
        tensor.to_local().view(dtype),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _ordered(value: Tensor, param: Tensor) -> Tensor:
    """A state in the memory order of its parameter."""
    if isinstance(value, DTensor) or value.stride() == param.stride():
        return value
    ordered = torch.empty_like(param, dtype=value.dtype, memory_format=torch.preserve_format)
    return ordered.copy_(value)

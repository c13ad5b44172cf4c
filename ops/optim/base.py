"""The base of Headroom's optimizers: a fused step over each group, and states that are never cast.

A subclass declares the state of its parameters and runs one op for the parameters of a group on
one device; :mod:`headroom.param_states` has the declarations, what a step passes to the op, and
what carries states through files. measuring.py and counts.py do the rest. They take tensors and
groups, and call no method of an optimizer in a step.

A step makes everything that it allocates before it writes: one that runs out of memory has changed
nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import islice
from numbers import Real
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._core.dtensor import local_part
from .._core.names import name_of
from .._core.table import table_of
from .._core.weight_modes import check_weight_options
from ..grad.norm import Measured
from ..param_states.errors import explained
from ..param_states.loading import (
    COPIED,
    complete_groups,
    export_state,
    keep_states,
    own_states,
    restored_states,
)
from ..param_states.memory import StateMemory, state_memory
from ..param_states.paging import OffloadHandle, Paging
from ..param_states.paging.handle import begin
from ..param_states.plan import (
    Bucket,
    Call,
    Calls,
    Options,
    Plan,
    States,
    StepScalars,
    arguments_of,
    buckets_of,
    check_memory,
    like_param,
)
from ..param_states.states import StatefulOptimizer
from .counts import SkippedSteps, StalledWeights, stalled_fraction
from .measuring import first_nonfinite, with_measured
from .options import (
    check_loaded_group,
    keep_unique,
)


def check_max_grad_norm(limit: Any) -> None:
    """Refuses a limit that is neither None nor a number of 0 or more."""
    if limit is not None and not isinstance(limit, Real):
        raise TypeError(f"max_grad_norm must be a number or None, got {type(limit).__name__}")
    if limit is not None and not limit >= 0:
        raise ValueError(f"max_grad_norm must be a number >= 0, got {limit}")


def common_max_grad_norm(groups: Sequence[dict[str, Any]]) -> float | None:
    """Returns the limit of all parameter groups, which must be the same."""
    limits = [group.get("max_grad_norm") for group in groups]
    for index, limit in enumerate(limits):
        check_max_grad_norm(limit)
        if limit != limits[0]:
            raise ValueError(
                "max_grad_norm clips the gradients of all parameter groups as one vector, so all "
                f"groups must have the same, but group 0 has {limits[0]} and group {index} has "
                f"{limit}; to clip groups one by one, leave it out and call "
                "headroom.clip_grad_norm_ for each"
            )
    return limits[0] if limits else None


class Optimizer(StatefulOptimizer):
    """Base of Headroom's optimizers. A subclass defines :meth:`_options`, :meth:`_prepared` and the
    declarations of :class:`StatefulOptimizer`."""

    # Tensors of one element that users and torch.amp.GradScaler set and delete. A step reads them
    # once, into StepScalars.
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    clip_coef: Tensor | None = None
    check_finite = False  # whether a step itself looks for gradients that are not finite
    grad_norm: Tensor | None = None  # of the last step that measured it
    _measured: Measured | None = None
    _measured_params: Sequence[Tensor] = ()
    max_consecutive_skips = 10  # skipped steps in a row before a warning
    _stalled: StalledWeights | None = None  # in the last step
    _release_handle: Any = None  # the ReleaseHandle that steps parameters inside backward
    _paging: Paging | None = None  # what keeps the states on the host
    _refuses_offload: str | None = None  # why states stay on the device, if they must
    _refuses_host_step: str | None = None  # why they are stepped there, if they must

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        count_stalled: bool = False,
        offload: Literal["state", "step"] | None = None,
        budget: int | str | None = None,
    ) -> None:
        self._stalled = StalledWeights() if count_stalled else None
        self._skips = SkippedSteps()
        self._places: list[Any] = []  # where the parameters lay at the last step
        check_max_grad_norm(defaults.get("max_grad_norm"))
        if budget is not None and offload is None:
            raise ValueError('budget is of what is offloaded: give offload="state" with it')
        super().__init__(params, defaults)
        if offload is not None:
            begin(self, offload, budget)

    @property
    def offload_handle(self) -> OffloadHandle | None:
        """Returns the handle of the offload, or None if there is none."""
        return None if self._paging is None else OffloadHandle(self)

    @property
    def _skips_nonfinite(self) -> bool:
        """Returns whether a step with gradients that are not finite changes nothing, even without a
        scaler."""
        return False

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the op's arguments that are options of a group, beside the learning rate."""
        raise NotImplementedError

    def _prepared(self, group: Options, bucket: Bucket, states: States, options: Options) -> Call:
        """Returns the call that runs the op on a bucket, after everything that it needs has been
        made: the call allocates nothing before its last write. ``states`` are the lists that its
        layout names, or a table of parameters, gradients and states; ``options`` are all other
        arguments."""
        raise NotImplementedError

    def _translated(
        self, param: Tensor, entry: dict[str, Any], group: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns a loaded state of another library in the form of this optimizer, unchecked."""
        return entry

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as :meth:`torch.optim.Optimizer.add_param_group` does. A parameter that it
        names twice is kept and stepped once, where torch steps it twice; a group without
        ``max_grad_norm`` gets that of the others.

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
            common_max_grad_norm([*self.param_groups, options])
            self._check_params(options.get("params"))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        keep_unique(group)
        # Counts are made here, before a step is traced or captured.
        for device in {param.device for param in group["params"]}:
            if self._stalled is not None:
                self._stalled.on(device)
            if device.type != "meta":
                self._skips.on(device)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Refuses options of a group that are out of range, or do not fit each other."""

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
                0, as :func:`torch.nn.utils.clip_grad_norm_` does (in some trainers it turns
                clipping off); infinity measures and clips nothing. None: the limit of the parameter
                groups.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: the groups have different ``max_grad_norm``. Nothing has been written then.
            RuntimeError: an op refuses its tensors or options. It has written nothing then, but
                ops before it have: a group takes one op for each layout of states and device. Or
                memory runs out: then nothing has been written.
        """
        if (handle := self._release_handle) is not None and handle._finish(closure, max_grad_norm):
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if max_grad_norm is None:
            max_grad_norm = common_max_grad_norm(self.param_groups)
        with torch.no_grad():
            self._step(max_grad_norm)
        return loss

    def _step(self, max_grad_norm: float | None) -> None:
        traced = torch.compiler.is_compiling()
        if traced and self._paging is not None:
            raise RuntimeError(
                "a step whose state is on the host cannot be compiled; compile the model alone"
            )
        plans = [] if traced else [self._plan(group) for group in self.param_groups]
        if not traced:
            self._places = check_memory(self.param_groups, plans, self._places)
        scalars = self.scalars
        self._measured = None
        checks = self.check_finite or (self._skips_nonfinite and self.found_inf is None)
        if max_grad_norm is not None or checks:
            scalars = with_measured(self, scalars, max_grad_norm, plans)
        calls = [call for plan in plans for call in self._calls(plan, scalars)]
        for group in self.param_groups if traced else ():
            calls += self._calls_on_lists(group, scalars)
        count = self._prepared_count(scalars.found_inf)
        self._restart_stalled()
        self._run(calls)
        if self._paging is not None:
            self._paging.finish()
        count()

    @property
    def scalars(self) -> StepScalars:
        """Returns the scalars that were set as attributes."""
        return StepScalars(self.grad_scale, self.found_inf, self.clip_coef)

    def _prepared_part(self, index: int, params: list[Tensor], scalars: StepScalars) -> Call:
        """Returns the call that steps some parameters of group ``index``, which have gradients, and
        no others. It measures nothing: it skips, unscales and clips by ``scalars`` alone."""
        with torch.no_grad():
            plan = self._plan(self.param_groups[index] | {"params": params})
            return partial(self._run, self._calls(plan, scalars))

    def _plan(self, group: dict[str, Any]) -> Plan:
        layouts, params = self._every_layout(group), group["params"]
        grads = list(map(attrgetter("grad"), params))
        found = [grad for grad in grads if grad is not None]
        if len(found) < len(grads):
            params = [param for param, grad in zip(params, grads) if grad is not None]
        if not params:
            return Plan(group, [], [], [], [])
        indices = self._layout_indices(params, group) if len(layouts) > 1 else []
        buckets = buckets_of(layouts, indices, params, found)
        return Plan(group, params, found, buckets, [self._table(bucket) for bucket in buckets])

    def _table(self, bucket: Bucket) -> Tensor | None:
        """Returns the table of a bucket, or None if it needs the list path or has no states yet."""
        layout = bucket.layout
        if layout.is_whole:
            return None
        try:
            lists = bucket.params, bucket.grads
            if self._paging is not None:  # the states are staged later
                return table_of(lists)
            return table_of(lists, self.state, layout.param_like, layout.extra)
        except (RuntimeError, NotImplementedError):  # the op's own error is better
            return None

    def _calls(self, plan: Plan, scalars: StepScalars) -> Calls:
        """Returns the calls that step the parameters of a plan, with their buckets. Missing states,
        and all else that a step allocates, are made here: the calls only write."""
        if self._paging is not None:
            return self._paging.calls(self, plan, scalars)
        tables = list(plan.tables)
        try:
            for i, bucket in enumerate(plan.buckets):
                if tables[i] is None and any(param not in self.state for param in bucket.params):
                    for param in bucket.params:
                        self._entry(param, plan.group)
                    tables[i] = self._table(bucket)
        except (RuntimeError, NotImplementedError) as error:
            raise explained(self, error, plan.params, plan.grads) from error
        if any(table is None for table in tables):
            return self._calls_on_lists(plan.group, scalars)
        return self._calls_on(plan.group, zip(plan.buckets, tables), scalars)

    def _calls_on_lists(self, group: dict[str, Any], scalars: StepScalars) -> Calls:
        """Returns the calls that step the parameters of a group by ops that take lists of
        tensors, one for each layout and :meth:`_list_key`."""
        layouts = self._every_layout(group)
        lists: list[Any] = [[[] for _ in range(2 + len(one.slots))] for one in layouts]
        self._init_group(group, *(column for columns in lists for column in columns))
        buckets = []
        for layout, (owners, grads, *states) in zip(layouts, lists):
            if any(param.device.type not in ("cpu", "cuda") for param in owners):
                raise explained(self, NotImplementedError(), owners, grads)
            grads = [like_param(grad, param) for grad, param in zip(grads, owners)]
            columns = [list(map(local_part, column)) for column in (owners, grads, *states)]
            positions: dict[Hashable, list[int]] = {}
            for i, owner in enumerate(owners):
                positions.setdefault(self._list_key(owner), []).append(i)
            for chosen in positions.values():
                members = [[column[i] for i in chosen] for column in (owners, *columns)]
                buckets.append((Bucket(layout, *members[:3]), members[3:]))
        return self._calls_on(group, buckets, scalars)

    def _list_key(self, param: Tensor) -> Hashable:
        """Returns what parameters that one op takes as lists have in common."""
        return param.device

    def _init_group(self, group: dict[str, Any], *columns: list[Tensor]) -> None:
        """Fills lists with the parameters that have gradients, the gradients, and the states, which
        it makes if they are missing. Each layout of the group has such lists, one layout after
        another.

        torch.compile knows this method by name: it runs it, does not trace it, and takes the
        tensors that the lists then hold as inputs of the graph.
        """
        remaining = iter(columns)
        lists = {
            (layout.index, layout.weights): (layout, list(islice(remaining, 2 + len(layout.slots))))
            for layout in self._every_layout(group)
        }
        for param in group["params"]:
            if param.grad is None:
                continue
            layout, chosen = lists[
                self._layout_index(param, group), self._weights_mode(param, group)
            ]
            entry = self._entry(param, group)
            values = (param, param.grad, *(entry[name] for name in layout.names))
            for value, column in zip(values, chosen):
                column.append(value)

    def _calls_on(
        self, group: dict[str, Any], buckets: Iterable[tuple[Bucket, Any]], scalars: StepScalars
    ) -> Calls:
        """Returns the calls that step buckets, each with its states: lists, or a table."""
        calls = []
        for bucket, states in buckets:
            stalled = None if self._stalled is None else self._stalled.on(bucket.params[0].device)
            try:
                shared = arguments_of(bucket, group, self.param_groups, scalars, stalled)
                options = self._options(group) | shared
                calls.append((bucket, self._prepared(group, bucket, states, options)))
            except (RuntimeError, NotImplementedError) as error:
                raise explained(self, error, bucket.owners, bucket.grads) from error
        return calls

    def _run(self, calls: Calls) -> None:
        for bucket, call in calls:
            try:
                call()
            except (RuntimeError, NotImplementedError) as error:
                raise explained(self, error, bucket.owners, bucket.grads) from error
            if self._stalled is not None:
                self._stalled.stepped += sum(param.numel() for param in bucket.params)

    def _restart_stalled(self) -> None:
        """Forgets the weights that did not move, at the beginning of a step."""
        if self._stalled is not None:
            self._stalled.restart()

    def stalled_fraction(self) -> float:
        """Returns the share of weights that the last step was too small to move: float32 would have
        moved them, but rounding left their stored value as it was. Counts the shards of this rank.

        Waits for the device.

        Raises:
            RuntimeError: the optimizer was made without ``count_stalled=True``, or has not stepped.
        """
        return stalled_fraction(self._stalled)

    # ---- skipped steps --------------------------------------------------------------------------

    @property
    def skipped_steps(self) -> int:
        """Returns the number of steps that changed nothing because a gradient was infinite or NaN.
        Steps look for such gradients if they clip, have a scaler, or were told to. The count is on
        the device, and reading it waits for the device. The first time that it is not 0, a warning
        names the first parameter whose gradient is not finite, if the last step was skipped or
        gradients still exist; of sharded gradients, on this rank.

        A step that a scaler does not call does not count. After about ``max_consecutive_skips``
        skipped steps in a row (10, an attribute to set) a warning comes without waiting.
        """
        skipped = self._skips.total()
        if skipped:
            words = f"{skipped:,} steps were"
            self._skips.warn("read", words, self._culprit, stacklevel=3)
        return skipped

    def _prepared_count(self, found_inf: Tensor | None) -> Call:
        """Returns the call that counts a step, which is skipped if the flag is not 0, after
        everything that it needs has been made."""
        if found_inf is None:
            return lambda: None
        count = self._skips.prepared(found_inf, self.max_consecutive_skips)

        def counted() -> None:
            for skipped in count():
                words = f"the last {skipped:,} steps were all"
                self._skips.warn("in a row", words, self._culprit, stacklevel=6)

        return counted

    def _culprit(self) -> str | None:
        param = first_nonfinite(self)
        return None if param is None else name_of(self.param_groups, param)

    # ---- states ---------------------------------------------------------------------------------

    def _state_device(self, param: Tensor) -> torch.device:
        is_paged = self._paging is not None and param not in self._paging.resident
        return torch.device("cpu") if is_paged else param.device

    def _entry(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        if self._paging is not None and param not in self._paging.resident:
            return self._paging.entry(self, param, group)
        return super()._entry(param, group)

    def memory(self) -> list[StateMemory]:
        """Returns the bytes of the state on this rank, by its dtypes. Parameters before their first
        step count with the state that they will have. Parameters without a state that require no
        gradient, and those of lazy modules before their first forward, do not count."""
        return state_memory(self)

    def __repr__(self) -> str:
        return "\n".join([super().__repr__(), *map(str, self.memory())])

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Returns the state as :meth:`torch.optim.Optimizer.state_dict` does.

        Collectives have no 16-bit integers, so remainders that are DTensors become the bfloat16
        numbers with the same bits; loading turns them back. ``state_dtype`` becomes a name: torch
        gathers options too, and takes no dtypes there.
        """
        state_dict = super().state_dict()
        if self._paging is not None:
            state_dict["state"] = self._paging.detached(self, state_dict["state"])
        return export_state(state_dict)

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state made by ``state_dict()`` of this optimizer or of its torch counterpart.

        States keep the dtype they were saved in, whatever the dtype of the parameters, and move to
        the parameter's device. They are copies, unless they are this optimizer's own, so that steps
        write to no other optimizer and to no state dict that was kept. If something does not fit,
        the error names the parameter and the reason, and the optimizer stays as it was.

        Raises:
            TypeError, ValueError: an option of a group is missing or out of range; or a state is
                missing, has another shape or dtype, or values that training never makes: a second
                moment below 0, or a scale of 8-bit codes that is below 0, infinite or NaN.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(f"the state dict is a {type(state_dict).__name__}, not a dict")
        # Registered last, so that the user's own hooks see tensors.
        hook = self.register_load_state_dict_pre_hook(keep_states)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: self.__dict__[name] for name in COPIED if name in self.__dict__}
        state = super().__getstate__()
        if self._paging is not None:  # a pickled view would bring its whole slab
            state["state"] = defaultdict(dict, self._paging.detached(self, state["state"]))
        return state | attributes

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups, is_checkpoint = state["param_groups"], "defaults" not in state
        complete_groups(groups, self.__dict__.get("defaults", {}))
        if is_checkpoint:
            for index, group in enumerate(groups):
                self._check_loaded(index, group)
        restored = restored_states(self, state)
        if is_checkpoint:  # after the states, whose errors tell more of modes that do not fit
            for group in groups:
                check_weight_options(group)
            common_max_grad_norm(groups)
            if self._paging is not None:
                self._paging.adopt(self, groups, restored)
        self._places = []
        self.__dict__.setdefault("_skips", SkippedSteps())
        before = {
            param: dict(entry)
            for param, entry in self.__dict__.get("state", {}).items()
            if isinstance(entry, dict)
        }
        super().__setstate__(state | {"state": restored})
        if is_checkpoint:
            own_states(self.state, state["state"], before)

    def _check_loaded(self, index: int, group: dict[str, Any]) -> None:
        """Refuses a group of a checkpoint whose options a step could not use."""
        check_loaded_group(group, self.defaults, self._check_options, index)

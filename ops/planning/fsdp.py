"""FSDP2 on fakes: what one rank gathers, drops and reduces, and when.

It follows ``torch.distributed.fsdp.fully_shard`` of torch 2.15, without a process group: parameters
of a copy become the shards of rank 0, the largest, and hooks put whole ones in their place as
``_fsdp_state.py`` and ``_fsdp_param_group.py`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..step.pytree import map_tensors, tensors_in
from .copies import copy_attributes
from .recorder import Recorder
from .sharding import Sharding, Unit

__all__ = ["ShardedModel"]


class _Parameter:
    """A parameter: its shard, and the whole one that is there while it is gathered."""

    def __init__(self, name: str, given: Tensor, ranks: int, computed: torch.dtype | None) -> None:
        rows = -(-given.shape[0] // ranks) if given.shape[0] else 0
        self.name, self.module = name, name.rpartition(".")[0]
        self.elements = rows * prod(given.shape[1:])  # of a shard, padded to be the same everywhere
        self.given, self.given_elements = given, given.numel()
        self.cast = computed if computed != given.dtype else None
        dtype = self.cast or given.dtype
        flat = torch.UntypedStorage(ranks * self.elements * dtype.itemsize, device="meta")
        self.whole = _as_parameter(_on_memory(flat, given.shape, dtype, given), given)
        own = torch.UntypedStorage(self.elements * given.element_size(), device="meta")
        shape = torch.Size((rows, *given.shape[1:]))
        self.shard = _as_parameter(_on_memory(own, shape, given.dtype, given), given)
        self.places: list[tuple[nn.Module, str]] = []

    def put(self, x: Tensor) -> None:
        for module, name in self.places:
            module._parameters[name] = x  # type: ignore[assignment]


def _on_memory(
    memory: torch.UntypedStorage, shape: torch.Size, dtype: torch.dtype, like: Any
) -> Tensor:
    """Returns a fake that begins where a memory does. It is no operation: those of all parameters
    would take as long as the rest of a plan."""
    with torch.no_grad(), _disable_current_modes():
        on_meta = torch.empty(0, dtype=dtype, device="meta").set_(memory, 0, shape)
    return FakeTensor(like.fake_mode, on_meta, like.device)


def _as_parameter(x: Tensor, like: Tensor) -> Tensor:
    parameter = nn.Parameter(x, requires_grad=like.requires_grad)
    copy_attributes(like, parameter)
    return parameter


class _AfterBackward(torch.autograd.Function):
    """Calls a function when the gradients of the inputs of a unit are there."""

    @staticmethod
    def forward(ctx: Any, after: Callable[[], None], *inputs: Tensor) -> Any:
        ctx.after = after
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.after()
        return None, *grads


class _Unit:
    """Parameters that are gathered and reduced together, and where in the step they are."""

    def __init__(self, unit: Unit, module: nn.Module, parameters: list[_Parameter]) -> None:
        self.unit, self.module, self.parameters = unit, module, parameters
        self.name = unit.module
        self.phase = "idle"  # "forward", "before backward" or "after backward"
        self.is_in_backward = self.is_whole = False
        self.arriving: Tensor | None = None  # the buffer that receives the whole parameters
        self.uses: list[int] = []  # places in the order of the forward pass


class ShardedModel:
    """The model of a plan as FSDP2 trains it. Makes its parameters shards; :meth:`install` adds the
    hooks."""

    def __init__(self, sharding: Sharding, model: nn.Module, recorder: Recorder) -> None:
        self._ranks, self._recorder, self._model = sharding.ranks, recorder, model
        modules = dict(model.named_modules())
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in modules.values():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append((module, name))
        self._units = []
        for unit in sharding.units:
            own = []
            for name in unit.parameters:
                given = model.get_parameter(name)
                own.append(_Parameter(name, given, self._ranks, unit.policy.param_dtype))
                own[-1].places = places[id(given)]
            self._units.append(_Unit(unit, modules[unit.module], own))
        for parameter in self._parameters():
            parameter.put(parameter.shard)
        self._kept: Tensor | None = None  # the last buffer of the forward pass
        self._reducing: list[Tensor] = []  # what is being reduced
        self._order: list[_Unit] = []  # of the forward pass
        self._has_callback = False

    def _parameters(self) -> Iterator[_Parameter]:
        for unit in self._units:
            yield from unit.parameters

    def replaced(self) -> dict[Tensor, tuple[Tensor, int]]:
        """Returns for each parameter that was given its shard, and how many elements it had."""
        return {p.given: (p.shard, p.given_elements) for p in self._parameters()}

    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what autograd gives gradients to, with its name."""
        shards = set()
        for parameter in self._parameters():
            shards.add(id(parameter.shard))
            yield parameter.name, parameter.whole
        for name, ignored in self._model.named_parameters():
            if id(ignored) not in shards:
                yield name, ignored

    def install(self) -> None:
        """Adds the hooks, and from now on counts whole parameters only while they are there."""
        for parameter in self._parameters():
            self._recorder.manage(parameter.whole)
        for unit in self._units:
            before = partial(self._before_forward, unit)
            unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(partial(self._after_forward, unit))

    # Forward

    def _before_forward(self, unit: _Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        policy = unit.unit.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        if unit.is_in_backward:  # computed again
            self._gather(unit)
            self._receive(unit)
            return args, kwargs
        unit.phase = "forward"
        self._gather(unit)
        self._receive(unit)
        return self._called_after(unit, args, kwargs) if unit.parameters else (args, kwargs)

    def _called_after(self, unit: _Unit, args: Any, kwargs: Any) -> Any:
        inputs = [x for x in tensors_in((args, kwargs)) if x.requires_grad]
        if not torch.is_grad_enabled() or not inputs:
            return args, kwargs
        results = iter(_AfterBackward.apply(partial(self._after_backward, unit), *inputs))
        return map_tensors((args, kwargs), lambda x: next(results) if x.requires_grad else x)

    def _after_forward(self, unit: _Unit, module: nn.Module, args: Any, output: Any) -> Any:
        dtype = unit.unit.policy.output_dtype
        if not unit.is_in_backward:
            self._leave(unit)
            for x in tensors_in(output):
                if x.requires_grad:
                    x.register_hook(partial(self._before_backward, unit))
        return output if dtype is None else _cast(output, dtype)

    def _leave(self, unit: _Unit) -> None:
        if unit.parameters:
            if unit.unit.reshards:
                self._drop(unit)
            unit.uses.append(len(self._order))
            self._order.append(unit)
        unit.phase = "idle"
        if unit is self._units[0]:
            self._kept = None

    # Parameters come and go

    def _gather(self, unit: _Unit) -> None:
        """Allocates the buffer for the whole parameters and fills it."""
        if unit.is_whole or unit.arriving is not None or not unit.parameters:
            return
        size = sum(
            p.elements * self._ranks * (p.cast or p.given.dtype).itemsize for p in unit.parameters
        )
        cast = [p for p in unit.parameters if p.cast is not None]
        copies = self._buffer(sum(p.elements * p.whole.element_size() for p in cast), unit)
        unit.arriving = self._buffer(size if self._ranks > 1 else 0, unit)
        del copies
        self._copied_by_gloo(unit.arriving, unit)

    def _receive(self, unit: _Unit) -> None:
        """Puts the whole parameters into the modules."""
        if unit.arriving is None:
            return
        arrived, unit.arriving = unit.arriving, None
        if unit.phase == "forward":
            self._kept = None  # of the unit before: until now its copies could still be read
        for parameter in unit.parameters:
            self._recorder.appear(
                parameter.whole, "communication", parameter.name, parameter.module
            )
            parameter.put(parameter.whole)
        unit.is_whole = True
        if unit.phase == "forward" and self._ranks > 1:
            self._kept = arrived

    def _drop(self, unit: _Unit) -> None:
        if unit.is_whole:
            for parameter in unit.parameters:
                parameter.put(parameter.shard)
                self._recorder.vanish(parameter.whole)
            unit.is_whole = False

    def _buffer(self, size: int, unit: _Unit, dtype: torch.dtype = torch.uint8) -> Tensor:
        buffer = torch.empty(size // dtype.itemsize, dtype=dtype, device=self._recorder.device)
        self._recorder.know(buffer, "communication", "fully_shard", unit.name)
        return buffer

    def _copied_by_gloo(self, x: Tensor, unit: _Unit) -> None:
        """Counts the copy that gloo makes on the CPU of what is gathered or reduced."""
        if self._recorder.device.type == "cpu" and self._ranks > 1:
            self._buffer(x.nbytes, unit)

    # Backward

    def _before_backward(self, unit: _Unit, grad: Tensor) -> Tensor:
        unit.is_in_backward = True
        if not self._has_callback:
            self._has_callback = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if unit.phase != "before backward" and unit.parameters:
            unit.phase = "before backward"
            self._gather(unit)
            self._receive(unit)
            before = unit.uses.pop() - 1 if unit.uses else -1
            if before >= 0:  # fetched early, so that it arrives in time
                self._gather(self._order[before])
        return grad

    def _after_backward(self, unit: _Unit) -> None:
        unit.phase = "after backward"
        with_grad = [p for p in unit.parameters if p.whole.grad is not None]
        grads = [p.whole.grad for p in with_grad]
        for parameter in with_grad:
            parameter.whole.grad = None
        self._drop(unit)
        if unit.parameters:
            self._reducing.clear()
        if with_grad:
            self._reduce(unit, with_grad, grads)

    @torch.no_grad()
    def _reduce(self, unit: _Unit, parameters: list[_Parameter], grads: list[Any]) -> None:
        kept = parameters[0].given.dtype
        reduced = unit.unit.policy.reduce_dtype or kept
        elements = sum(p.elements for p in parameters)
        sent = self._buffer(elements * self._ranks * reduced.itemsize, unit, reduced)
        grads.clear()
        self._reducing.append(sent)
        result = self._buffer(elements * reduced.itemsize, unit, reduced)
        self._copied_by_gloo(sent, unit)
        if reduced != kept:
            result = result.to(kept)
        for parameter in parameters:
            shard = parameter.shard
            # Wherever in the buffer it is.
            new = _on_memory(result.untyped_storage(), shard.shape, kept, shard)
            if shard.grad is None:
                shard.grad = new
                self._recorder.know(new, "gradients", unit.name, unit.name)
            else:
                shard.grad.add_(new)

    def _end_backward(self) -> None:
        """Ends the backward pass of what is left, such as units whose inputs needed no
        gradients."""
        self._has_callback = False
        for unit in self._units:
            if unit.phase != "after backward":
                self._after_backward(unit)
            unit.phase, unit.is_in_backward = "idle", False
            unit.uses.clear()
        self._reducing.clear()
        self._order.clear()
        self._kept = None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(value, lambda x: x.to(dtype) if x.is_floating_point() else x)

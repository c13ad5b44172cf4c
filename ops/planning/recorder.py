"""Watches the operations of a step on fakes: which memory is allocated, by whom, and until when."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .._core.overlap import is_dense
from .._core.running_modules import watching_modules
from ..memory.events import KINDS, Allocation, Span, Timeline
from ..step.errors import PlanError
from ..step.watch import listening
from .op_workspaces import BODIES, RESULTS, as_allocated, as_placed, workspaces_of
from .products import Products

__all__ = ["Recorder"]

_RANK = {kind: rank for rank, kind in enumerate(KINDS)}
_DEVICE = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_ADD = torch.ops.aten.add.Tensor
_DETACH = torch.ops.aten.detach.default
_PUT = torch.ops.aten.index_put.default
_CPU, _XLA = torch.device("cpu"), torch.device("xla", 0)
_DRAWS = torch.Tag.nondeterministic_seeded


class Recorder(TorchDispatchMode):
    """A mode that counts the storages of fakes.

    Args:
        device: of the plan: ``cpu`` or ``cuda``.
        is_lying: C++ is told that fakes are on the CPU, so that the autograd engine runs without a
            GPU.
    """

    def __init__(self, device: torch.device, is_lying: bool) -> None:
        super().__init__()
        self.device, self._is_lying = device, is_lying
        self.allocations: list[Allocation] = []
        self.workspaces: list[Allocation] = []  # of cuBLAS: no tensors, and counted by themselves
        self._products = Products() if device.type == "cuda" else None
        self._staying: set[tuple[bool, bool]] = set()  # workspaces that stay
        self.spans: list[Span] = []
        self.now = self._began = 0
        self.step, self.phase = 0, "other"
        self.module: str | None = None
        self.last: tuple[str, str | None] = ("", None)  # the operation and module, for errors
        self.draws = 0  # operations that took random numbers
        self.scalar: Callable[[Any, Tensor], Any] = lambda func, x: None
        self.is_paused = False
        self.is_on_host = False  # whether a tensor is made that the program says is on the CPU
        self.adds_in_place = False  # what fakes add out of place, since they are subclasses
        self._outer: str | None = None  # the operation whose parts are recorded
        self._live: dict[int, tuple[Any, int]] = {}
        self._managed: set[int] = set()  # memory that comes and goes while its tensor stays
        self._stack: list[str | None] = []
        self._seen_in_backward: str | None = None
        self.has_autocast = False  # which asks where tensors are
        self._asked: Any = None  # the tensor of which C++ asked where it is, if nothing ran since
        # Of leaves that no operation has taken yet, with the leaf: another may get its number.
        self._accumulators: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self._is_accumulating = False
        self._unshared = 0  # what counts of an unshared tensor look like from inside the mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard takes longer than the work

    # ---- storages -------------------------------------------------------------------------------

    def know(
        self, x: Tensor, kind: str, owner: str | None = None, module: str | None = None
    ) -> None:
        """Counts a tensor, or tells what one that is counted is for."""
        if not self._is_here(x):
            return
        storage = x.untyped_storage()
        at = self._live.get(storage._cdata)
        if at is None:
            if storage.nbytes() and storage._cdata not in self._managed:
                self._born(storage, kind, owner, module)
            return
        allocation = self.allocations[at[1]]
        if storage._cdata in self._managed and kind == "activations":
            return  # autograd keeps the tensor, and not its memory
        if _RANK[kind] < _RANK[allocation.kind]:
            allocation.kind = kind
            if module is not None:
                allocation.module = module
            if owner is not None:
                allocation.op = owner

    def _is_here(self, x: Tensor) -> bool:
        """Returns whether a tensor is on the device of the plan. A step on a GPU has others on the
        host, such as the counts of steps of torch's optimizers, which are not counted."""
        return x.device.type == self.device.type

    def _born(self, storage: Any, kind: str, op: str | None, module: str | None) -> None:
        key, at = storage._cdata, len(self.allocations)
        allocation = Allocation(
            at, storage.nbytes(), self.now, None, kind, module, op, self.phase, self.step
        )
        self.now += 1
        self.allocations.append(allocation)
        self._live[key] = weakref.ref(storage, lambda _: self._died(key, at)), at

    def _died(self, key: int, at: int) -> None:
        found = self._live.get(key)
        if found is not None and found[1] == at:
            del self._live[key]
        self.allocations[at].end = self.now
        self.now += 1

    def manage(self, x: Tensor) -> None:
        """Counts the memory of a tensor from :meth:`appear` to :meth:`vanish` from now on."""
        storage = x.untyped_storage()
        self._managed.add(storage._cdata)  # until another may have its number
        weakref.finalize(storage, self._managed.discard, storage._cdata)

    def appear(self, x: Tensor, kind: str, owner: str | None, module: str | None) -> None:
        """Allocates the memory of a tensor that is managed."""
        storage = x.untyped_storage()
        if storage.nbytes() and storage._cdata not in self._live:
            self._born(storage, kind, owner, module)

    def vanish(self, x: Tensor) -> None:
        """Frees the memory of a tensor that is managed."""
        key = x.untyped_storage()._cdata
        if key in self._live:
            self._died(key, self._live[key][1])

    def move(self, x: Tensor) -> Allocation | None:
        """Takes a tensor off the device, as if it had never been there. Returns what was known of
        it if this is the first time."""
        storage = x.untyped_storage()
        if storage._cdata in self._managed:
            return None
        self.manage(x)
        if (at := self._live.pop(storage._cdata, None)) is None:
            return None
        allocation = self.allocations[at[1]]
        moved, allocation.bytes, allocation.end = replace(allocation), 0, allocation.start
        return moved

    def begin(self, phase: str) -> None:
        """Begins a phase."""
        self.phase = phase
        self.spans.append(Span(self.now, self.step, phase))
        self.now += 1  # so that a phase in which nothing is allocated has an event
        self.module = self._seen_in_backward = None
        self._stack.clear()

    def allocation_of(self, x: Tensor) -> Allocation | None:
        """Returns what is known of the memory of a tensor, or None."""
        at = self._live.get(x.untyped_storage()._cdata)
        return None if at is None else self.allocations[at[1]]

    def timeline(
        self,
        notes: Iterable[str] = (),
        on_host: Sequence[Allocation] = (),
        link_bytes: int = 0,
    ) -> Timeline:
        host = Timeline([*on_host], self.spans, "host") if on_host else None
        return Timeline(
            [a for a in self.allocations if a.bytes and not self._is_past(a)],  # others have moved
            self.spans,
            self.device.type,
            list(notes),
            host,
            link_bytes,
            self.workspaces,
            [a for a in self.allocations if a.bytes and self._is_past(a)],
            self._began,
        )

    def begin_steps(self) -> None:
        """Says that the model and the optimizer are as the steps find them."""
        self._began = self.now
        self.now += 1

    def _is_past(self, a: Allocation) -> bool:
        return a.end is not None and a.end < self._began

    # ---- devices --------------------------------------------------------------------------------

    def _device_for_cpp(self, x: Tensor) -> torch.device:
        """Answers where a tensor is. The autograd engine asks for every tensor of its graph, in
        order to choose a thread and a stream: it hears the CPU, because without a GPU it has no
        others. In an operation that autocast has taken, autocast asks first whether a tensor is on
        CUDA, and at once whether it is on XLA: the second answer is yes, or it would cast nothing.
        """
        if not self._is_lying:
            return x.device
        if not self.has_autocast or torch.is_autocast_enabled("cuda"):  # it is off inside of them
            return _CPU
        if x.is_leaf and x.requires_grad:
            if self._is_accumulating:
                return _CPU
            known = self._accumulators.get(id(x))
            if known is None or known[0]() is not x:
                self._accumulate(x)
        is_again = self._asked is not None and self._asked() is x
        self._asked = None if is_again else weakref.ref(x)
        return _XLA if is_again else _CPU

    def _accumulate(self, x: Tensor) -> None:
        """Has the engine ask now where a leaf is, and not before the leaf's first operation: its
        question could not be told from one of autocast then, and XLA would end the process. It asks
        when it makes the leaf's gradient accumulator, which lives on until the operation holds it:
        the engine makes it under a lock, in which no other may be made of the leaf."""
        before = self.is_paused, self._asked
        self.is_paused = self._is_accumulating = True
        try:
            with self, torch.enable_grad():
                self._accumulators[id(x)] = weakref.ref(x), x.view_as(x).grad_fn
        finally:
            self._is_accumulating = False
            self.is_paused, self._asked = before

    # ---- operations -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return self._device_for_cpp(args[0])
        self._asked = None
        if func is _DETACH:  # also of what autograd keeps: it takes no memory
            return func(*args, **kwargs)
        if self._accumulators and not self._is_accumulating:
            for x in tree_iter(args):
                self._accumulators.pop(id(x), None)
        if self.is_paused:
            if func is _ADD and torch._C._current_graph_task_id() != -1:
                self._unshared = _uses(args[0])
            return func(*args, **kwargs)
        if self._is_lying and kwargs.get("device") is not None and not self.is_on_host:
            kwargs = kwargs | {"device": self.device}
        self.last = str(func), self.module
        self.draws += _DRAWS in func.tags
        if func is _ITEM and (value := self.scalar(func, args[0])) is not None:
            return value
        if func is _ADD and self.phase == "backward" and self._is_summed_in_place(args, kwargs):
            return args[0]
        if func is _ADD and self.adds_in_place:
            return torch.ops.aten.alias.default(args[0])
        if func is _PUT and self.phase == "backward" and _is_called_by_engine():
            return args[0]  # index_backward puts in place, except into subclasses
        module = self._seen_in_backward if self.phase == "backward" else self.module
        name = func._schema.name
        if name in BODIES:
            return self._through(name, args, kwargs)
        extra = workspaces_of(func, args, kwargs, self.device.type)
        result = as_placed(name, args, func(*args, **kwargs))
        results, name = as_allocated(name, result), self._outer or name
        # Behind the results, as most operations allocate: what fits a gap depends on the order.
        held: list[Allocation] = []
        for size, kind in extra if RESULTS in extra else [RESULTS, *extra]:
            if (size, kind) == RESULTS:
                self._note(results, name, module)
            elif size < 0:
                self._let_go(next(one for one in reversed(held) if one.bytes == -size), held)
            else:
                held.append(self._held(self.allocations, size, kind, name, module))
        if self._products is not None:
            held += self._held_by_product(func, args, kwargs, result, name, module)
        for one in held:
            one.end = self.now
        if held:
            self.now += 1
        return result

    def _let_go(self, one: Allocation, held: list[Allocation]) -> None:
        """Frees what an operation holds before it ends."""
        held.remove(one)
        one.end = self.now
        self.now += 1

    def _held(
        self, among: list[Allocation], size: int, kind: str, name: str, module: str | None
    ) -> Allocation:
        """Allocates what an operation holds until it ends."""
        one = Allocation(
            len(among), size, self.now, None, kind, module, name, self.phase, self.step
        )
        self.now += 1
        among.append(one)
        return one

    def _held_by_product(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        name: str,
        module: str | None,
    ) -> list[Allocation]:
        """Allocates what cuBLAS takes for a product; its workspace may stay."""
        products = self._products
        assert products is not None
        found = products.scratch(func, args, kwargs, result)
        if found is None:
            return []
        held = [
            self._held(self.allocations, size, "temporaries", name, module) for size in found.copies
        ]
        # The autograd engine runs in a thread of its own, which has a handle of its own.
        place = self.phase == "backward", found.is_lt and not products.is_shared
        if not products.keeps:
            held.append(self._held(self.workspaces, found.workspace, "workspaces", name, module))
        elif place not in self._staying:
            self._staying.add(place)
            self._held(self.workspaces, found.workspace, "workspaces", name, module)
        return held

    def _through(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records the operations that an operation is made of, under its name."""
        self._outer, outer = name, self._outer
        try:
            with self:
                result = BODIES[name](*args, **kwargs)
        finally:
            self._outer = outer
        return result

    def _is_summed_in_place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether the autograd engine would add a gradient to another in place. It does so
        if nothing else holds the other, but never for subclasses of Tensor (InputBuffer.cpp)."""
        if kwargs or not _is_called_by_engine():
            return False
        x, y = args
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.shape != y.shape:
            return False
        return _uses(x) <= self._unshared and is_dense(x)

    def _calibrate(self) -> None:
        """Learns how many references an unshared gradient has when the engine adds to it."""
        self.is_paused = True
        x = torch.ones(2, device=self.device, requires_grad=True)
        (x * 2 + x * 3).sum().backward()
        self.is_paused = False

    def _note(self, result: Any, name: str, module: str | None) -> None:
        if isinstance(result, FakeTensor):
            if not self._is_here(result):
                return
            if result.layout != torch.strided:
                where = f" in {module!r}" if module else ""
                raise PlanError(
                    f"{name}{where} makes a tensor of layout {result.layout}, and how many numbers "
                    "it has depends on values. Plan with measure=True, which runs real steps, or "
                    "an nn.Embedding with sparse=False, whose gradient is at least as large"
                )
            storage = result.untyped_storage()
            at = self._live.get(storage._cdata)
            if storage._cdata in self._managed:
                return
            if at is None:
                if storage.nbytes():
                    self._born(storage, "temporaries", name, module)
            elif self.allocations[at[1]].bytes != storage.nbytes():  # resized
                old = self.allocations[at[1]]
                self._died(storage._cdata, at[1])
                if storage.nbytes():
                    self._born(storage, old.kind, old.op, old.module)
        elif isinstance(result, (list, tuple)):
            for item in result:
                self._note(item, name, module)

    # ---- modules and saved tensors --------------------------------------------------------------

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Notes, while it lasts, operations, the modules that run, and tensors that autograd
        keeps."""
        with listening(self._kept, self._place, self._asked_for), self:
            with watching_modules(model, self._enter, self._leave):
                self._calibrate()
                yield

    def _enter(self, name: str) -> None:
        self._stack.append(self.module)
        self.module = name

    def _leave(self) -> None:
        if self._stack:
            self.module = self._stack.pop()

    def _kept(self, x: Tensor) -> None:
        if isinstance(x, FakeTensor):
            self.know(x, "activations", module=self.module)

    def _place(self) -> tuple[str | None]:
        return (self.module,)

    def _asked_for(self, place: tuple[str | None]) -> None:
        if self.phase == "backward":
            (self._seen_in_backward,) = place


def _is_called_by_engine() -> bool:
    """Returns whether C++ code of the autograd engine dispatched the operation."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _uses(x: Tensor) -> int:
    """Returns the number of references to a tensor and its memory."""
    storage = x.untyped_storage()
    return x._use_count() + torch._C._storage_Use_Count(storage._cdata)

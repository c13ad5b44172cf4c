"""Reads what ``torch.profiler`` recorded as a list of calls, each with its module, its phase, and
whether it was computed again.

- **Module**: of an operation in a forward pass, the innermost range of a module around it. Of a
  node of autograd, the module of the operation with the node's sequence number, which torch gives
  to both: exact, also where modules are called several times.
- **Phase**: "backward" within nodes of autograd, "optimizer" within the ranges that torch puts
  around ``Optimizer.step`` and ``zero_grad``, "data" within those of a DataLoader, else "forward"
  in a module, else None.
- **Computed again**: a module that runs within a backward pass; and in it any operation that runs
  with gradients on, which only recomputation does, unless ``create_graph=True`` was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch._C._autograd import DeviceType

__all__ = ["Call", "Memory", "Recording", "read"]

_NODE = "autograd::engine::evaluate_function: "
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
_LOADER = "enumerate(DataLoader)#"
_STEP = "ProfilerStep#"
_FUNCTION, _BACKWARD = 0, 1  # of RecordScope: operations, and the work of nodes of autograd


class Call:
    """A range on one thread of the host: an operation, a node, a module.

    Attributes:
        name, thread: of the range.
        start, end: in nanoseconds.
        parent: the call around it on the same thread, or None.
        event: what the profiler gave.
        module: the name of the module that it belongs to, or None.
        phase: see the module's docstring.
        again: whether it was computed again.
        inside: nanoseconds of the calls directly in it.
        device_ns: nanoseconds of the kernels that it launched itself.
        label: the module, if the call is that of a module.
    """

    __slots__ = (
        *("name", "thread", "start", "end", "parent", "event", "module", "phase", "again"),
        *("inside", "device_ns", "label"),
    )

    def __init__(self, event: Any, parent: Call | None) -> None:
        self.name: str = event.name()
        self.thread: int = event.start_thread_id()
        self.start: int = event.start_ns()
        self.end: int = self.start + event.duration_ns()
        self.parent, self.event = parent, event
        self.module: str | None = None if parent is None else parent.module
        self.phase: str | None = None if parent is None else parent.phase
        self.again: bool = parent is not None and parent.again
        self.inside = self.device_ns = 0
        self.label: str | None = None

    @property
    def own_ns(self) -> int:
        """Returns the nanoseconds less those of the calls in it."""
        return max(0, self.end - self.start - self.inside)

    @property
    def is_node(self) -> bool:
        """Returns whether it is a node of autograd that runs."""
        return self.name.startswith(_NODE)

    @property
    def is_loader(self) -> bool:
        """Returns whether torch's DataLoader makes a batch in it."""
        return self.name.startswith(_LOADER)

    @property
    def is_optimizer(self) -> bool:
        """Returns whether it is a call of an optimizer's ``step`` or ``zero_grad``."""
        return self.name.startswith(_OPTIMIZER)


class Memory(NamedTuple):
    """An allocation (positive) or its end (negative), with the innermost call around it."""

    time: int
    bytes: int
    device: str
    call: Call | None


class Recording:
    """The calls and allocations that were recorded.

    Attributes:
        calls: in the order of their starts.
        memory: in order.
        steps: the ranges that ``prof.step()`` ends, by their numbers.
        has_device: whether there are kernels.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.memory: list[Memory] = []
        self.steps: dict[int, Call] = {}
        self.has_device = False


def read(events: Iterable[Any], labels: Mapping[str, tuple[str, bool]]) -> Recording:
    """Returns the recording of the profiler's events. ``labels`` says which names are ranges of
    modules, as :class:`headroom.profiling.ranges.Ranges` does."""
    found = Recording()
    host: list[tuple[int, int, int, Any]] = []
    kernels: list[Any] = []
    for order, event in enumerate(events):
        name = event.name()
        if name == "[memory]":
            host.append((event.start_ns(), 0, order, event))
        elif event.device_type() != DeviceType.CPU:
            if not event.is_user_annotation():
                kernels.append(event)
        elif not event.is_async() and not event.is_hidden_event():
            host.append((event.start_ns(), -event.duration_ns(), order, event))
    host.sort(key=lambda item: item[:3])
    by_correlation = _nest(found, host, labels)
    for kernel in kernels:
        call = by_correlation.get(kernel.linked_correlation_id())
        if call is not None:
            found.has_device = True
            call.device_ns += kernel.duration_ns()
    return found


def _nest(found: Recording, host: list[Any], labels: Mapping[str, tuple[str, bool]]) -> dict:
    open_calls: dict[int, list[Call]] = {}  # by thread
    modules: dict[tuple[int, int], str] = {}  # by thread and sequence number
    by_correlation: dict[int, Call] = {}
    for start, _, _, event in host:
        stack = open_calls.setdefault(event.start_thread_id(), [])
        while stack and stack[-1].end <= start:
            stack.pop()
        parent = stack[-1] if stack else None
        if event.name() == "[memory]":
            found.memory.append(Memory(start, event.nbytes(), _device(event), parent))
            continue
        if event.name().startswith(_STEP):
            # What encloses a step says nothing about what is in it, so it is not on the stack.
            found.steps[int(event.name()[len(_STEP) :])] = Call(event, None)
            continue
        call = Call(event, parent)
        if parent is not None:
            parent.inside += call.end - call.start
        _place(call, labels, modules)
        by_correlation[event.correlation_id()] = call
        found.calls.append(call)
        stack.append(call)
    return by_correlation


def _place(
    call: Call,
    labels: Mapping[str, tuple[str, bool]],
    modules: dict[tuple[int, int], str],
) -> None:
    """Finds out what a call belongs to, from its own name and numbers."""
    event = call.event
    label = labels.get(call.name)
    if label is not None:
        call.label = call.module = label[0]
        call.again = call.again or label[1]
        call.phase = call.phase or "forward"
        return
    sequence = event.sequence_nr()
    if call.is_node:
        call.phase, call.again = "backward", False
        call.module = modules.get((event.fwd_thread_id(), sequence))
    elif call.is_optimizer:
        call.phase, call.module = "optimizer", None
    elif call.is_loader:
        call.phase = "data"
    elif sequence >= 0 and event.scope() == _FUNCTION:
        if call.phase == "backward":
            call.again = True
        if call.module is not None:
            # The last operation that sees a number is the one that makes its node.
            modules[call.thread, sequence] = call.module
        else:
            modules.pop((call.thread, sequence), None)


def _device(event: Any) -> str:
    kind = event.device_type().name.lower()
    return kind if kind == "cpu" else f"{kind}:{event.device_index()}"

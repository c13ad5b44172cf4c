"""Records what torch's CPU allocator does: every allocation and every free, whichever op makes it.

The source is torch's profiler, whose memory events come from the allocator itself and carry the
address and the size. (``TorchDispatchMode`` sees what ops return, but no temporary inside an op;
hooks of the allocator in C++ have no stable interface.) Not seen: memory that does not come from
torch's allocator (oneDNN's and OpenMP's own buffers, numpy, Python objects, memory mapped files),
what other threads allocate, and the end of what was allocated before the recorder started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch._C import _profiler
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler

from .lines import DEPTH, is_inner, line_of
from .stream import Event

__all__ = ["CpuRecorder", "check_no_profiler"]

MARK = "headroom::mark:"
_NODE = "autograd::engine::evaluate_function: "  # a node of the graph begins to run
_APART = (_NODE, "Optimizer.")  # what is no part of the operation around it
_NODES = 1 << 18  # of the graph, whose modules are known to later recordings of the same recorder


def check_no_profiler() -> None:
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError(
            "a profiler is running already, which headroom.memory needs itself: leave its block, "
            "or that of another headroom.memory.track, first"
        )


class CpuRecorder:
    """Records from :meth:`start` to :meth:`stop`, of this thread and of its backward passes."""

    def __init__(self, stacks: bool = True) -> None:
        self._stacks = stacks
        self.remarks: list[str] = []
        self._result: Any = None
        self._modules: dict[int, str] = {}  # by sequence number of the graph's nodes

    def start(self) -> None:
        check_no_profiler()
        config = _profiler.ProfilerConfig(
            _profiler.ProfilerState.KINETO,
            False,  # record_shapes
            True,  # profile_memory
            self._stacks,
            False,  # with_flops
            False,  # with_modules
            _profiler._ExperimentalConfig(verbose=self._stacks),
            "",  # trace_id
        )
        activities = {_profiler.ProfilerActivity.CPU}
        with _quiet():
            _prepare_profiler(config, activities)
            _enable_profiler(config, activities)

    def mark(self, number: int) -> None:
        """Takes a place among the events."""
        with _profiler._RecordFunctionFast(f"{MARK}{number}"):
            pass

    def stop(self) -> None:
        """Ends the recording."""
        with _quiet():
            self._result = _disable_profiler()

    def events(self, modules: Mapping[int, str] | None = None) -> list[Event]:
        """Returns what was recorded, in order. ``modules`` says which marks stand where another
        module begins to run."""
        result, self._result = self._result, None
        found, times = self._read(result.experimental_event_tree(), modules or {})
        if any(a > b for a, b in zip(times, times[1:])):  # of several threads
            found = [found[k] for k in sorted(range(len(found)), key=times.__getitem__)]
        for old in list(self._modules)[:-_NODES]:
            del self._modules[old]
        return found

    def _read(self, roots: list[Any], begins: Mapping[int, str]) -> tuple[list[Event], list[int]]:
        """Returns the events and their times. Every attribute of a node costs most of a
        microsecond, and there are tens of thousands of nodes: few are asked for few."""
        found: list[Event] = []
        times: list[int] = []
        running = ""
        modules = self._modules
        has_others = torch.cuda.is_initialized()  # whose memory is another recorder's
        stack = [(node, _Context()) for node in reversed(roots)]
        while stack:
            node, context = stack.pop()
            name = node.name
            if name == "[memory]":
                about = node.extra_fields
                size = about.alloc_size
                if size and not (has_others and about.device.type != "cpu"):
                    event = _event(about.ptr, size, context, running)
                    times.append(node.start_time_ns)
                    event.time_us = times[-1] // 1000
                    found.append(event)
                continue
            if name.startswith(MARK):
                number = int(name[len(MARK) :])
                running = begins.get(number, running)
                times.append(node.start_time_ns)
                found.append(Event("mark", number, time_us=times[-1] // 1000))
                continue
            if self._stacks and (fields := _python_call(node)) is not None:
                context = context.of_python(fields)
            elif context.op is None or running or name.startswith(_APART):
                # The sequence numbers that forward and backward pass share.
                sequence = -1
                if running or context.phase is None or name.startswith(_NODE):
                    sequence = getattr(node.extra_fields, "sequence_number", -1)
                inner = context.of_op(name, modules.get(sequence), bool(running))
                if sequence >= 0 and (running or inner.phase is None):
                    modules[sequence] = running
                context = inner
            elif context.phase is None:
                sequence = getattr(node.extra_fields, "sequence_number", -1)
                if sequence >= 0:
                    modules[sequence] = running
            stack += [(child, context) for child in reversed(node.children)]
        return found, times


def _python_call(node: Any) -> Any:
    return node.extra_fields if node.tag.name in ("PyCall", "PyCCall") else None


def _event(address: int, size: int, context: _Context, running: str) -> Event:
    if size < 0:
        return Event("free", address, -size, phase=context.phase)
    # Within a backward pass modules run if they are computed again; else the node knows its own.
    module = running or context.module
    return Event("alloc", address, size, context.op, module, context.phase, context.stack())


class _Context:
    """What encloses an event: op, module, phase, lines of Python."""

    __slots__ = ("op", "module", "phase", "_node", "_outer", "_stack")

    def __init__(self) -> None:
        self.op: str | None = None
        self.module: str | None = None
        self.phase: str | None = None
        self._node: Any = None
        self._outer: _Context | None = None
        self._stack: tuple[str, ...] | None = ()

    def _inner(self) -> _Context:
        inner = _Context()
        inner.op, inner.module, inner.phase = self.op, self.module, self.phase
        inner._node, inner._outer, inner._stack = None, self, None
        return inner

    def of_op(self, name: str, module: str | None, runs: bool) -> _Context:
        """Returns the context of an operation, whose name is that of the outermost one. ``module``
        is of its node in the graph; ``runs`` tells that a module runs, in a backward pass again."""
        if name.startswith(_NODE):
            inner = self._inner()
            inner.op, inner.phase, inner.module = None, "backward", module
            inner._outer, inner._stack = None, ()
            return inner
        if name.startswith("Optimizer.step#"):
            inner = self._inner()
            inner.op, inner.phase, inner.module = None, "optimizer", None
            return inner
        again = runs and self.op is not None and self.op.endswith(("Backward0", "Backward"))
        if (self.op is not None and not again) or name.startswith("Optimizer.zero_grad#"):
            return self
        inner = self._inner()
        inner.op = name
        return inner

    def of_python(self, fields: Any) -> _Context:
        """Returns the context of a call in Python."""
        inner = self._inner()
        inner._node, inner.op = fields, None
        return inner

    def stack(self) -> tuple[str, ...]:
        """Returns the lines of the user's Python, innermost first."""
        if self._stack is None:
            if self._node is None:  # an operation
                self._stack = self._outer.stack() if self._outer is not None else ()
            else:
                # An operator such as + is no call, so the line within its function is not known.
                called = getattr(self._node, "callsite", None)
                line = None if called is None else _line(called)
                lines = self._callers()
                self._stack = lines if line is None else (line, *lines)[:DEPTH]
        return self._stack

    def _callers(self) -> tuple[str, ...]:
        lines: list[str] = []
        context: _Context | None = self
        while context is not None and len(lines) < DEPTH:
            if context._node is not None:
                line = _line(context._node.caller)
                if line is not None:
                    lines.append(line)
            context = context._outer
        return tuple(lines)


def _line(frame: Any) -> str | None:
    """Returns the line of a frame, or None for the frames of torch and of this package."""
    if is_inner(frame.file_name):
        return None
    return line_of(frame.file_name, frame.line_number, frame.function_name)


class _quiet:
    """Keeps the profiler's library from writing to stderr, unless the user set its level."""

    def __enter__(self) -> None:
        self._ours = "KINETO_LOG_LEVEL" not in os.environ
        if self._ours:
            os.environ["KINETO_LOG_LEVEL"] = "99"

    def __exit__(self, *raised: object) -> None:
        if self._ours:
            os.environ.pop("KINETO_LOG_LEVEL", None)

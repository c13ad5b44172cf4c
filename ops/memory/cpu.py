"""Records what torch's CPU allocator does: every allocation and every free, whichever op makes it.

The source is torch's profiler, whose memory events come from the allocator itself and carry the
address and the size. (``TorchDispatchMode`` sees what ops return, but no temporary inside an op;
hooks of the allocator in C++ have no stable interface.) Not seen: memory that does not come from
torch's allocator (oneDNN's and OpenMP's own buffers, numpy, Python objects, memory mapped files),
what other threads allocate, and the end of what others allocated or end. Of these :class:`Watch`
knows what tensors are labeled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
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
        if times != sorted(times):  # of several threads
            found = [found[k] for k in sorted(range(len(found)), key=times.__getitem__)]
        return found

    def _read(self, roots: list[Any], begins: Mapping[int, str]) -> tuple[list[Event], list[int]]:
        """Returns the events and their times. Every attribute of a node costs a good part of a
        microsecond, and there are tens of thousands of nodes: few are asked for few."""
        found: list[Event] = []
        times: list[int] = []
        running = ""
        modules, stacks = self._modules, self._stacks
        has_others = torch.cuda.is_initialized()  # whose memory is another recorder's
        work = [(iter(roots), _Context())]
        while work:
            nodes, context = work[-1]
            for node in nodes:
                name = node.name
                if name == "[memory]":
                    about = node.extra_fields
                    size = about.alloc_size
                    if size and not (has_others and about.device.type != "cpu"):
                        time = node.start_time_ns
                        times.append(time)
                        found.append(_event(about.ptr, size, context, running, time // 1000))
                    continue
                if name.startswith(MARK):
                    number = int(name[len(MARK) :])
                    running = begins.get(number, running)
                    times.append(node.start_time_ns)
                    found.append(Event("mark", number, time_us=times[-1] // 1000))
                    continue
                inner = context
                fields = node.extra_fields if stacks else None
                if stacks and isinstance(fields, _CALLS):
                    inner = context.of_python(fields)
                elif context.op is None or running or name.startswith(_APART):
                    # The sequence numbers that forward and backward pass share.
                    sequence = -1
                    if running or context.phase is None or name.startswith(_NODE):
                        sequence = getattr(fields or node.extra_fields, "sequence_number", -1)
                    inner = context.of_op(name, modules.get(sequence), bool(running))
                    if sequence >= 0 and (running or inner.phase is None):
                        modules[sequence] = running
                elif context.phase is None:
                    sequence = getattr(fields or node.extra_fields, "sequence_number", -1)
                    if sequence >= 0:
                        modules[sequence] = running
                if children := node.children:
                    work.append((iter(children), inner))
                    break
            else:
                work.pop()
        return found, times


_CALLS = (_profiler._ExtraFields_PyCall, _profiler._ExtraFields_PyCCall)


def _event(address: int, size: int, context: _Context, running: str, time_us: int) -> Event:
    if size < 0:
        return Event("free", address, -size, None, None, context.phase, (), time_us)
    # Within a backward pass modules run if they are computed again; else the node knows its own.
    module, stack = running or context.module, context.stack()
    return Event("alloc", address, size, context.op, module, context.phase, stack, time_us)


class _Context:
    """The surroundings of an event: op, module, phase, lines of Python."""

    __slots__ = ("op", "module", "phase", "_node", "_outer", "_stack", "_lines")

    def __init__(
        self,
        op: str | None = None,
        module: str | None = None,
        phase: str | None = None,
        node: Any = None,
        outer: _Context | None = None,
    ) -> None:
        self.op, self.module, self.phase = op, module, phase
        self._node, self._outer = node, outer
        self._stack: tuple[str, ...] | None = None
        self._lines: tuple[str, ...] | None = None

    def of_op(self, name: str, module: str | None, runs: bool) -> _Context:
        """Returns the context of an operation, whose name is that of the outermost one. ``module``
        is of its node in the graph; ``runs`` tells that a module runs, in a backward pass again."""
        if name.startswith(_NODE):
            return _Context(None, module, "backward")
        if name.startswith("Optimizer.step#"):
            return _Context(None, None, "optimizer", None, self)
        again = runs and self.op is not None and self.op.endswith(("Backward0", "Backward"))
        if (self.op is not None and not again) or name.startswith("Optimizer.zero_grad#"):
            return self
        return _Context(name, self.module, self.phase, None, self)

    def of_python(self, fields: Any) -> _Context:
        """Returns the context of a call in Python."""
        return _Context(None, self.module, self.phase, fields, self)

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
        """Returns the lines of the calls that lead here, of which each is read once."""
        unread: list[_Context] = []
        context: _Context | None = self
        while context is not None and context._lines is None:
            unread.append(context)
            context = context._outer
        lines = () if context is None or context._lines is None else context._lines
        for each in reversed(unread):
            line = None if each._node is None else _line(each._node.caller)
            if line is not None:
                lines = (line, *lines)[:DEPTH]
            each._lines = lines
        return lines


def _line(frame: Any) -> str | None:
    """Returns the line of a frame, or None for the frames of torch and of this package."""
    return _text(frame.file_name, frame.line_number, frame.function_name)


@lru_cache(1 << 16)
def _text(path: str, number: int, function: str) -> str | None:
    return None if is_inner(path) else line_of(path, number, function)


class _quiet:
    """Keeps the profiler's library from writing to stderr, unless the user set its level."""

    def __enter__(self) -> None:
        self._ours = "KINETO_LOG_LEVEL" not in os.environ
        if self._ours:
            os.environ["KINETO_LOG_LEVEL"] = "99"

    def __exit__(self, *raised: object) -> None:
        if self._ours:
            os.environ.pop("KINETO_LOG_LEVEL", None)

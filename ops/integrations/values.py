"""Answers for values of tensors that a loop reads to log them, in a step planned on fakes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ValuesRead", "line_of"]

FEW = 3  # lines that a note names
_ITEM = torch.ops.aten._local_scalar_dense.default
_INDEX = torch.ops.aten.index.Tensor
PACKAGE = __name__.partition(".")[0]
_MODULE = nn.Module._call_impl.__code__


class ValuesRead:
    """Answers 1 for the values of fakes that a loop's own code reads, such as ``loss.item()`` for
    its metrics, and all elements where it selects some by a mask. A ``forward`` that was set on an
    instance, as TRL does, is the loop's. What a module asks for in its own is left to planning,
    which refuses: the sizes of what follows may depend on it.

    Attributes:
        lines: where values were read, as ``file:line``.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> ValuesRead:
        return self  # a copy for planning notes lines in the same place

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Answers for the values of fakes while it lasts. Costs nothing where no fakes are."""
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            yield
            return
        with _Answers(self.lines):
            yield

    def note(self) -> list[str]:
        """Returns a sentence for the plan, if values were read."""
        if not self.lines:
            return []
        return [
            "values that the loop reads are planned as 1, and masks as True, as for metrics: "
            + ", ".join(self.lines[:FEW])
            + (f" and {len(self.lines) - FEW} more lines" if len(self.lines) > FEW else "")
        ]


def line_of(error: BaseException | None) -> str | None:
    """Returns where code of the user's or of another library caused an error, as ``file:line``."""
    trace = None if error is None else error.__traceback__
    found = None
    while trace is not None:
        found = _line(trace.tb_frame, trace.tb_lineno) or found
        trace = trace.tb_next
    return found


def _line(frame: FrameType, line: int) -> str | None:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    name = frame.f_code.co_filename.rpartition("/")[2]
    return None if package in ("torch", PACKAGE) else f"{name}:{line}"


class _Answers(TorchDispatchMode):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _ITEM and isinstance(args[0], FakeTensor) and args[0].constant is None:
            if self._is_loops():
                dtype = args[0].dtype
                return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        elif func is _INDEX and _selects(*args) and self._is_loops():
            x, (mask,) = args
            return x.flatten(0, mask.dim() - 1).clone()
        return func(*args, **kwargs or {})

    def _is_loops(self) -> bool:
        """Returns whether the loop asks, and not a module; notes where."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code is not _MODULE:
            if (found := _line(frame, frame.f_lineno)) is not None:
                is_loops = _is_set(frame) or not _is_in_module(frame)
                if is_loops and found not in self._lines:
                    self._lines.append(found)
                return is_loops
            frame = frame.f_back
        return False


def _is_in_module(frame: FrameType | None) -> bool:
    """Returns whether a module has called what runs."""
    while frame is not None and frame.f_code is not _MODULE:
        frame = frame.f_back
    return frame is not None


def _is_set(frame: FrameType) -> bool:
    """Returns whether a function runs that was set as the forward of a module's instance. Others,
    such as Accelerate, may have set theirs around it."""
    owner = frame.f_locals.get("self")
    is_set = isinstance(owner, nn.Module) and "forward" in vars(owner)
    return is_set and not hasattr(type(owner), frame.f_code.co_name)


def _selects(x: Any, indices: list[Any]) -> bool:
    """Returns whether elements of a fake are taken where a mask is True."""
    return (
        isinstance(x, FakeTensor)
        and len(indices) == 1
        and isinstance(indices[0], FakeTensor)
        and indices[0].dtype == torch.bool
        and indices[0].dim() > 0
    )

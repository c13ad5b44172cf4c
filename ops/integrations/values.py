"""Values of tensors that a loop reads to log them, in a step that is planned on fakes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ValuesRead"]

_ITEM = torch.ops.aten._local_scalar_dense.default
PACKAGE = __name__.partition(".")[0]
_MODULE = nn.Module._call_impl.__code__


class ValuesRead:
    """Answers 1 for the values of fakes that a loop's own code reads, such as ``loss.item()`` for
    its metrics. What a module reads in its ``forward`` is left to planning, which refuses: sizes
    of what follows may depend on it.

    Attributes:
        lines: where values were read, as ``file:line``.
    """

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ValuesRead:
        return self  # a copy for planning notes lines in the same place

    @contextmanager
    def answered(self) -> Iterator[None]:
        """While it lasts, values of fakes are answered. Costs nothing where no fakes are."""
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            yield
            return
        with _Answers(self.lines, sys._getframe()):
            yield

    def note(self) -> list[str]:
        """Returns a sentence for the plan, if values were read."""
        if not self.lines:
            return []
        where = ", ".join(self.lines)
        return [f"values that the loop reads are planned as 1, as for metrics: {where}"]


class _Answers(TorchDispatchMode):
    def __init__(self, lines: dict[str, None], outermost: Any) -> None:
        super().__init__()
        self._lines, self._outermost = lines, outermost

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _ITEM and isinstance(args[0], FakeTensor) and args[0].constant is None:
            line = self._line()
            if line is not None:
                self._lines[line] = None
                dtype = args[0].dtype
                return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **kwargs or {})

    def _line(self) -> str | None:
        """Where the loop reads a value; None if a module does."""
        frame: Any = sys._getframe(2)
        found = None
        while frame is not None and frame is not self._outermost:
            code = frame.f_code
            if code is _MODULE:
                return None
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if found is None and package not in ("torch", PACKAGE):
                found = f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return found

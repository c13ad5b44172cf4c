"""Asks this machine's CPU how much scratch memory an operation takes, by running it once.

oneDNN's convolutions and 16-bit products take scratch memory that depends on the processor, the
number of threads and the shapes, by rules of its own. Fakes do not show it, and no formula here
would hold on another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..memory.cpu import CpuRecorder

__all__ = ["asked", "scratch"]

LIMIT = 64 << 20  # Bytes of arguments and results: larger operations are not run.
Found = tuple[int, tuple[int, ...]]
_found: dict[Any, Found] = {}
unasked: set[str] = set()  # names of operations that could not be asked of in this plan


def scratch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """Returns the most bytes that a CPU operation holds beyond its results, or ``None`` where that
    cannot be asked: its tensors are too large, or a profiler runs on this thread."""
    found = asked(func, args, kwargs)
    return None if found is None else found[0]


def asked(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Found | None:
    """Returns that, and the bytes of each result."""
    state = torch.get_num_threads(), torch.is_grad_enabled()
    key = str(func), *state, _described(args), _described(kwargs)
    if key not in _found:
        if _bytes(args) > LIMIT or torch._C._autograd._profiler_enabled():
            unasked.add(func._schema.name)
            return None
        with _disable_current_modes():
            _found[key] = _measured(func, _real(args), _real(kwargs))
    return _found[key]


def _measured(func: Any, args: Any, kwargs: Any) -> Found:
    func(*args, **kwargs)  # The first call allocates what is kept.
    recorder = CpuRecorder(stacks=False)
    recorder.start()
    try:
        result = func(*args, **kwargs)
    finally:
        recorder.stop()
    live = most = 0
    for event in recorder.events():
        live += event.bytes if event.action == "alloc" else -event.bytes
        most = max(most, live)
    results = result if isinstance(result, (list, tuple)) else (result,)
    return max(0, most - live), tuple(map(_bytes, results))


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.requires_grad
    if isinstance(value, (list, tuple)):
        return tuple(_described(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _described(item)) for name, item in value.items())
    return value


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value) if isinstance(value, (list, tuple)) else 0


def _real(value: Any) -> Any:
    if isinstance(value, Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return made.zero_()
    if isinstance(value, (list, tuple)):
        return type(value)(_real(item) for item in value)
    if isinstance(value, dict):
        return {name: _real(item) for name, item in value.items()}
    return value

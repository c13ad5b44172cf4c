"""Asks this machine's CPU how much scratch memory an operation takes, by running it once.

oneDNN's convolutions and 16-bit products take scratch memory that depends on the processor, the
number of threads and the shapes, by rules of its own. Fakes do not show it, and no formula here
would hold on another machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from ..memory.cpu import CpuRecorder
from ..step.pytree import map_tensors, tensors_in

__all__ = ["asked"]

LIMIT = 64 << 20  # Bytes of arguments and results: larger operations are not run.
Found = tuple[int, tuple[int, ...]]
_found: dict[Any, Found] = {}
unasked: set[str] = set()  # names of operations that could not be asked of in this plan


def asked(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Found | None:
    """Returns the most bytes that a CPU operation holds beyond its results, and the bytes of each
    result; or None where that cannot be asked: its tensors are too large, or a profiler runs on
    this thread."""
    state = torch.get_num_threads(), torch.is_grad_enabled()
    leaves, tree = tree_flatten((args, kwargs))
    key = str(func), *state, tree, *map(_described, leaves)
    if key not in _found:
        if (
            sum(x.nbytes for x in tensors_in(args)) > LIMIT
            or torch._C._autograd._profiler_enabled()
        ):
            unasked.add(func._schema.name)
            return None
        with _disable_current_modes():
            args, kwargs = map_tensors(args, _zeros), map_tensors(kwargs, _zeros)
            given = dict(zip((one.name for one in func._schema.arguments), args)) | kwargs
            routings = _routings(func._schema.name, given)
            _found[key] = max(_measured(func, args, kwargs) for _ in routings)
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
    return max(0, most - live), tuple(x.nbytes for x in tensors_in(result))


def _routings(name: str, given: dict[str, Any]) -> Iterator[None]:
    """Sends rows to experts, where a product is of these: all to one, and as many to each. Others
    are asked once."""
    if name == "headroom::experts":
        index, count = given["index"], given["experts"]
        for each in (1, count):
            index.copy_((torch.arange(index.numel()) % each).view(index.shape))
            yield
    elif name == "headroom::experts_backward":
        offsets, rows = given["offsets"], given["weight"].numel()
        for ends in (
            torch.full((len(offsets) - 1,), rows),
            torch.linspace(0, rows, len(offsets))[1:],
        ):
            offsets[1:] = ends
            yield
    else:
        yield


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.requires_grad
    return leaf


def _zeros(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_()

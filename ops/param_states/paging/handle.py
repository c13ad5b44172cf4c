"""Offers offload to a training loop: a function, and the handle that it returns."""

from __future__ import annotations

from typing import Any

from ..._core.sizes import parse_bytes
from ...host.arena import HostArena, default_arena
from .hosted import Hosting, HostingMemory
from .paged import Paging, PagingMemory, planned_paging


def check(optimizer: Any) -> None:
    """Refuses an optimizer whose state is offloaded already, or cannot be."""
    if optimizer._paging is not None:
        raise ValueError("the state of the optimizer is offloaded already: see its offload_handle")
    if optimizer._refuses_offload is not None:
        raise ValueError(optimizer._refuses_offload)


def is_stepped_there(optimizer: Any, what: str | None) -> bool:
    """Returns whether the host steps what it holds, and does not only hold the state.

    Raises:
        ValueError: neither can be.
    """
    if what not in ("state", "step"):
        raise ValueError(f'offload must be "state", "step" or None, got {what!r}')
    check(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # Where host and device are one, the step is there already.
    found = what == "step" and any(param.device.type != "cpu" for param in params)
    if found and optimizer._refuses_host_step is not None:
        raise ValueError(optimizer._refuses_host_step)
    return found


def begin(
    optimizer: Any,
    what: str | None,
    budget: int | str | None,
    host: HostArena | None = None,
    bucket_bytes: int | None = None,
) -> None:
    """Begins to keep the state of an optimizer on the host; see :func:`headroom.optim.offload`."""
    is_hosted = is_stepped_there(optimizer, what)
    if what == "step" and budget is not None:
        raise ValueError(
            'offload="step" takes no budget: no state stays on the device, for the host steps it'
        )
    if host is not None and not isinstance(host, HostArena):
        raise TypeError(f"host is {type(host).__name__}, wanted a headroom.HostArena")
    if bucket_bytes is not None and bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    size = None if budget is None else parse_bytes(budget, "budget")
    kind = Hosting if is_hosted else Paging
    paging = kind(default_arena() if host is None else host, size, bucket_bytes)
    paging.adopt(optimizer)
    optimizer._paging = paging


class OffloadHandle:
    """The offload of an optimizer's state, which lasts until :meth:`remove`, or the end of a
    ``with`` block."""

    def __init__(self, optimizer: Any) -> None:
        self._offloaded = optimizer

    @property
    def _paging(self) -> Paging:
        if (paging := self._offloaded._paging) is None:
            raise RuntimeError("the state of the optimizer is not offloaded any more")
        return paging

    @property
    def host(self) -> HostArena:
        """Returns the arena that the state lies in."""
        return self._paging.arena

    @property
    def budget(self) -> int:
        """Returns the bytes of state that may stay on the device, with those of the ring; 0: only
        the ring."""
        return self._paging.budget or 0

    def memory(self) -> PagingMemory | HostingMemory:
        """Returns the bytes of the state on the host and on devices, and those of the ring; of a
        step on the host, those of states and weights there, and of gradients that pass or wait."""
        return self._paging.memory(self._offloaded)

    def wait(self) -> None:
        """Waits until the copies of the last step have ended. ``optimizer.state`` may be read then;
        ``state_dict()`` waits by itself. On the CPU there is nothing to wait for."""
        self._paging.wait()

    def reduce_memory(self) -> bool:
        """Moves half of the state that stays on devices to the host, or all. Returns whether there
        was any."""
        paging, optimizer = self._paging, self._offloaded
        before = paging.resident
        if not before:
            return False
        budget = paging.budget
        # Also before there is a state.
        resident = planned_paging(optimizer, budget, paging.bucket_bytes).resident
        for less in (paging.ring_bytes + resident // 2, 0):
            paging.budget = less
            try:
                paging.adopt(optimizer)
            except BaseException:
                paging.budget = budget
                raise
            if len(paging.resident) < len(before):
                break
        if not paging.resident:
            paging.budget = 0
        return True

    def remove(self) -> None:
        """Brings the state back to the devices of the parameters, and ends the offload. A second
        call does nothing."""
        if self._offloaded._paging is not None:
            self._offloaded._paging.release(self._offloaded)
            self._offloaded._paging = None

    def __enter__(self) -> OffloadHandle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        if self._offloaded._paging is None:
            return "OffloadHandle(removed)"
        return f"OffloadHandle({self.memory()})"

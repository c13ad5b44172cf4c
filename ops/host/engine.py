"""Copies bytes between host and device: what every engine offers, and the one of the CPU.

An engine has two queues, up (to the device) and down (to the host). A copy is put into its queue
and runs there when the copies before it have, and when what its tickets stand for is done; the
caller goes on meanwhile. Source and destination of a copy are the caller's: until its ticket has
been waited for, the source must not be written, the destination not be touched, and neither be
freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .files import copy_through_file

Ticket = Any  # stands for work that was put into a queue, or was given to the device before


class Engine:
    """Checks copies and counts their bytes, as all engines do.

    Attributes:
        is_asynchronous: whether copies run beside what the device computes.
    """

    is_asynchronous = True

    def __init__(self) -> None:
        self.bytes_up = 0
        self.bytes_down = 0

    def up(self, target: Tensor, source: Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        """Copies bytes of the host to the device, and returns the ticket of the copy.

        Args:
            target, source: vectors of bytes, of the same size.
            after: tickets of what must be done before.
        """
        _check(target, source)
        self.bytes_up += source.numel()
        return self._copy("up", target, source, after)

    def down(self, target: Tensor, source: Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        """Copies bytes of the device to the host, as :meth:`up` does in the other direction."""
        _check(target, source)
        self.bytes_down += source.numel()
        return self._copy("down", target, source, after)

    def _copy(self, queue: str, target: Tensor, source: Tensor, after: Iterable[Ticket]) -> Ticket:
        raise NotImplementedError

    def mark(self) -> Ticket:
        """Returns the ticket of all that the device was given to compute until now."""
        raise NotImplementedError

    def wait(self, ticket: Ticket) -> None:
        """Lets what the device is given to compute from now on wait for a ticket."""
        raise NotImplementedError

    def sync(self, ticket: Ticket) -> None:
        """Waits, on the host, for a ticket."""
        raise NotImplementedError


class Inline(Engine):
    """An engine whose copies are done when the call returns: that of tensors on the CPU."""

    is_asynchronous = False

    def _copy(self, queue: str, target: Tensor, source: Tensor, after: Iterable[Ticket]) -> Ticket:
        if not copy_through_file(target, source):
            target.copy_(source)

    def mark(self) -> Ticket:
        return None

    def wait(self, ticket: Ticket) -> None:
        pass

    def sync(self, ticket: Ticket) -> None:
        pass


def _check(target: Tensor, source: Tensor) -> None:
    for name, tensor in (("target", target), ("source", source)):
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"the {name} of a copy is {tensor.dtype} of shape {list(tensor.shape)}, wanted a "
                "vector of bytes: a copy that converts would change bits"
            )
    if target.numel() != source.numel():
        raise ValueError(f"a copy of {source.numel()} bytes goes to {target.numel()}")

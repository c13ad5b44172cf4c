"""Brings the gradients of a call of a block to its parameters, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..._core.overlap import bytes_of
from ..engine import Ticket
from ..ring import aligned
from . import fields
from .fields import ALIGNMENT, Block


class Arrival:
    """Gradients of a block that are copied to the host.

    Attributes:
        is_there: whether the host has waited for them.
    """

    is_there = False

    def __init__(self, engine: Any, ticket: Ticket, held: Any) -> None:
        self._engine, self._ticket = engine, ticket
        self._held = held  # while they are read

    def leave(self) -> None:
        """Frees their memory on the device, once they have been copied."""
        if self._held is not None:
            self._engine.wait(self._ticket)
            self._held = None

    def sync(self) -> None:
        """Waits, on the host, until they are there. It frees nothing: while the device computes,
        what it reserves would depend on when."""
        self._engine.sync(self._ticket)
        self.is_there = True


class Way:
    """Brings the gradients of one call to the parameters.

    Attributes:
        block: that is called. A way that waits for its call has none: a block with a graph that has
            the block would never be freed.
        is_asked_for: whether the backward pass has come to the parameters.
    """

    block: Block
    is_asked_for = False

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self._arrival: Arrival | None = None

    def down(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Begins to copy gradients, and returns tensors of the host that will have them."""
        block = self.block
        stream = block.stream
        engine = stream.engine_of(block.device)
        found: list[Tensor | None] = [None] * len(grads)
        sources, size = [], 0
        for i, (p, grad) in enumerate(zip(self.params, grads)):
            if grad is None:
                continue
            if grad.layout is not torch.strided or not grad.numel():
                found[i] = grad.to(p.device)
                continue
            sources.append((i, size, bytes_of(grad, p.stride())))
            size = aligned(size + grad.nbytes, ALIGNMENT)
        if not sources:
            return found
        if engine.is_asynchronous:
            self.is_asked_for = False
            stream.send(self)
        run = stream.host_memory(size, block.device)
        computed, ticket = engine.mark(), None
        for i, first, source in sources:
            target = run[first : first + source.numel()]
            ticket = engine.down(target, source, after=(computed,))
            p, start = self.params[i], first // self.params[i].element_size()
            found[i] = fields.on_memory(
                run.untyped_storage(), run.device, p.dtype, start, p.shape, p.stride()
            )
        if engine.is_asynchronous:
            self._arrival = Arrival(engine, ticket, (run, sources))
            stream.add(self._arrival)
        return found

    def arrive(self) -> None:
        """Waits for what :meth:`down` has begun to copy."""
        if self._arrival is not None:
            self.block.stream.ask(self)
            self._arrival.sync()
            self._arrival = None


class Fetch(torch.autograd.Function):
    """Gives tensors of a slot the place of parameters."""

    @staticmethod
    def forward(ctx: Any, way: Way, views: list[Tensor], *arrived: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.way, ctx.lent = way, way.params
        return tuple(views)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *ctx.way.down(grads)


class Arrive(torch.autograd.Function):
    """Lets gradients reach the parameters when they have been copied."""

    @staticmethod
    def forward(ctx: Any, way: Way, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.way = way
        return tuple(p.detach() for p in params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.way.arrive()
        return None, *grads

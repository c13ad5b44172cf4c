"""Bytes of one rank when a model is replicated by DDP or sharded by FSDP2.

Everything here is arithmetic on shapes: no process group, no device. What a rank keeps and what
passes through during a step follows ``torch.distributed.fsdp.fully_shard`` and ``torch.nn.parallel.
DistributedDataParallel`` of torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["FSDP2", "Change", "Unit", "UnitBytes", "ddp_buckets", "units_of"]

MIB = 1 << 20


# DDP


def ddp_buckets(
    parameters: Iterable[Tensor],
    bucket_cap_mb: float | None = None,
    gradient_as_bucket_view: bool = False,
) -> list[int]:
    """Returns the bytes of each bucket that DDP allocates besides the gradients.

    The buckets are flat copies of the gradients, filled from the last parameter on: the first of 1
    MiB, the others of 25 MiB, each closed by the gradient that reaches its size. DDP orders them
    anew after the first step, by when gradients arrived; their total stays.

    Args:
        bucket_cap_mb: the size of all buckets, the first included, as the argument of DDP.
        gradient_as_bucket_view: gradients are views of the buckets: no bucket is an addition, and
            the list is empty.
    """
    if gradient_as_bucket_view:
        return []
    first, rest = (1, 25) if bucket_cap_mb is None else (bucket_cap_mb, bucket_cap_mb)
    buckets, open_buckets, closed = [], {}, {}
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        key = (parameter.dtype, parameter.device)
        size = open_buckets.get(key, 0) + parameter.numel() * parameter.element_size()
        if size >= (rest if closed.get(key) else first) * MIB:
            buckets.append(size)
            closed[key], size = True, 0
        open_buckets[key] = size
    return buckets + [size for size in open_buckets.values() if size]


# FSDP2


@dataclass(frozen=True)
class Unit:
    """The parameters that one call of ``fully_shard`` gathers and reduces together.

    Attributes:
        name: of the module; ``""`` is the model itself, the root.
        shapes: of its parameters, dimension 0 is sharded.
        dtypes: of its parameters.
        trainable: whether each needs a gradient.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    trainable: tuple[bool, ...]


@dataclass(frozen=True)
class UnitBytes:
    """What a unit takes on one rank.

    Attributes:
        parameters: the shard, padded so that all ranks hold the same.
        gradients: the reduced shard.
        gathered: the whole parameters while they are used, in the dtype of the computation.
        all_gather: the buffer that receives them before they are copied out.
        cast: the shard in the dtype of the computation, while the buffer is filled.
        unsharded_gradients: of the whole parameters, as autograd makes them.
        reduce_input: those padded, in the dtype of the reduction.
        reduce_output: the shard that arrives. It becomes the gradient where the dtypes agree.
    """

    parameters: int
    gradients: int
    gathered: int
    all_gather: int
    cast: int
    unsharded_gradients: int
    reduce_input: int
    reduce_output: int


class Change(NamedTuple):
    """Bytes that appear (positive) or go (negative) at a moment of the step."""

    moment: str
    """``"before forward"``, ``"after forward"``, ``"before backward"``, ``"after backward"`` of the
    unit, or ``"end"``."""
    unit: str
    what: str
    """One of the attributes of :class:`UnitBytes`."""
    bytes: int


def units_of(model: nn.Module, wrapped: Iterable[nn.Module]) -> list[Unit]:
    """Returns the units of a model of which ``wrapped`` were given to ``fully_shard``, the root
    first; a parameter belongs to the innermost of them."""
    chosen = {id(module) for module in wrapped} | {id(model)}
    seen: set[int] = set()
    found: dict[str, list[Tensor]] = {}

    def visit(module: nn.Module, name: str, unit: str) -> None:
        unit = name if id(module) in chosen else unit
        own = found.setdefault(unit, [])
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                own.append(parameter)
        for key, child in module.named_children():
            visit(child, f"{name}.{key}" if name else key, unit)

    visit(model, "", "")
    return [
        Unit(
            name,
            tuple(tuple(p.shape) for p in own),
            tuple(p.dtype for p in own),
            tuple(p.requires_grad for p in own),
        )
        for name, own in found.items()
    ]


class FSDP2:
    """Bytes per rank of a model that ``fully_shard`` shards over ``world_size`` ranks.

    Args:
        units: the root first, then the others in the order in which the forward pass runs them.
        world_size: of the dimension of the mesh that shards.
        param_dtype: of ``MixedPrecisionPolicy``: what parameters are cast to when gathered.
        reduce_dtype: of ``MixedPrecisionPolicy``. ``None`` is the parameters' own dtype, which is
            what torch 2.15 does; releases before reduced in ``param_dtype``.
        reshard_after_forward: whether the units but the root give their whole parameters back after
            the forward pass. The root never does, as in torch by default.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        world_size: int,
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}, wanted at least 1")
        if not units or units[0].name:
            raise ValueError("units[0] must be the root, whose name is ''")
        self.units = list(units)
        self.world_size = world_size
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.reshard_after_forward = reshard_after_forward
        self.sizes = {unit.name: self._sizes(unit) for unit in units}

    def _sizes(self, unit: Unit) -> UnitBytes:
        size = dict.fromkeys(UnitBytes.__dataclass_fields__, 0)
        for shape, dtype, trainable in zip(unit.shapes, unit.dtypes, unit.trainable, strict=True):
            if not shape:
                raise ValueError(f"unit {unit.name!r} has a parameter without dimensions")
            shard = -(-shape[0] // self.world_size) * prod(shape[1:])
            computed = self.param_dtype or dtype
            reduced = self.reduce_dtype or dtype
            size["parameters"] += shard * dtype.itemsize
            size["gathered"] += shard * self.world_size * computed.itemsize
            size["cast"] += shard * computed.itemsize if self.param_dtype else 0
            if trainable:
                size["gradients"] += shard * dtype.itemsize
                size["unsharded_gradients"] += prod(shape) * computed.itemsize
                size["reduce_input"] += shard * self.world_size * reduced.itemsize
                size["reduce_output"] += shard * reduced.itemsize
        if self.world_size == 1:
            size["cast"] = 0
        else:
            size["all_gather"] = size["gathered"]
        return UnitBytes(**size)

    @property
    def parameters(self) -> int:
        """The bytes of this rank's shards of all parameters."""
        return sum(size.parameters for size in self.sizes.values())

    @property
    def gradients(self) -> int:
        """The bytes of this rank's shards of all gradients."""
        return sum(size.gradients for size in self.sizes.values())

    def fraction(self, shape: Sequence[int]) -> float:
        """Returns which part of a parameter rank 0 holds, and so of its optimizer state."""
        return -(-shape[0] // self.world_size) / shape[0] if shape and shape[0] else 1.0

    def step(self) -> Iterator[Change]:
        """Yields what one forward and backward pass allocates and frees, in order.

        The shards themselves are there before; the gradients are there after. Activations and what
        autograd makes besides the gradients of the parameters are not in it.
        """
        root, *blocks = (unit.name for unit in self.units)
        held: str | None = None  # Its buffer is freed by the next unit.
        for name in (root, *blocks):
            when = "before forward"
            yield from self._gather(name, when)
            if held is not None:
                yield self._change(when, held, "all_gather", -1)
            yield self._change(when, name, "gathered")
            held = name
            if name != root and self.reshard_after_forward:
                yield self._change("after forward", name, "gathered", -1)
        if held is not None:
            yield self._change("after forward", root, "all_gather", -1, of=held)
        fetched: str | None = None
        if blocks and self.reshard_after_forward:
            fetched = blocks[-1]
            yield from self._gather(fetched, "before backward", at=root)
        reducing: str | None = None
        for index in range(len(blocks) - 1, -1, -1):
            name = blocks[index]
            if self.reshard_after_forward:
                if fetched != name:
                    yield from self._gather(name, "before backward")
                yield self._change("before backward", name, "gathered")
                yield self._change("before backward", name, "all_gather", -1)
                if index:
                    fetched = blocks[index - 1]
                    yield from self._gather(fetched, "before backward", at=name)
            yield from self._reduce(name, reducing)
            reducing = name
        yield from self._reduce(root, reducing)
        yield self._change("end", root, "reduce_input", -1)

    def _gather(self, name: str, when: str, at: str | None = None) -> Iterator[Change]:
        at = name if at is None else at
        yield self._change(when, at, "cast", of=name)
        yield self._change(when, at, "all_gather", of=name)
        yield self._change(when, at, "cast", -1, of=name)

    def _reduce(self, name: str, before: str | None) -> Iterator[Change]:
        when, size = "after backward", self.sizes[name]
        yield self._change(when, name, "unsharded_gradients")
        yield self._change(when, name, "gathered", -1)
        if before is not None:
            yield self._change(when, name, "reduce_input", -1, of=before)
        yield self._change(when, name, "reduce_input")
        yield self._change(when, name, "unsharded_gradients", -1)
        if size.reduce_output == size.gradients:
            yield self._change(when, name, "gradients")
        else:
            yield self._change(when, name, "reduce_output")
            yield self._change(when, name, "gradients")
            yield self._change(when, name, "reduce_output", -1)

    def _change(
        self, when: str, at: str, what: str, sign: int = 1, *, of: str | None = None
    ) -> Change:
        size = getattr(self.sizes[at if of is None else of], what)
        return Change(when, at, what, sign * size)

    def peak(self) -> int:
        """Returns the most bytes of :meth:`step` at once, the shards of the parameters included."""
        live = most = self.parameters
        for change in self.step():
            live += change.bytes
            most = max(most, live)
        return most

"""Finds out how a model is spread over ranks: by DDP or FSDP2, as arguments or the model say."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..patching.blocks import find_blocks

__all__ = ["DDP", "FSDP", "Sharding", "Unit", "sharding_of"]


@dataclass(frozen=True)
class DDP:
    """Replicates the model by :class:`torch.nn.parallel.DistributedDataParallel`.

    Attributes:
        bucket_cap_mb, gradient_as_bucket_view, broadcast_buffers: its arguments of these names.
    """

    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True


@dataclass(frozen=True)
class FSDP:
    """Shards the model by ``torch.distributed.fsdp.fully_shard``.

    Attributes:
        wrap: what is sharded by itself before the whole model is: modules of the model, their names
            or classes. None: its repeated blocks.
        reshard_after_forward: whether whole parameters are dropped between the forward and the
            backward pass; None: of all but the model's own, as in torch.
        mp_policy: the ``MixedPrecisionPolicy``.
        ignored_params: parameters of the model, or their names, that stay whole on each rank.
    """

    wrap: Sequence[nn.Module | str | type] | None = None
    reshard_after_forward: bool | None = None
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    ignored_params: Collection[nn.Parameter | str] = ()


@dataclass(frozen=True)
class Unit:
    """The parameters that one call of ``fully_shard`` gathers and reduces together.

    Attributes:
        module: its name; ``""`` is the model itself, the root.
        parameters: names, the first where several are of one parameter.
        reshards: whether the whole parameters are dropped after the forward pass.
        policy: in which dtypes it computes and reduces.
    """

    module: str
    parameters: tuple[str, ...]
    reshards: bool
    policy: MixedPrecisionPolicy


@dataclass(frozen=True)
class Sharding:
    """A model on several ranks.

    Attributes:
        ranks: over which it is replicated or sharded.
        how: by DDP, or FSDP.
        units: of FSDP, the root first, the others as modules are listed.
    """

    ranks: int
    how: DDP | FSDP
    units: tuple[Unit, ...] = ()

    def __str__(self) -> str:
        return f"{self.ranks} by {'DDP' if isinstance(self.how, DDP) else 'FSDP'}"

    def but(self, model: nn.Module, how: DDP | FSDP) -> Sharding:
        """Returns how the same ranks would train the model otherwise."""
        return replace(self, how=how, units=_units(model, how) if isinstance(how, FSDP) else ())


_NAMES: dict[str, DDP | FSDP] = {
    "ddp": DDP(),
    "fsdp": FSDP(),
    "fsdp-no-reshard": FSDP(reshard_after_forward=False),
}


def sharding_of(
    model: nn.Module, world_size: int | DeviceMesh | None, shard: Any
) -> tuple[nn.Module, Sharding | None]:
    """Returns the model without its wrapper of DDP, and how it is spread; None on one rank.

    Raises:
        TypeError, ValueError: the arguments do not fit each other or the model.
    """
    ranks = _ranks(world_size)
    wrapped = isinstance(model, DistributedDataParallel)
    if wrapped and shard is not None:
        raise ValueError(f"shard is {shard!r}, but the model is wrapped by DDP: leave it out")
    if isinstance(model, DistributedDataParallel):
        own = torch.distributed.get_world_size(model.process_group)
        return model.module, Sharding(own if ranks is None else ranks, _ddp_of(model))
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            "the model is sharded already: plan it before fully_shard, with world_size and shard, "
            "or before it is parallelized in another way, with the sizes of one rank"
        )
    if ranks is None and shard is None:
        return model, None
    how = _how(shard)
    if ranks is None:
        if not torch.distributed.is_initialized():
            raise ValueError(f"shard is {shard!r}, on how many ranks? give world_size")
        ranks = torch.distributed.get_world_size()
    if isinstance(world_size, DeviceMesh) and isinstance(how, DDP) and world_size.ndim != 1:
        raise ValueError(f"world_size is a mesh of {world_size.ndim} dimensions; DDP takes one")
    return model, Sharding(ranks, how).but(model, how)


def _ranks(world_size: Any) -> int | None:
    if world_size is None:
        return None
    if isinstance(world_size, DeviceMesh):
        if world_size.ndim > 2:
            raise ValueError(
                f"world_size is a mesh of {world_size.ndim} dimensions, wanted the one that "
                "shards, or the one that replicates and the one that shards"
            )
        return world_size.size(world_size.ndim - 1)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}, wanted an integer from 1 on or a mesh")
    return world_size


def _how(shard: Any) -> DDP | FSDP:
    if shard is None:
        return DDP()
    if isinstance(shard, (DDP, FSDP)):
        return shard
    if isinstance(shard, (list, tuple)):
        return FSDP(wrap=shard)
    if isinstance(shard, str) and shard in _NAMES:
        return _NAMES[shard]
    raise ValueError(
        f"shard is {shard!r}, wanted {', '.join(map(repr, _NAMES))}, a list of modules to shard, "
        "or a headroom.planning.DDP or FSDP"
    )


def _ddp_of(model: DistributedDataParallel) -> DDP:
    default = getattr(model, "bucket_bytes_cap_default", True)
    return DDP(
        None if default else model.bucket_bytes_cap / 2**20,
        model.gradient_as_bucket_view,
        model.broadcast_buffers,
    )


# Units of FSDP2


def _units(model: nn.Module, how: FSDP) -> tuple[Unit, ...]:
    """Returns the units of a model of which some modules and then the whole are sharded; a
    parameter belongs to the innermost of them."""
    found: dict[str, list[str]] = {name: [] for name in ("", *_wrapped(model, how.wrap))}
    ignored = set(_ignored(model, how.ignored_params))
    owners: dict[int, str] = {}
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = max((unit for unit in found if _is_in(name, unit)), key=len)
        owner = owners.setdefault(id(parameter), unit)
        if owner != unit:
            raise ValueError(
                f"{name!r} is a parameter of {owner!r} too, and fully_shard wants shared "
                "parameters in one unit: leave one of the modules out of wrap"
            )
        if id(parameter) in seen or id(parameter) in ignored:
            continue
        seen.add(id(parameter))
        if not parameter.dim():
            raise ValueError(f"{name!r} has no dimension, and fully_shard shards the first")
        found[unit].append(name)
    reshard = how.reshard_after_forward
    return tuple(
        Unit(unit, tuple(names), bool(unit) if reshard is None else reshard, how.mp_policy)
        for unit, names in found.items()
    )


def _ignored(model: nn.Module, given: Iterable[nn.Parameter | str]) -> Iterator[int]:
    """Yields the ids of parameters that are given by themselves or by their names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    ids = {id(parameter) for parameter in named.values()}
    for one in given:
        parameter = named.get(one) if isinstance(one, str) else one
        if id(parameter) not in ids:
            what = repr(one) if isinstance(one, str) else f"a {type(one).__name__}"
            raise ValueError(f"ignored_params has {what}, which is no parameter of the model")
        yield id(parameter)


def _is_in(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _wrapped(model: nn.Module, wrap: Iterable[Any] | None) -> Iterator[str]:
    if wrap is None:
        yield from (block.name for block in find_blocks(model))
        return
    chosen, wrap = set(), list(wrap)
    for what in wrap:
        names = [
            name
            for name, module in model.named_modules()
            if module is what or name == what or isinstance(what, type) and type(module) is what
        ]
        if not names:
            raise ValueError(f"shard names {what!r}, which is no module of the model and no class")
        chosen.update(names)
    yield from (name for name, _ in model.named_modules() if name and name in chosen)

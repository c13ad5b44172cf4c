"""Finds out from a model how the gradients of several ranks become one mean: by DDP or FSDP2.

Under DDP each rank keeps the gradients of its micro-batches, and the sums are added up over the
ranks once. FSDP2 averages the gradients of each backward over the ranks at once, so weights that
differ between ranks must be in the gradients before that.
"""

from __future__ import annotations

import contextlib
import math
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .._core.ranks import fsdp_class, world_size

LOCAL = "local"


class Ranks:
    """Knows the ranks that share the work on a model, and what becomes of gradients in backward.

    Attributes:
        ddp: the DistributedDataParallel module, given or found in the first forward.
        averages: whether the gradients that backward gives are averaged over the ranks.
        weighting: what puts a rank's weight into gradients that FSDP2 averages.
    """

    def __init__(self, module: nn.Module | None, params: Sequence[Tensor], group: Any) -> None:
        if not (group is None or group == LOCAL or isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"process_group must be a ProcessGroup, 'local' or None, got {group!r}")
        self._module, self._given = module, group
        self._device = params[0].device
        modules = () if module is None else tuple(module.modules())
        self.ddp = _first(modules, DistributedDataParallel)
        fsdp1 = _first(modules, fsdp_class("FullyShardedDataParallel"))
        fsdp2 = _first(modules, fsdp_class("FSDPModule"))
        wrapper = fsdp1 or fsdp2 or (group == LOCAL and self.ddp)
        if group is not None and wrapper:
            raise ValueError(
                f"process_group={group!r} contradicts {type(wrapper).__name__}, which reduces the "
                "gradients of its ranks; leave process_group out"
            )
        sharded = [param for param in params if isinstance(param, DTensor)]
        # Of parameters on several meshes (experts, say), the mesh with all ranks counts.
        mesh = max((p.device_mesh for p in sharded), key=lambda mesh: mesh.size(), default=None)
        self._mesh_groups: tuple[Any, ...] = ()
        if group is not None:
            self.averages = False
        elif mesh is not None:
            self.averages = True
            self._mesh_groups = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
            self._device = torch.device(mesh.device_type)
        else:
            self.averages = fsdp1 is not None
            if fsdp1 is not None:
                self._mesh_groups = (fsdp1.process_group,)
        self.weighting = Weighting(module) if self.averages and fsdp2 is not None else None
        self._looked = False  # for DDP, in a forward

    @property
    def sums(self) -> bool:
        """Returns whether finish() adds up the sums of the ranks, as each has its own gradients."""
        return isinstance(self._given, dist.ProcessGroup) or (
            self._given is None and self.ddp is not None and not self.averages
        )

    @property
    def groups(self) -> tuple[Any, ...]:
        """Returns the process groups over which gradients are reduced, one after another."""
        if isinstance(self._given, dist.ProcessGroup):
            return (self._given,)
        if self.averages:
            return self._mesh_groups
        return (self.ddp.process_group,) if self.sums else ()

    @property
    def averaged_by_ddp(self) -> bool:
        """Returns whether DDP has averaged the gradients of the last backward, which did not run in
        :meth:`micro_batch`."""
        # The last forward, which may have run under no_sync(), set the second.
        ddp = self.ddp
        return ddp is not None and ddp.require_backward_grad_sync and ddp.require_forward_param_sync

    def check_known(self, more: str = "") -> None:
        """Raises if there are several ranks and nothing tells how their gradients are reduced."""
        if self._given is not None or self.ddp is not None or self.averages:
            return
        if world_size() == 1:
            return
        raise RuntimeError(
            f"{world_size()} ranks train, and nothing says how their gradients are "
            f"reduced{more}. Give the accumulator the wrapped module, GradAccumulator(ddp_model), "
            "or make it after fully_shard(model); or give process_group=, the ranks over which "
            "finish() adds up gradients that nothing else reduces; or process_group='local' if "
            "each rank trains for itself"
        )

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Encloses a forward and backward after which each rank has its own gradients."""
        looks = not (self._looked or self._given == LOCAL or self.ddp or self.averages)
        looks = looks and dist.is_available() and dist.is_initialized()
        with contextlib.ExitStack() as stack:
            if self.ddp is not None:
                # DDP's only: other wrappers' no_sync() keeps gradients elsewhere.
                stack.enter_context(self.ddp.no_sync())
            elif looks and self._module is not None:
                hook = self._module.register_forward_pre_hook(partial(self._look, stack))
                stack.callback(hook.remove)
            elif looks:
                self.check_known()
            yield
            self._looked = self._looked or looks
            self.check_known(": the forward did not run in a DistributedDataParallel module")

    def _look(self, stack: contextlib.ExitStack, module: nn.Module, args: Any) -> None:
        """Finds a DDP module that wraps the model since, before a forward of the model."""
        if torch.compiler.is_compiling() or self.ddp is not None:
            return
        self.ddp = DistributedDataParallel._get_active_ddp_module()
        if self.ddp is not None:  # its forward asks only at its end whether to reduce
            stack.enter_context(self.ddp.no_sync())

    def reduced(self, values: Sequence[float], op: Any = None) -> list[float]:
        """Returns numbers added up over the ranks, or reduced by another op. Waits for the
        device."""
        groups = self.groups
        if not groups:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64).to(self._device)
        for group in groups:
            dist.all_reduce(shared, dist.ReduceOp.SUM if op is None else op, group)
        return shared.tolist()

    @property
    def size(self) -> int:
        return math.prod(map(dist.get_world_size, self.groups))

    def largest(self, value: float) -> float:
        """Returns the largest value of any rank."""
        return self.reduced([value], dist.ReduceOp.MAX)[0]

    def agree(self, value: float) -> bool:
        """Returns whether all ranks have the same value."""
        high, low = self.reduced([value, -value], dist.ReduceOp.MAX)
        return high == -low


class Weighting:
    """Multiplies the gradients of an FSDP2 model by ``factor`` before they are averaged."""

    def __init__(self, root: nn.Module) -> None:
        self.factor = 1.0
        self.weighted: set[Tensor] = set()  # sharded parameters whose gradients have the factor
        self._unsharded: dict[Tensor, Tensor] = {}  # the whole parameter of each in a forward
        self._sharded = {
            (owner, name): param
            for owner in root.modules()
            for name, param in owner._parameters.items()
            if param is not None
        }
        handles: list[Any] = []
        self._handles = handles
        method = weakref.WeakMethod(self._unshard)  # else the module would keep this for good
        for module in root.modules():
            if isinstance(module, fsdp_class("FSDPModule")):
                handles.append(module.register_forward_pre_hook(partial(_call, method)))
        weakref.finalize(self, _remove, handles)

    def _unshard(self, module: nn.Module) -> None:
        """Hooks the module's parameters, which a hook of FSDP2 has made whole before."""
        for owner in module.modules():
            for name, param in owner._parameters.items():
                sharded = self._sharded.get((owner, name))
                if param is None or sharded is None or param is sharded:
                    continue
                if self._unsharded.get(sharded) is not param and param.requires_grad:
                    self._unsharded[sharded] = param
                    hook = partial(_weigh, weakref.ref(self), weakref.ref(sharded))
                    self._handles.append(param.register_hook(hook))


@torch._disable_dynamo
def _call(method: weakref.WeakMethod, module: nn.Module, args: Any) -> None:
    if (call := method()) is not None:
        call(module)


def _weigh(weighting: weakref.ref, sharded: weakref.ref, grad: Tensor) -> Tensor | None:
    weighting, sharded = weighting(), sharded()
    if weighting is None or sharded is None:
        return None
    weighting.weighted.add(sharded)
    if weighting.factor == 0.0:
        return torch.zeros_like(grad)  # a mean over nothing is not a number
    return None if weighting.factor == 1.0 else grad * weighting.factor


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _first(modules: Iterable[nn.Module], cls: type | tuple[type, ...]) -> Any:
    return next((module for module in modules if isinstance(module, cls)), None)


def checksum(numbers: Iterable[float]) -> float:
    """Returns a number that almost surely differs for lists of numbers that differ."""
    return float(zlib.crc32(repr(list(numbers)).encode()))

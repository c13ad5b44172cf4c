"""A block whose parameters lie in an arena: where they are, and what happens when it is called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..._core.overlap import bytes_of, is_dense
from ..._core.ranks import fsdp_class
from ..engine import Inline
from ..files import let_pages_go
from ..ring import aligned
from .call import Call
from .fields import ALIGNMENT, Field
from .stream import Stream

_INLINE = Inline()


class StreamedBlock:
    """A block whose parameters lie in an arena.

    Attributes:
        stream: what its slots come from.
        device: that it computes on.
        stay: the parameters that it leaves where they are, by module and name.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        stream: Stream,
        stay: Collection[tuple[nn.Module, str]],
    ) -> None:
        self.module, self.name = module, name
        self.join(stream, stay)
        self.device = next((p.device for p in self._found()), torch.device("cpu"))
        self._reset()

    def join(self, stream: Stream, stay: Collection[tuple[nn.Module, str]]) -> None:
        """Takes its slots from another stream from now on."""
        self.stream, self.stay = stream, [*stay]
        if self not in stream.blocks:
            stream.blocks.append(self)

    def _reset(self) -> None:
        self.fields: list[Field] = []
        self.params: list[nn.Parameter] = []  # of the fields
        self.slab = torch.empty(0, dtype=torch.uint8)
        self.threads: set[int] = set()  # that run it

    @property
    def is_lent(self) -> bool:
        """Returns whether this thread runs it, and finds the weights on the device."""
        return threading.get_ident() in self.threads

    def __getstate__(self) -> dict[str, Any]:
        # A copy lies where its parameters were put, until it is called. It computes where a file of
        # it is mapped to, as a tensor is.
        state = {name: getattr(self, name) for name in ("module", "name", "stream", "stay")}
        return state | {"device": torch.empty(0, device=self.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if isinstance(self.device, Tensor):  # but in files of earlier versions
            self.device = self.device.device
        self._reset()

    # ---- where the weights are -------------------------------------------------------------------

    def _found(self) -> dict[nn.Parameter, tuple[tuple[nn.Module, str], ...]]:
        """Returns the parameters that stream, and the places that have them."""
        stay = {(id(module), name) for module, name in self.stay}
        found: dict[Any, tuple[tuple[nn.Module, str], ...]] = {}
        for module in self.module.modules():
            for name, p in module._parameters.items():
                if p is not None and (id(module), name) not in stay:
                    found[p] = (*found.get(p, ()), (module, name))
        return found

    @property
    def size(self) -> int:
        """Returns the bytes of a slot."""
        return self.slab.numel()

    def versions(self) -> list[int]:
        return [p._version for p in self.params]

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.params if p.requires_grad]

    def settle(self) -> None:
        """Sees to it that all parameters lie in the arena: also those that were replaced, cast or
        moved, or came with a copy of the module.

        Raises:
            RuntimeError: one of them cannot.
            HostMemoryError: the arena has no room. All stay where they are.
        """
        if self.is_lent:
            return
        found = self._found()
        if len(found) != len(self.fields) or not all(
            places == field.places and self._holds(field, p)
            for (p, places), field in zip(found.items(), self.fields)
        ):
            self._adopt(found)
        self.params = [*found]

    def _holds(self, field: Field, p: nn.Parameter) -> bool:
        """Returns whether a parameter lies in the place of a field."""
        if type(p) is not nn.Parameter or p.dtype != field.dtype or p.shape != field.shape:
            return False
        return not field.size or p.data_ptr() == self.slab.data_ptr() + field.first

    def _is_sharded(self) -> bool:
        """Returns whether FSDP has come to the model, whose parameters are its own then."""
        kinds = (*fsdp_class("FSDPModule"), *fsdp_class("FullyShardedDataParallel"))
        root = self.stream.root() or self.module
        return bool(kinds) and any(isinstance(module, kinds) for module in root.modules())

    @torch.inference_mode(False)
    @torch.no_grad()
    def _adopt(self, found: dict[nn.Parameter, tuple[tuple[nn.Module, str], ...]]) -> None:
        fields: list[Field] = []
        size = 0
        for p, places in found.items():
            if type(p) is not nn.Parameter or p.layout is not torch.strided or self._is_sharded():
                raise RuntimeError(_unplain(self.name, places[0][1], p))
            stride = p.stride() if is_dense(p) else torch.empty(p.shape, device="meta").stride()
            fields.append(Field(places, size, p.shape, stride, p.dtype))
            size = aligned(size + fields[-1].size, ALIGNMENT)
        devices = {p.device for p in found if p.device.type != "cpu"} or {self.device}
        if len(devices) > 1 or not {d.type for d in devices} <= {"cpu", "cuda"}:
            raise RuntimeError(
                f"the weights of {self.name} are on {', '.join(sorted(map(str, devices)))}, wanted "
                "one CUDA device, or the CPU"
            )
        self.stream.settle()  # copies may still read the slab
        (self.device,) = devices
        slab = self.slab
        if slab.numel() != size:
            arena = self.stream.arena
            slab = arena.take(size, kind="weights", owner="blocks", device=self.device)
        for p, field in zip(found, fields):
            if field.size and p.data_ptr() != slab.data_ptr() + field.first:
                place = slab[field.first : field.first + field.size]
                _INLINE.down(place, bytes_of(p, field.stride))
        for p, field in zip(found, fields):
            grad, p.grad = p.grad, None
            p.data = field.of(slab)
            p.grad = None if grad is None else grad.cpu()
        self.slab, self.fields = slab, fields
        self.let_pages_go()

    @torch.no_grad()
    def follow(self, move: Callable[[Tensor], Tensor]) -> None:
        """Lets the block compute where its parameters would be if they were on the device, now
        that ``move`` has been applied to them, and sees to it that they lie in the arena.

        To move what is on the host to the host changes nothing, but what is on the device.
        """
        params = [*self._found()]
        if self.device.type != "cpu" and params and all(p.device.type == "cpu" for p in params):
            small = min(params, key=lambda p: p.nbytes)
            moved = move(torch.empty_like(small, device=self.device)).device
            if moved != self.device:
                self.stream.free()
                self.device = moved
        self.settle()

    @torch.no_grad()
    def bring_back(self) -> None:
        """Moves the parameters to the device, and gives their memory back to the arena."""
        self.stream.free()
        if self in self.stream.blocks:
            self.stream.blocks.remove(self)
        for field, (p, places) in zip(self.fields, self._found().items()):
            if places == field.places and self._holds(field, p):
                grad, p.grad = p.grad, None
                made = torch.empty_strided(
                    field.shape, field.stride, dtype=field.dtype, device=self.device
                )
                p.data = made.copy_(p)
                p.grad = None if grad is None else grad.to(self.device, copy=True)
        self._reset()

    def let_pages_go(self) -> None:
        if self.slab.numel():
            let_pages_go(self.slab)

    # ---- a call ----------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns ``function(*args, **kwargs)``, which finds the weights on the device."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"the weights of {self.name} stream, which torch.compile cannot trace; call the "
                "model as it is, or patch it without weights='host'"
            )
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"the weights of {self.name} stream, which transforms of torch.func cannot trace; "
                "call headroom.unpatch(model) before"
            )
        if self.is_lent:  # it calls itself
            return function(*args, **kwargs)
        with self.stream.lock:
            self.settle()
            call = Call(self)
        with call.saving(), call.lent(in_backward=torch._C._current_graph_task_id() != -1):
            return function(*args, **kwargs)


def _unplain(block: str, name: str, p: Tensor) -> str:
    if isinstance(p, FakeTensor):
        return (
            f"{block}: weights that stream cannot be run on fakes; plan the model before it is "
            "patched with weights='host'"
        )
    return (
        f"{block}: the parameter {name} is a {type(p).__name__} now, which cannot stream; weights "
        "that stream are for models that nothing shards: DistributedDataParallel around the model "
        "is fine, FSDP is not"
    )

"""Lends the weights of blocks to a device while these run, and brings their gradients back.

The parameters of a block are CPU tensors in one slab of an arena. When the block is called, a slot
of the device has a copy of the slab, which the block reads in their place, and the copies for the
blocks after it are under way. No graph of autograd keeps what lies in a slot: it keeps tokens, for
which the backward pass fetches the weights again, in the reverse order. Gradients go down when a
block's backward pass is over, and reach the parameters when they have arrived.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from .._core.overlap import flat, is_dense, laid_out
from .._core.ranks import fsdp_class
from .._core.recompute import Kept, inside_checkpoint
from .._core.surroundings import LENT_FOR, cast_parameter, is_plain, within
from .arena import HostArena
from .engine import Inline, Ticket
from .engines import engine_of
from .files import let_pages_go
from .ring import aligned
from .slabs import Slabs

ALIGNMENT = 512  # of tensors in a slot; that of what torch allocates on a device
_INLINE = Inline()


class Field(NamedTuple):
    """Says where a parameter lies in the run of its block.

    Attributes:
        places: the modules that have it, and its names in them.
        first: its first byte.
        shape, stride, dtype: of the tensor.
    """

    places: tuple[tuple[nn.Module, str], ...]
    first: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def of(self, run: Tensor) -> Tensor:
        """Returns a tensor in the memory of a run of bytes, which is no view of it."""
        first = self.first // self.dtype.itemsize
        memory = run.untyped_storage()
        return _on_memory(memory, run.device, self.dtype, first, self.shape, self.stride)


def _on_memory(
    memory: torch.UntypedStorage,
    device: torch.device,
    dtype: torch.dtype,
    first: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device).set_(memory, first, shape, stride)


def _bytes(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Returns the bytes of a tensor, laid out with strides that are dense."""
    return flat(laid_out(x.detach(), stride)).view(torch.uint8)


class Stream:
    """The slots of a device that the blocks of a model take turns in.

    Args:
        arena: that the weights and their gradients lie in.
        prefetch: how many blocks ahead a slot is filled, where copies run beside the computation.
    """

    def __init__(self, arena: HostArena, prefetch: int) -> None:
        self.arena, self.prefetch = arena, prefetch
        self._begin()

    def _begin(self) -> None:
        self.blocks: list[StreamedBlock] = []  # in the order in which they were last called
        self._loaded: dict[StreamedBlock, _Slot] = {}  # the one used longest ago first
        self._memories: dict[torch.device, list[_Memory]] = {}
        self._arrivals: list[_Arrival] = []
        self._last: StreamedBlock | None = None  # that was called in this forward pass
        self._task = -1  # the backward pass at whose end all copies are waited for
        self._visit: tuple[int, StreamedBlock] | None = None  # of a backward pass, the last one
        self.root: Callable[[], nn.Module | None] = lambda: None  # the model that they are of
        self._lock = threading.RLock()  # backward passes run on a thread for each device
        self._slabs = Slabs(partial(_taken, self.arena), engine_of)

    def __getstate__(self) -> dict[str, Any]:
        return {"arena": self.arena, "prefetch": self.prefetch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _ahead(self, device: torch.device) -> int:
        return self.prefetch if engine_of(device).is_asynchronous else 0

    # ---- weights, on their way up ----------------------------------------------------------------

    def slot(self, block: StreamedBlock, in_backward: bool) -> _Slot:
        """Returns the slot with the weights of a block, which the device waits for, and begins to
        fill those of the blocks that are next."""
        with self._lock:
            task = torch._C._current_graph_task_id()
            visit = (task, block) if in_backward and task != -1 else None
            if visit is not None and visit == self._visit and block in self._loaded:
                return self._loaded[block]  # another tensor of the block that asked last
            self._visit = visit
            if block not in self.blocks:
                self.blocks.append(block)
            if in_backward:
                self._settle_at_the_end()
            else:
                self.settle_gradients()
                self._learn(block)
            slot = self._load(block, in_backward)
            place, way = self.blocks.index(block), -1 if in_backward else 1
            for k in range(place + way, place + way * (self._ahead(block.device) + 1), way):
                if 0 <= k < len(self.blocks) and self.blocks[k].device == block.device:
                    self._load(self.blocks[k], in_backward)
            slot.is_new = False
            slot.wait()
            return slot

    def _load(self, block: StreamedBlock, in_backward: bool) -> _Slot:
        block.settle()
        slot = self._loaded.pop(block, None)
        # A forward pass reads what the weights are now, and takes only what was fetched for it.
        if slot is None or not (slot.is_new or in_backward) or slot.versions != block.versions():
            slot = _Slot(block, self._memory(block))
            if not in_backward and torch.is_grad_enabled():
                slot.begin_way()
        self._loaded[block] = slot
        return slot

    def _memory(self, block: StreamedBlock) -> _Memory:
        """Returns memory for a slot that nothing looks into any more. What was given to the device
        to compute until now may still use it, and copies to it come one after another."""
        device = block.device
        here = [other for other in self._loaded if other.device == device]
        for other in here[: max(0, len(here) - self._ahead(device))]:
            del self._loaded[other]
            other.let_pages_go()
        taken = [slot.memory for slot in self._loaded.values()]
        memories = self._memories.setdefault(device, [])
        for one in memories:
            if one not in taken and one.run.numel() >= block.size and not one.is_used():
                return one
        size = max(other.size for other in self.blocks if other.device == device)
        memories.append(_Memory(size, device))
        return memories[-1]

    def _learn(self, block: StreamedBlock) -> None:
        """Puts a block behind the one that was called before it."""
        last, self._last = self._last, block
        place = 0 if last is None else self.blocks.index(last) + 1
        if self.blocks.index(block) < place:
            # Another pass, before which the weights may have been written.
            for slot in self._loaded.values():
                slot.is_new = False
        if last is block or block is self.blocks[0] or self.blocks[place : place + 1] == [block]:
            return
        self.blocks.remove(block)
        self.blocks.insert(0 if last is None else self.blocks.index(last) + 1, block)

    # ---- gradients, on their way down ------------------------------------------------------------

    def host_memory(self, size: int, device: torch.device) -> Tensor:
        """Returns bytes of the arena, which go back to it with the last tensor in them."""
        slab = self._slabs.take(size, device)
        view = memoryview(slab.numpy())
        run = torch.frombuffer(view, dtype=torch.uint8)
        weakref.finalize(view, _give, self._slabs, slab, device).atexit = False
        return run

    def add(self, arrival: _Arrival) -> None:
        """Keeps gradients that are on their way, those of one block on the device at a time."""
        with self._lock:
            for other in self._arrivals:
                other.leave()
            self._arrivals.append(arrival)

    def arrived(self, arrival: _Arrival) -> None:
        with self._lock:
            if arrival in self._arrivals:
                self._arrivals.remove(arrival)

    def settle_gradients(self) -> None:
        """Waits for gradients that no backward pass has asked for, because it raised."""
        with self._lock:
            for arrival in [*self._arrivals]:
                arrival.sync()

    def _settle_at_the_end(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)

    def settle(self) -> None:
        """Waits for all copies: the host may read and write weights and gradients then."""
        with self._lock:
            self.settle_gradients()
            for slot in self._loaded.values():
                slot.sync()
                slot.is_new = False
            self._last, self._task, self._visit = None, -1, None
            for block in self.blocks:
                block.let_pages_go()

    def free(self) -> None:
        """Frees the slots, and the memory that waits for gradients."""
        with self._lock:
            self.settle()
            self._loaded.clear()
            self._memories.clear()
            self._slabs.trim()

    @property
    def slots(self) -> list[Tensor]:
        """Returns the memory of the slots that exist."""
        return [one.run for found in self._memories.values() for one in found]

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes of the slots that exist."""
        return sum(run.nbytes for run in self.slots)


def _taken(arena: HostArena, size: int, device: torch.device) -> Tensor:
    return arena.take(size, kind="gradients", owner="blocks", device=device)


def _give(slabs: Slabs, slab: Tensor, device: torch.device) -> None:
    let_pages_go(slab)
    slabs.give(slab, device)


class _Memory:
    """Memory of the device that slots take turns in."""

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.run = torch.empty(size, dtype=torch.uint8, device=device)
        self._alone = self._uses()  # those of this object

    def _uses(self) -> int:
        return torch._C._storage_Use_Count(self.run.untyped_storage()._cdata)

    def is_used(self) -> bool:
        """Returns whether a tensor looks into it."""
        return self._uses() > self._alone


class _Slot:
    """The weights of a block on a device.

    Attributes:
        is_new: whether they were fetched for a call that is still to come.
    """

    def __init__(self, block: StreamedBlock, memory: _Memory) -> None:
        self._up: Ticket = None
        self._is_there = False
        self.block, self.memory = block, memory
        self.versions, self.is_new = block.versions(), True
        self._way: tuple[_Way, tuple[Tensor, ...]] | None = None  # of a call still to come
        self._engine = engine_of(block.device)
        slab = block.slab
        if slab.numel():
            ready = self._engine.mark()
            target = memory.run[: slab.numel()]
            with torch.inference_mode(False):
                self._up = self._engine.up(target, slab, after=(ready,))

    def __del__(self) -> None:
        if not self._is_there:  # nobody used it
            self.sync()

    def begin_way(self) -> tuple[_Way, tuple[Tensor, ...]]:
        """Makes the way of a call's gradients, and returns it with the tensors that it begins at. A
        backward pass takes one that was made before others after those: after the pass of the block
        in front, which is computed while gradients are copied."""
        trained = self.block.trained()
        way = _Way(trained)
        self._way = way, (_Arrive.apply(way, *trained) if trained else ())
        return self._way

    def take_way(self) -> tuple[_Way, tuple[Tensor, ...]]:
        found = self._way
        if found is None or found[0].params != self.block.trained():
            found = self.begin_way()
        self._way = None
        found[0].block = self.block
        return found

    def wait(self) -> None:
        """Lets the device wait for the weights."""
        if not self._is_there:
            self._is_there = True
            if self._up is not None:
                self._engine.wait(self._up)

    def sync(self) -> None:
        """Waits, on the host, until the arena has been read."""
        if self._up is not None:
            self._engine.sync(self._up)
            self._up, self._is_there = None, True


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
        self.is_lent = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy lies where its parameters were put, until it is called.
        return {
            name: getattr(self, name) for name in ("module", "name", "stream", "stay", "device")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
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
                _INLINE.down(place, _bytes(p, field.stride))
        for p, field in zip(found, fields):
            grad, p.grad = p.grad, None
            p.data = field.of(slab)
            p.grad = None if grad is None else grad.cpu()
        self.slab, self.fields = slab, fields
        self.let_pages_go()

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
        self.settle()
        call = _Call(self)
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


class _Call:
    """One call of a block, which a backward pass may come back to."""

    def __init__(self, block: StreamedBlock) -> None:
        self.block = block
        self.fields, self.params = block.fields, block.params
        self._versions = block.versions()
        self._memory = -1  # of the slot, while the block runs
        self._outer: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    @contextmanager
    def lent(self, in_backward: bool) -> Iterator[None]:
        """Puts the tensors of a slot into the modules, while it lasts."""
        block = self.block
        slot = block.stream.slot(block, in_backward)
        tensors = self._tensors(slot)
        versions = [x._version for x in tensors]
        self._memory = slot.memory.run.untyped_storage()._cdata
        block.is_lent = True
        try:
            self._put(tensors)
            with within(self.again):
                yield
            self._check_writes(tensors, versions)
        finally:
            self._put(self.params)
            block.is_lent = False
            self._memory = -1
            if not in_backward:
                slot.sync()  # the host may write the weights from here on

    def _put(self, tensors: Sequence[Any]) -> None:
        for field, x in zip(self.fields, tensors):
            for module, name in field.places:
                module._parameters[name] = x

    @contextmanager
    def again(self) -> Iterator[None]:
        """Lends the weights to a part of the block that is run again."""
        if self.block.is_lent:
            yield
            return
        self.check()
        with self.lent(in_backward=True):
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Lets autograd keep tokens of what lies in the slot."""
        if not torch.is_grad_enabled():
            yield
            return
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():
            raise RuntimeError(
                f"the weights of {self.block.name} stream, which takes hooks on saved tensors, and "
                "these are disabled here"
            )

        def pack(x: Tensor) -> Kept | _Token:
            return self._packed(x)

        pack.in_checkpoint = inside_checkpoint()  # type: ignore[attr-defined]
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        try:
            with saved_tensors_hooks(pack, _unpack):
                yield
        finally:
            self._outer = None

    def _tensors(self, slot: _Slot) -> list[Any]:
        """Returns the tensors of the slot that stand for the parameters."""
        with torch.inference_mode(False):
            tensors = [field.of(slot.memory.run) for field in self.fields]
            if not torch.is_grad_enabled():
                # Views, of which autocast keeps no casts.
                views = [x.view(x.shape) for x in tensors]
                tensors = [x.requires_grad_(p.requires_grad) for x, p in zip(views, self.params)]
            elif any(p.requires_grad for p in self.params):
                way, arrived = slot.take_way()
                trained = [i for i, p in enumerate(self.params) if p.requires_grad]
                fetched = _Fetch.apply(way, [tensors[i] for i in trained], *arrived)
                for i, x in zip(trained, fetched):
                    tensors[i] = x
        for x, p in zip(tensors, self.params):
            if isinstance(x, FakeTensor):
                x._is_param = True  # type: ignore[attr-defined]
            else:
                x.__class__ = nn.Parameter  # by which layers know their weights
            setattr(x, LENT_FOR, p)
        return tensors

    def _check_writes(self, tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
        for i, (x, version) in enumerate(zip(tensors, versions)):
            if x._version != version:
                raise RuntimeError(
                    f"{self._name(i)} is written to while its block runs, which has a copy of what "
                    "is on the host; write to it outside of the block, or leave the block out of "
                    "weights="
                )

    def _name(self, index: int) -> str:
        module, name = self.fields[index].places[0]
        named = self.block.module.named_modules(prefix=self.block.name)
        return next((f"{path}.{name}" for path, other in named if other is module), name)

    def check(self, index: int | None = None) -> None:
        """Raises if parameters, or one of them, have been changed since the call."""
        for i, (p, version) in enumerate(zip(self.params, self._versions)):
            if index in (None, i) and p._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: the parameter {self._name(i)} is at version {p._version}, "
                    f"wanted version {version}, at which it was used"
                )

    def _packed(self, x: Tensor) -> Kept | _Token:
        if is_plain(x) and x.layout is torch.strided and not x.is_nested:
            if x.untyped_storage()._cdata == self._memory:
                return _Token(self, x)
            lent = cast_parameter(x)
            if lent is not None and any(lent is p for p in self.params):
                return _Token(self, x, lent)
        return Kept(x, self._outer)


class _Token:
    """Stands in autograd in the place of a tensor that looks into a slot.

    Args:
        lent: a parameter of which ``x`` is a cast; None: ``x`` looks into the slot itself.
    """

    def __init__(self, call: _Call, x: Tensor, lent: Tensor | None = None) -> None:
        self._call, self._dtype, self._cast = call, x.dtype, None
        self._view = x.storage_offset(), x.size(), x.stride()
        if lent is None:
            first = x.storage_offset() * x.element_size()
            places = (i for i, f in enumerate(call.fields) if f.first <= first)
            self._index = max(places, default=0)
        else:
            self._index = next(i for i, p in enumerate(call.params) if p is lent)
            self._cast, self._dtype = x.dtype, lent.dtype

    def tensor(self) -> Tensor:
        call = self._call
        call.check(self._index)
        slot = call.block.stream.slot(call.block, in_backward=True)
        if torch._C._current_graph_task_id() == -1:
            call.block.stream.settle()  # no backward pass will
        run = slot.memory.run
        if self._cast is not None:
            cast = call.fields[self._index].of(run).to(self._cast)
            return cast.as_strided(self._view[1], self._view[2], self._view[0])
        return _on_memory(run.untyped_storage(), run.device, self._dtype, *self._view)


def _unpack(packed: Kept | _Token) -> Tensor:
    return packed.tensor()


# ---- gradients -----------------------------------------------------------------------------------


class _Arrival:
    """Gradients of a block that are copied to the host."""

    def __init__(self, stream: Stream, device: torch.device, ticket: Ticket, held: Any) -> None:
        self._stream, self._engine, self._ticket = stream, engine_of(device), ticket
        self._held = held  # while they are read

    def leave(self) -> None:
        """Frees their memory on the device, once they have been copied."""
        if self._held is not None:
            self._engine.wait(self._ticket)
            self._held = None

    def sync(self) -> None:
        """Waits, on the host, until they are there."""
        self._engine.sync(self._ticket)
        self._held = None
        self._stream.arrived(self)


class _Way:
    """Brings the gradients of one call to the parameters.

    Attributes:
        block: that is called. A way that waits for its call has none: a block with a graph that has
            the block would never be freed.
    """

    block: StreamedBlock

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self._arrival: _Arrival | None = None

    def down(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Begins to copy gradients, and returns tensors of the host that will have them."""
        block = self.block
        engine, stream = engine_of(block.device), block.stream
        found: list[Tensor | None] = [None] * len(grads)
        sources, size = [], 0
        for i, (p, grad) in enumerate(zip(self.params, grads)):
            if grad is None:
                continue
            if grad.layout is not torch.strided or not grad.numel():
                found[i] = grad.to(p.device)
                continue
            sources.append((i, size, _bytes(grad, p.stride())))
            size = aligned(size + grad.nbytes, ALIGNMENT)
        if not sources:
            return found
        run = stream.host_memory(size, block.device)
        computed, ticket = engine.mark(), None
        for i, first, source in sources:
            target = run[first : first + source.numel()]
            ticket = engine.down(target, source, after=(computed,))
            p, start = self.params[i], first // self.params[i].element_size()
            found[i] = _on_memory(
                run.untyped_storage(), run.device, p.dtype, start, p.shape, p.stride()
            )
        if engine.is_asynchronous:
            self._arrival = _Arrival(stream, block.device, ticket, (run, sources))
            stream.add(self._arrival)
        return found

    def arrive(self) -> None:
        """Waits for what :meth:`down` has begun to copy."""
        if self._arrival is not None:
            self._arrival.sync()
            self._arrival = None


class _Fetch(torch.autograd.Function):
    """Gives tensors of a slot the place of parameters."""

    @staticmethod
    def forward(ctx: Any, way: _Way, views: list[Tensor], *arrived: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.way, ctx.lent = way, way.params
        return tuple(views)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *ctx.way.down(grads)


class _Arrive(torch.autograd.Function):
    """Lets gradients reach the parameters when they have been copied."""

    @staticmethod
    def forward(ctx: Any, way: _Way, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.way = way
        return tuple(p.detach() for p in params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.way.arrive()
        return None, *grads

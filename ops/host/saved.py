"""Holds what autograd saves in the host arena between the forward and the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .._core.recompute import Kept, Saving, can_drop, may_be_written
from .._core.surroundings import cast_parameter, is_plain, is_trained, viewed
from .arena import default_arena
from .engines import engine_of
from .slabs import Slabs

MIN_BYTES = 64 << 10  # below, a copy costs more time than the memory is worth


def saved_on_host(*, stay: Iterable[Any] = ()) -> AbstractContextManager[Any]:
    """Returns a context in which what autograd saves is held in the host arena until the backward
    pass asks for it.

    Each storage is copied once, however many tensors look into it, and is freed when autograd
    frees the last of them. What stays on the device: leaves that require a gradient and their casts
    by autocast, tensors in ``stay`` that require none, storages of less than 64 KiB, and tensors of
    other classes or layouts. Without gradients and within a checkpoint, which saves by itself,
    the context does nothing.

    Raises:
        RuntimeError: while torch.compile traces it, which decides by itself what is kept.
        HostMemoryError: within it, when the arena has no room.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise RuntimeError(
            "what autograd saves cannot be held on the host while torch.compile traces the block, "
            "because it decides by itself what is kept; use a level without '@host', or 'L5@host', "
            "which is then 'L5'"
        )
    return _Saving(stay) if can_drop() else nullcontext()


def _taken(size: int, device: torch.device) -> Tensor:
    return default_arena().take(size, kind="activations", owner="blocks", device=device)


_slabs = Slabs(_taken, engine_of)
_slabs_of_fakes: Slabs | None = None


@contextmanager
def fakes_on_host(slabs: Slabs) -> Iterator[None]:
    """Takes ``slabs`` for fakes, while it lasts. Without any, fakes stay where they are."""
    global _slabs_of_fakes
    before, _slabs_of_fakes = _slabs_of_fakes, slabs
    try:
        yield
    finally:
        _slabs_of_fakes = before


def trim() -> None:
    """Gives back to the arena the memory that waits for the tensors of the next step."""
    _slabs.trim()


class _Storage:
    """A storage that has left the device, for the tensors of a graph that look into it.

    Args:
        x: looks into it.
        late: begins to copy it in :meth:`complete`, unless the copy is done at once.
    """

    def __init__(self, x: Tensor, slabs: Slabs, late: bool) -> None:
        storage = x.untyped_storage()
        self._slab = slabs.take(storage.nbytes(), x.device)
        self._slabs, self._device = slabs, x.device
        self._engine = slabs.engine_of(x.device)
        # While the first is held, no other memory gets its number.
        self._memory, self._version = StorageWeakRef(storage), x._version
        self._tokens: weakref.WeakSet[_SavedHandle] = weakref.WeakSet()
        self._wanted: weakref.WeakSet[_SavedHandle] = weakref.WeakSet()
        self._base: Tensor | None = None  # while a backward pass has it back
        self._up: Any = None  # the ticket of the copy that fills it
        self._is_overwritten = False
        self._source: Tensor | None = x.detach()  # held as long as it is read
        self._ticket: Any = None
        self._has_begun = False
        if not (late and self._engine.is_asynchronous):
            self._copy(x)

    def _copy(self, x: Tensor) -> None:
        self._has_begun, self._source = True, x.detach()
        computed = self._engine.mark()
        self._ticket = self._engine.down(self._slab, _bytes(x), after=(computed,))
        if not self._engine.is_asynchronous:
            self.leave()

    def complete(self, x: Tensor) -> None:
        """Copies what the operation that saved ``x`` has written since, by which its version need
        not move."""
        if self._has_begun and (x._version != self._version or self._is_copied(x)):
            return
        self._copy(x)

    def _is_copied(self, x: Tensor) -> bool:
        if isinstance(x, FakeTensor):
            return True
        return not self._engine.is_asynchronous and torch.equal(self._slab, _bytes(x))

    def __del__(self) -> None:
        if hasattr(self, "_ticket"):  # there was room
            self.leave()
            self._drop()
            self._slabs.give(self._slab, self._device)

    def leave(self) -> None:
        """Frees the memory on the device, once it has been copied."""
        if self._source is not None:
            if self._has_begun:
                self._engine.wait(self._ticket)
            self._is_overwritten = self._source._version != self._version
            self._source = None
            for token in self._tokens:
                token.held = None

    def holds(self, x: Tensor) -> bool:
        """Returns whether it was copied from what ``x`` looks into, as that is now."""
        return not self._memory.expired() and self._version == x._version

    def token(self, x: Tensor) -> _SavedHandle:
        token = _SavedHandle(self, x, held=x.detach() if self._source is not None else None)
        self._tokens.add(token)
        return token

    def prefetch(self) -> None:
        """Begins to bring it back, if that goes on beside other work."""
        if self._engine.is_asynchronous and self._source is None:
            self._fetch()

    def _fetch(self) -> None:
        if self._base is not None:
            return
        self._wanted = weakref.WeakSet(self._tokens)
        size = self._slab.numel()
        self._base = torch.empty(size, dtype=torch.uint8, device=self._device)
        # The memory may have been freed by work that still runs.
        ready = self._engine.mark()
        self._up = self._engine.up(self._base, self._slab, after=(ready,))
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._drop)

    def base(self, token: _SavedHandle) -> Tensor:
        """Returns its bytes on the device, which stay there until each of its tensors has been
        asked for, or the backward pass ends."""
        self._fetch()
        base = self._base
        assert base is not None
        if self._up is not None:
            self._engine.wait(self._up)
            self._up = None
        self._wanted.discard(token)
        if not self._wanted:
            self._drop()
        return base

    def check(self) -> None:
        """Raises if it was changed in place while it was copied."""
        if self._source is not None:
            self._is_overwritten = self._source._version != self._version
        if self._is_overwritten:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation, while it was copied to the host; clone it before it is changed"
            )

    def _drop(self) -> None:
        if self._up is not None:
            self._engine.wait(self._up)
        self._base = self._up = None


class _SavedHandle:
    """Stands in autograd in the place of a tensor.

    Attributes:
        held: the tensor, until its storage has left.
    """

    def __init__(self, storage: _Storage, x: Tensor, held: Tensor | None) -> None:
        self._storage, self.held = storage, held
        self._dtype, self._view = x.dtype, (x.size(), x.stride(), x.storage_offset())

    def tensor(self) -> Tensor:
        self._storage.check()
        if self.held is not None:
            return self.held
        base = self._storage.base(self)
        size = self._dtype.itemsize
        whole = base[: base.numel() // size * size].view(self._dtype)
        return whole.as_strided(*self._view)


_storages: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()


class _Saving:
    """One call of a block. When a backward pass asks for its tensors, those of the call before it
    will be asked for next."""

    _latest: weakref.ref[_Saving] | None = None

    def __init__(self, stay: Iterable[Any]) -> None:
        self._stay = {
            x.untyped_storage()._cdata for x in stay if is_plain(x) and not x.requires_grad
        }
        # In the order in which they were saved: what memory they get again depends on it.
        self._storages = weakref.WeakKeyDictionary[_Storage, None]()
        self._saving = Saving()
        self._late: list[tuple[_Storage, Tensor]] = []
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._before, _Saving._latest = _Saving._latest, weakref.ref(self)
        # The copies of the last call go on beside this one; those of the call before it are done.
        last = self._before and self._before()
        before = last and last._before and last._before()
        for storage in before._storages if before else ():
            storage.leave()
        self._hooks.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
        self._complete()

    def _complete(self) -> None:
        """Lets what operations that have ended may have written after they saved it leave."""
        late, self._late = self._late, []
        for storage, x in late:
            storage.complete(x)

    def _leaves(self, x: Tensor) -> bool:
        if not is_plain(x) or x.layout is not torch.strided or x.is_nested or x.is_meta:
            return False
        if isinstance(x, FakeTensor) and _slabs_of_fakes is None:
            return False
        storage = x.untyped_storage()
        return (
            storage.nbytes() >= MIN_BYTES
            and storage._cdata not in self._stay
            and not (x.is_conj() or x.is_neg())
            and not (isinstance(viewed(x), torch.nn.Parameter) or is_trained(x))
            and cast_parameter(x) is None
        )

    def _pack(self, x: Tensor) -> Kept | _SavedHandle:
        if self._saving.follow(x):
            self._complete()
        if not self._leaves(x):
            return Kept(x, self._outer)
        key = x.untyped_storage()._cdata
        storage, late = _storages.get(key), may_be_written(x)
        if storage is None or not storage.holds(x):
            slabs = _slabs_of_fakes if isinstance(x, FakeTensor) else _slabs
            assert slabs is not None
            storage = _storages[key] = _Storage(x, slabs, late)
        if late:
            self._late.append((storage, x))
        self._storages[storage] = None
        return storage.token(x)

    def _unpack(self, packed: Kept | _SavedHandle) -> Tensor:
        before = self._before and self._before()
        if before is not None:
            for storage in reversed(list(before._storages)):  # what was saved last is wanted first
                storage.prefetch()
        return packed.tensor()


def _bytes(x: Tensor) -> Tensor:
    """Returns all bytes of the storage of a tensor; of a fake, the tensor."""
    if isinstance(x, FakeTensor):
        return x
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())

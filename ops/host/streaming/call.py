"""One call of a block, and the tokens that autograd keeps in place of what lies in a slot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from ..._core.recompute import Kept, inside_checkpoint
from ..._core.surroundings import LENT_FOR, cast_parameter, is_plain, within
from ..lent import lent
from . import fields
from .fields import Block
from .gradients import Fetch
from .slots import Slot


class Call:
    """One call of a block, which a backward pass may come back to."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.fields, self.params = block.fields, block.params
        self._versions = block.versions()
        self._memory = -1  # of the slot, while the block runs
        self._outer: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    @contextmanager
    def lent(self, in_backward: bool) -> Iterator[None]:
        """Puts the tensors of a slot into the modules, while it lasts."""
        block, before = self.block, self._memory
        with block.stream.lock:
            slot = block.stream.slot(block, in_backward)
            tensors = self._tensors(slot)
        versions = [x._version for x in tensors]
        self._memory = slot.memory.run.untyped_storage()._cdata
        block.threads.add(threading.get_ident())
        try:
            with lent(self._by_module(tensors)), within(self.again):
                yield
            self._check_writes(tensors, versions)
        finally:
            block.threads.discard(threading.get_ident())
            self._memory = before
            if not in_backward:
                slot.sync()  # the host may write the weights from here on

    def _by_module(self, tensors: Sequence[Any]) -> dict[nn.Module, dict[str, Any]]:
        found: dict[nn.Module, dict[str, Any]] = {}
        for field, x in zip(self.fields, tensors):
            for module, name in field.places:
                found.setdefault(module, {})[name] = x
        return found

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

        def pack(x: Tensor) -> Kept | Token:
            return self._packed(x)

        pack.in_checkpoint = inside_checkpoint()  # type: ignore[attr-defined]
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        try:
            with saved_tensors_hooks(pack, _unpack):
                yield
        finally:
            self._outer = None

    def _tensors(self, slot: Slot) -> list[Any]:
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
                fetched = Fetch.apply(way, [tensors[i] for i in trained], *arrived)
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

    def _packed(self, x: Tensor) -> Kept | Token:
        if is_plain(x) and x.layout is torch.strided and not x.is_nested:
            if x.untyped_storage()._cdata == self._memory:
                return Token(self, x)
            lent = cast_parameter(x)
            if lent is not None and any(lent is p for p in self.params):
                return Token(self, x, lent)
        return Kept(x, self._outer)


class Token:
    """Stands in autograd in the place of a tensor that looks into a slot.

    Args:
        lent: a parameter of which ``x`` is a cast; None: ``x`` looks into the slot itself.
    """

    def __init__(self, call: Call, x: Tensor, lent: Tensor | None = None) -> None:
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
        call, stream = self._call, self._call.block.stream
        call.check(self._index)
        with stream.lock:
            run = stream.slot(call.block, in_backward=True).memory.run
            if torch._C._current_graph_task_id() == -1:
                stream.settle()  # no backward pass will
            if self._cast is None:
                return fields.on_memory(run.untyped_storage(), run.device, self._dtype, *self._view)
            cast = call.fields[self._index].of(run).to(self._cast)
        return cast.as_strided(self._view[1], self._view[2], self._view[0])


def _unpack(packed: Kept | Token) -> Tensor:
    return packed.tensor()

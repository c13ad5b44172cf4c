"""Holds inputs of a block in 8 bits between the forward and the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._core.recompute import Kept, can_drop
from .._core.registration import FLOATS
from .._core.surroundings import is_plain, is_trained, viewed
from ..functional import dequantize_blocks, quantize_blocks

BLOCK_SIZE = 64  # elements per scale: a massive channel costs no more than its neighbors their bits


def saved_in_8_bits(inputs: Iterable[Any]) -> AbstractContextManager[Any]:
    """Returns a context in which autograd saves the memory of ``inputs`` as codes of the dynamic
    map with a scale per 64 elements (:func:`headroom.functional.quantize_blocks`), 17/16 bytes per
    element together, until the backward pass asks for it.

    Memory is coded once, however many tensors look into it, and decoded once in a backward pass.
    An element comes back to within 0.71 % of the largest in its block, to within 0.15 % if it is
    below a tenth of that, and 0.03 % below a hundredth; those of a block with an infinity or a NaN
    are all NaN. Hooks that were in force before
    get the codes. What is saved as it is: all other tensors, leaves that require a gradient,
    tensors that are a part of other memory, and such as are not of 32 or 16 bits. Without gradients
    and within a checkpoint, which saves by itself, the context does nothing.

    Raises:
        RuntimeError: while torch.compile traces it, which decides by itself what is kept. In a
            backward pass with ``create_graph=True``, whose derivatives would be those of the
            rounded tensors.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise RuntimeError(
            "what autograd saves cannot be held in 8 bits while torch.compile traces the block, "
            "because it decides by itself what is kept; use a level without ':8bit'"
        )
    return _Saving(inputs) if can_drop() else nullcontext()


def _can_be_coded(x: Any) -> bool:
    return (
        is_plain(x)
        and x.layout is torch.strided
        and not (x.is_nested or x.is_meta or x.is_conj() or x.is_neg())
        and x.dtype in FLOATS
        and not (isinstance(viewed(x), torch.nn.Parameter) or is_trained(x))
        and torch.ops.aten.is_non_overlapping_and_dense(x)
        and 0 < x.nbytes == x.untyped_storage().nbytes()
    )


class _Saving:
    """One call of a block."""

    def __init__(self, inputs: Iterable[Any]) -> None:
        # The tensors are held, so that no other memory gets their numbers.
        self._inputs = {x.untyped_storage()._cdata: x for x in inputs if _can_be_coded(x)}
        self._coded: dict[int, _Coded] = {}
        self._outer: tuple[Callable, Callable] | None = None
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> None:
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._hooks.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
        self._inputs, self._coded = {}, {}

    def _pack(self, x: Tensor) -> Kept | _SavedHandle:
        key = x.untyped_storage()._cdata if is_plain(x) else None
        given = None if key is None else self._inputs.get(key)
        if key is None or given is None or x.dtype != given.dtype:
            return Kept(x, self._outer)
        coded = self._coded.get(key)
        if coded is None or coded.version != x._version:
            coded = self._coded[key] = _Coded(given, x._version, self._outer)
        return _SavedHandle(coded, x)


class _Coded:
    """The codes of a tensor, for those that look into its memory.

    Attributes:
        version: of the tensor when it was coded.
        handles: of those that were saved.
    """

    def __init__(self, x: Tensor, version: int, hooks: tuple[Callable, Callable] | None) -> None:
        with torch.no_grad():
            flat = x.detach().as_strided((x.numel(),), (1,), 0)
            parts = quantize_blocks(flat, is_signed=True, block_size=BLOCK_SIZE)
        self._parts = [Kept(part, hooks) for part in parts]
        self._dtype, self.version = x.dtype, version
        self.handles: weakref.WeakSet[_SavedHandle] = weakref.WeakSet()
        self._wanted: weakref.WeakSet[_SavedHandle] = weakref.WeakSet()
        self._decoded: Tensor | None = None  # while a backward pass has it back

    def decoded(self, handle: _SavedHandle) -> Tensor:
        """Returns all of its elements, which stay until each of the handles has asked, or the
        backward pass ends."""
        runs_backward = torch._C._current_graph_task_id() != -1
        if runs_backward and torch.is_grad_enabled():
            raise RuntimeError(
                "a backward pass with create_graph=True reached a block that keeps its input in 8 "
                "bits: second derivatives would be those of the rounded input; give the block a "
                "save level without ':8bit'"
            )
        found = self._decoded
        if found is None:
            codes, scales = (part.tensor() for part in self._parts)
            found = dequantize_blocks(codes, scales, is_signed=True, block_size=BLOCK_SIZE)
            self._decoded = found = found.to(self._dtype)
            self._wanted = weakref.WeakSet(self.handles)
            if runs_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self._drop)
        self._wanted.discard(handle)
        if not (self._wanted and runs_backward):
            self._drop()
        return found

    def _drop(self) -> None:
        self._decoded = None


class _SavedHandle:
    """Stands in autograd in the place of a tensor."""

    def __init__(self, coded: _Coded, x: Tensor) -> None:
        self._coded = coded
        self._view = (x.size(), x.stride(), x.storage_offset())
        coded.handles.add(self)

    def tensor(self) -> Tensor:
        return self._coded.decoded(self).as_strided(*self._view)


def _unpack(packed: Kept | _SavedHandle) -> Tensor:
    return packed.tensor()

"""Compares what a checkpoint recomputes with what it dropped.

While the region runs, hooks on saved tensors stand in front of the checkpoint's own: they keep the
checksums of every tensor on its way into the checkpoint, and compare them when the recomputed
tensor comes out. Parameters and leaves that require grad are in memory all the time: of these, the
version is kept, and whether the same one comes out is looked at, so that they are not read. A
reentrant checkpoint saves nothing in its forward pass, so its results are
compared instead.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _current_autograd_node
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .._core.dtensor import local_part
from .._core.recompute import Saving, may_be_written
from .._core.running_modules import watching_modules
from .._core.surroundings import is_plain, is_trained, viewed
from ..host.checksums import BLOCK_BYTES, checksums, first_difference


class RecomputeError(RuntimeError):
    """Says that a checkpoint recomputed other values than it dropped: gradients would be wrong."""


class Dropped(NamedTuple):
    """Describes a tensor as it was in the forward pass."""

    what: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    sums: Tensor | None
    leaf: Leaf | None = None


class Leaf(NamedTuple):
    """Tells the parameter, or leaf that requires grad, of which a saved tensor is a view."""

    ref: weakref.ref[Tensor]
    version: int
    stride: tuple[int, ...]
    offset: int


def _dropped(what: str, x: Tensor, read: bool = True) -> Dropped:
    base, sums, leaf = viewed(x), None, None
    if is_trained(x) or isinstance(base, nn.Parameter):
        if is_plain(local_part(x)) and x.layout == torch.strided and not base.is_inference():
            mine = local_part(x)
            leaf = Leaf(weakref.ref(base), base._version, mine.stride(), mine.storage_offset())
    elif read:
        sums = checksums(x)
    return Dropped(what, x.shape, _strides(x), x.dtype, x.requires_grad, sums, leaf)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Returns the strides of the dimensions that have several elements."""
    if x.layout != torch.strided:
        return ()
    return tuple(stride for size, stride in zip(x.shape, x.stride()) if size > 1)


def _is_there(leaf: Leaf, name: str, was: Dropped, now: Tensor) -> bool:
    """Returns whether ``now`` is the memory that was saved, or memory that has been freed since.

    Raises:
        RecomputeError: the leaf has been written since.
    """
    base = leaf.ref()
    if base is None:
        return True
    if base._version != leaf.version:
        raise RecomputeError(
            f"checkpoint: {name} was written between the forward and the backward pass: it is at "
            f"version {base._version}, wanted version {leaf.version}. {_CAUSES}"
        )
    memory, same = local_part(base).untyped_storage(), _strides(now) == was.stride
    if memory._cdata == local_part(now).untyped_storage()._cdata:
        return same and local_part(now).storage_offset() == leaf.offset
    return isinstance(base, DTensor) or memory.nbytes() < base.nbytes


def _compare(was: Dropped, now: Tensor) -> None:
    name = f"{was.what} ({str(was.dtype).removeprefix('torch.')} {list(was.shape)})"
    if now.shape != was.shape or now.dtype != was.dtype:
        kind = f"{str(now.dtype).removeprefix('torch.')} {list(now.shape)}"
        raise RecomputeError(f"checkpoint: {name} was recomputed as {kind}. {_CAUSES}")
    sums_then = was.sums
    if was.leaf is not None:
        if _is_there(was.leaf, name, was, now):
            return
        leaf = was.leaf.ref().detach()
        sums_then = checksums(leaf.as_strided(was.shape, was.leaf.stride, was.leaf.offset))
    if _strides(now) != was.stride:
        raise RecomputeError(
            f"checkpoint: {name} was recomputed with strides {now.stride()}. {_CAUSES}"
        )
    sums = None if sums_then is None else checksums(now)
    if sums_then is None or sums is None:
        return
    block = first_difference(sums_then, sums)
    if block is None:
        return
    per_block = BLOCK_BYTES // now.element_size()
    last = min((block + 1) * per_block, now.numel()) - 1
    raise RecomputeError(
        f"checkpoint: {name} was recomputed with other values; the first difference is in elements "
        f"{block * per_block} to {last}, in memory order. {_CAUSES}"
    )


_CAUSES = (
    "The function must compute the same twice: keep preserve_rng_state=True where it draws random "
    "numbers, and let it neither change nor depend on state that changes between the forward and "
    "the backward pass (counters, running averages, caches, data written in place)."
)


def _may_be_internal(was: Dropped) -> bool:
    return was.dtype == torch.uint8 or (len(was.shape) == 1 and not was.requires_grad)


def _is_internal(was: Dropped, node: Any) -> bool:
    """Returns whether a tensor that a node of autograd has saved may differ though gradients do
    not: a running statistic of a norm in training, which both runs move and no gradient depends on,
    or a workspace of oneDNN or cuDNN, of which some bytes are never written. What these are
    computed from is saved beside them, and compared."""
    if node is None or isinstance(node, BackwardCFunction) or not _may_be_internal(was):
        return False  # a function in Python may have such a name, and saves what it uses
    if "BatchNorm" in node.name():
        return was.dtype == torch.uint8 or getattr(node, "_saved_training", False)
    return "Rnn" in node.name() and was.dtype == torch.uint8


class _Packed:
    """Stands in autograd in the place of a saved tensor."""

    def __init__(self, holder: Any, was: Dropped) -> None:
        self.holder = holder
        self.was = was

    def compare(self, now: Tensor) -> None:
        """Compares it with the recomputed tensor, for the node of autograd that needs it now."""
        if not _is_internal(self.was, _current_autograd_node()):
            _compare(self.was, now)


def _name_first(entries: list[_Packed], inner_unpack: Callable[[Any], Tensor]) -> None:
    """Raises for the first difference in the order of the forward pass. The backward pass, which
    found one, asks for the last tensors first."""
    for packed in entries:
        if _may_be_internal(packed.was):
            continue  # which only the node that has saved it knows
        try:
            now = inner_unpack(packed.holder)
        except RuntimeError:  # this one has been used already
            continue
        _compare(packed.was, now)


@contextmanager
def _callers(function: Any) -> Iterator[list[str]]:
    """Gives the modules that run in this thread, outermost first, by their names in the module that
    ``function`` is, or is of."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        function = function.args[0] if function.args else function.func
    root = getattr(function, "__self__", function)  # of a method
    running = ["the function itself"]
    thread = threading.get_ident()

    def begin(name: str) -> None:
        if threading.get_ident() == thread:
            running.append(name or type(root).__name__)

    def end() -> None:
        if threading.get_ident() == thread:
            running.pop()

    with watching_modules(root if isinstance(root, nn.Module) else None, begin, end):
        yield running


@contextmanager
def verified_region(fn: Callable[..., Any]) -> Iterator[None]:
    """Verifies the tensors that are saved within, in the forward pass of a checkpoint whose hooks
    are in force."""
    inner = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if inner is None:  # nothing is dropped, as under torch.no_grad()
        yield
        return
    inner_pack, inner_unpack = inner
    entries: list[weakref.ref[_Packed]] = []
    saving = Saving()
    written_late: list[tuple[_Packed, Tensor]] = []

    def read_late() -> None:
        for packed, x in written_late:
            packed.was = packed.was._replace(sums=checksums(x))
        written_late.clear()

    def pack(x: Tensor) -> _Packed:
        if saving.follow(x):
            read_late()
        late = may_be_written(x)
        was = _dropped(f"saved tensor {len(entries)}, of {running[-1]},", x, read=not late)
        packed = _Packed(inner_pack(x), was)
        entries.append(weakref.ref(packed))
        if late:
            written_late.append((packed, x))
        return packed

    def unpack(packed: _Packed) -> Tensor:
        now = inner_unpack(packed.holder)
        try:
            packed.compare(now)
        except RecomputeError:
            _name_first([packed for ref in entries if (packed := ref())], inner_unpack)
            raise
        return now

    functools.update_wrapper(pack, inner_pack)  # checkpoints are recognized by their pack hook
    with _callers(fn) as running, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    read_late()


def verified_results(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``fn`` with the results of its second and later calls compared with its first, which
    a reentrant checkpoint makes without gradients. It is made with gradients, and drops what is
    saved, because operations with two kernels (LSTMs) round otherwise in each."""
    first: list[Dropped] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not first:
            dropping = torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x)
            with torch.enable_grad(), dropping:
                results = fn(*args, **kwargs)
            results = tree_map_only(Tensor, Tensor.detach, results)
            tensors = [x for x in tree_leaves(results) if isinstance(x, Tensor)]
            first.extend(_dropped(f"result {k}", x) for k, x in enumerate(tensors))
            return results
        results = fn(*args, **kwargs)
        tensors = [x for x in tree_leaves(results) if isinstance(x, Tensor)]
        if len(tensors) != len(first):
            raise RecomputeError(
                f"checkpoint: the function returned {len(first)} tensors, and {len(tensors)} when "
                f"it was called again. {_CAUSES}"
            )
        for was, now in zip(first, tensors):
            _compare(was, now)
        return results

    return call

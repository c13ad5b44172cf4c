"""Compares what a checkpoint recomputes with what it dropped.

While the region runs, hooks on saved tensors stand in front of the checkpoint's own: they keep the
checksums of every tensor on its way into the checkpoint, and compare them when the recomputed
tensor comes out. A reentrant checkpoint saves nothing in its forward pass, so its results are
compared instead.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _current_autograd_node
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from .._core.surroundings import is_trained
from .checksums import BLOCK_BYTES, checksums, first_difference

__all__ = ["RecomputeError", "verified_region", "verified_results"]


class RecomputeError(RuntimeError):
    """What a checkpoint recomputed is not what it had dropped, so gradients would be wrong."""


class Dropped(NamedTuple):
    """A tensor as it was in the forward pass."""

    what: str
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    sums: Tensor | None


def _dropped(what: str, x: Tensor) -> Dropped:
    return Dropped(what, x.shape, x.dtype, x.requires_grad, checksums(x))


def _compare(was: Dropped, now: Tensor) -> None:
    name = f"{was.what} ({str(was.dtype).removeprefix('torch.')} {list(was.shape)})"
    if now.shape != was.shape or now.dtype != was.dtype:
        kind = f"{str(now.dtype).removeprefix('torch.')} {list(now.shape)}"
        raise RecomputeError(f"checkpoint: {name} was recomputed as {kind}. {_CAUSES}")
    sums = None if was.sums is None else checksums(now)
    if was.sums is None or sums is None:
        return
    block = first_difference(was.sums, sums)
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
    """Whether a tensor that a node of autograd has saved may differ although gradients do not: a
    running statistic of a norm in training, which both runs move and no gradient depends on, or a
    workspace of oneDNN or cuDNN, of which some bytes are never written. What these are computed
    from is saved beside them, and compared."""
    if node is None or isinstance(node, BackwardCFunction) or not _may_be_internal(was):
        return False  # a function in Python may have such a name, and saves what it uses
    if "BatchNorm" in node.name():
        return was.dtype == torch.uint8 or getattr(node, "_saved_training", False)
    return "Rnn" in node.name() and was.dtype == torch.uint8


class _Packed:
    """What autograd holds in the place of a saved tensor."""

    def __init__(self, holder: Any, was: Dropped | None) -> None:
        self.holder = holder
        self.was = was

    def compare(self, now: Tensor) -> None:
        """Compares it with the recomputed tensor, for the node of autograd that needs it now."""
        if self.was is not None and not _is_internal(self.was, _current_autograd_node()):
            _compare(self.was, now)


def _name_first(entries: list[_Packed], inner_unpack: Callable[[Any], Tensor]) -> None:
    """Raises for the first difference in the order of the forward pass. The backward pass, which
    found one, asks for the last tensors first."""
    for packed in entries:
        if packed.was is None or _may_be_internal(packed.was):
            continue  # which only the node that has saved it knows
        try:
            now = inner_unpack(packed.holder)
        except RuntimeError:  # this one has been used already
            continue
        _compare(packed.was, now)


class _Callers:
    """The modules that are running in this thread, outermost first, by their names in ``root``."""

    def __init__(self, root: Any) -> None:
        if isinstance(root, functools.partial):
            root = root.args[0] if root.args else root.func
        root = getattr(root, "__self__", root)  # of a method
        modules = root.named_modules() if isinstance(root, nn.Module) else ()
        self._names = {module: name or type(module).__name__ for name, module in modules}
        self._running: list[str] = []
        self._thread = threading.get_ident()

    def innermost(self) -> str:
        return self._running[-1] if self._running else "the function itself"

    @contextmanager
    def watched(self) -> Iterator[None]:
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running.append(self._names.get(module, type(module).__name__))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if threading.get_ident() == self._thread and self._running:
            self._running.pop()


@contextmanager
def verified_region(fn: Callable[..., Any]) -> Iterator[None]:
    """Verifies the tensors that are saved within, in the forward pass of a checkpoint whose hooks
    are in force."""
    inner = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if inner is None:  # nothing is dropped, as under torch.no_grad()
        yield
        return
    inner_pack, inner_unpack = inner
    callers = _Callers(fn)
    entries: list[weakref.ref[_Packed]] = []

    def pack(x: Tensor) -> _Packed:
        was = None
        if not is_trained(x):  # which is not dropped
            was = _dropped(f"saved tensor {len(entries)}, of {callers.innermost()},", x)
        packed = _Packed(inner_pack(x), was)
        entries.append(weakref.ref(packed))
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
    with callers.watched(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def verified_results(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``fn`` with the results of its second and later calls compared with its first."""
    first: list[Dropped] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        results = fn(*args, **kwargs)
        tensors = [x for x in tree_leaves(results) if isinstance(x, Tensor)]
        if not first:
            first.extend(_dropped(f"result {k}", x) for k, x in enumerate(tensors))
            return results
        if len(tensors) != len(first):
            raise RecomputeError(
                f"checkpoint: the function returned {len(first)} tensors, and {len(tensors)} when "
                f"it was called again. {_CAUSES}"
            )
        for was, now in zip(first, tensors):
            _compare(was, now)
        return results

    return call

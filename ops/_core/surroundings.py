"""Keeps what a function must find as it was to compute the same again, beside random numbers: the
settings that choose kernels, and the parameters and buffers of modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import is_autocast_available
from torch.autograd import forward_ad
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.nn.parameter import is_lazy

from .registration import FLOATS

DEVICES = ("cpu", "cuda", "meta")
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)  # a fake has memory of its own, which is counted


def is_plain(x: Any) -> bool:
    """Returns whether ``x`` is a Tensor, a Parameter or a fake of one, and of no other subclass."""
    return type(x) in _PLAIN


def takes_ops(x: Any, ranks: Collection[int] | None = None) -> bool:
    """Returns whether ops of Headroom on rows take ``x`` here, as those of torch do, and it has one
    of these numbers of dimensions.

    They take no float64, no nested and subclassed tensors and no other devices. Transforms of
    ``torch.func`` and forward-mode derivatives are left to torch, and so are traces that leave
    Python, which shall not depend on this package.
    """
    if (
        not is_plain(x)
        or x.dtype not in FLOATS
        or x.device.type not in DEVICES
        or x.is_nested
        or x.layout is not torch.strided
        or (ranks is not None and x.dim() not in ranks)
    ):
        return False
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return not (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets torch.compile call ``function`` and keep its result, as
    ``torch.compiler.assume_constant_result`` does, which would import all of ``torch._dynamo``."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def viewed(x: Tensor) -> Tensor:
    """Returns the tensor that ``x`` is a view of, or ``x``."""
    return x if x._base is None else x._base


def is_trained(x: Tensor) -> bool:
    """Returns whether ``x`` is a leaf that requires a gradient, or a view of one. The graph holds
    such a tensor, whoever else drops it."""
    base = viewed(x)
    return base.is_leaf and base.requires_grad


LENT_FOR = "_headroom_lent_for"  # the attribute of a tensor that stands for a parameter


def cast_parameter(x: Tensor) -> Tensor | None:
    """Returns the parameter that ``x`` is a cast of by autocast, or a view of one; or None."""
    node = viewed(x).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    (below, index), *_ = node.next_functions
    lent = getattr(below, "lent", None)  # of a node that lends parameters
    return getattr(below, "variable", None) if lent is None else lent[index]


def version_of(x: Tensor) -> int | None:
    """Returns how often a tensor has been written; None if it was made in inference mode, or a lazy
    module has still to make it."""
    return None if is_lazy(x) or x.is_inference() else x._version


def _autocast(kind: str) -> tuple[Any, ...]:
    return (
        kind,
        torch.get_autocast_dtype(kind),
        torch.is_autocast_enabled(kind),
        torch.is_autocast_cache_enabled(),
    )


def _backends() -> tuple[Any, ...]:
    """Returns which backends attention may take, in their order."""
    return _cur_sdpa_kernel_backends(), torch._C._get_sdp_priority_order()


class Settings:
    """Keeps what decides which kernels run, now: autocast, and the choice of
    :func:`torch.nn.attention.sdpa_kernel`."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._autocast = [_autocast(kind) for kind in kinds if is_autocast_available(kind)]
        self._chosen, self._order = _backends()

    def hold(self) -> bool:
        """Returns whether they are in force."""
        return (self._chosen, self._order) == _backends() and all(
            options == _autocast(options[0]) for options in self._autocast
        )

    def settled(self) -> Settings:
        """Returns these settings as they are behind the first run of what they are kept for: torch
        decides on the order of backends during the first call of attention, on some devices."""
        order = torch._C._get_sdp_priority_order()
        if order == self._order:
            return self
        settings = Settings(())
        settings._autocast, settings._chosen, settings._order = self._autocast, self._chosen, order
        return settings

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for options in self._autocast:
                if options != _autocast(options[0]):
                    stack.enter_context(torch.autocast(*options))
            if (self._chosen, self._order) != _backends():
                # sdpa_kernel() leaves what it turns on first in the order, also when it ends.
                order = torch._C._get_sdp_priority_order()
                stack.callback(torch._C._set_sdp_priority_order, order)
                stack.enter_context(sdpa_kernel(self._chosen, set_priority=True))
                torch._C._set_sdp_priority_order(self._order)
            yield


_around: ContextVar[Callable[[], AbstractContextManager[Any]] | None]
_around = ContextVar("around", default=None)


@contextmanager
def within(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Lets what is called while it lasts, and called again in the backward pass, find ``context()``
    around it there."""
    token = _around.set(context)
    try:
        yield
    finally:
        _around.reset(token)


def again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that does what ``function`` does now, also when it is called in the
    backward pass: within what is around it here."""
    context = _around.get()
    if context is None:
        return function

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return called


def later_calls(
    function: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """Returns the function that does what ``function`` does, in its second and later calls within
    ``context()``: of a function that a checkpoint calls, these are the runs in backward passes."""
    has_run = False

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if not has_run:
            has_run = True
            return function(*args, **kwargs)
        with context():
            return function(*args, **kwargs)

    return called


class Parameters:
    """Keeps the parameters of modules as they are now, to find out whether they are the same later.

    Neither DTensors nor other subclasses are looked at. FSDP2 frees and allocates the memory of a
    parameter, but leaves its storage and its version, so those are compared.
    """

    def __init__(self, modules: Iterable[torch.nn.Module | None]) -> None:
        self._seen = [
            (part, name, p, p.untyped_storage(), p._version)
            for module in modules
            if module is not None
            for part in module.modules()
            for name, now in part._parameters.items()
            for p in (getattr(now, LENT_FOR, now),)
            if is_plain(p) and not p.is_inference()
        ]

    def changed(self) -> str | None:
        """Returns which parameter has been replaced or changed, and how, or None."""
        for part, name, p, storage, version in self._seen:
            now = part._parameters.get(name)
            now = getattr(now, LENT_FOR, now)
            if now is not p and not is_plain(now) and now is not None:
                continue
            what = f"parameter {name} of {type(part).__name__}"
            if now is not p or p.untyped_storage()._cdata != storage._cdata:
                return f"{what} has been replaced"
            if p._version != version:
                return f"{what} is at version {p._version}, wanted version {version}"
        return None


class Buffers:
    """Keeps the buffers of modules as they are now, such as the running statistics of BatchNorm.

    Buffers of more than ``limit`` bytes are not copied, but watched: weights that a model keeps in
    buffers, quantized ones for instance, do not change. So are sparse buffers, and those of lazy
    modules, which have no size yet.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], limit: int | None = None) -> None:
        self._names = {part: set(part._buffers) for module in modules for part in module.modules()}
        self._seen = [
            (
                part,
                name,
                buffer,
                _copied(buffer, limit),
                None if buffer is None else version_of(buffer),
            )
            for part in self._names
            for name, buffer in part._buffers.items()
        ]

    def lost(self) -> str | None:
        """Returns the name of a buffer that has been changed and was not copied, or None."""
        for part, name, buffer, copy, version in self._seen:
            if buffer is not None and copy is None and version_of(buffer) != version:
                return f"buffer {name} of {type(part).__name__}"
        return None

    @torch.no_grad()
    def restore(self) -> None:
        """Gives modules the buffers that they had, with the same bits, and no others."""
        for part, names in self._names.items():
            for name in part._buffers.keys() - names:
                delattr(part, name)
        for part, name, buffer, copy, _ in self._seen:
            part._buffers[name] = buffer
            if buffer is not None and copy is not None and not _same(buffer, copy):
                buffer.copy_(copy)


def _copied(buffer: Tensor | None, limit: int | None) -> Tensor | None:
    if buffer is None or is_lazy(buffer) or buffer.layout != torch.strided:
        return None
    if limit is not None and buffer.nbytes > limit:
        return None
    return buffer.detach().clone()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b))

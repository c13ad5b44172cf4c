"""Hears which tensors autograd keeps, when gradients arrive and when blocks run, through hooks that
change neither numbers nor what is kept, and that are gone afterwards."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import _enable_record_function
from torch.autograd.graph import saved_tensors_hooks

from .._core.recompute import check_version
from .pytree import tensors_in

__all__ = ["hearing_blocks", "hearing_gradients", "listening", "unseen"]

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def _as_it_is(hook: _Hook) -> _Hook:
    return hook


def unseen(hook: _Hook) -> _Hook:
    """Returns a hook whose calls profilers of Python do not see, of which each would cost as much
    as the hook. Before Python 3.11 they see them."""
    api = ctypes.pythonapi
    if not hasattr(api, "PyThreadState_EnterTracing"):
        return hook
    enter, leave, here = (
        api.PyThreadState_EnterTracing,
        api.PyThreadState_LeaveTracing,
        api.PyThreadState_Get,
    )
    here.restype = ctypes.c_void_p
    enter.argtypes = leave.argtypes = [ctypes.c_void_p]

    def call(*args: Any, **kwargs: Any) -> Any:
        thread = here()
        enter(thread)
        try:
            return hook(*args, **kwargs)
        finally:
            leave(thread)

    return call  # type: ignore[return-value]


@contextmanager
def hearing_gradients(
    module: nn.Module, arrived: Callable[[str, nn.Parameter], None]
) -> Iterator[None]:
    """Calls ``arrived``, while it lasts, with the name of a parameter and the parameter whenever a
    gradient has been added to it."""
    with ExitStack() as hooks:
        for name, param in module.named_parameters():
            if param.requires_grad:
                hook = functools.partial(arrived, name)
                hooks.callback(param.register_post_accumulate_grad_hook(hook).remove)
        yield


@contextmanager
def hearing_blocks(
    blocks: Iterable[nn.Module], before: Callable[..., None], after: Callable[..., None]
) -> Iterator[None]:
    """Calls, while it lasts, ``before(block, args, kwargs)`` and ``after(block, args, result)`` of
    each run of a block."""
    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(after).remove)
        yield


def _given_back(tensor: Tensor, version: int) -> Tensor:
    """Returns a tensor that was saved at ``version``, or raises if it was changed in place."""
    check_version(tensor, version)
    return tensor


def listening(
    note: Callable[[Tensor], None],
    place: Callable[[], Any] = lambda: None,
    unpacked: Callable[[Any], None] = lambda _: None,
    asks: Callable[[], bool] = lambda: False,
    hidden: Callable[[_Hook], _Hook] = _as_it_is,
) -> ExitStack:
    """Returns a context in which ``note`` gets every tensor that autograd keeps for the backward
    pass, also within the hooks of others, such as checkpoints.

    Args:
        place: what it returns when a tensor is kept, if that is not None,
        unpacked: gets when the tensor is asked for: the name of the module that ran, say.
        asks: while it returns True, hooks of others are asked and compute nothing.
        hidden: wraps hooks, as :func:`unseen`.

    Of those, what counts is what their hooks return, because that is kept, and within a backward
    pass what is computed again.
    """
    enter, note = saved_tensors_hooks.__enter__, hidden(note)

    def wrapped(pack: Callable) -> Callable:
        @functools.wraps(pack)  # a checkpoint is told by the name and the marks of its hook
        def listening_pack(tensor: Tensor) -> Any:
            if torch._C._current_graph_task_id() != -1:
                note(tensor)
            packed = pack(tensor)
            for kept in tensors_in(packed):
                note(kept)
            return packed

        return listening_pack

    def silent(unpack: Callable) -> Callable:
        return lambda packed: torch.empty(0) if asks() else unpack(packed)

    def listening_enter(self: saved_tensors_hooks) -> None:
        given = self.pack_hook, self.unpack_hook
        self.pack_hook, self.unpack_hook = wrapped(given[0]), silent(given[1])
        try:
            enter(self)
        finally:
            self.pack_hook, self.unpack_hook = given

    def pack(tensor: Tensor) -> tuple[Tensor, int, Any]:
        note(tensor)
        if tensor.is_leaf:
            return tensor, tensor._version, place()
        # An output that kept its node would keep itself alive. Recorders need not see this.
        _enable_record_function(False)
        try:
            return tensor.detach(), tensor._version, place()
        finally:
            _enable_record_function(True)

    def unpack(kept: tuple[Tensor, int, Any]) -> Tensor:
        tensor, version, name = kept
        if name is not None:
            unpacked(name)
        return _given_back(tensor, version)

    with ExitStack() as undo:
        undo.enter_context(saved_tensors_hooks(hidden(pack), hidden(unpack)))
        undo.callback(setattr, saved_tensors_hooks, "__enter__", enter)
        saved_tensors_hooks.__enter__ = listening_enter
        return undo.pop_all()

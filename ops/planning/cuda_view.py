"""Lets code that is written for CUDA run on fakes on a machine without a GPU."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from .products import capability
from .recorder import Recorder

__all__ = ["HostTold", "autocast_told", "cuda_view", "kernels"]

_VARLEN = "torch.nn.attention.varlen"


@contextmanager
def cuda_view() -> Iterator[None]:
    """Enables ``torch.autocast("cuda")`` and generators, keeps no state of CUDA's random numbers in
    checkpoints, and answers questions about the GPU as the one that plans are for does."""
    planned_for = capability()
    with ExitStack() as stack:

        def patch(target: str, name: str, value: Any) -> None:
            module = sys.modules.get(target)
            if module is not None and hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, value))

        patch("torch.cuda.amp.common", "amp_definitely_not_available", lambda: False)
        patch("torch.amp.autocast_mode", "amp_definitely_not_available", lambda: False)
        patch("torch.utils.checkpoint", "get_device_states", lambda *args: ([], []))
        patch("torch.utils.checkpoint", "set_device_states", lambda *args, **options: None)
        patch("torch", "Generator", _Generator)
        patch("torch.cuda", "is_bf16_supported", lambda *args, **options: True)
        patch("torch.cuda", "current_device", lambda: 0)
        patch("torch.cuda", "synchronize", lambda *args: None)
        patch("torch.cuda", "get_device_capability", lambda *args: planned_for)
        importlib.import_module(_VARLEN)  # which remembers what it was told, also for later steps
        patch(_VARLEN, "_should_use_cudnn", lambda index: False)
        patch(_VARLEN, "_cudnn_version_and_major_capability", lambda index: (None, 8))
        yield


class _Generator(torch.Generator):
    """A generator of the CPU, also where one of a GPU is asked for: on fakes nothing is drawn."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


class HostTold(TorchFunctionMode):
    """Tells the recorder when a program makes a tensor that it says is on the CPU. In operations
    that cannot be told from one that is made where another tensor is, of which C++ is told that it
    is on the CPU."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder, self._makers = recorder, _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        if func not in self._makers or str(kwargs.get("device")) != "cpu":
            return func(*args, **kwargs)
        before, recorder.is_on_host = recorder.is_on_host, True
        try:
            made = func(*args, **kwargs)
        finally:
            recorder.is_on_host = before
        made.drawn_on_host = func is torch.randint  # such as the seed of a generator
        return made


@contextmanager
def autocast_told(recorder: Recorder) -> Iterator[None]:
    """Tells the recorder when autocast is on. In an operation that autocast has taken, torch says
    that it is off."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    before: list[bool] = []

    def entered(self: Any) -> Any:
        result = enter(self)
        before.append(recorder.has_autocast)
        if self.device == "cuda":
            recorder.has_autocast = bool(self._enabled)
        return result

    def left(self: Any, *raised: Any) -> Any:
        recorder.has_autocast = before.pop()
        return leave(self, *raised)

    with (
        mock.patch.object(torch.autocast, "__enter__", entered),
        mock.patch.object(torch.autocast, "__exit__", left),
    ):
        yield


@contextmanager
def kernels(recorder: Recorder) -> Iterator[None]:
    """Chooses kernels as the device of the plan does, also where torch asks in C++ where a tensor
    is: fakes cannot answer there that it is on a GPU. Tells the recorder of operations whose
    parts add in place.

    They are registered with the dispatcher, because modes are not there in everything that a step
    runs: what is recomputed in the backward pass, autograd functions, and functions of torch that
    call others.
    """
    library = torch.library.Library("aten", "IMPL")

    def overload(name: str) -> Any:
        packet, _, which = name.partition(".")
        return getattr(getattr(torch.ops.aten, packet), which or "default")

    def register(name: str, chosen: Callable[..., Any], key: str) -> None:
        whole = overload(name)

        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(x, FakeTensor):  # not of another thread
                return chosen(x, *args, **kwargs)
            return whole._op_dk(_COMPOSITE, x, *args, **kwargs)

        library.impl(name, call, key)

    def below_autocast(name: str, key: str, adds_in_place: bool = False) -> None:
        """Registers an operation whose parts ask where tensors are, when autocast, which answers
        that, has passed. Some add a mask or a bias in place: attention.cpp, Linear.cpp."""
        whole = overload(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            before = recorder.has_autocast, recorder.adds_in_place
            recorder.has_autocast = False
            recorder.adds_in_place |= adds_in_place
            try:
                return whole._op_dk(_COMPOSITE, *args, **kwargs)
            finally:
                recorder.has_autocast, recorder.adds_in_place = before

        register(name, call, key)

    key = "AutogradCUDA" if recorder.device.type == "cuda" else "AutogradCPU"
    try:
        if recorder.device.type == "cuda":
            register("scaled_dot_product_attention", _attention, key)
            register("dropout", _dropout, key)
            # They convert what has its dtype already, if told of another device than before.
            for name in ("softmax.int", "log_softmax.int"):
                below_autocast(name, key)
        below_autocast("_scaled_dot_product_attention_math", key, adds_in_place=True)
        below_autocast("linear", key, adds_in_place=True)
        yield
    finally:
        library._destroy()


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_DROPOUT = torch.ops.aten.dropout.default


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes attention as sdp_utils.cpp chooses: by flash attention for 16-bit numbers without a
    mask, by the memory-efficient kernel otherwise, and by plain products where neither fits. cuDNN,
    which is chosen before flash attention on 9.0 and 10.0, has results of the same bytes."""
    backends = torch.backends.cuda
    ops = torch.ops.aten
    is_ampere = capability() >= (8, 0)  # or newer
    size, is_plain = query.shape[-1], query.dim() == 4
    small = query.dtype in (torch.bfloat16, torch.float16)
    one_head = is_plain and key.shape[1] == value.shape[1] == 1 and _efficient_shares_heads()
    shares_heads = is_plain and not query.shape[1] == key.shape[1] == value.shape[1]
    if shares_heads and not (enable_gqa or one_head):
        is_plain = False
    fits = is_plain and small and attn_mask is None and size == value.shape[-1] and size <= 256
    fits = fits and is_ampere and (not is_causal or query.shape[-2] == key.shape[-2])
    if fits and backends.flash_sdp_enabled():
        pad = -size % 8
        q, k, v = (F.pad(x, (0, pad)) if pad else x for x in (query, key, value))
        flash = ops._scaled_dot_product_flash_attention
        factor = size**-0.5 if scale is None else scale
        out = _first([*flash(q, k, v, dropout_p, is_causal, scale=factor)])
        return out[..., :size] if pad else out
    aligned = 8 if small else 4 if is_ampere else 1
    fits = is_plain and query.dtype != torch.float64
    fits = fits and (is_ampere or query.dtype != torch.bfloat16)
    fits = fits and size % aligned == value.shape[-1] % aligned == 0
    fits = fits and (not shares_heads or _efficient_shares_heads())
    if fits and backends.mem_efficient_sdp_enabled():
        if attn_mask is not None:
            attn_mask = _added(attn_mask, query).expand(
                query.shape[0], query.shape[1], query.shape[2], key.shape[2]
            )
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        efficient = ops._scaled_dot_product_efficient_attention
        given = (query, key, value, attn_mask, grad, dropout_p, is_causal)
        return _first([*efficient(*given, scale=scale)])
    if attn_mask is not None:
        attn_mask = _added(attn_mask, query)
    return ops._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _first(results: list[Tensor]) -> Tensor:
    """Returns the first result. The others are freed in their order, as by C++; a tuple would free
    the last one first, and the next request take another gap."""
    first = results.pop(0)
    while results:
        results.pop(0)
    return first


@functools.cache
def _efficient_shares_heads() -> bool:
    """Returns whether the memory-efficient kernel of this torch lets heads of the query share those
    of keys and values: then their gradients have fewer heads, too."""
    q, kv = torch.empty(1, 2, 8, 8, device="meta"), torch.empty(1, 1, 8, 8, device="meta")
    rows, none = torch.empty(1, 2, 32, device="meta"), torch.empty((), device="meta")
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    with _disable_current_modes():
        grads = backward(q, q, kv, kv, None, q, rows, none, none, 0.0, [True, True, True, False])
    return bool(grads[1].shape == kv.shape)


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """Returns what a mask adds to scores."""
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, float("-inf"))


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1 and input.numel():  # Dropout.cpp, is_fused_kernel_acceptable
        return torch.ops.aten.native_dropout(input, p, True)[0]
    return _DROPOUT._op_dk(_COMPOSITE, input, p, train)

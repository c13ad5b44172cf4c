"""Lets code that is written for CUDA run on fakes on a machine without a GPU."""

from __future__ import annotations

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

from .device import capability
from .recorder import Recorder

__all__ = ["autocast_told", "cuda_view", "kernels"]

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
    is: fakes cannot answer there that it is on a GPU. Tells the recorder of attention that is made
    of products.

    They are registered with the dispatcher, because modes are not there in everything that a step
    runs: what is recomputed in the backward pass, autograd functions, and functions of torch that
    call others.
    """
    library = torch.library.Library("aten", "IMPL")

    def register(name: str, chosen: Callable[..., Any], key: str) -> None:
        whole = getattr(torch.ops.aten, name).default

        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(x, FakeTensor):  # not of another thread
                return chosen(x, *args, **kwargs)
            return whole._op_dk(_COMPOSITE, x, *args, **kwargs)

        library.impl(name, call, key)

    def products(*args: Any, **kwargs: Any) -> Any:
        recorder.in_attention = True
        try:
            return _PRODUCTS._op_dk(_COMPOSITE, *args, **kwargs)
        finally:
            recorder.in_attention = False

    try:
        if recorder.device.type == "cuda":
            register("scaled_dot_product_attention", _attention, "AutogradCUDA")
            register("dropout", _dropout, "AutogradCUDA")
            register("_scaled_dot_product_attention_math", products, "AutogradCUDA")
        else:
            register("_scaled_dot_product_attention_math", products, "AutogradCPU")
        yield
    finally:
        library._destroy()


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_PRODUCTS = torch.ops.aten._scaled_dot_product_attention_math.default
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
    mask, by the memory-efficient kernel otherwise, and by plain products where neither fits."""
    backends = torch.backends.cuda
    ops = torch.ops.aten
    small = query.dtype in (torch.bfloat16, torch.float16)
    fits = query.dim() == 4 and query.shape[-1] == value.shape[-1] and query.shape[-1] <= 256
    if enable_gqa and query.shape[-3] != key.shape[-3] and not (small and attn_mask is None):
        fits = False
    if fits and small and attn_mask is None and backends.flash_sdp_enabled():
        size = query.shape[-1]
        pad = -size % 8
        q, k, v = (F.pad(x, (0, pad)) if pad else x for x in (query, key, value))
        out = ops._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, scale=size**-0.5 if scale is None else scale
        )[0]
        return out[..., :size] if pad else out
    if fits and query.dtype != torch.float64 and backends.mem_efficient_sdp_enabled():
        if attn_mask is not None:
            attn_mask = _added(attn_mask, query).expand(
                query.shape[0], query.shape[1], query.shape[2], key.shape[2]
            )
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        return ops._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, grad, dropout_p, is_causal, scale=scale
        )[0]
    if attn_mask is not None:
        attn_mask = _added(attn_mask, query)
    return ops._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


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

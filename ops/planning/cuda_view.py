"""Lets code that is written for CUDA run on fakes on a machine without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .recorder import Recorder

__all__ = ["Kernels", "cuda_view", "functions_told"]


@contextmanager
def cuda_view() -> Iterator[None]:
    """While it lasts, ``torch.autocast("cuda")`` is enabled, checkpoints keep no state of CUDA's
    random numbers, and questions about the GPU are answered as on one of compute capability 8.0."""
    with ExitStack() as stack:

        def patch(target: str, name: str, value: Any) -> None:
            module = sys.modules.get(target)
            if module is not None and hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, value))

        patch("torch.cuda.amp.common", "amp_definitely_not_available", lambda: False)
        patch("torch.amp.autocast_mode", "amp_definitely_not_available", lambda: False)
        patch("torch.utils.checkpoint", "get_device_states", lambda *args: ([], []))
        patch("torch.utils.checkpoint", "set_device_states", lambda *args, **options: None)
        patch("torch.cuda", "is_bf16_supported", lambda *args, **options: True)
        patch("torch.cuda", "current_device", lambda: 0)
        patch("torch.cuda", "synchronize", lambda *args: None)
        patch("torch.cuda", "get_device_capability", lambda *args: (8, 0))
        yield


@contextmanager
def functions_told(recorder: Recorder) -> Iterator[None]:
    """Tells the recorder of the results of autograd functions, which get a graph after their
    forward has run without one."""
    function = torch.autograd.Function
    own = vars(function).get("apply")  # a method of Python in some versions, else of C++

    def told(cls: Any, *args: Any, **kwargs: Any) -> Any:
        forward = cls.forward

        def noted(*inputs: Any, **options: Any) -> Any:
            results = forward(*inputs, **options)
            recorder.expect_metadata(results)
            return results

        with mock.patch.object(cls, "forward", staticmethod(noted)):
            parent: Any = super(function, cls)
            bound = parent.apply if own is None else own.__get__(None, cls)
            return bound(*args, **kwargs)

    with mock.patch.object(function, "apply", classmethod(told)), autocast_told(recorder):
        yield


@contextmanager
def autocast_told(recorder: Recorder) -> Iterator[None]:
    """Tells the recorder when autocast is on. Inside of an operation that autocast has taken, torch
    says that it is off."""
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


class Kernels(TorchFunctionMode):
    """Chooses kernels as CUDA does, where functions that torch decomposes in C++ ask where a tensor
    is: fakes cannot answer there that it is on a GPU. Tells the recorder of attention."""

    def __init__(self, recorder: Recorder, is_cuda: bool) -> None:
        super().__init__()
        self._recorder = recorder
        self._choices = _CHOICES if is_cuda else {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        chosen = self._choices.get(func)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs) if chosen is None else chosen(func, *args, **kwargs)
        self._recorder.in_attention = True
        try:
            return func(*args, **kwargs) if chosen is None else chosen(func, *args, **kwargs)
        finally:
            self._recorder.in_attention = False


def _attention(
    func: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As sdp_utils.cpp chooses: flash attention for 16-bit numbers without a mask, the
    memory-efficient kernel otherwise, and plain products where neither fits."""
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
            if attn_mask.dtype == torch.bool:
                zero = torch.zeros((), dtype=query.dtype, device=query.device)
                attn_mask = torch.where(attn_mask, zero, float("-inf"))
            attn_mask = attn_mask.expand(
                query.shape[0], query.shape[1], query.shape[2], key.shape[2]
            )
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        return ops._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, grad, dropout_p, is_causal, scale=scale
        )[0]
    return func(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _dropout(
    func: Callable[..., Any], input: Tensor, p: float = 0.5, *rest: Any, **options: Any
) -> Tensor:
    training = options.get("training", options.get("train", rest[0] if rest else True))
    inplace = options.get("inplace", rest[1] if len(rest) > 1 else False)
    if training and 0 < p < 1 and not inplace:  # Dropout.cpp, is_fused_kernel_acceptable
        return torch.ops.aten.native_dropout(input, p, True)[0]
    return func(input, p, *rest, **options)


_CHOICES: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    torch.dropout: _dropout,
}

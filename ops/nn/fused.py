"""Finds out whether the feed-forward half of a block can be the one op that mlp_block is."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .._core.registration import FLOATS
from .._core.rows import autocast_dtype
from ..functional.linear import linear_forward
from ..functional.linear_quantized import weight_and_bias
from .functional import mlp_block
from .linear import Linear
from .mlp import MLP
from .norms import LayerNorm, RMSNorm
from .quantized import Linear4bit, Linear8bit

FEW_ROWS = 16  # of x: a layer of few bits then decodes its weight on the way, which is faster

# Classes, and functions in the place of a forward, that draw no random numbers.
known: set[Any] = {nn.Linear, Linear, linear_forward, Linear4bit, Linear8bit, RMSNorm, LayerNorm}


def is_untouched(module: nn.Module) -> bool:
    """Returns whether calling the module does nothing but what its class says, or a known function
    in place of its ``forward``."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if module._backward_hooks or module._backward_pre_hooks:
        return False
    own = vars(module).get("forward")
    return own is None or getattr(own, "func", None) in known


def is_known(module: nn.Module | None) -> bool:
    """Returns whether the module is unmodified and draws no random numbers; True for None. What a
    class of ``known`` draws only at times, its ``draws`` says."""
    if module is None:
        return True
    if not (type(module) in known or "forward" in vars(module)) or not is_untouched(module):
        return False
    return not getattr(module, "draws", False)


def can_fuse(x: Tensor, linears: tuple[nn.Module, ...], others: tuple[nn.Module, ...]) -> bool:
    """Returns whether ``mlp_block`` can read the weights of these Linears and modules.

    Not with autocast, which adds in the dtype of x; nor where other modules have taken the place of
    Linears, such as adapters, or of their weights, such as those of tensor parallelism; nor where
    some of them are of few bits and others are not.
    """
    return (
        autocast_dtype(x.device.type) is None
        and (_are_dense(x, linears) or _are_of_few_bits(x, linears))
        and all(is_untouched(module) for module in (*others, *linears))
        and all(type(linear.weight) in (nn.Parameter, FakeTensor) for linear in linears)
    )


def _are_dense(x: Tensor, linears: tuple[Any, ...]) -> bool:
    return all(
        type(linear) in (nn.Linear, Linear) and linear.weight.dtype == x.dtype for linear in linears
    )


def _are_of_few_bits(x: Tensor, linears: tuple[Any, ...]) -> bool:
    return (
        all(type(linear) in (Linear4bit, Linear8bit) for linear in linears)
        and len({(each.format, each.block_size, each.nested) for each in linears}) == 1
        and all(type(linear.scales) in (nn.Parameter, FakeTensor) for linear in linears)
        and x.dtype in FLOATS
        and x.shape[:-1].numel() > FEW_ROWS
    )


def is_fusible(norm: nn.Module, mlp: nn.Module, x: Tensor) -> bool:
    """Returns whether :func:`fused_mlp` is ``x + mlp(norm(x))``."""
    if type(norm) not in (RMSNorm, LayerNorm) or type(mlp) is not MLP:
        return False
    return can_fuse(x, (mlp.first, mlp.down), (norm, mlp))


def fused_mlp(norm: nn.Module, mlp: MLP, x: Tensor, save: str) -> Tensor:
    """Returns ``x + mlp(norm(x))``. ``save`` is what ``mlp_block`` calls so."""
    rms = isinstance(norm, RMSNorm)
    assert isinstance(norm, (RMSNorm, LayerNorm))
    (first, first_bias), (down, down_bias) = (
        weight_and_bias(linear, x.dtype) for linear in (mlp.first, mlp.down)
    )
    return mlp_block(
        x,
        norm.weight,
        first,
        down,
        norm_bias=None if rms else norm.bias,
        gate_up_bias=first_bias,
        down_bias=down_bias,
        norm="rms" if rms else "layer",
        eps=norm.epsilon if rms else norm.eps,
        offset=norm.offset if rms else 0.0,
        casting=norm.casting if rms else "once",
        activation=mlp.activation,
        save=save,
    )

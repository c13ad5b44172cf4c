"""Finds out whether the feed-forward half of a block can be the one op that mlp_block is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .._core.registration import FLOATS
from .._core.rows import autocast_dtype
from .._core.surroundings import takes_ops
from ..functional.linear import linear_forward
from ..functional.linear_quantized import weight_and_bias
from ..functional.quantize_matrix import QuantizedMatrix
from .functional import mlp_block
from .linear import Linear
from .mlp import MLP
from .mlp_lora import Factor
from .norms import LayerNorm, RMSNorm
from .quantized import Linear4bit, Linear8bit, QuantizedLinear

FEW_ROWS = 16  # of x: a layer of few bits then decodes its weight on the way, which is faster

# Classes, and functions in the place of a forward, that draw no random numbers.
known: set[Any] = {nn.Linear, Linear, linear_forward, Linear4bit, Linear8bit, RMSNorm, LayerNorm}

# Functions that read the matrix, the bias and the adapter of a layer that has one, by the class of
# the layer or the function in the place of its forward. They return None where it computes more.
readers: dict[Any, Callable[[Any, Tensor], Factor | None]] = {}


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_untouched(module: nn.Module) -> bool:
    """Returns whether calling the module does nothing but what its class says, or a known function
    in place of its ``forward``."""
    if _has_hooks(module):
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
    Linears, or of their weights, such as those of tensor parallelism; nor where some of them are of
    few bits and others are not, without adapters.
    """
    if autocast_dtype(x.device.type) is not None or not all(map(is_untouched, others)):
        return False
    if any(map(_reader, linears)):
        return all(factor_of(linear, x) is not None for linear in linears)
    return (
        (_are_dense(x, linears) or _are_of_few_bits(x, linears))
        and all(map(is_untouched, linears))
        and all(type(linear.weight) in (nn.Parameter, FakeTensor) for linear in linears)
    )


def _reader(linear: nn.Module) -> Callable[[Any, Tensor], Factor | None] | None:
    own = vars(linear).get("forward")
    return readers.get(type(linear) if own is None else getattr(own, "func", None))


def factor_of(linear: nn.Module, x: Tensor) -> Factor | None:
    """Returns the matrix, the bias and the adapter of a layer beside whose matrix, or those of the
    other layers, ``mlp_block`` takes adapters; None where it cannot read them."""
    if (reader := _reader(linear)) is not None:
        return None if _has_hooks(linear) else reader(linear, x)
    matrix = frozen_matrix(linear, x)
    return None if matrix is None else Factor(matrix, bias_of(linear, x))


def bias_of(linear: Any, x: Tensor) -> Tensor | None:
    """Returns the bias of a layer in the dtype of x, or None."""
    return None if linear.bias is None else linear.bias.to(x.dtype)


def frozen_matrix(linear: nn.Module, x: Tensor) -> Tensor | QuantizedMatrix | None:
    """Returns the matrix of a linear layer, if ops that give it no gradient may take the place of a
    call; None where the layer does more, is trained, or has another dtype."""
    if not is_known(linear) or not takes_ops(x):
        return None
    if isinstance(linear, QuantizedLinear):
        return linear.matrix
    if type(linear) not in (nn.Linear, Linear) or not takes_ops(linear.weight):
        return None
    fits = autocast_dtype(x.device.type) is not None or linear.weight.dtype == x.dtype
    return linear.weight if fits and not linear.weight.requires_grad else None


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


def weights_of(
    x: Tensor, first: nn.Module, *rest: nn.Module
) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Returns the matrices of the first Linear and of the last, and by their names the other
    arguments of ``mlp_block`` for Linears that it can read: the first, ``up`` if it is a Linear of
    its own, and ``down``."""
    linears = (first, *rest)
    if any(map(_reader, linears)):
        factors = [factor_of(linear, x) for linear in linears]
    else:
        factors = [Factor(*weight_and_bias(linear, x.dtype)) for linear in linears]
    gate, *others, down = (factor for factor in factors if factor is not None)
    up = others[0] if others else Factor(None)
    named = {"gate_up": gate, "up": up, "down": down}
    options = {f"{name}_bias": factor.bias for name, factor in named.items()}
    options |= {f"{name}_adapter": factor.adapter for name, factor in named.items()}
    return (gate.weight, down.weight), options | {"up_weight": up.weight}


def is_fusible(norm: nn.Module, mlp: nn.Module, x: Tensor) -> bool:
    """Returns whether :func:`fused_mlp` is ``x + mlp(norm(x))``."""
    if type(norm) not in (RMSNorm, LayerNorm) or type(mlp) is not MLP:
        return False
    return can_fuse(x, (mlp.first, mlp.down), (norm, mlp))


def fused_mlp(norm: nn.Module, mlp: MLP, x: Tensor, save: str) -> Tensor:
    """Returns ``x + mlp(norm(x))``. ``save`` is what ``mlp_block`` calls so."""
    rms = isinstance(norm, RMSNorm)
    assert isinstance(norm, (RMSNorm, LayerNorm))
    matrices, options = weights_of(x, mlp.first, mlp.down)
    return mlp_block(
        x,
        norm.weight,
        *matrices,
        **options,
        norm_bias=None if rms else norm.bias,
        norm="rms" if rms else "layer",
        eps=norm.epsilon if rms else norm.eps,
        offset=norm.offset if rms else 0.0,
        casting=norm.casting if rms else "once",
        activation=mlp.activation,
        save=save,
    )

"""Brings the arguments of this package's losses into the form that ops take."""

from __future__ import annotations

from torch import Tensor

from .._core.rows import constant_factors
from .._core.surroundings import is_plain


def whole_layer(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the input, weight and bias of a linear layer; where FSDP2 has sharded them, gathered
    from the ranks and in the dtype of the input."""
    if is_plain(weight) and (bias is None or is_plain(bias)):
        return hidden, weight, bias
    from .gathered import gathered  # loads DTensor, which takes long

    whole_bias = None if bias is None else gathered(bias, hidden.dtype)
    return hidden, gathered(weight, hidden.dtype), whole_bias


def token_factors(factors: Tensor | None, target: Tensor) -> Tensor | None:
    """Returns ``token_weight``, which gets no gradient, in float32.

    Raises:
        RuntimeError: it requires grad, or has another shape than the targets.
    """
    if factors is not None and factors.shape != target.shape:
        raise RuntimeError(
            f"token_weight has shape {tuple(factors.shape)}, wanted that of target, "
            f"{tuple(target.shape)}"
        )
    return constant_factors(factors, "token_weight")

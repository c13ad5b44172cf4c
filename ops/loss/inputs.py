"""Brings the arguments of this package's losses into the form that ops take."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._core.checks import check_choice
from .._core.rows import constant_factors
from .._core.surroundings import is_plain
from ..functional.cross_entropy import REDUCTIONS


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


def check_names(
    reduction: str, denominator: Any, empty: str, stats: Any, known: tuple[str, ...]
) -> None:
    """Refuses how losses of rows become one, and names of statistics that are not ``known``."""
    check_choice("reduction", reduction, REDUCTIONS)
    if reduction == "none" and denominator is not None:
        raise ValueError(
            "denominator is given, but reduction is 'none'; divide the losses yourself"
        )
    check_choice("empty", empty, ("nan", "zero"))
    if isinstance(stats, str) or any(name not in known for name in stats):
        raise ValueError(f"stats is {stats!r}, wanted a list of names among {', '.join(known)}")


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

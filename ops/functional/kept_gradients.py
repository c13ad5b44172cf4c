"""Gradients that a forward pass has computed and keeps, for the backward pass to multiply by a
number. The inputs that they depend on are not kept, so a second derivative cannot be computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.registration import no_second_derivative

__all__ = ["may_overwrite", "multiplied", "origins_of", "without_derivative"]


def may_overwrite(kept: Tensor) -> bool:
    """Returns whether a saved tensor, which is unpacked now, is needed no more: the graph is not
    retained, and no transform or compiler looks on."""
    return type(kept) is Tensor and not (
        torch._C._are_functorch_transforms_active()
        or torch._C._autograd._get_current_graph_task_keep_graph()
    )


def multiplied(
    factor: Tensor, *kept: Tensor, dtype: torch.dtype, in_place: bool = True
) -> list[Tensor]:
    """Returns gradients times a number, in ``dtype``; if ``in_place``, where they lie, as far as
    that is possible."""
    return [
        one.mul_(factor)
        if in_place and one.dtype == dtype and may_overwrite(one)
        else (one * factor).to(dtype)
        for one in kept
    ]


def origins_of(inputs: Iterable[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """Returns, for each input that needs a gradient, a tensor without elements that autograd takes
    for a result of it. It says where gradients come from, and keeps no memory of the input."""
    with torch.enable_grad():
        return [
            x.narrow(0, 0, 0).clone() if x is not None and needed else None
            for x, needed in zip(inputs, needs)
        ]


def without_derivative(
    name: str,
    function: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor],
    origins: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Returns ``function(*tensors)`` in a backward pass. Where a second derivative may follow, one
    with respect to ``origins`` raises and names ``headroom::{name}``."""
    if not torch.is_grad_enabled():
        return tuple(function(*tensors))
    return _WithoutDerivative.apply(name, function, len(tensors), *tensors, *origins)


class _WithoutDerivative(torch.autograd.Function):
    """Computes gradients of which no derivative can be computed, and refuses one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        name: str, function: Callable[..., Sequence[Tensor]], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(function(*tensors[:count]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise no_second_derivative(ctx.name)

"""Gradients that a forward pass has computed and keeps, for the backward pass to multiply by a
number. The inputs that they depend on are not kept, so a second derivative cannot be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.registration import no_second_derivative
from .._core.row_ops import Gradient


def may_overwrite(saved: Tensor) -> bool:
    """Returns whether a saved tensor, which is unpacked now, is needed no more: the graph is not
    retained, and no transform or compiler looks on."""
    return type(saved) is Tensor and not (
        torch._C._are_functorch_transforms_active()
        or torch._C._autograd._get_current_graph_task_keep_graph()
    )


def multiplied(factor: Tensor, *kept: Tensor, dtype: torch.dtype, in_place: bool) -> list[Tensor]:
    """Returns gradients times a number, in ``dtype``; if ``in_place``, where they lie, as far as
    that is possible."""
    return [
        one.mul_(factor)
        if in_place and one.dtype == dtype and may_overwrite(one)
        else (one * factor).to(dtype)
        for one in kept
    ]


class KeptGradient:
    """Gives the gradient of an op whose forward pass computes those that are asked for.

    Args:
        derived: the gradient by the backward op, where the forward pass has not computed it.
        inputs: the arguments that have gradients.
        kept: results that are kept: what the gradients are to be scaled by, and these.
        is_done: takes a call's arguments and which of ``inputs`` need gradients, and returns
            whether the forward pass has computed them.
        scaled: takes a dtype, and returns a function of the gradient of the loss and of ``kept``,
            which returns the gradients in it.
    """

    def __init__(
        self,
        derived: Gradient,
        inputs: tuple[str, ...],
        kept: tuple[str, ...],
        is_done: Callable[[dict[str, Any], Sequence[bool]], bool],
        scaled: Callable[[torch.dtype], Callable[..., Sequence[Tensor]]],
    ) -> None:
        self._derived, self._inputs, self._kept = derived, inputs, kept
        self._is_done, self._scaled = is_done, scaled

    def save(self, ctx: Any, given: dict[str, Any], results: dict[str, Tensor]) -> None:
        first, *_ = inputs = [given[name] for name in self._inputs]
        needs = ctx.needs_input_grad[: len(inputs)]
        ctx.dtype, ctx.is_done = first.dtype, self._is_done(given, needs)
        if not ctx.is_done:
            self._derived.save(ctx, given, results)
            return
        # Tensors without elements that autograd takes for results of the inputs: they say where
        # gradients come from, and keep no memory of an input.
        with torch.enable_grad():
            ctx.origins = [
                x.narrow(0, 0, 0).clone() if x is not None and needed else None
                for x, needed in zip(inputs, needs)
            ]
        ctx.save_for_backward(*(results[name] for name in self._kept))
        _, *others = results.values()
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)

    def backward(
        self, ctx: Any, grads: dict[str, Tensor | None], needs: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        if not ctx.is_done:
            found = self._derived.backward(ctx, grads, needs)
            return {name: None if g is None else g.to(ctx.dtype) for name, g in found.items()}
        dloss = next(iter(grads.values()))
        if dloss is None:
            return {}
        function, tensors = self._scaled(ctx.dtype), (dloss, *ctx.saved_tensors)
        if not torch.is_grad_enabled():
            return dict(zip(self._inputs, function(*tensors)))
        name = self._derived.name
        found = _WithoutDerivative.apply(name, function, len(tensors), *tensors, *ctx.origins)
        return dict(zip(self._inputs, found))


class _WithoutDerivative(torch.autograd.Function):
    """Computes gradients, and refuses a derivative of them with respect to what they depend on."""

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

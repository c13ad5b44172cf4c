"""Completes ops that are registered from C++.

:func:`complete` is for ops without a derivative: it bumps version counters, and raises where a
gradient would be lost. :func:`differentiable` is for ops with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import binaries  # noqa: F401  (registers the ops)

__all__ = ["FLOATS", "complete", "differentiable", "require"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels read and write

_library = torch.library.Library("headroom", "IMPL")


def require(condition: bool, message: str) -> None:
    """Raises in a fake, while an op is traced, the error that the op would raise when it runs."""
    if not condition:
        raise RuntimeError(message)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (item for item in value if isinstance(item, Tensor))


def complete(name: str, spared: Callable[[dict[str, Any]], set[str]] = lambda given: set()) -> None:
    """Makes ``headroom::name`` bump the version counters of the tensors that its schema marks as
    written, and refuse tensors that require grad outside ``torch.no_grad()``.

    ``spared`` gets the arguments of a call and returns the names of those that this call does not
    write although the schema marks them.
    """
    op = getattr(torch.ops.headroom, name).default
    arguments = op._schema.arguments
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]

    def before(keyset: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        given = dict(zip(positional, args)) | options
        if torch.is_grad_enabled() and any(
            tensor.requires_grad for value in given.values() for tensor in _tensors(value)
        ):
            raise RuntimeError(
                f"headroom::{name} has no derivative, but one of its tensors requires grad; call "
                "it under torch.no_grad(), or detach the tensor"
            )
        skipped = spared(given)
        torch.autograd.graph.increment_version(
            [t for key in written if key not in skipped for t in _tensors(given.get(key))]
        )
        return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **options)

    _library.impl(name, before, "ADInplaceOrView", with_keyset=True)


def differentiable(
    name: str,
    *,
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    flops: Callable[..., int] | None = None,
) -> None:
    """Gives ``headroom::name`` its fake, its gradient and its count of floating-point operations.

    The profiler shows the gradient as ``headroom::name_backward``, and around the op, from the
    second call on, ``headroom::name_forward``. If ``backward`` calls an op of
    its own, give that op to :func:`complete`, so that a second derivative raises.

    Args:
        name: an op that writes none of its arguments.
        fake: takes the op's arguments and returns empty tensors of the shapes, dtypes and strides
            of its results.
        setup_context: ``setup_context(ctx, inputs, output)`` saves what ``backward`` needs; it gets
            ``keyword_only_inputs`` too if the schema has such arguments.
        backward: ``backward(ctx, *grads)`` returns a gradient, or None, for each positional
            argument.
        flops: takes the shapes of the arguments, and ``out_shape``; for
            :class:`torch.utils.flop_counter.FlopCounterMode`. None for ops that multiply no
            matrices.
    """
    qualified = f"headroom::{name}"

    def named_context(ctx: Any, **given: Any) -> None:
        # torch calls both GeneratedBackwardFor_headroom_..., and users see that in a profile.
        type(ctx).__name__ = f"{qualified}_backward"
        type(ctx)._forward_cls.__name__ = f"{qualified}_forward"
        setup_context(ctx, **given)

    torch.library.register_fake(qualified, fake)
    torch.library.register_autograd(qualified, backward, setup_context=named_context)
    if flops is not None:
        from torch.utils.flop_counter import register_flop_formula  # heavy, and few ops need it

        register_flop_formula(getattr(torch.ops.headroom, name))(flops)

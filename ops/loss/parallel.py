"""Linear cross entropy of a weight whose rows, the classes, are split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .._core.dtensor import first_row
from .._core.rows import autocast, check_tensors, constant_factors
from ..functional.linear_cross_entropy import PART, Options, call, gradients, joined
from .inputs import check_names, token_factors

__all__ = ["parallel_linear_cross_entropy"]

STATS = ("lse", "target_logit")
# What the backward pass keeps, by the names of the op's arguments.
_SAVED = (
    *("hidden", "weight", "bias", "target", "class_weight", "token_weight"),
    *("factors", "lse", "lse_low"),
)


class _How(NamedTuple):
    """Says what the ranks agree on, and, in the numbers, which classes are this one's."""

    group: Any
    reduction: str
    numbers: Options


def parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: Any = None,
    first_class: int | None = None,
    all_classes: int | None = None,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    denominator: Tensor | float | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    empty: str = "zero",
    stats: Sequence[str] = (),
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Returns what :func:`headroom.linear_cross_entropy` does, of classes split over ranks.

    Each rank has some rows of the weight, and all have the same hidden states and targets, as in
    tensor parallelism. A rank computes with its own classes; what ranks exchange is 16 bytes per
    token, and in the backward pass the gradient of ``hidden``, which is whole on every rank, like
    the loss. Every rank of the group must call, and run a backward pass.

    Args:
        hidden: float32, bfloat16 or float16 ``[..., features]``, or a DTensor of it that is
            replicated.
        weight: ``[rows, features]``, the classes of this rank, or a DTensor of all classes, sharded
            by its first dimension over a mesh of one dimension. A rank may have no rows.
        target: int64 or int32 ``[...]``: classes from 0 to ``all_classes - 1``.
        group: whose ranks have the classes, in the order of their ranks; by default all, or those
            of the mesh of a DTensor.
        first_class: the class of the first row of this rank; by default that of the mesh of a
            DTensor, or the rank times the rows, which must then be as many on every rank.
        all_classes: how many classes there are on all ranks; by default likewise.
        bias: ``[rows]``, sharded like the weight.
        class_weight: ``[all_classes]``, whole on every rank.
        token_weight, denominator, ignore_index, reduction, label_smoothing, logit_scale, softcap,
            z_loss, empty: as in :func:`headroom.linear_cross_entropy`.
        stats: names of further results, which have no gradient, of each row over all classes: "lse"
            and "target_logit".

    Returns:
        The loss, float32, of the same bits on every rank; with ``stats`` also a dict of them.

    Raises:
        ValueError: an option is none of those above, or a DTensor is placed in another way.
        RuntimeError: an argument does not fit. On the CPU also if a target is no class.
    """
    check_names(reduction, denominator, empty, stats, STATS)
    check_tensors(hidden=hidden, weight=weight, target=target)
    class_weight = constant_factors(class_weight, "class_weight")
    token_weight = token_factors(token_weight, target)
    if isinstance(weight, DTensor):
        _check_placement("weight", weight)
        group = weight.device_mesh.get_group() if group is None else group
        first_class = first_row(weight) if first_class is None else first_class
        all_classes = weight.shape[0] if all_classes is None else all_classes
        weight = weight.to_local()
    if isinstance(bias, DTensor):
        _check_placement("bias", bias)
        bias = bias.to_local()
    if isinstance(hidden, DTensor):
        if not all(placement.is_replicate() for placement in hidden.placements):
            raise ValueError(
                f"hidden is placed as {hidden.placements}, wanted a DTensor that is replicated, or "
                "a plain tensor that is the same on every rank"
            )
        hidden = hidden.to_local()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    rows = weight.shape[0]
    first_class = rank * rows if first_class is None else first_class
    all_classes = ranks * rows if all_classes is None else all_classes
    if first_class < 0 or first_class + rows > all_classes:
        raise ValueError(
            f"first_class is {first_class} and all_classes is {all_classes}, wanted room for the "
            f"{rows} rows of weight"
        )
    numbers = Options(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=0.0 if softcap is None else softcap,
        z_loss=z_loss,
        logit_scale=logit_scale,
        first_class=first_class,
        all_classes=all_classes,
    )
    if target.shape != hidden.shape[:-1]:
        raise RuntimeError(
            f"target has shape {tuple(target.shape)}, wanted that of hidden without the last "
            f"dimension, {tuple(hidden.shape[:-1])}"
        )
    hidden, weight, bias = autocast(hidden, weight, bias)
    if isinstance(denominator, Tensor):
        denominator = constant_factors(denominator, "denominator")
    if denominator is not None:
        denominator = torch.as_tensor(denominator, dtype=torch.float32, device=hidden.device)
        if denominator.numel() != 1:
            raise RuntimeError(
                f"denominator has shape {tuple(denominator.shape)}, wanted a number or a tensor of "
                "one element"
            )
        denominator = denominator.reshape(())
    fixed = (target, class_weight, token_weight, denominator)
    is_zero = reduction == "mean" and empty == "zero"
    how = _How(group, "mean or zero" if is_zero else reduction, numbers)
    loss, *rows = _Parallel.apply(hidden, weight, bias, fixed, how)
    return (loss, {name: rows[STATS.index(name)] for name in stats}) if stats else loss


def _check_placement(name: str, tensor: DTensor) -> None:
    if len(tensor.placements) != 1 or tensor.placements[0] != Shard(0):
        raise ValueError(
            f"{name} is placed as {tensor.placements}, wanted Shard(0) over a mesh of one dimension"
        )


def _gathered(values: Tensor, group: Any) -> Tensor:
    """Returns the values of all ranks, one after another along a new first dimension."""
    found = values.new_empty(dist.get_world_size(group), *values.shape)
    dist.all_gather_into_tensor(found, values[None].contiguous(), group=group)
    return found


class _Parallel(torch.autograd.Function):
    """The losses of rows whose classes lie on several ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fixed: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
        how: _How,
    ) -> tuple[Tensor, ...]:
        target, class_weight, token_weight, denominator = fixed
        part = _part(hidden, weight, bias, target, class_weight, how)
        loss, factors, lse, lse_low, target_logit = joined(
            how.numbers,
            _gathered(torch.stack(part, -1), how.group),
            reduction=how.reduction,
            target=target,
            class_weight=class_weight,
            token_weight=token_weight,
            denominator=denominator,
        )
        ctx.how = how
        ctx.save_for_backward(
            *(hidden, weight, bias, target, class_weight, token_weight), factors, lse, lse_low
        )
        stats = lse.clone(), target_logit
        ctx.mark_non_differentiable(*stats)
        return loss, *stats

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grads = _part_gradients(dloss, ctx.saved_tensors, ctx.how, ctx.needs_input_grad[:3])
        dhidden = grads[0]
        if dhidden is not None:
            total = dhidden.float()
            dist.all_reduce(total, group=ctx.how.group)
            dhidden = total.to(dhidden.dtype)
        return dhidden, *grads[1:], None, None


def _part(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    how: _How,
) -> tuple[Tensor, ...]:
    """Returns, of each row and over the classes of this rank, the log-sum-exp in two parts, the
    target's logit or 0, and the sum of ``class_weight`` times logits."""
    if weight.shape[0] == 0:
        _check_classes(target, how.numbers)
        zeros = torch.zeros(target.shape, dtype=torch.float32, device=hidden.device)
        return zeros - torch.inf, zeros, zeros, zeros
    found = call(
        how.numbers,
        results=PART,
        hidden=hidden,
        weight=weight,
        bias=bias,
        target=target,
        class_weight=class_weight,
        token_weight=None,
        denominator=None,
    )
    return found[3:7]


def _check_classes(target: Tensor, numbers: Options) -> None:
    """Raises what the op raises, on a rank that has no classes, so that none waits for it."""
    if target.device.type != "cpu":
        return
    classes, ignored = numbers.all_classes, numbers.ignore_index
    wrong = (target != ignored) & ((target < 0) | (target >= classes))
    if wrong.any():
        raise RuntimeError(
            f"target {int(target[wrong][0])} is no class, wanted 0 to {classes - 1} or "
            f"ignore_index ({ignored})"
        )


def _part_gradients(
    dloss: Tensor,
    saved: tuple[Tensor, ...],
    how: _How,
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """Returns the gradients of hidden, of which ranks have addends, weight and bias."""
    given = dict(zip(_SAVED, saved))
    inputs = [given[name] for name in _SAVED[:3]]
    if given["weight"].shape[0] == 0:
        found: Any = tuple(None if x is None else torch.zeros_like(x) for x in inputs)
    else:
        bits = sum(1 << k for k, is_wanted in enumerate(wanted) if is_wanted)
        found = gradients(how.numbers, bits, dloss=dloss.contiguous(), **given)
    return [
        grad.to(given.dtype) if grad is not None and is_wanted else None
        for grad, given, is_wanted in zip(found, inputs, wanted)
    ]

"""The cross entropy of a linear layer's output, without the output: see
:func:`linear_cross_entropy`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_choice, check_flags
from .._core.registration import by_name
from .._core.rows import autocast, check_tensors, constant_factors
from .._core.sizes import parse_bytes
from ..functional import linear_cross_entropy as ops
from ..functional.quantize_matrix import QuantizedMatrix
from .inputs import check_names, token_factors, whole_layer

_backward_ = by_name("linear_cross_entropy_backward_")
STATS = (
    *("lse", "target_logit", "entropy", "argmax", "rank", "accuracy"),
    *("is_top1", "mean_logit", "log_sum_sq_probs"),
)
# The results of rows that they are made of.
_OF_ROWS = {name: name for name in STATS} | {"accuracy": "argmax", "is_top1": "argmax"}
_ENTROPY = 3 + list(ops.RESULTS).index("entropy")  # among what a call returns


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | QuantizedMatrix,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    denominator: float | Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    shift: bool = False,
    empty: str = "zero",
    mode: str = "auto",
    workspace: int | str | None = None,
    accumulate_into_grad: bool = False,
    check_target: bool = False,
    stats: Sequence[str] = (),
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Returns the cross entropy of ``hidden @ weight.T + bias`` with the targets; these logits are
    computed for some rows or some classes at a time and never kept.

    A scalar loss computes its gradients in the forward pass, with 6 N H V floating-point operations
    in all for N rows that count, H features and V classes (4 if ``weight`` is frozen), and keeps
    them; ``reduction="none"`` and ``accumulate_into_grad`` compute the logits again in the backward
    pass, with 8 N H V, and keep ``hidden`` and eight bytes per row. Where no input requires grad it
    is 2 N H V, and nothing is kept.

    Args:
        hidden: float32, bfloat16 or float16 ``[..., features]``, of any strides.
        weight: ``[classes, features]``, in the dtype of hidden; under autocast both are cast. A
            DTensor, as FSDP2 makes it, is gathered: see :mod:`headroom.loss.gathered`. Or a matrix
            of 4 or 8 bits, from :func:`headroom.functional.quantize_matrix`: it has no gradient,
            and is decoded to the dtype of hidden for as many classes at a time as take 4 MiB, or 32
            MiB on CUDA, and at least 64.
        target: int64 or int32 ``[...]``: a class from 0 to ``classes - 1``, or ``ignore_index``.
        bias: ``[classes]``, or None.
        class_weight: ``[classes]``, a factor for each class, as ``weight`` in
            :func:`torch.nn.functional.cross_entropy`; it gets no gradient.
        token_weight: ``[...]``, a factor for each target; it gets no gradient. "mean" divides by
            the sum of the products of both weights.
        ignore_index: rows with this target count for nothing, and on the CPU cost nothing; on CUDA,
            where nobody waits for their number, they cost as much as others.
        reduction: "mean", "sum" or "none".
        denominator: what the sum is divided by, a number or a tensor of one element, which gets no
            gradient: the tokens of all micro-batches, for example. ``reduction`` must then be
            "mean" or "sum".
        label_smoothing: the share of the target, from 0 to 1, that all classes get.
        logit_scale: multiplies the logits.
        softcap: if given, each logit ``z`` then counts as ``softcap * tanh(z / softcap)``.
        z_loss: if given, ``z_loss * lse ** 2`` is added to the loss of a row; "mean" divides it by
            the number of rows that count, or the sum of their ``token_weight``.
        shift: the row at place t of a sequence (the dimension before the features) takes the
            target, and its weight, at place t + 1, and the last row counts for nothing; no copy is
            made.
        empty: the mean if the weights of the rows that count add up to 0, as they do if no row
            counts: "zero", or "nan", as in torch. Gradients of it are zero; a ``z_loss`` is
            divided by ``token_weight`` alone.
        mode: "tokens" computes all classes for a chunk of rows; "vocabulary" all rows for a tile of
            classes, which computes the logits once more but adds up no gradient of ``weight``;
            "auto" takes the former for "rank" and where all rows fit the workspace, else what takes
            less time: on the CPU "tokens" if 64 rows fit, on CUDA by the sizes and the rates of the
            GPU's architecture.
        workspace: bytes of logits at a time, such as ``"256 MiB"``; None: half of the bytes of
            ``weight`` in the dtype of hidden, and at least 32 MiB (256 MiB on CUDA), of which
            "vocabulary" leaves up to half to copies of the rows.
        accumulate_into_grad: adds the gradients of ``weight`` and ``bias``, which must be leaves,
            to their ``.grad`` in the backward pass, and returns none: hooks of them, and with them
            DistributedDataParallel and FSDP, do not run. Not under ``torch.compile``.
        check_target: on CUDA, waits for the device to look at the targets, and raises as on the CPU
            if one is no class. For a search for the bad label: the wait costs time in every step,
            and the capture of a CUDA graph, which cannot wait, is refused.
        stats: names of further results of each row: "lse", "target_logit", "entropy", "mean_logit"
            (over the classes), "log_sum_sq_probs" (the logarithm of the sum of their squared
            probabilities), "argmax", "rank" (how many classes have a larger logit than the target:
            ``rank < k`` is top-k accuracy), "is_top1" (whether the first of the largest logits is
            the target's), 0, False or -1 where it is ignored; and "accuracy", the share of the rows
            that count for which that is so, and NaN if none counts. "rank" needs "tokens". The
            entropy has a gradient with ``reduction="none"`` and ``accumulate_into_grad``, the
            others have none.

    Returns:
        The loss, float32; with ``stats`` also a dict of them.

    Raises:
        ValueError: a name or a combination is none of those above.
        RuntimeError: another argument does not fit. On the CPU, and with ``check_target`` on CUDA,
            also if a target is no class, with the row and value of the first; on CUDA without it
            the loss is then NaN, and nothing is read out of bounds.

    The formula and its sources are documented at ``hr_linear_cross_entropy`` in ``headroom.h``.
    """
    check_tensors(hidden=hidden, target=target)
    if not isinstance(weight, QuantizedMatrix):
        check_tensors(weight=weight)
    check_names(reduction, denominator, empty, stats, STATS)
    check_choice("mode", mode, ops.MODES)
    check_flags(
        shift=shift,
        accumulate_into_grad=accumulate_into_grad,
        check_target=check_target,
    )
    hidden, weight, bias = _layer(hidden, weight, bias)
    options = ops.Options(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=0.0 if softcap is None else softcap,
        z_loss=z_loss,
        logit_scale=logit_scale,
        mode=ops.MODES["tokens" if mode == "auto" and "rank" in stats else mode],
        workspace_limit=_workspace(workspace),
        shift=shift,
        check_target=check_target,
    )
    constants = {
        "target": target,
        "class_weight": constant_factors(class_weight, "class_weight"),
        "token_weight": token_factors(token_weight, target),
        "denominator": _denominator(denominator, hidden),
    }
    how = "mean or zero" if reduction == "mean" and empty == "zero" else reduction
    wanted = _wanted(hidden, weight, bias)
    results = {_OF_ROWS[name] for name in stats}
    if accumulate_into_grad and wanted & (ops.WEIGHT | ops.BIAS):
        _check_grads_can_be_written()
        results |= {"lse", "lse_low"}
        anchor = hidden.new_empty(0, requires_grad=True)
        how_to = {"options": options, "reduction": how, "results": results}
        found = _IntoGrad.apply(anchor, hidden, (weight, bias), constants, how_to)
    else:
        if reduction == "none" and wanted:
            results |= {"lse", "lse_low"}
        fused = wanted if reduction != "none" else 0
        layer = {"hidden": hidden, "weight": weight, "bias": bias}
        found = ops.call(
            options, reduction=how, results=results, wanted=fused, **layer, **constants
        )
    if not stats:
        return found[0]
    of_rows = dict(zip(ops.RESULTS, found[3:]))
    return found[0], {n: _stat(n, of_rows[_OF_ROWS[n]], target, options) for n in stats}


def _layer(
    hidden: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None
) -> tuple[Any, ...]:
    """Returns the layer as ops take it: whole, and under autocast in its dtype."""
    if not isinstance(weight, QuantizedMatrix):
        return autocast(*whole_layer(hidden, weight, bias))
    hidden, bias = autocast(hidden, bias)
    return hidden, weight, bias


def _workspace(workspace: int | str | None) -> int:
    if workspace is None:
        return 0
    size = parse_bytes(workspace, "workspace")
    if size < 1:
        raise ValueError(f"workspace is {workspace!r}, wanted 1 byte or more, or None")
    return size


def _check_grads_can_be_written() -> None:
    if torch.compiler.is_compiling():
        raise ValueError("accumulate_into_grad writes to .grad, which torch.compile cannot see")
    if torch._C._are_functorch_transforms_active():
        raise ValueError(
            "accumulate_into_grad writes to .grad, which torch.func does not return; leave it out"
        )


def _denominator(denominator: float | Tensor | None, hidden: Tensor) -> Tensor | None:
    if denominator is None or isinstance(denominator, Tensor):
        return constant_factors(denominator, "denominator")
    return hidden.new_full((), denominator, dtype=torch.float32)


def _wanted(hidden: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None) -> int:
    if not torch.is_grad_enabled():
        return 0
    tensors = {ops.HIDDEN: hidden, ops.WEIGHT: weight, ops.BIAS: bias}
    return sum(bit for bit, x in tensors.items() if isinstance(x, Tensor) and x.requires_grad)


def _stat(name: str, of_rows: Tensor, target: Tensor, options: ops.Options) -> Tensor:
    if name not in ("accuracy", "is_top1"):
        return of_rows
    counts = of_rows >= 0
    if options.shift:
        target = torch.cat((target[..., 1:], target[..., :1]), -1)
    hits = counts & (of_rows == target)
    return hits if name == "is_top1" else hits.sum() / counts.sum()


class _IntoGrad(torch.autograd.Function):
    """Adds the gradients of weight and bias to what is in their ``.grad``.

    The graph does not lead to them, so that their hooks do not run; it begins at ``anchor``, which
    requires grad, where hidden does not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        hidden: Tensor,
        layer: tuple[Tensor | QuantizedMatrix, Tensor | None],
        constants: dict[str, Tensor | None],
        how: dict[str, Any],
    ) -> tuple[Tensor, ...]:
        weight, bias = layer
        tensors, ctx.numbers = ops.of_weight(weight)
        leaves = (tensors["weight"], bias)
        for name, leaf in zip(("weight", "bias"), leaves):
            if leaf is not None and leaf.requires_grad and not leaf.is_leaf:
                raise ValueError(
                    f"{name} is not a leaf, so its .grad is not what accumulate_into_grad could "
                    "add to; under autocast, keep the weights in 16 bits"
                )
            grad = None if leaf is None or not leaf.requires_grad else leaf.grad
            if grad is not None and (not grad.is_contiguous() or grad.dtype != leaf.dtype):
                raise ValueError(
                    f"{name}.grad is a {grad.dtype} tensor with strides {grad.stride()}, wanted a "
                    f"contiguous one in {leaf.dtype} for accumulate_into_grad; set it to None, or "
                    f"to {name}.grad.contiguous()"
                )
            if leaf is not None and leaf.dtype == torch.float16:
                raise ValueError("accumulate_into_grad needs float32 or bfloat16 weights")
        given = {"hidden": hidden, "bias": bias, **constants}
        found = ops.call(weight=weight, **given, **how)
        del given["denominator"]
        given |= tensors | {"factors": found[1], "lse": found[3], "lse_low": found[4]}
        entropy = found[_ENTROPY] if "entropy" in how["results"] else None
        given |= {"entropy": entropy}
        ctx.save_for_backward(*given.values())
        # What is saved may be unpacked as another tensor, which has no .grad that anyone reads.
        ctx.leaves, ctx.names, ctx.options = leaves, tuple(given), how["options"]
        ctx.mark_non_differentiable(*(x for x in found[1:] if x is not entropy))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, *others: Any) -> tuple:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "accumulate_into_grad adds to .grad, which has no graph for a second derivative; "
                "leave it out, or call backward without create_graph=True"
            )
        given = dict(zip(ctx.names, ctx.saved_tensors))
        wants_hidden = ctx.needs_input_grad[1]
        dentropy = others[_ENTROPY - 1]
        if dloss is None:
            if dentropy is None:
                return (None,) * 5
            dloss = dentropy.new_zeros(())
        grads = [
            _grad_of(leaf) if leaf is not None and leaf.requires_grad else None
            for leaf in ctx.leaves
        ]
        found = _backward_(
            dloss=dloss,
            dentropy=dentropy,
            weight_grad=grads[0],
            bias_grad=grads[1],
            want_hidden=wants_hidden,
            **given,
            **ctx.numbers,
            **ctx.options.numbers(given["hidden"]),
        )
        return None, found if wants_hidden else None, None, None, None


def _grad_of(leaf: Tensor) -> Tensor:
    if leaf.grad is None:
        leaf.grad = torch.zeros_like(leaf, memory_format=torch.contiguous_format)
    return leaf.grad

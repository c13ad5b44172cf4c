"""Log-probabilities of tokens without logits, for trainers of preferences and rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .linear_cross_entropy import linear_cross_entropy

# Options of the loss after which it would be no log-probability, or which are set here.
_OTHERS = {
    *("class_weight", "token_weight", "reduction", "denominator", "label_smoothing"),
    *("logit_scale", "z_loss", "empty"),
}


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    stats: Sequence[str] = (),
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, dict[str, Tensor]]:
    """Returns the log-probability of each target under ``softmax(hidden @ weight.T + bias)``.

    It is what DPO, GRPO and their kin compute from logits: ``log_softmax(logits / temperature)`` at
    the target. The logits exist for some tokens at a time, in the backward pass again, in which
    each token has a gradient of its own.

    Args:
        hidden: float32, bfloat16 or float16 ``[..., features]``.
        weight: ``[classes, features]``, such as ``lm_head.weight``.
        target: int64 or int32 ``[...]``: a class, or ``ignore_index``.
        bias: ``[classes]``, or None.
        temperature: what logits are divided by, after the softcap.
        softcap: if given, each logit ``z`` counts as ``softcap * tanh(z / softcap)``.
        ignore_index: tokens with this target have log-probability 0, no gradient and no cost.
        return_entropy: also returns the entropy of each token's distribution, float32 ``[...]``; 0
            for tokens that are ignored. It has a gradient, which costs nothing where nobody asks
            for it.
        stats: in place of ``return_entropy``: names of what else is returned, such as "entropy",
            "is_top1", "mean_logit" and "log_sum_sq_probs", as in
            :func:`headroom.linear_cross_entropy`. All of it comes from one pass over the logits.
        options: ``shift``, ``workspace`` and others of :func:`headroom.linear_cross_entropy` that
            do not change the loss.

    Returns:
        float32 ``[...]``, or a tuple of it and the entropy, or of it and a dict of ``stats``.

    Raises:
        ValueError: ``temperature`` is not positive and finite, or both ``return_entropy`` and
            ``stats`` are given.
        TypeError: an option would change the loss.
        RuntimeError, ValueError: as :func:`headroom.linear_cross_entropy`.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}, wanted a finite number more than 0")
    if return_entropy and stats:
        raise ValueError("return_entropy and stats are given; name 'entropy' among stats instead")
    if refused := _OTHERS & options.keys():
        raise TypeError(
            f"linear_log_prob takes no {', '.join(sorted(refused))}, which would change what it "
            "returns; multiply the log-probabilities, or call linear_cross_entropy"
        )
    found: Any = linear_cross_entropy(
        hidden,
        weight,
        target,
        bias,
        reduction="none",
        ignore_index=ignore_index,
        # The op scales before the softcap: c tanh(z / c) / t is c' tanh(z / t / c') for c' = c / t.
        logit_scale=1 / temperature,
        softcap=None if softcap is None else softcap / temperature,
        stats=("entropy",) if return_entropy else stats,
        **options,
    )
    if return_entropy:
        return -found[0], found[1]["entropy"]
    return (-found[0], found[1]) if stats else -found

"""Says how long Newton-Schulz takes beside the passes of the model, in operations."""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch import Tensor

from ...functional.newton_schulz import newton_schulz_flops
from .matrices import matrix_shape, parts_of


def newton_schulz_share(optimizer: Any, tokens: int) -> float:
    """Returns the operations of Newton-Schulz over those of forward and backward of the same
    matrices, which are 6 for each element and token; frozen ones are left out. 0 for an optimizer
    without matrices of Muon. About 5 d / tokens for d x d matrices.

    Args:
        tokens: rows that a step multiplies by each matrix, on all its micro-batches.
    """
    iterations = products = 0
    for group in optimizer.param_groups:
        if not group.get("use_muon") or "ns_steps" not in group:
            continue
        gram = group["variant"] == "gram"
        for param in group["params"]:
            if not param.requires_grad:
                continue
            number, rows, cols = matrix_shape(param.shape)
            for part in parts_of(param.shape, group["split"]):
                steps = group["ns_steps"]
                iterations += newton_schulz_flops(number, *part.size, steps, gram)
            products += 6 * tokens * number * rows * cols
    return iterations / products if products else 0.0


def warn_if_slow(optimizer: Any, batch: list[Tensor], accumulation: int) -> None:
    """Warns where Newton-Schulz takes more operations than the model. The tokens of a batch are
    taken to be the elements of its first tensor of integers, or the rows of its first tensor."""
    if not batch:
        return
    ids = next((x for x in batch if not x.is_floating_point()), None)
    rows = math.prod(batch[0].shape[:-1]) if ids is None else ids.numel()
    tokens = max(1, rows * accumulation)
    share = newton_schulz_share(optimizer, tokens)
    if share > 1:
        warnings.warn(
            f"Newton-Schulz of {type(optimizer).__name__} takes {share:.1f} times the operations "
            f"of forward and backward of its matrices: a step has {tokens:,} tokens, and "
            f"{math.ceil(tokens * share):,} would take as many. Accumulate more micro-batches, or "
            "use variant='gram' where matrices are not square",
            stacklevel=2,
        )

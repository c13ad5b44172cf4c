"""Says how long Newton-Schulz takes beside the passes of the model: in operations, before a step is
made, and by the clock where steps are."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..._core.dtensor import local_part
from ...functional.newton_schulz import newton_schulz_flops
from .matrices import matrix_shape, parts_of

TIMED = 4  # steps, of which the first makes what later ones find
WORTH_SAYING = 0.025  # seconds of a step; in shorter ones Python and launches count, too


def newton_schulz_work(groups: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Returns the operations of Newton-Schulz in a step of groups of Muon, of Headroom or torch,
    and those of forward and backward of the same matrices for each token, which are 6 for each
    element. Frozen ones and other groups are left out."""
    iterations = products = 0
    for group in groups:
        if "ns_steps" not in group or not group.get("use_muon", True):
            continue
        gram = group.get("variant") == "gram"
        for param in group["params"]:
            if not param.requires_grad:
                continue
            number, rows, cols = matrix_shape(param.shape)
            for part in parts_of(param.shape, group.get("split")):
                iterations += newton_schulz_flops(number, *part.size, group["ns_steps"], gram)
            products += 6 * number * rows * cols
    return iterations, products


def newton_schulz_share(optimizer: Any, tokens: int) -> float:
    """Returns the operations of Newton-Schulz over those of forward and backward of the same
    matrices. 0 for an optimizer without matrices of Muon. About 5 d / tokens for d x d matrices.

    Args:
        tokens: rows that a step multiplies by each matrix, on all its micro-batches.
    """
    iterations, products = newton_schulz_work(optimizer.param_groups)
    return iterations / (products * tokens) if products else 0.0


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
            "use headroom.optim.Muon with variant='gram' where matrices are not square",
            stacklevel=2,
        )


class StepClock:
    """Times the first steps of an optimizer and the loop between them, and warns where the steps
    take longer. On CUDA by events, for which nothing waits."""

    def __init__(self) -> None:
        self._laps: list[Any] = []  # the beginning of a step, its end, ...
        self._is_running = True

    @contextmanager
    def step(self, optimizer: Any) -> Iterator[None]:
        """Times a step; not one of fakes, and none from the first on that a graph captures."""
        if not self._is_running:
            yield
            return
        param = local_part(next(p for group in optimizer.param_groups for p in group["params"]))
        is_captured = param.is_cuda and torch.cuda.is_current_stream_capturing()
        self._is_running = not (isinstance(param, FakeTensor) or is_captured)
        begin = _now(param) if self._is_running else None
        yield
        if begin is not None:
            self._laps += [begin, _now(param)]
            self._warn_if_slow(optimizer)

    def _warn_if_slow(self, optimizer: Any) -> None:
        laps = self._laps[1 : 2 * TIMED]
        done = (isinstance(lap, float) or lap.query() for lap in laps)
        if len(laps) < 2 * TIMED - 1 or not all(done):
            return
        self._is_running = False
        between = [_seconds(*pair) for pair in zip(laps, laps[1:])]
        loop, steps = (sum(one) / (TIMED - 1) for one in (between[::2], between[1::2]))
        own, products = newton_schulz_work(optimizer.param_groups)
        if products and steps > max(loop, WORTH_SAYING):
            warnings.warn(
                f"A step of {type(optimizer).__name__} takes {steps * 1e3:.0f} ms, and everything "
                f"else between two steps {loop * 1e3:.0f} ms: Newton-Schulz takes as many "
                "operations as forward and backward of its matrices for "
                f"{math.ceil(own / products):,} tokens. Accumulate more micro-batches, or use "
                "variant='gram' where matrices are not square",
                stacklevel=9,
            )


def _now(param: Tensor) -> Any:
    if not param.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(param.device))
    return event


def _seconds(first: Any, second: Any) -> float:
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1000

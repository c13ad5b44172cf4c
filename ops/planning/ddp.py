"""DDP on fakes: the buckets in which one rank reduces its gradients.

It follows ``torch/csrc/distributed/c10d/reducer.cpp``, without a process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..step.micro_batches import bytes_of
from .recorder import Recorder
from .sharding import DDP, Sharding

__all__ = ["ReplicatedModel", "buckets"]

MIB = 1 << 20


def buckets(parameters: Iterable[Tensor], bucket_cap_mb: float | None = None) -> list[list[Tensor]]:
    """Returns which gradients DDP reduces together, in the order in which they arrive.

    The first bucket is of 1 MiB and the others of 25 MiB, each closed by the gradient that reaches
    its size; parameters of one dtype and device share buckets.

    Args:
        parameters: in the order of arrival.
        bucket_cap_mb: the size of all buckets, the first included.
    """
    first, rest = (1, 25) if bucket_cap_mb is None else (bucket_cap_mb, bucket_cap_mb)
    found: list[list[Tensor]] = []
    open_buckets: dict[Any, list[Tensor]] = {}
    closed = set()
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        bucket = open_buckets.setdefault(key, [])
        bucket.append(parameter)
        if bytes_of(bucket) >= (rest if key in closed else first) * MIB:
            closed.add(key)
            found.append(open_buckets.pop(key))
    return found + list(open_buckets.values())


class ReplicatedModel:
    """The model of a plan as DDP trains it."""

    def __init__(self, sharding: Sharding, model: nn.Module, recorder: Recorder) -> None:
        assert isinstance(sharding.how, DDP)
        self._how, self._model, self._recorder = sharding.how, model, recorder
        self._parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._views: dict[Tensor, Tensor] = {}  # the part of a bucket that is of a parameter
        self._arrived: list[Tensor] = []
        self._is_rebuilt = False

    def replaced(self) -> dict[Tensor, tuple[Tensor, int]]:
        """Returns an empty dict: parameters stay as they are."""
        return {}

    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what autograd gives gradients to, with its name."""
        yield from self._model.named_parameters()

    def install(self) -> None:
        """Allocates the buckets and adds the hooks."""
        self._allocate(self._parameters[::-1])
        self._model.register_forward_pre_hook(self._before_forward)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def _allocate(self, parameters: list[Tensor]) -> None:
        self._views.clear()
        for bucket in buckets(parameters, self._how.bucket_cap_mb):
            elements = sum(p.numel() for p in bucket)
            flat = bucket[0].new_empty(elements, requires_grad=False)
            self._recorder.know(flat, "communication", "DistributedDataParallel", "")
            parts = flat.split([p.numel() for p in bucket])
            self._views.update((p, part.view(p.shape)) for p, part in zip(bucket, parts))

    @torch.no_grad()
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._arrived and not self._is_rebuilt:  # once, in the order in which gradients came
            self._is_rebuilt = True
            late = [p for p in self._parameters if p not in set(self._arrived)]
            self._allocate([*dict.fromkeys(self._arrived), *late])
        if self._how.broadcast_buffers:
            size = bytes_of([*self._model.buffers()])
            sent = torch.empty(size, dtype=torch.uint8, device=self._recorder.device)
            self._recorder.know(sent, "communication", "DistributedDataParallel", "")

    def _arrive(self, parameter: Tensor) -> None:
        if not self._is_rebuilt:
            self._arrived.append(parameter)
        if self._how.gradient_as_bucket_view:
            view = self._views[parameter]
            self._recorder.know(view, "gradients")
            parameter.grad = view

"""Parts of a batch, whose gradients add up to those of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..step.trees import mapped, tensors_in

__all__ = ["bytes_of", "counts", "mixes_samples", "parts", "samples_of", "some_samples"]


def samples_of(batch: Any) -> int | None:
    """Returns the samples of a batch: the first dimension of its first tensor that has one. None
    if there is no such tensor."""
    first = next((x for x in tensors_in(batch) if x.dim()), None)
    return None if first is None else first.shape[0]


def bytes_of(batch: Any) -> int:
    """Returns the bytes of the tensors of a batch."""
    return sum(x.numel() * x.element_size() for x in tensors_in(batch))


def counts(samples: int | None) -> Iterator[int]:
    """Yields the numbers of micro-batches to look at: of those that divide the samples, the first
    from each power of two on, up to 64."""
    last = 1
    for power in range(1, 7):
        fitting = (n for n in range(2**power, 2 ** (power + 1)) if samples and samples % n == 0)
        count = next(fitting, last)
        if count > last:
            yield count
            last = count


def parts(batch: Any, count: int) -> list[Any]:
    """Returns ``count`` parts of a batch, which are views of it: of equal size, but for the last
    where the samples cannot be divided so. Where these are fewer, so are the parts.

    Tensors whose first dimension is that of the first tensor are cut along it; everything else is
    in every part.

    Raises:
        ValueError: the batch has no samples.
    """
    if count == 1:
        return [batch]
    samples = samples_of(batch)
    if not samples:
        raise ValueError(
            f"the batch has no samples to make {count} micro-batches of: wanted a tensor whose "
            "first dimension counts them"
        )
    size = -(-samples // count)

    def cut(x: Tensor, at: int) -> Tensor:
        return x[at : at + size] if x.dim() and x.shape[0] == samples else x

    return [mapped(batch, partial(cut, at=at)) for at in range(0, samples, size)]


def some_samples(batch: Any, count: int) -> Any:
    """Returns a batch of at most ``count`` of the samples, spread over all of them, which are
    copies: views would keep the memory of all of them."""
    samples = samples_of(batch) or 0
    rows = [k * samples // count for k in range(count)] if count < samples else [*range(samples)]
    return mapped(batch, lambda x: x[rows] if x.dim() and x.shape[0] == samples else x)


def mixes_samples(model: nn.Module) -> bool:
    """Returns whether a step of the whole batch is another than that of its parts, because a
    BatchNorm takes statistics over the batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())

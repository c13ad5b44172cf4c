"""Equal parts of a batch, whose gradients add up to those of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..planning.copies import tensors_in

__all__ = ["counts", "mixes_samples", "parts", "samples_of"]


def samples_of(batch: Any) -> int | None:
    """Returns the samples of a batch: the first dimension of its first tensor that has one. None
    if there is no such tensor."""
    first = next((x for x in tensors_in(batch) if x.dim()), None)
    return None if first is None else first.shape[0]


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
    """Returns ``count`` equal parts of a batch, which are views of it.

    Tensors whose first dimension is that of the first tensor are cut along it; everything else is
    in every part.

    Raises:
        ValueError: the samples cannot be divided by ``count``.
    """
    if count == 1:
        return [batch]
    samples = samples_of(batch)
    if samples is None or samples % count:
        raise ValueError(
            f"the batch has {samples or 'no'} samples, wanted a multiple of {count}, the number of "
            "micro-batches; drop the last batch of an epoch if it is smaller (drop_last=True)"
        )
    size = samples // count
    return [
        _mapped(batch, lambda x, at=at: x.narrow(0, at, size) if x.shape[0] == samples else x)
        for at in range(0, samples, size)
    ]


def _mapped(value: Any, cut: Callable[[Tensor], Tensor]) -> Any:
    """Returns nested dicts, lists and tuples with ``cut`` applied to tensors with dimensions."""
    if isinstance(value, Tensor):
        return cut(value) if value.dim() else value
    if isinstance(value, dict):
        return {key: _mapped(item, cut) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, cut) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def mixes_samples(model: nn.Module) -> bool:
    """Returns whether a step of the whole batch is another than that of its parts, because a
    BatchNorm takes statistics over the batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())

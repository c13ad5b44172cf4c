"""Cuts a batch into parts, and says what the loss of each part counts for, so that the gradients of
the parts add up to that of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._core.checks import check_count
from .layout import labels_of, layout_of
from .packed import chosen, ends_of, resized_row, spread
from .pytree import map_tensors, tensors_in

__all__ = [
    "NEXT_TOKENS",
    "SAMPLES",
    "SUM",
    "TOKENS",
    "bytes_of",
    "can_cut",
    "check_told",
    "counts",
    "labels_of",
    "largest_part",
    "micro_batches",
    "mixes_samples",
    "parts",
    "picked",
    "repeated",
    "resized",
    "samples_of",
    "shares",
    "some_samples",
]

# What the loss of a batch is a mean over, which a rule of shares is called by.
SAMPLES = "samples"
TOKENS = "tokens"  # the labels that are not -100
NEXT_TOKENS = "next tokens"  # these but the first of each sequence, which nothing predicts
SUM = "sum"  # over nothing: the loss of the batch is the sum of those of its parts

IGNORED = -100  # the label of what counts for nothing, in losses of torch and of transformers


def samples_of(batch: Any) -> int | None:
    """Returns the samples of a batch, or the sequences that are packed into its one row. None if no
    tensor has a dimension."""
    if (ends := ends_of(batch)) is not None:
        return len(ends) - 1
    return layout_of(batch).samples


def bytes_of(batch: Any) -> int:
    """Returns the bytes of the tensors in a batch, or in other containers."""
    return sum(x.nbytes for x in tensors_in(batch))


def parts(batch: Any, count: int) -> list[Any]:
    """Returns ``count`` parts of a batch, which are views of it: of equal size, but for the last
    where the samples cannot be divided so. Where these are fewer, so are the parts.

    Tensors that have a row for each sample are cut along it, as :mod:`headroom.step.layout` finds
    them; everything else is in every part. A row of packed sequences is cut at their ends, into
    parts of about as many tokens, with all tensors that have its tokens.

    Raises:
        ValueError: the batch has no samples, or pieces of which it says nowhere to which of them
            they belong.
    """
    if count > 1:
        check_told(batch)
    return _parts(batch, count)


def check_told(batch: Any) -> None:
    """Raises if samples have images or sounds of which the batch does not say whose they are."""
    untold = layout_of(batch).untold
    if untold is not None and (samples_of(batch) or 0) > 1:
        raise ValueError(
            f"the batch cannot be cut into micro-batches: {untold}; let the loader make smaller "
            "batches"
        )


def _parts(batch: Any, count: int) -> list[Any]:
    if count == 1:
        return [batch]
    if (ends := ends_of(batch)) is not None:
        return [chosen(batch, ends, numbers) for numbers in spread(ends, min(count, len(ends) - 1))]
    samples, _, dims, _ = layout_of(batch)
    if not samples:
        raise ValueError(
            f"the batch has no samples to make {count} micro-batches of: wanted a tensor whose "
            "first dimension counts them"
        )
    size = -(-samples // count)

    def cut(x: Tensor, at: int) -> Tensor:
        dim = dims.get(id(x))
        return x if dim is None else x.narrow(dim, at, min(size, samples - at))

    return [map_tensors(batch, partial(cut, at=at)) for at in range(0, samples, size)]


def micro_batches(batch: Any, count: int, *, next_tokens: bool = False) -> list[tuple[Any, int]]:
    """Returns micro-batches of a batch, each with its weight in the mean:
    ``accumulator.micro_batch(weight=weight)`` of a :class:`headroom.GradAccumulator`.

    The weight is the number of labels that are not -100, or of samples in a batch without labels.
    Rows of packed sequences are cut at their ends, in parts of about as many tokens; other batches
    along the first dimension of ``input_ids``, or else of the labels, or of the first tensor.
    Positions ``[3, rows, tokens]``, of vision models, are cut with their rows; what has another
    first dimension is in every part.

    Args:
        batch: a tensor, or tensors in a dict, tuple or list. Labels are ``batch["labels"]``, or the
            last of a tuple.
        count: how many micro-batches. There are fewer if there are fewer samples.
        next_tokens: the model has each token predict the one after it, so that the first label of
            each sequence does not count either.

    Raises:
        ValueError: the batch has no samples, or images of which it does not say which sample has
            them, as those of Qwen2-VL; or ``count`` is below 1.
    """
    check_count("count", count, 1)
    each = parts(batch, count)
    if labels_of(batch) is None:
        return list(zip(each, _samples_in(each, batch)))
    return [(part, int(_counted(part, next_tokens))) for part in each]


def largest_part(batch: Any, count: int) -> Any:
    """Returns the one of ``count`` parts of a batch that takes the most memory, with all images if
    nobody knows which they have."""
    return max(_parts(batch, count), key=bytes_of)


def some_samples(batch: Any, count: int) -> Any:
    """Returns a batch of at most ``count`` of the samples, spread over all of them, which are
    copies: views would keep the memory of all of them."""
    samples = samples_of(batch) or 0
    return picked(
        batch, [k * samples // count for k in range(count)] if count < samples else range(samples)
    )


def picked(batch: Any, numbers: Sequence[int]) -> Any:
    """Returns a batch of copies of the samples with these numbers."""
    if (ends := ends_of(batch)) is not None:
        return map_tensors(chosen(batch, ends, numbers), torch.clone)
    dims = layout_of(batch).dims

    def pick(x: Tensor) -> Tensor:
        dim = dims.get(id(x))
        return x if dim is None else x.index_select(dim, torch.tensor([*numbers], device=x.device))

    return map_tensors(batch, pick)


def resized(batch: Any, samples: int) -> Any:
    """Returns a batch of as many samples, on the meta device.

    Raises:
        ValueError: the batch has no samples.
    """
    if (ends := ends_of(batch)) is not None:
        return resized_row(batch, ends, samples)
    count, _, dims, _ = layout_of(batch)
    if count is None:
        raise ValueError(
            "sample_batch has no tensor with a dimension, so it has no batch to resize"
        )

    def resize(x: Tensor) -> Tensor:
        if (dim := dims.get(id(x))) is None:
            return x
        shape = [*x.shape]
        shape[dim] = samples
        return torch.empty(shape, dtype=x.dtype, device="meta")

    return map_tensors(batch, resize)


def repeated(batch: Any, times: int) -> Any:
    """Returns a batch of ``times`` as many samples, which are its own again and again."""
    if times == 1:
        return batch
    if (ends := ends_of(batch)) is not None:
        return chosen(batch, ends, [*range(len(ends) - 1)] * times)
    dims = layout_of(batch).dims

    def repeat(x: Tensor) -> Tensor:
        dim = dims.get(id(x))
        return x if dim is None else torch.cat([x] * times, dim)

    return map_tensors(batch, repeat)


def can_cut(batch: Any, count: int) -> bool:
    """Returns whether a batch has ``count`` parts of equal size, or, of a row of packed sequences,
    of about as many tokens."""
    samples = samples_of(batch) or 1
    return count <= samples if ends_of(batch) is not None else samples % count == 0


def counts(batch: Any) -> Iterator[int]:
    """Yields the numbers of micro-batches to look at: of those that the batch can be cut into, the
    first from each power of two on, up to 64."""
    for power in range(1, 7):
        yield from islice((n for n in range(2**power, 2 ** (power + 1)) if can_cut(batch, n)), 1)


def mixes_samples(model: nn.Module) -> bool:
    """Returns whether a step of the whole batch is another than that of its parts, because a
    BatchNorm takes statistics over the batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


def shares(each: Sequence[Any], rule: str = SAMPLES, whole: Any = None) -> list[Fraction]:
    """Returns what the loss of each part of a batch is multiplied by.

    Parts without a token that counts get 0 and need not be computed: a mean over none is nan. If no
    part has any, all get the same.

    Args:
        each: the parts.
        rule: what the loss is a mean over.
        whole: the batch, if it is known.
    """
    if rule == SUM:
        return [Fraction(1) for _ in each]
    if rule == SAMPLES or len(each) == 1:
        counts = _samples_in(each, whole)
    else:
        # One transfer for all of them, before anything is computed that it would wait for.
        counts = torch.stack([_counted(part, rule == NEXT_TOKENS) for part in each]).tolist()
        counts = counts if any(counts) else [1] * len(each)
    return [Fraction(count, sum(counts)) for count in counts]


def _samples_in(each: Sequence[Any], whole: Any) -> list[int]:
    """Returns the samples of each part: sequences of a row that is packed, or else rows, which may
    be packed themselves."""
    rows = [layout_of(part).samples or 1 for part in each]
    if max(rows, default=0) > 1 or (whole is not None and ends_of(whole) is None):
        return rows
    return [samples_of(part) or 1 for part in each]


def _counted(part: Any, shifted: bool) -> Tensor:
    """Returns the number of tokens that count."""
    labels = labels_of(part)
    assert labels is not None
    if shifted and not (isinstance(part, Mapping) and "shift_labels" in part):
        if (ends := ends_of(part)) is not None:
            labels = labels.index_fill(-1, labels.new_tensor(ends[:-1]), IGNORED)
        elif labels.dim() > 1 or len(labels) == layout_of(part).tokens:
            labels = labels[..., 1:]
    return labels.ne(IGNORED).sum()

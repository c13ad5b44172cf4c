"""The largest batch of a loader, taken without the training noticing."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .._core.randomness import generators_in, loader_kept
from ..step.micro_batches import bytes_of
from ..step.pytree import map_tensors

__all__ = ["moved", "sample_batch"]


# Batches that are looked at for the largest, and those after which, if all are of one size, no
# other is expected.
MOST, ALIKE = 256, 8


def sample_batch(loader: Any, *, who: str) -> Any:
    """Returns the largest of the first batches that ``loader`` yields, on the CPU: of 256, or of 8
    if these are of one size.

    The order of its samples and all random numbers stay as they were: indices come from a copy of
    the sampler, samples are read in this process, and generators are put back. A dataset that is
    iterated is started once more.

    Args:
        loader: a DataLoader, or what another library has made of one.
        who: the caller, for errors.

    Raises:
        TypeError: it is no DataLoader.
        ValueError: it has no batch.
    """
    if not all(hasattr(loader, name) for name in ("dataset", "collate_fn", "batch_sampler")):
        raise TypeError(
            f"{who}: the training loader is {type(loader).__name__}, wanted a DataLoader; give "
            "sample_batch="
        )
    with loader_kept(loader):
        data = loader.dataset
        how: dict[str, Any]
        if isinstance(data, IterableDataset):
            how = {"batch_size": loader.batch_size}
        elif loader.batch_sampler is None:  # batches are made by the dataset
            how = {"batch_size": None, "sampler": _copied(loader.sampler, data)}
        else:
            how = {"batch_sampler": _copied(loader.batch_sampler, data)}
        plain = DataLoader(data, collate_fn=loader.collate_fn, **how)
        found, sizes = None, set()
        for number, batch in enumerate(islice(plain, MOST), start=1):
            size = bytes_of(batch)
            if found is None or size > max(sizes):
                found = batch
            sizes.add(size)
            if number >= ALIKE and len(sizes) == 1:
                break
    if found is None:
        raise ValueError(f"{who}: the training loader has no batch; give sample_batch=")
    return found


def _copied(sampler: Any, data: Any) -> Any:
    """Returns a sampler that can be used up; the data, which may be large, are not copied."""
    generators = {id(generator): generator for generator in generators_in(sampler)}
    return copy.deepcopy(sampler, {id(data): data, **generators})


def moved(batch: Any, device: torch.device) -> Any:
    """Returns a batch with all tensors on ``device``."""
    # A mapping may know how, and keep more than its items.
    return batch.to(device) if hasattr(batch, "to") else map_tensors(batch, lambda x: x.to(device))

"""A batch of a loader, taken without the training noticing."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .._core.randomness import generators_kept
from ..step.trees import mapped

__all__ = ["moved", "repeated", "sample_batch"]


def sample_batch(loader: Any, *, who: str) -> Any:
    """Returns a batch such as ``loader`` yields, on the CPU.

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
    with generators_kept(own=_generators(loader)):
        data = loader.dataset
        how: dict[str, Any]
        if isinstance(data, IterableDataset):
            how = {"batch_size": loader.batch_size}
        elif loader.batch_sampler is None:  # batches are made by the dataset
            how = {"batch_size": None, "sampler": _copied(loader.sampler, data)}
        else:
            how = {"batch_sampler": _copied(loader.batch_sampler, data)}
        plain = DataLoader(data, collate_fn=loader.collate_fn, **how)
        found = next(iter(plain), None)
    if found is None:
        raise ValueError(f"{who}: the training loader has no batch; give sample_batch=")
    return found


def _copied(sampler: Any, data: Any) -> Any:
    """Returns a sampler that can be used up; the data, which may be large, are not copied."""
    generators = {id(generator): generator for generator in _generators(sampler)}
    return copy.deepcopy(sampler, {id(data): data, **generators})


def _generators(of: Any) -> list[torch.Generator]:
    """Returns the generators that a loader or a sampler and its samplers draw from."""
    found: dict[int, torch.Generator] = {}
    seen: set[int] = set()
    parts = [of]
    while parts:
        part = parts.pop()
        if id(part) in seen or not hasattr(part, "__dict__"):
            continue
        seen.add(id(part))
        for name, value in vars(part).items():
            if isinstance(value, torch.Generator):
                found[id(value)] = value
            elif name.endswith(("sampler", "base_dataloader")):
                parts.append(value)
    return list(found.values())


def moved(batch: Any, device: torch.device) -> Any:
    """Returns a batch with all tensors on ``device``."""
    # A mapping may know how, and keep more than its items.
    return batch.to(device) if hasattr(batch, "to") else mapped(batch, lambda x: x.to(device))


def repeated(batch: Any, times: int) -> Any:
    """Returns a batch of ``times`` as many samples, which are its own again and again."""
    if times == 1:
        return batch
    return mapped(batch, lambda x: torch.cat([x] * times) if x.dim() else x)

"""The settings of a loader that change when its batches are made, and not which."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

__all__ = ["Settings", "check_loader", "settings_of", "with_settings"]


@dataclass(frozen=True)
class Settings:
    """The settings by which a loader makes its batches.

    Attributes:
        num_workers, prefetch_factor, pin_memory, persistent_workers: as in
            :class:`torch.utils.data.DataLoader`.
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False

    def but(self, **changes: Any) -> Settings:
        """Returns the settings with some replaced, and without those that need workers if there
        are none."""
        made = replace(self, **changes)
        if not made.num_workers:
            return replace(made, prefetch_factor=None, persistent_workers=False)
        return replace(made, prefetch_factor=made.prefetch_factor or 2)

    def __str__(self) -> str:
        parts = [f"num_workers={self.num_workers}"]
        if self.num_workers:
            parts += [f"prefetch_factor={self.prefetch_factor}"]
            parts += [f"persistent_workers={self.persistent_workers}"]
        return ", ".join([*parts, f"pin_memory={self.pin_memory}"])


def check_loader(loader: Any) -> None:
    """Refuses what is not a loader of torch whose settings can be changed.

    Raises:
        TypeError: says what it is, and what to give instead.
    """
    if hasattr(loader, "base_dataloader"):
        raise TypeError(
            "the loader was prepared by accelerate, which keeps its settings inside: give the one "
            "that is prepared"
        )
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"loader is {type(loader).__name__}, wanted a torch.utils.data.DataLoader or a "
            "subclass: other loaders have no settings that are known here"
        )


def settings_of(loader: DataLoader[Any]) -> Settings:
    """Returns the settings of a loader."""
    return Settings(
        loader.num_workers, loader.prefetch_factor, loader.pin_memory, loader.persistent_workers
    )


def with_settings(
    loader: DataLoader[Any], settings: Settings, indices: Sequence[Any] | None = None
) -> DataLoader[Any]:
    """Returns a copy of a loader that has other settings. It is of the same class and has all else
    of it, such as the dataset, the sampler and the generator, itself.

    Args:
        indices: what the sampler of batches gives instead, or that of samples if the loader makes
            no batches of them.
    """
    # Not by a call of the class: that of a subclass may take what it does not keep.
    made = copy.copy(loader)
    found: dict[str, Any] = {
        "num_workers": settings.num_workers,
        "prefetch_factor": settings.prefetch_factor,
        "pin_memory": settings.pin_memory,
        "persistent_workers": settings.persistent_workers,
        "_iterator": None,
    }
    if hasattr(made, "next_iter_state"):  # torchdata's: whoever asked for the state has begun one
        found["_initial_iter_for_state_dict"] = False
    if not settings.num_workers:
        found["timeout"] = 0  # which is that of workers
    if indices is not None:
        found["sampler" if loader.batch_sampler is None else "batch_sampler"] = indices
    vars(made).update(found)
    return made


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Returns whether the dataset says itself what comes next, and has no indices."""
    return isinstance(loader.dataset, IterableDataset)

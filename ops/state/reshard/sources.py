"""Reads the optimizer states of a distributed checkpoint."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict


class Stored(NamedTuple):
    """Describes a part of a parameter's state, as it was saved."""

    key: str  # in the checkpoint
    size: torch.Size | None = None  # None: not a tensor
    dtype: torch.dtype | None = None


class Checkpoint:
    """Finds an optimizer's states in a distributed checkpoint, nested or flattened.

    Attributes:
        parts: the parts of each parameter's state, by the parameter's name.
        groups: the parameter groups.
    """

    def __init__(self, reader: dcp.StorageReader, key: str, group: Any) -> None:
        self._reader, self._group = reader, group
        self._metadata = reader.read_metadata()
        prefix = f"{key}." if key else ""
        self.parts: dict[str, dict[str, Stored]] = {}
        options: dict[str, Any] = {}
        for name, saved in self._metadata.state_dict_metadata.items():
            what, _, path = name.removeprefix(prefix).partition(".")
            if not name.startswith(prefix) or what not in ("state", "param_groups"):
                continue
            if what == "param_groups":
                options[name] = None
                continue
            fqn, _, part = path.rpartition(".")
            size = getattr(saved, "size", None)
            dtype = None if size is None else saved.properties.dtype
            self.parts.setdefault(fqn, {})[part] = Stored(name, size, dtype)
        if not self.parts:
            some = sorted({name.partition(".")[0] for name in self._metadata.state_dict_metadata})
            raise KeyError(f"the checkpoint has no states under {key!r}; it has {some}")
        self.read(options)
        self.groups = self._groups(options, prefix)

    def _groups(self, options: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
        paths = self._metadata.planner_data
        if all("param_groups" in paths[name] for name in options):
            tails = {name: paths[name][paths[name].index("param_groups") :] for name in options}
            return unflatten_state_dict(options, tails)["param_groups"]
        flat = {name.removeprefix(prefix): value for name, value in options.items()}
        return _groups_of_parameters(flat)

    def read(self, targets: dict[str, Any]) -> None:
        """Fills tensors, and sets what is not a tensor. Every rank must call."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(targets, storage_reader=self._reader, process_group=self._group)

    def chunks(self, part: Stored) -> list[tuple[tuple[int, ...], tuple[int, ...], str | None]]:
        """Returns the offsets and sizes of the chunks that ranks wrote, in order, and the writer of
        each."""
        if not hasattr(self, "_writers"):
            self._writers: dict[Any, str] = {}
            for index, info in (self._metadata.storage_data or {}).items():
                file = getattr(info, "relative_path", None)  # __RANK_NUMBER.distcp
                if index.offset is not None and file:
                    self._writers[index.fqn, tuple(index.offset)] = file.rpartition("_")[0]
        return sorted(
            (offset, tuple(chunk.sizes), self._writers.get((part.key, offset)))
            for chunk in self._metadata.state_dict_metadata[part.key].chunks
            if math.prod(chunk.sizes)
            for offset in [tuple(chunk.offsets)]
        )


def _groups_of_parameters(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a group for each parameter, from flattened options ``param_groups.NAME.OPTION``."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in options.items():
        fqn, _, option = key.removeprefix("param_groups.").rpartition(".")
        groups.setdefault(fqn, {"params": [fqn]})[option] = value
    return list(groups.values())

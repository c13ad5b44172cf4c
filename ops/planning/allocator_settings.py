"""The settings of torch's CUDA caching allocator that change what it reserves."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from math import inf

import torch

__all__ = ["AllocatorSettings", "current_settings", "settings_of"]

MIB = 1 << 20
_INTERVALS = 16  # of sizes, from 1 MiB on, each twice as large as the one before
_LIMIT = "per_process_memory_fraction"
_OPTIONS = re.compile(r"(\w+):(\[[^]]*\]|[^,]*)")


@dataclass(frozen=True)
class AllocatorSettings:
    """Holds what ``PYTORCH_ALLOC_CONF`` says, in bytes.

    Attributes:
        expandable: whether segments grow page by page, instead of being allocated one by one.
        large_segment: the size of a segment that requests of 1 to 10 MiB share.
        max_split: a block of this size is not split, and serves no smaller request.
        max_excess: by how much such a block may exceed what it serves.
        divisions: into how many parts the way to the next power of two is divided, to which a
            request is rounded up, for each interval of sizes.
        collects_from: with so much reserved, a new segment lets unused ones be given back.
        left_out: names of settings that are not replayed.
    """

    expandable: bool = False
    large_segment: int = 20 * MIB
    max_split: float = inf
    max_excess: int = 20 * MIB
    divisions: tuple[int, ...] = (0,) * _INTERVALS
    collects_from: float = inf
    left_out: tuple[str, ...] = ()

    def rounded(self, size: int, smallest: int) -> int:
        """Returns the bytes of the block that a request needs, a multiple of the smallest."""
        parts = self.divisions[_interval(size >> 20)]
        if parts > 1 and size > smallest * parts:
            step = max(1, (1 << size.bit_length() - 1) // parts)
            return -(-size // step) * step
        return -(-size // smallest) * smallest


def current_settings() -> AllocatorSettings:
    """Returns the settings of this process, and of the device that it uses."""
    allowed = inf
    if torch.cuda.is_initialized() and (part := torch.cuda.get_per_process_memory_fraction()) < 1:
        allowed = part * torch.cuda.get_device_properties().total_memory
    return settings_of(_text(), allowed)


def _text() -> str:
    if in_use := getattr(torch._C, "_accelerator_getAllocatorSettings", None):
        return in_use()
    # An older torch does not say.
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def settings_of(text: str, allowed: float = inf) -> AllocatorSettings:
    """Returns the settings that a text says.

    Args:
        text: such as ``"expandable_segments:True,max_split_size_mb:128"``.
        allowed: the bytes to which the process is limited.
    """
    said = dict(_OPTIONS.findall(re.sub(r"\s", "", text)))
    left_out = list[str]()
    if said.get("backend", "native") != "native":
        left_out.append(f"backend:{said['backend']}")
    if allowed == inf and {"garbage_collection_threshold", _LIMIT} <= {*said}:
        left_out.append(_LIMIT)  # of a device that is not here

    mib = {name: int(said[name]) * MIB for name in said if name.endswith("_mb")}
    large = mib.get("large_segment_size_mb", AllocatorSettings.large_segment)
    return AllocatorSettings(
        said.get("expandable_segments") == "True",
        large,
        mib.get("max_split_size_mb", inf),
        mib.get("max_non_split_rounding_mb", large),
        _divisions(said.get("roundup_power2_divisions", "0")),
        # Nothing is collected in a process without a limit.
        allowed * float(said.get("garbage_collection_threshold", inf)),
        tuple(left_out),
    )


def _interval(mib: int) -> int:
    return max(0, min(mib.bit_length() - 1, _INTERVALS - 1))


def _divisions(text: str) -> tuple[int, ...]:
    """Returns the divisions of each interval: AllocatorConfig.cpp, parseRoundUpPower2Divisions."""
    if not text.startswith("["):
        return (int(text),) * _INTERVALS
    found, last = [0] * _INTERVALS, 0
    for number, pair in enumerate(text.strip("[]").split(",")):
        size, _, parts = pair.partition(":")
        if size == ">":
            found[last + 1 :] = [int(parts)] * (_INTERVALS - last - 1)
            continue
        last = _interval(int(size))
        if number == 0:
            found[:last] = [int(parts)] * last
        found[last] = int(parts)
    return tuple(found)

"""The settings of torch's CUDA caching allocator, as ``PYTORCH_CUDA_ALLOC_CONF`` writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["AllocatorSettings"]

MIB = 1 << 20
SMALLEST_BLOCK = 512
# A list of divisions has one entry for each power of two from 1 MiB to 32 GiB.
POWERS = 16


@dataclass(frozen=True)
class AllocatorSettings:
    """What the replay of the allocator follows; the defaults are torch's.

    Attributes:
        expandable_segments: segments grow page by page (2 MiB pages for small requests, pages of
            ``large_segment`` for larger ones) instead of being allocated one by one.
        max_split_size: blocks of at least this many bytes are never split.
        max_non_split_rounding: how much larger than the request such a block may be.
        roundup_power2_divisions: into how many equal steps the range between two powers of two is
            divided; requests are rounded up to the next step. By power of two, in MiB.
        garbage_collection_threshold: the fraction of the capacity above which blocks that went
            unused for long are given back before more is reserved.
        large_segment: bytes of a segment for requests between 1 and 10 MiB.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = 20 * MIB
    roundup_power2_divisions: Mapping[int, int] = field(
        default_factory=lambda: MappingProxyType({})
    )
    garbage_collection_threshold: float = 0.0
    large_segment: int = 20 * MIB

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Returns the settings of a text such as ``"expandable_segments:True"``.

        Options that concern pinned memory, streams or threads change nothing here and are skipped.

        Raises:
            ValueError: a part is no ``name:value``, or asks for ``cudaMallocAsync``.
        """
        found: dict[str, object] = {}
        for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", text.replace(" ", "")):
            name, colon, value = part.partition(":")
            if not colon or not value:
                raise ValueError(f"allocator settings: expected name:value, got {part!r}")
            if name == "expandable_segments":
                found[name] = value.lower() == "true"
            elif name == "max_split_size_mb":
                found["max_split_size"] = int(value) * MIB
            elif name == "max_non_split_rounding_mb":
                found["max_non_split_rounding"] = int(value) * MIB
            elif name == "large_segment_size_mb":
                found["large_segment"] = int(value) * MIB
            elif name == "garbage_collection_threshold":
                found[name] = float(value)
            elif name == "roundup_power2_divisions":
                found[name] = _divisions(value)
            elif name == "backend" and value != "native":
                raise ValueError(f"allocator settings: only the native backend, got {value!r}")
        return cls(**found)  # pyright: ignore[reportArgumentType]

    def rounded(self, size: int) -> int:
        """Returns the bytes of the block that a request of ``size`` bytes looks for."""
        if self.roundup_power2_divisions:
            power = min(max(size.bit_length() - 21, 0), POWERS - 1)
            divisions = self.roundup_power2_divisions.get(1 << power, 0)
            if divisions > 1 and size > SMALLEST_BLOCK * divisions:
                return _next_division(size, divisions)
        return max(-(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK, SMALLEST_BLOCK)


def _next_division(size: int, divisions: int) -> int:
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return 2 * floor
    return -(-size // step) * step


def _divisions(value: str) -> Mapping[int, int]:
    """Reads ``4`` or ``[256:1,512:2,>:4]``: a size in MiB and the divisions from it on.

    What lies below the first size has the divisions of the first; what lies between two sizes and
    is not named is not rounded, as in torch.
    """
    if not value.startswith("["):
        return MappingProxyType({1 << power: int(value) for power in range(POWERS)})
    divisions: dict[int, int] = {}
    last = 0
    for pair in value.strip("[]").split(","):
        bound, _, number = pair.partition(":")
        if bound == ">":
            powers = range(last, POWERS)
        else:
            power = int(bound).bit_length() - 1
            powers = range(0 if not divisions else power, min(power + 1, POWERS))
            last = power
        divisions.update({1 << power: int(number) for power in powers})
    return MappingProxyType(divisions)

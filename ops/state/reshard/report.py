"""Reports what became of 8-bit moments that were saved in other blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist


class Recut(NamedTuple):
    """Counts the blocks of an 8-bit moment that was cut into others."""

    param: str
    name: str  # "exp_avg", "exp_avg_sq" or "momentum_buffer"
    kept: int  # blocks that have the codes and the scale that were saved
    requantized: int  # blocks that were parts of several
    error: float = 0.0  # the largest of an element
    largest: float = 0.0  # the largest magnitude of an element before

    def merged(self, other: Recut) -> Recut:
        """Returns the counts of two shards together."""
        counts = self.kept + other.kept, self.requantized + other.requantized
        worst = max(self.error, other.error), max(self.largest, other.largest)
        return Recut(self.param, self.name, *counts, *worst)


@dataclass
class ReshardReport:
    """Lists the 8-bit moments that were saved in other blocks, on all ranks together. All
    other states have the bits that were saved."""

    moments: list[Recut] = field(default_factory=list)

    @property
    def kept(self) -> int:
        """Returns the number of blocks that have the codes and the scale that were saved."""
        return sum(moment.kept for moment in self.moments)

    @property
    def requantized(self) -> int:
        """Returns the number of blocks that lay across several old ones."""
        return sum(moment.requantized for moment in self.moments)

    @property
    def is_lossless(self) -> bool:
        """Returns whether every block has the codes and the scale that were saved."""
        return not self.requantized

    def __str__(self) -> str:
        if not self.moments:
            return "All states have the bits that were saved"
        text = (
            f"{len(self.moments):,} 8-bit moments were cut into other blocks: {self.kept:,} blocks "
            "kept their bits"
        )
        if self.is_lossless:
            return text
        worst = max(self.moments, key=lambda moment: moment.error / (moment.largest or 1))
        return (
            f"{text}, {self.requantized:,} lie across old blocks and were quantized again, by up "
            f"to {worst.error / (worst.largest or 1):.2g} of the moment's largest element "
            f"('{worst.name}' of '{worst.param}')"
        )


def gathered_report(recuts: dict[tuple[str, str, int], Recut], group: Any) -> ReshardReport:
    """Returns the report of all ranks. ``recuts`` are those of this rank, by parameter, moment and
    first element of the shard."""
    every: list[dict[tuple[str, str, int], Recut]] = [recuts]
    if dist.is_available() and dist.is_initialized():
        every = [{}] * dist.get_world_size(group)
        dist.all_gather_object(every, recuts, group=group)
    # Ranks with the same shard have the same counts.
    shards = {where: recut for each in every for where, recut in each.items()}
    moments: dict[tuple[str, str], Recut] = {}
    for (fqn, name, _), recut in sorted(shards.items()):
        at = fqn, name
        moments[at] = moments[at].merged(recut) if at in moments else recut
    return ReshardReport(list(moments.values()))

"""Notices weights on a device that somebody has written since the last step on the host: checksums
of them are compared with those that were taken then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..._core.dtensor import local_part
from ...host.checksums import checksums
from ...host.engine import Engine
from ...host.ring import aligned
from .hosted_parts import HostedHome

FLAGS = 4096  # parameters, in multiples of which there are flags


class WrittenWeights:
    """Compares the weights of each device once in a step."""

    def __init__(self) -> None:
        self._flags: dict[torch.device, Tensor] = {}  # on the host
        self.restart()

    @property
    def size(self) -> int:
        """Returns the bytes of the flags on the host."""
        return sum(flags.numel() for flags in self._flags.values())

    def restart(self) -> None:
        """Lets the next step compare anew."""
        self._differs: dict[torch.device, Tensor] = {}  # the flags on a device
        self._numbers: dict[HostedHome, int] = {}  # of the flags

    def check(
        self,
        device: torch.device,
        engine: Engine,
        homes: Mapping[Tensor, HostedHome],
        take: Callable[[int], Tensor],
    ) -> None:
        """Compares all weights on a device with those that the host has, which finds out before the
        gradients arrive."""
        if device in self._differs:
            return
        known = {
            home: local_part(param)
            for param, home in homes.items()
            if home.sums is not None and param.device == device
        }
        flags = self._flags.get(device)
        if flags is None or flags.numel() < len(known):
            flags = self._flags[device] = take(aligned(len(homes), FLAGS))
        differs = self._differs[device] = torch.empty(len(known), dtype=torch.uint8, device=device)
        compare(known, differs)
        if known:
            engine.down(flags[: len(known)], differs, [engine.mark()])
        self._numbers |= {home: i for i, home in enumerate(known)}

    def has(self, home: HostedHome, device: torch.device) -> bool:
        """Returns whether weights are no longer those that the host has, or may not be."""
        number = self._numbers.get(home)
        return number is None or bool(self._flags[device][number])


def note(brought: Sequence[tuple[Tensor, HostedHome]]) -> None:
    """Notes the checksums of weights on a device, which those on the host are equal to now."""
    for local, home in brought:
        home.sums = checksums(local)


def compare(known: Mapping[HostedHome, Tensor], differs: Tensor) -> None:
    """Sets a flag for each of these weights on a device, if they are no longer those that the host
    has."""
    for (home, local), flag in zip(known.items(), differs):
        now = checksums(local)
        is_as_large = now.shape == home.sums.shape
        flag.copy_((now != home.sums).any()) if is_as_large else flag.fill_(1)

"""The host arena of a plan, for optimizers whose states are there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from .._core.sizes import format_bytes
from ..host.engine import Inline
from .recorder import Recorder

__all__ = ["StatesOnHost"]


class StatesOnHost(Inline):
    """Counts what the states of an optimizer take of the host, and what a step copies: an arena of
    fakes and an engine in one.

    Attributes:
        held: bytes of the states.
    """

    def __init__(self, recorder: Recorder, mode: FakeTensorMode) -> None:
        super().__init__()
        self._recorder, self._mode = recorder, mode
        self._slabs: list[Tensor] = []
        self.held = 0

    def take(self, size: int, *, kind: str, owner: str, device: torch.device) -> Tensor:
        with _disable_current_modes(), self._mode:
            slab = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._recorder.manage(slab)  # and it never appears
        self._slabs.append(slab)
        self.held += size
        return slab

    def begin_step(self) -> None:
        """Counts the copies of the step that follows alone."""
        self.bytes_up = self.bytes_down = 0

    def note(self) -> str:
        """Returns the sentence that says what is on the host."""
        return (
            f"The host arena holds {format_bytes(self.held)} of optimizer state, and a step copies "
            f"{format_bytes(self.bytes_up)} to the device and {format_bytes(self.bytes_down)} back."
        )

    def _copy(self, queue: str, target: Tensor, source: Tensor, after: Iterable[Any]) -> None:
        pass  # the bytes were counted

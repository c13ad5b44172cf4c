"""Records what torch's CUDA allocator does, from its own trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import cuda_trace
from .stream import Event

__all__ = ["ENTRIES", "CudaRecorder"]

ENTRIES = 1_000_000  # events that are kept; torch keeps all by default, in gigabytes


class CudaRecorder:
    """Records from :meth:`start` to :meth:`stop`, on one device, of all threads.

    Only torch's allocator is seen: neither the CUDA context nor what NCCL and other libraries
    allocate by themselves. A trace that the user records is ended by it.
    """

    def __init__(self, device: torch.device, stacks: bool = True, most: int = ENTRIES) -> None:
        self._device, self._stacks, self._most = device, stacks, most
        # Torch knows the one or the other.
        self._annotate = getattr(torch._C, "_cuda_annotateMemory", None)
        self._set_metadata = getattr(torch.cuda.memory, "_set_memory_metadata", lambda text: None)
        self._anchor: torch.Tensor | None = None
        self._last = ""
        self.found: dict[str, Any] = {}
        """torch's snapshot at the end of the recording."""
        self.remarks: list[str] = []

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        self._anchor = torch.empty(1, dtype=torch.uint8, device=self._device)
        torch.cuda.memory._record_memory_history(
            enabled="all",
            context="alloc" if self._stacks else None,
            stacks="python",
            max_entries=self._most,
            clear_history=True,
        )

    def mark(self, number: int) -> None:
        """Takes a place among the events."""
        text = self._last = f"{cuda_trace.MARK}{number}"
        if self._annotate is not None and self._anchor is not None:
            self._annotate(self._anchor.data_ptr(), text)
        else:
            self._set_metadata(text)

    def read(self) -> dict[str, Any]:
        """Returns torch's snapshot of now, and goes on."""
        if self._annotate is None:  # the last marks are those of the next allocation
            self._set_metadata(self._last)
            torch.empty(1, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory._snapshot(self._device)

    def stop(self) -> None:
        """Ends the recording."""
        try:
            self.found = self.read()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
            if self._annotate is None:
                self._set_metadata("")
            self._anchor = None

    def events(self, modules: Mapping[int, str] | None = None) -> list[Event]:
        """Returns what was recorded, in order. Modules are told by the notes alone."""
        index = self._device.index or 0
        if len(self.found["device_traces"][index]) >= self._most:
            self.remarks.append(
                f"Only the last {self._most:,} events were kept: track fewer steps."
            )
        return cuda_trace.events_of(self.found, index)

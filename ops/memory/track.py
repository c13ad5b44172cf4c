"""Tracks the memory of training steps while they run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..host.arena import Slab, slabs
from .collecting import no_collections
from .cpu import CpuRecorder, check_no_profiler
from .cuda import ENTRIES, CudaRecorder
from .events import Owner, Timeline
from .stream import Event, Label, Note, resolve
from .watch import Watch

__all__ = ["Tracked", "track"]


class Tracked:
    """The result of :func:`track`: a context, and afterwards what was seen in it."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        device: torch.device,
        batch: Any,
        stacks: bool,
        most: int | None = None,
    ) -> None:
        self.recorder = recorder_of(device, stacks, most)
        mark = self.recorder.mark
        # On the CPU the recorder sees which node of the graph runs.
        self.watch = Watch(
            model, optimizers, device, mark, batch, device.type != "cpu", not stacks, most
        )
        self._device = device
        self.before: list[Label] = []
        """What existed before."""
        self.after: list[Label] = []
        """What exists afterwards."""
        self.is_running = False
        self._slabs: dict[int, Slab] = {}  # of the host's arenas, before
        self._timeline: Timeline | None = None
        self._ended = False

    def __enter__(self) -> Tracked:
        if self._ended:
            raise RuntimeError("this recording has been used already: make another")
        if self._device.type == "cpu":
            check_no_profiler()
        self.before, self._slabs = self.watch.present(), slabs()
        self.watch.install()
        try:
            self.recorder.start()
        except BaseException:
            self.watch.remove()
            raise
        self.is_running = True
        return self

    def __exit__(self, *raised: object) -> None:
        self.is_running = False
        try:
            self.watch.catch_up()
            self.recorder.stop()
            self._ended = True
            self.after = self.watch.present()
        finally:
            self.watch.remove()

    @property
    def timeline(self) -> Timeline:
        """Returns every allocation, with its kind and its owner."""
        if self._timeline is None:
            if not self._ended:
                raise RuntimeError("read what was tracked after the with block has ended")
            with no_collections():
                self._timeline = self._read()
        return self._timeline

    def _read(self) -> Timeline:
        events, notes = self._seen()
        return resolve(
            self.before, events, notes, str(self._device), self.recorder.remarks, self._slabs
        )

    def _seen(self) -> tuple[list[Event], list[Note]]:
        """Returns what happened, in order, and the notes by their numbers. May be called once."""
        notes = self.watch.notes
        events = self.recorder.events(self.watch.modules)
        events.append(Event("mark", len(notes)))
        notes.append(Note(self.after))
        return events, notes

    @property
    def peak_bytes(self) -> int:
        """Returns the most bytes that were live at once."""
        return self.timeline.peak_bytes

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """Returns the bytes of every kind at the peak."""
        return self.timeline.peak_by_kind

    def owners(self, top: int | None = None) -> list[Owner]:
        """Returns who owns the bytes at the peak, the largest first."""
        return self.timeline.owners(top=top)

    def __str__(self) -> str:
        return self.timeline.table()


def recorder_of(
    device: torch.device, stacks: bool = True, most: int | None = None
) -> CpuRecorder | CudaRecorder:
    """Returns what records the allocator of a device; on CUDA the last ``most`` events."""
    if device.type == "cuda":
        return CudaRecorder(device, stacks, most or ENTRIES)
    return CpuRecorder(stacks)


def track(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    batch: Any = None,
    device: torch.device | str | None = None,
    stacks: bool = False,
) -> Tracked:
    """Tracks the live bytes of training steps by kind, module and phase, while they run.

    Example::

        model = torch.nn.Linear(64, 64)
        optimizer = headroom.optim.AdamW(model.parameters())
        with headroom.memory.track(model, optimizer) as tracked:
            for _ in range(2):
                loss = model(torch.randn(8, 64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        print(tracked)  # kinds, phases, and the owners at the peak
        print(tracked.peak_bytes, tracked.peak_by_kind, tracked.timeline.peaks())

    On the CPU every allocation of torch's allocator counts, temporaries inside operations included;
    see :mod:`headroom.memory.cpu` for what is not seen. On CUDA the trace of the caching allocator
    is read, in the bytes that were asked for. What existed before and belongs to neither model nor
    optimizer is not counted.

    The steps compute the same bits as without. What is computed again in the backward pass belongs
    to it. The first steps of a process allocate more than later ones, and an optimizer makes its
    state in its first step, so track at least two.

    Args:
        model: with its parameters on one device.
        optimizer: or several; its state is told from gradients and weights.
        batch: tensors that count as "batch", besides those that the model is called with.
        device: to look at, if the model is on several. Defaults to that of the parameters.
        stacks: keep the lines of Python of every allocation, and not only of what is saved for the
            backward pass. Steps of small operations then take twice as long as without.

    Raises:
        TypeError: a model or an optimizer that is none.
        ValueError: a model on the meta device, on several devices, or without parameters; an
            optimizer with parameters that the model does not have.
        RuntimeError: on entering, if a profiler or another ``track`` runs on this thread.
    """
    optimizers = checked(model, optimizer)
    return Tracked(model, optimizers, device_of(model, device), batch, stacks)


def checked(model: Any, optimizer: Any) -> list[torch.optim.Optimizer]:
    """Returns the optimizers, which must be of parameters of the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, wanted a torch.nn.Module")
    if optimizer is None:
        return []
    one = isinstance(optimizer, torch.optim.Optimizer) or not isinstance(optimizer, Iterable)
    optimizers = [optimizer] if one else list(optimizer)
    own = {id(p) for p in model.parameters()}
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(f"optimizer is {type(each).__name__}, wanted a torch.optim.Optimizer")
        params = [p for group in each.param_groups for p in group["params"]]
        foreign = [p for p in params if id(p) not in own]
        if foreign:
            raise ValueError(
                f"optimizer {type(each).__name__} holds {len(params)} parameters, of which "
                f"{len(foreign)} are not in the model, the first of shape "
                f"{list(foreign[0].shape)}: give the model that it trains, or several modules in "
                "a torch.nn.ModuleList"
            )
    return optimizers


def device_of(model: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """Returns the device to look at."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    places: dict[torch.device, str] = {}
    for name, tensor in tensors:
        places.setdefault(tensor.device, name)
    if torch.device("meta") in places:
        raise ValueError(
            f"{places[torch.device('meta')]} is on the meta device, where nothing is allocated: "
            "move the model to a device with to_empty(), or plan it with headroom.plan"
        )
    if device is None:
        if not places:
            raise ValueError("the model has no parameters: say which device= to look at")
        if len(places) > 1:
            shown = ", ".join(f"{place} ({name})" for place, name in places.items())
            raise ValueError(
                f"the model is on several devices: {shown}; say which device= to look at"
            )
        chosen = next(iter(places))
    else:
        chosen = torch.device(device)
        if chosen.type == "cuda" and chosen.index is None:
            chosen = torch.device(chosen.type, torch.accelerator.current_device_index())
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {chosen}, wanted cpu or cuda")
    return chosen if chosen.type == "cuda" else torch.device("cpu")  # accelerate has a cpu:0

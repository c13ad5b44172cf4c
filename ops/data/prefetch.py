"""Copies the next batch to the device while a step computes: :class:`DevicePrefetcher`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._core.overlap import bytes_of
from ..host.engine import Engine, Ticket
from ..host.engines import engine_of
from ..step.pytree import map_tensors

__all__ = ["DevicePrefetcher"]


class DevicePrefetcher:
    """Iterates over a loader and gives its batches on a device, one batch ahead.

    While the step of a batch computes, the next one is fetched from the loader and copied, on a
    stream of its own. Batches, their order and the random draws of the loader stay as they are.

    Example::

        loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=16)
        for batch in headroom.data.DevicePrefetcher(loader, "cpu"):
            print(batch.mean())

    Tensors are replaced in nested lists, tuples, dicts, dataclasses and batches of transformers;
    an object with a method ``to``, such as a ``PackedSequence``, is moved by it. What is not in
    pinned memory is copied into such memory first. On the CPU batches are passed on as they are,
    and nothing is fetched ahead.

    Iterate on the stream that computes: it waits for the copies. A loader that uses its memory
    again must leave a batch as it is until two more have been asked for. An error of the loader is
    raised in place of the batch that it stopped. All attributes that are not listed here are those
    of the loader, such as ``dataset`` and ``sampler``. If the loader has ``state_dict`` and
    ``load_state_dict``, as torchdata's ``StatefulDataLoader``, so has this: the state is that of a
    loader from which only the batches that were given out have been fetched, so that a resumed run
    begins with the batch after them.

    Args:
        loader: an iterable of batches.
        device: "cpu", or a CUDA device.

    Raises:
        ValueError: another kind of device.
        TypeError: a loader that cannot be iterated, or one that accelerate has prepared, which
            looks ahead by itself; says where to put this.

    Attributes:
        loader, device: as given.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str) -> None:
        self.loader, self.device = loader, torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device.type!r}, wanted cpu or cuda")
        if not hasattr(type(loader), "__iter__"):
            raise TypeError(f"loader is {type(loader).__name__}, wanted an iterable of batches")
        if hasattr(loader, "base_dataloader"):
            raise TypeError(
                "the loader was prepared by accelerate, which finds out which batch is the last by "
                "looking ahead: set loader.base_dataloader = headroom.data.DevicePrefetcher("
                "loader.base_dataloader, accelerator.device) instead"
            )
        if self.device.type == "cuda" and self.device.index is None and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._state: Any = None  # of the loader before it fetched what is ahead

    def __iter__(self) -> Iterator[Any]:
        engine = engine_of(self.device)
        self._state = None
        return _Ahead(self, engine) if engine.is_asynchronous else iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Tells the loader the number of the epoch, or else whichever of its batch sampler, its
        sampler and its dataset want to know."""
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)
            return
        sampler = getattr(self.loader, "sampler", None)
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        for part in (batch_sampler, sampler, getattr(self.loader, "dataset", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_state"):  # of a copy that is being made
            raise AttributeError(name)
        found = getattr(self.loader, name)
        # Who asks whether a loader has a state must hear what is true of this one.
        return {"state_dict": self._state_dict, "load_state_dict": self._load}.get(name, found)

    def _state_dict(self) -> Any:
        if self._state is None:
            return self.loader.state_dict()  # type: ignore[attr-defined]
        return copy.deepcopy(self._state)

    def _load(self, state: Any) -> None:
        self._state = None
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]


class _Fetched:
    """Holds a batch of a loader, and the copy of it that is under way."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.error: Exception | None = None  # that the loader raised instead
        self.state: Any = None  # of the loader, once it had given this
        self.ticket: Ticket = None  # of the last of the copies, if any, which run in order
        self.sources: list[Tensor] = []  # that are read until then


class _Ahead:
    """An iteration over the batches of a prefetcher, whose next batch is on its way."""

    def __init__(self, prefetcher: DevicePrefetcher, engine: Engine) -> None:
        self._prefetcher, self._engine = prefetcher, engine
        self._iterator = iter(prefetcher.loader)
        self._next: _Fetched | None = None
        self._given: _Fetched | None = None  # whose sources are held

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        fetched = self._next or self._fetch()
        self._next = fetched  # also if fetching another one is interrupted
        if fetched.error is None:
            self._settle(self._given)  # it was waited for a step ago
            self._given = None
            ahead = self._fetch()
            if fetched.ticket is not None:
                self._engine.wait(fetched.ticket)
            self._next, self._given = ahead, fetched
            self._prefetcher._state = fetched.state
            batch, fetched.batch = fetched.batch, None
            return batch
        self._next = None
        self._prefetcher._state = None  # nothing is ahead
        raise fetched.error

    def __del__(self) -> None:
        for name in ("_next", "_given"):
            self._settle(getattr(self, name, None))

    def _settle(self, fetched: _Fetched | None) -> None:
        """Waits until nothing is read or written for a batch any more, so that it can be freed."""
        if fetched is not None and fetched.sources:
            self._engine.sync(fetched.ticket)
            fetched.sources.clear()

    def _fetch(self) -> _Fetched:
        fetched = _Fetched()
        loader = self._prefetcher.loader
        try:
            batch = next(self._iterator)
            if hasattr(loader, "state_dict"):
                # A copy: what the state is made of may change when the next batch is fetched.
                fetched.state = copy.deepcopy(loader.state_dict())
            fetched.batch = self._copied(batch, fetched)
        except Exception as error:
            self._settle(fetched)
            fetched.batch, fetched.error = None, error
        return fetched

    def _copied(self, batch: Any, fetched: _Fetched) -> Any:
        device, engine = self._prefetcher.device, self._engine
        done: dict[int, Tensor] = {}  # a tensor that is met twice is copied once

        def moved(x: Tensor) -> Tensor:
            if not _has_plain_bytes(x):
                return x.to(device)
            if id(x) not in done:
                target = torch.empty_like(x, device=device)
                source = _laid_out_as(target, x)
                done[id(x)] = target
                if x.numel():
                    fetched.sources.append(source)
                    # Work that still runs may have freed the memory of the target, by now.
                    ready = engine.mark()
                    fetched.ticket = engine.up(bytes_of(target), bytes_of(source), after=(ready,))
            return done[id(x)]

        def other(leaf: Any) -> Any:
            has_to = hasattr(leaf, "to") and not isinstance(leaf, (type, nn.Module))
            return leaf.to(device) if has_to else leaf

        return map_tensors(batch, moved, other)


def _has_plain_bytes(x: Tensor) -> bool:
    """Returns whether the bytes of a tensor on the host are all that it is."""
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and not (x.requires_grad or x.is_quantized or x.is_conj() or x.is_neg())
    )


def _laid_out_as(target: Tensor, x: Tensor) -> Tensor:
    """Returns ``x``, or a copy of it that has the strides of ``target`` and, for a GPU, is in
    pinned memory."""
    pins = target.is_cuda and not x.is_pinned()
    if x.stride() == target.stride() and not pins:
        return x
    made = torch.empty_strided(x.shape, target.stride(), dtype=x.dtype, pin_memory=pins)
    return made.copy_(x)

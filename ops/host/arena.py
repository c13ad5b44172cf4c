"""Takes memory of the host in slabs outside torch's allocators, and keeps account of them.

torch's pinned allocator rounds sizes up to powers of two and gives nothing back. A slab is a
mapping of exactly the size that was asked for, and goes back to the system with the last tensor in
it. As torch knows nothing of it, its bytes count for no device, not even for the CPU.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._core.available import host_headroom
from .._core.checks import check_count
from .._core.sizes import format_bytes, parse_bytes
from .files import MappedFile, copied_through_file, mapped_file
from .passes import drop_what_is_left
from .pinning import pinned

ALIGNMENT = 512  # of slabs; that of what torch allocates on a device
SHARE = 0.8  # of the memory that can be had, which an arena takes at most


class Slab(NamedTuple):
    """Says how many bytes an arena has taken, for what, and whether they are a file on a disk."""

    size: int
    kind: str
    owner: str
    on_disk: bool = False


_slabs: dict[int, Slab] = {}  # by their addresses
listeners: list[Callable[[int, Slab | None], Any]] = []
"""Called with the address of each slab that an arena takes, and the slab, and with that of each
that it gives back, and None."""


def slabs() -> dict[int, Slab]:
    """Returns the slabs of all arenas that exist, by their addresses."""
    return dict(_slabs)


def _tell(address: int, slab: Slab | None) -> None:
    for listener in [*listeners]:
        listener(address, slab)


def in_arena(tensor: Tensor) -> bool:
    """Returns whether the memory of a tensor is that of an arena."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _slabs


class HostMemoryError(MemoryError):
    """Says that the host has no room for what an arena was asked for, and which limit is reached.

    Attributes:
        asked: bytes that were asked for.
        held: bytes that the arena has.
        limit: bytes that it may have in all.
        which: the name of that limit.
    """

    def __init__(self, what: str, asked: int, held: int, limit: int, which: str) -> None:
        self.asked, self.held, self.limit, self.which = asked, held, limit, which
        super().__init__(
            f"the host arena was asked for {_exact(asked)} for {what}, beside {_exact(held)} that "
            f"it has, but may have {_exact(limit)} in all: {which}"
        )


def _exact(size: int) -> str:
    return format_bytes(size) if size < 1000 else f"{format_bytes(size)} ({size:,} bytes)"


class HostArena:
    """Memory of the host for what a device has no room for, with a limit and an account.

    Nothing is taken when an arena is made. :meth:`take` maps a slab of exactly the bytes that it is
    asked for, aligned to 512 bytes. The slab is given back when the last tensor in it is freed.
    Forked processes, such as those of data loaders, do not have slabs: one that reads a slab
    crashes.

    Args:
        budget: the bytes, or text such as ``"32 GiB"``, that slabs may take together. None: no more
            than the system allows, which is 0.8 of what is left to the cgroup of the process and of
            the memory that is available (with ``file``, of the space that is free on the disk).
            That holds beside a budget, too.
        pin: ``"auto"`` registers slabs for a CUDA device, so that copies run beside the
            computation. Where the system refuses that, a warning says so once, and copies wait.
            False never registers them.
        file: a folder on a disk. Slabs are then files in it, which have no names and vanish with
            the process: the system keeps in memory what it has room for.

    Example::

        arena = headroom.HostArena("2 GiB")
        optimizer = headroom.optim.AdamW8bit(model.parameters())
        handle = headroom.optim.offload(optimizer, host=arena)
        print(arena)
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        pin: Literal["auto", False] = "auto",
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.budget = None if budget is None else parse_bytes(budget, "budget")
        if pin not in ("auto", False):
            raise ValueError(f'pin must be "auto" or False, got {pin!r}')
        if file is not None and not os.path.isdir(file):
            raise NotADirectoryError(f"file={os.fspath(file)!r} is not a folder")
        self.pin, self.file = pin, None if file is None else Path(file)
        self.bytes = 0
        self.peak = 0
        self._by: dict[tuple[str, str], int] = {}
        self._lock = threading.RLock()  # slabs are freed on any thread, and in a collection

    def __repr__(self) -> str:
        lines = [f"HostArena: {_exact(self.bytes)} now, {_exact(self.peak)} at most"]
        for (kind, owner), size in sorted(self._by.items()):
            lines.append(f"    {kind} of {owner}: {_exact(size)}")
        return "\n".join(lines)

    def memory(self) -> dict[tuple[str, str], int]:
        """Returns the bytes of the slabs that exist, by their kind and owner."""
        drop_what_is_left()
        with self._lock:
            return dict(self._by)

    def reset_peak(self) -> None:
        """Lets ``peak`` begin anew, at the bytes that there are now."""
        with self._lock:
            self.peak = self.bytes

    def limit(self) -> tuple[int, str]:
        """Returns how many bytes the slabs may have together at the moment, and what limits
        them."""
        if self.file is None:
            found = {
                f"{SHARE} of {name}": int(SHARE * (size + self.bytes))
                for name, size in host_headroom().items()
            }
        else:
            free = shutil.disk_usage(self.file).free
            found = {f"{SHARE} of the space in {self.file}": int(SHARE * (free + self.bytes))}
        if self.budget is not None:
            found["the budget of the arena"] = self.budget
        which = min(found, key=found.__getitem__, default="")
        return found.get(which, 1 << 62), which

    def take(
        self, size: int, *, kind: str, owner: str, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Returns a slab of zeros, a tensor of bytes on the CPU that views may be made of.

        Args:
            size: in bytes.
            kind, owner: under which the account lists it.
            device: that copies will go to and come from.

        Raises:
            HostMemoryError: a limit would be passed. Nothing has been taken then.
            TypeError, ValueError: ``size`` is no integer of 0 or more.
        """
        check_count("size", size, 0)
        device = torch.device(device)
        drop_what_is_left()
        with self._lock:
            limit, which = self.limit()
            if self.bytes + size > limit:
                raise HostMemoryError(f"{kind} of {owner}", size, self.bytes, limit, which)
            if size == 0:
                return torch.empty(0, dtype=torch.uint8, device="cpu")
            try:
                mapping = _mapped(size) if self.file is None else _mapped_file(size, self.file)
            except OSError as error:
                which = f"the system refuses it ({error})"
                raise HostMemoryError(
                    f"{kind} of {owner}", size, self.bytes, self.bytes, which
                ) from error
            view = memoryview(mapping)[:size]
            slab = torch.frombuffer(view, dtype=torch.uint8)
            if self.file is None:
                slab.zero_()  # the first touch, by torch's threads, decides where pages lie
            undo = None
            if device.type == "cuda" and self.pin == "auto":
                undo = pinned(slab, device)
            elif device.type == "cpu" and isinstance(mapping, MappedFile):
                undo = copied_through_file(slab, mapping)
            _slabs[slab.data_ptr()] = taken = Slab(size, kind, owner, self.file is not None)
            self._count(size, kind, owner)
            _tell(slab.data_ptr(), taken)
        # The mapping lives until the last tensor has dropped the view, and is unregistered before.
        give_back = partial(_give_back, self, mapping, slab.data_ptr(), undo)
        weakref.finalize(view, give_back, size, kind, owner).atexit = False
        return slab

    def _count(self, change: int, kind: str, owner: str) -> None:
        with self._lock:
            self.bytes += change
            self.peak = max(self.peak, self.bytes)
            left = self._by.pop((kind, owner), 0) + change
            if left:
                self._by[kind, owner] = left

    def __deepcopy__(self, memo: dict[int, Any]) -> HostArena:
        return self  # what copies keep lies in the same memory

    def __reduce__(self) -> Any:
        return _unpickled, (self.budget, self.pin, self.file)


def _give_back(
    arena: HostArena,
    mapping: mmap.mmap,
    address: int,
    undo: Any,
    size: int,
    kind: str,
    owner: str,
) -> None:
    if undo is not None:
        undo()
    _slabs.pop(address, None)
    arena._count(-size, kind, owner)
    _tell(address, None)
    del mapping


def _mapped(size: int) -> mmap.mmap:
    """Returns anonymous memory that forked processes do not get: a copy on write there would leave
    a device with the old page."""
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(mapping, "MADV_DONTFORK", "MADV_HUGEPAGE")
    return mapping


def _mapped_file(size: int, folder: Path) -> MappedFile:
    mapping = mapped_file(size, folder)
    _advise(mapping, "MADV_DONTFORK")
    return mapping


def _advise(mapping: mmap.mmap, *names: str) -> None:
    for name in names:
        if (advice := getattr(mmap, name, None)) is not None:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapping.madvise(advice)


_default: HostArena | None = None
_default_lock = threading.Lock()


def default_arena() -> HostArena:
    """Returns the arena of this process, which is made at the first call."""
    global _default
    with _default_lock:
        if _default is None:
            _default = HostArena()
        return _default


def _unpickled(budget: int | None, pin: Any, file: Path | None) -> HostArena:
    """Returns the arena of an unpickled owner: the default one, unless it had options."""
    if budget is None and pin == "auto" and file is None:
        return default_arena()
    if file is not None and not file.is_dir():
        warnings.warn(f"there is no folder {file}: the host arena is in memory", stacklevel=2)
        file = None
    return HostArena(budget, pin=pin, file=file)

"""Memory of the host in a rehearsal: what a program has of it is counted and held to a limit, and
large tensors on the CPU are address space, since nothing is written to them.

Counted is pinned memory, which the device's runtime gives, tensors on the CPU, for which torch's
allocator asks the C library, and Headroom's arena. The rest is what the process really has besides.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from typing import Any

import torch
from headroom._core import available
from headroom._core.sizes import format_bytes
from headroom.host import arena
from headroom.integrations.attaching import after_import

from ._operations import COMPOSITE, HOST_KERNELS, KEPT, Operation, register
from .installed import redirect_calls
from .lines import line, line_of
from .values import libraries

__all__ = ["KINDS", "Host", "in_words", "install", "ran_out"]

KINDS = ("pinned", "tensors", "arena")
_WORDS = {
    "pinned": "pinned memory",
    "tensors": "tensors on the CPU",
    "arena": "Headroom's arena",
    "rest": "the rest of the process",
}
_Told = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)
_NO_LIMIT = (1 << 64) - 1
# Numbers of these types are not computed: weights and what is made of them, and codes of them.
# Integers are: masks, tokens and lengths decide what a program does.
_VALUES = {d for d in vars(torch).values() if isinstance(d, torch.dtype)} - {
    torch.bool, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip


def install(runtime: ctypes.CDLL, computed: int) -> None:
    """Sends the memory of tensors on the CPU through the library of the software device, and lets
    operations on those of more than ``computed`` bytes write nothing."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    runtime.rehearsal_watch_host.argtypes = [size, size, _Told]
    runtime.rehearsal_take_arena.argtypes = [pointer, size]
    runtime.rehearsal_give_arena.argtypes = [pointer]
    runtime.rehearsal_host_left.restype = size
    functions = {
        "posix_memalign": runtime.rehearsal_posix_memalign,
        "free": runtime.rehearsal_free,
    }
    redirect_calls("libc10.so", functions)
    _skip_large(computed)


class Host:
    """The memory of the host, from now on.

    Args:
        runtime: the library of the software device, after :func:`install`.
        limit: bytes of the host; None: no limit.
        computed: bytes up to which tensors are computed, and not counted.
    """

    def __init__(self, runtime: ctypes.CDLL, limit: int | None, computed: int) -> None:
        self._limit, self._refused = limit, list[dict[str, Any]]()
        self._runtime, self._told = runtime, _Told(self._tell)
        runtime.rehearsal_watch_host(_NO_LIMIT if limit is None else limit, computed, self._told)
        arena.listeners.append(self._on_slab)
        available.host_headroom = arena.host_headroom = self._left
        if limit is not None:
            after_import("psutil", self._tell_psutil)

    def report(self, error: BaseException | None) -> dict[str, Any]:
        """Returns the peak of the host's memory, in bytes, and of what it consisted.

        Args:
            error: with which the program ended; an arena refuses what is above its limit by one.
        """
        if isinstance(error, arena.HostMemoryError):
            held = error.held
            place = line_of(error.__traceback__)
            self._refused.append(
                {"line": place, "asked": error.asked, "held": held, "kind": "arena"}
            )
        found = (ctypes.c_size_t * (len(KINDS) + 2))()
        self._runtime.rehearsal_host_peak(found)
        peak, *parts = found
        # What numpy had, say, while nothing was counted.
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if resident > peak:
            peak, parts = resident, [0] * len(KINDS) + [resident]
        return {
            "peak": peak,
            **dict(zip((*KINDS, "rest"), parts, strict=True)),
            "limit": self._limit,
            "refused": self._refused,
        }

    def _tell(self, kind: int, asked: int, held: int) -> None:
        self._refused.append({"line": line(), "asked": asked, "held": held, "kind": KINDS[kind]})

    def _on_slab(self, address: int, slab: arena.Slab | None) -> None:
        if slab is None:
            self._runtime.rehearsal_give_arena(address)
        elif not slab.on_disk:
            self._runtime.rehearsal_take_arena(address, slab.size)

    def _left(self, *_: Any) -> dict[str, int]:
        """Returns what is left of the host that is rehearsed, for Headroom's arenas."""
        if self._limit is None:
            return {}
        return {"what is left of --host-memory": self._runtime.rehearsal_host_left()}

    def _tell_psutil(self, module: Any) -> None:
        """Lets a program that asks psutil, such as accelerate for device_map="auto", see it."""
        own = module.virtual_memory

        def virtual_memory() -> Any:
            left = self._runtime.rehearsal_host_left()
            return own()._replace(total=self._limit, available=left, free=left)

        module.virtual_memory = virtual_memory


def in_words(found: dict[str, Any]) -> str:
    """Returns of what the peak of a report consisted."""
    return ", ".join(f"{what} {format_bytes(found[k])}" for k, what in _WORDS.items() if found[k])


def ran_out(found: dict[str, Any]) -> Iterator[str]:
    """Yields what was asked for above the limit, a line each."""
    for one in found["refused"]:
        asked, held = format_bytes(one["asked"]), format_bytes(one["held"])
        yield f"{asked} asked for {_WORDS[one['kind']]} beside {held}, at {one['line']}"


# ---- Operations on large tensors of the CPU -----------------------------------------------------


def _skip_large(limit: int) -> None:
    """Lets operations that write large tensors of numbers on the CPU return without doing so."""
    for namespace in ("aten", "headroom"):
        library = torch.library.Library(namespace, "IMPL")
        libraries.append(library)
        composite = [f"aten::{short}" for short in COMPOSITE]
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU") + composite:
            short = name.removeprefix(namespace + "::")
            if short == name or short in KEPT or short.startswith("_nested_"):
                continue
            o = Operation(name, "CPU")
            HOST_KERNELS[name] = o.native
            register(library, short, _kernel(o, limit), "CPU")


def _kernel(o: Operation, limit: int):
    # Of a list whose addresses are in a table, large tensors may be.
    always = "_table" in o.name

    def kernel(keyset, *args, **kwargs):
        try:
            with torch._C.DisableTorchFunction():
                if (
                    always
                    or _has_large(args, limit)
                    or kwargs
                    and _has_large(kwargs.values(), limit)
                ):
                    found, result = _skipped(o, args, kwargs, limit, always)
                    if found:
                        return result
                return o.native.call_boxed(keyset, *o.without_numbers(args), **kwargs)
        except BaseException as error:
            # The frames of a traceback hold tensors; torch's own C++ frames do not.
            args = kwargs = None
            raise error.with_traceback(None)  # noqa: B904

    return kernel


def _has_large(values, limit: int) -> bool:
    for v in values:
        if isinstance(v, torch.Tensor):
            if v.nbytes > limit:
                return True
        elif isinstance(v, list) and v and isinstance(v[0], torch.Tensor):
            if any(t is not None and t.nbytes > limit for t in v):
                return True
    return False


def _skipped(o: Operation, args, kwargs, limit: int, always: bool) -> tuple[bool, Any]:
    """Returns whether an operation is not computed, and then what it returns."""
    written = o.written(args, kwargs)
    skipped = always or any(t.nbytes > limit and t.dtype in _VALUES for t in written)
    if skipped and not o.makes_tensors:
        return True, o.returned(args, kwargs, None, [None] * len(o.op._schema.returns))
    if not o.makes_tensors:
        return False, None
    try:
        meta = o.on_meta(args, kwargs)
    except Exception:  # its own code says what is wrong
        return False, None
    if not skipped:
        skipped = any(t.nbytes > limit and t.dtype in _VALUES for t in o.fresh_tensors(meta))
    return skipped, o.returned(args, kwargs, _zeros, meta) if skipped else None


def _zeros(values: Any) -> Any:
    """Returns zeros on the CPU in the places of tensors of meta."""
    if isinstance(values, torch.Tensor):
        made = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="cpu")
        return made.zero_()
    if isinstance(values, (list, tuple)):
        return type(values)(_zeros(v) for v in values)
    return values

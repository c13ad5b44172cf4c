"""Sends the calls of the installed libheadroom to the software device.

The library holds a CUDA runtime of its own, which only NVIDIA's driver can serve. So the functions
of that runtime begin with a jump to those of the device: then the code of the host around
Headroom's kernels is the real one, with its checks, allocations and launches, and the launches do
nothing. That is what a rehearsal wants, in which large tensors are not computed.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import subprocess
from pathlib import Path

__all__ = ["redirect", "redirect_calls"]

_SIZE = 13  # of the jump
_KEPT = ("__cudaRegister", "__cudaUnregister")  # called as the library is loaded and as it goes


def redirect(library: Path, runtime: ctypes.CDLL) -> None:
    """Loads a libheadroom, whose calls of the CUDA runtime go to that of the device from now on.

    Raises:
        RuntimeError: it was built without CUDA, has no symbols, or is for another processor.
    """
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    functions = _functions(library)
    if "cudaLaunchKernel" not in functions:
        raise RuntimeError(
            f"a rehearsal needs a Headroom that was built with CUDA and has its symbols; {library} "
            "has no cudaLaunchKernel: install another one, or build it again with CUDA"
        )
    if platform.machine() != "x86_64":
        raise RuntimeError(f"a rehearsal runs on x86_64 alone; this is {platform.machine()}")
    base = _address(loaded.hr_version) - functions["hr_version"][0]
    for name, (offset, size) in functions.items():
        if name.startswith(("cuda", "__cuda")) and not name.startswith(_KEPT) and size >= _SIZE:
            target = getattr(runtime, name, None)
            if target is not None:
                _jump(base + offset, _address(target))


def redirect_calls(library: str, functions: dict[str, ctypes._FuncPointer]) -> None:
    """Sends calls that a loaded library makes of others to functions of the same names.

    Args:
        library: its file name.
        functions: by their names, which the library's table of addresses has.
    """
    rows = [row.split() for row in Path("/proc/self/maps").read_text().splitlines()]
    starts = [
        (row[0], row[2], row[5]) for row in rows if row[5:] and row[5].endswith("/" + library)
    ]
    where, offset, path = starts[0]
    base = int(where.partition("-")[0], 16) - int(offset, 16)
    text = subprocess.run(
        ["readelf", "--relocs", "--wide", path], capture_output=True, text=True, check=True
    ).stdout
    for row in (line.split() for line in text.splitlines()):
        name = row[4].partition("@")[0] if len(row) > 4 and row[2].startswith("R_X86_64_") else ""
        if name in functions:
            place = base + int(row[0], 16)
            page = place & -mmap.PAGESIZE
            _protect(page, place + 8 - page, mmap.PROT_READ | mmap.PROT_WRITE)
            ctypes.c_uint64.from_address(place).value = _address(functions[name])


def _functions(library: Path) -> dict[str, tuple[int, int]]:
    """Returns where the functions of a library begin, and their bytes."""
    text = subprocess.run(
        ["nm", "--defined-only", "--print-size", str(library)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    rows = (line.split() for line in text.splitlines())
    return {r[3]: (int(r[0], 16), int(r[1], 16)) for r in rows if len(r) == 4 and r[2] in "tT"}


def _address(function: ctypes._FuncPointer) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _jump(begin: int, to: int) -> None:
    """Writes ``mov r11, to; jmp r11`` at ``begin``."""
    code = b"\x49\xbb" + to.to_bytes(8, "little") + b"\x41\xff\xe3"
    page = begin & -mmap.PAGESIZE
    size = begin + len(code) - page
    _protect(page, size, mmap.PROT_READ | mmap.PROT_WRITE)
    ctypes.memmove(begin, code, len(code))
    _protect(page, size, mmap.PROT_READ | mmap.PROT_EXEC)


def _protect(page: int, size: int, how: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(size), how):
        raise OSError(ctypes.get_errno(), "a page of a library cannot be written")

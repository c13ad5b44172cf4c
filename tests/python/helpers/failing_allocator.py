"""Torch's CPU allocator, made to fail at one allocation with the error that it has itself."""

import contextlib
import ctypes
import functools
import gc
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")


@functools.cache
def _library():
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler is needed, as for the installation"
    root, abi = Path(torch.__file__).parent, int(torch._C._GLIBCXX_USE_CXX11_ABI)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failing_allocator.so"
        command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", str(SOURCE)]
        command += [f"-I{root / 'include'}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
        subprocess.run([*command, f"-L{root / 'lib'}", "-lc10", "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))
    library.live_bytes.restype = ctypes.c_longlong
    library.allocations.restype = ctypes.c_long
    library.fail_at.argtypes = [ctypes.c_long]
    return library


class FailingAllocator:
    """Counts allocations and live bytes, and fails where it is told to.

    Attributes:
        count: how many allocations the last block had.
    """

    count = 0

    @contextlib.contextmanager
    def failing_at(self, number):
        """Fails at this allocation of the block, from 1; 0 counts only."""
        _library().fail_at(number)
        try:
            yield self
        finally:
            self.count = _library().allocations()
            _library().fail_at(0)

    def live(self, collects=True):
        """The bytes that are live, of those that were allocated while it was installed."""
        if collects:
            gc.collect()
        return _library().live_bytes()


@contextlib.contextmanager
def failing_allocator(as_device=False):
    """Installs the allocator, which is compiled once in a process, for a block. What has been
    imported before is not looked at in garbage collections, which then take microseconds.

    It fails with the error of the CPU's allocator, or ``as_device``, of a GPU's."""
    gc.collect()
    gc.freeze()
    _library().fail_as_device(as_device)
    _library().install(1)
    try:
        yield FailingAllocator()
    finally:
        _library().install(0)

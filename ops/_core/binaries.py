"""Finds the binaries of the package and loads them. Import it before the ops are used."""

import ctypes
import os
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LIBRARY_DIR = ROOT / "lib"
INCLUDE_DIR = ROOT / "include"

try:
    torch.ops.load_library(LIBRARY_DIR / "libheadroom_torch.so")
except OSError as error:
    raise ImportError(
        f"headroom could not load {LIBRARY_DIR / 'libheadroom_torch.so'}: {error}. It needs "
        f"torch >= 2.11 (this is {torch.__version__}) and a finished build: in the source folder, "
        "run `pip install .`"
    ) from error

# The library is the one place where the version number is kept.
_library = ctypes.CDLL(next(map(str, LIBRARY_DIR.glob("libheadroom.so.*"))))
_number = _library.hr_version()
VERSION = f"{_number // 10000}.{_number // 100 % 100}.{_number % 100}"

# The library never prints: a level that it does not take is said here.
_library.hr_build_info.restype = ctypes.c_char_p


def build_info() -> dict[str, str]:
    """Returns what the library was built with and for, and the instruction set in use now."""
    pairs = _library.hr_build_info().decode().split("; ")
    return dict(pair.partition("=")[::2] for pair in pairs)


_level = build_info()["cpu"]
_wanted = os.environ.get("HEADROOM_CPU_LEVEL") or _level
if _wanted != _level:
    warnings.warn(
        f"HEADROOM_CPU_LEVEL={_wanted} is not a level of this processor (baseline, avx2, avx512 "
        f"and avx512vbmi, up to its highest): CPU kernels use {_level}",
        stacklevel=2,
    )

try:
    from .. import _C
except ImportError:  # a wheel for every Python, or a build without pybind11: the ops still work
    _C = None

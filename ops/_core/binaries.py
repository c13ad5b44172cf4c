"""Finds the binaries of the package and loads them. Import it before the ops are used."""

import ctypes
import os
import re
import sys
import warnings
from pathlib import Path

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":  # a torch that lacks something says so itself
        raise
    raise ImportError(
        f"headroom needs torch >= 2.11, and {sys.executable} has none: pip install torch"
    ) from error

ROOT = Path(__file__).resolve().parents[1]
LIBRARY_DIR = ROOT / "lib"
INCLUDE_DIR = ROOT / "include"


def _why_not(error: OSError) -> str:
    """Returns why the ops could not be loaded, and what to do."""
    library = LIBRARY_DIR / "libheadroom_torch.so"
    if not library.exists():
        return f"headroom at {ROOT} is not built, it has no {library}: in a clone, pip install ."
    version = str(torch.__version__)
    if [int(number) for number in re.findall(r"\d+", version)[:2]] < [2, 11]:
        return f"headroom needs torch >= 2.11, and this is {version}: pip install 'torch>=2.11'"
    # torch's error names the file alone, and the system's, below it, says what is wrong.
    return (
        f"headroom could not load {library}: {error.__cause__ or error}. If it was built for "
        f"another system or torch than this {version}: in a clone, pip install . --force-reinstall"
    )


try:
    torch.ops.load_library(LIBRARY_DIR / "libheadroom_torch.so")
except OSError as error:
    raise ImportError(_why_not(error)) from error

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

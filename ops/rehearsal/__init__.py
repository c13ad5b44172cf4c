"""A CUDA device made of software, for torch on a machine without a GPU.

torch's allocator, streams, autograd and the host code of its operations are the real ones. What is
replaced are the C libraries under torch: the runtime, the driver, cuBLAS, cuBLASLt and NVML, whose
sources are in ``rehearsal/``. This package is imported as ``headroom_rehearsal``, without torch and
without Headroom, since it must be there before torch is:

    headroom rehearse --gpu "RTX 4090" train.py
    python -m pytest -p headroom_rehearsal.pytest_plugin tests/

:func:`run` does the former from Python, and returns a :class:`Report`. The rest is internal: names
may change.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from .build import build
from .running import Report, run

__all__ = ["Report", "device", "gpus", "note", "run", "start"]

_device: Any = None  # of values, once the device was started


def start(
    gpu: str = "H100",
    *,
    memory: int | None = None,
    capability: int | None = None,
    devices: int = 1,
    context: int = 0,
    computed: int | None = None,
    late: bool = False,
    ordered: bool = False,
    headroom: Path | None = None,
) -> ctypes.CDLL:
    """Returns the runtime of the device, after which torch sees a GPU.

    Args:
        gpu: name of the GPU, such as ``"H100"`` or ``"RTX 4090"``.
        memory: bytes of each device instead of those of the GPU.
        capability: compute capability instead of that of the GPU, such as 86.
        devices: how many there are.
        context: bytes that the context takes on each.
        computed: bytes up to which tensors have values; all have if None.
        late: what is queued on a stream runs only when something has to wait for it.
        ordered: accesses that nothing puts in order are reported on stderr, and counted.
        headroom: libheadroom for this device, in place of the installed one.

    Raises:
        RuntimeError: torch is imported already, or the device cannot be built.
    """
    global _device
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already; start the software device before that")
    numbers = {
        "MEMORY": memory,
        "CAPABILITY": capability,
        "DEVICES": devices,
        "CONTEXT": context,
        "COMPUTED": computed,
        "LATE": int(late),
        "ORDERED": int(ordered),
    }
    os.environ["HEADROOM_REHEARSAL_GPU"] = gpu
    for name, number in numbers.items():
        os.environ[f"HEADROOM_REHEARSAL_{name}"] = "" if number is None else str(number)
    folder = build()
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    order = ("libcudart.", "libcuda.", "libnvidia-ml.", "libcublasLt.", "libcublas.", "libcupti.")
    files = [file for start in order for file in folder.iterdir() if file.name.startswith(start)]
    libraries = [ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL) for file in files]
    runtime = libraries[0]
    _declare(runtime)
    if headroom is not None:
        ctypes.CDLL(str(headroom), mode=ctypes.RTLD_GLOBAL)
    import torch

    from .values import install

    torch.backends.cudnn.enabled = False  # its library asks the driver for what is not there
    _device = install(runtime, computed)
    atexit.register(_wait_for_backward)
    return runtime


def gpus() -> dict[str, tuple[int, int]]:
    """Returns the bytes and the compute capability of each GPU by its name."""
    (file,) = build().glob("libcudart.*")
    runtime = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    _declare(runtime)
    rows = (row.split("\t") for row in runtime.rehearsal_gpus().decode().splitlines())
    return {name: (int(size), int(capability)) for name, size, capability in rows}


def device() -> Any:
    """Returns the started device as the operations see it."""
    return _device


def note(namespace: str) -> None:
    """Notes from now on what the ops of a library read and write, such as those of ``"headroom"``,
    so that accesses in no order are reported."""
    from .values import note

    note(_device, namespace)


def _wait_for_backward() -> None:
    """Waits until the threads of backward passes have nothing left to do.

    torch lets the caller of a backward pass go on before its thread has freed what the pass held,
    and a thread that then needs the interpreter as it ends aborts the process:
    https://github.com/pytorch/pytorch/issues/190489. Each thread runs what it is given in order, so
    that the end of one more pass is the end of all before it. Nothing of that pass is ever freed.
    """
    import torch

    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        leaf = torch.empty(0, device=f"cuda:{index}", requires_grad=True)
        kept = (leaf, leaf.clone(), torch.empty_like(leaf))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        kept[1].backward(kept[2])


def _declare(runtime: ctypes.CDLL) -> None:
    """Gives the functions of the runtime their types."""
    pointer, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    types = {
        "begin": (None, [pointer]),
        "touch": (None, [pointer, pointer, size, ctypes.c_int, text]),
        "enqueue": (None, [pointer, pointer, pointer]),
        "take_dropped": (pointer, []),
        "report": (None, [text]),
        "capturing": (ctypes.c_int, [pointer]),
        "late": (ctypes.c_int, []),
        "ordered": (ctypes.c_int, []),
        "take_reports": (text, []),
        "missing": (text, []),
        "gpus": (text, []),
        "used": (size, [ctypes.c_int]),
        "peak": (size, [ctypes.c_int]),
        "pending": (ctypes.c_uint64, []),
        "launches": (ctypes.c_uint64, []),
    }
    for name, (result, arguments) in types.items():
        function = getattr(runtime, f"rehearsal_{name}")
        function.restype, function.argtypes = result, arguments

"""Measures the peak memory of this process: the allocator's on CUDA, resident memory on the CPU."""

import ctypes
import gc
import sys

import torch


class PeakMemory:
    """Peak memory of this process from `restart()` to `read()`, above what it held when created."""

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"
        gc.collect()
        if not self.cuda and sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
            if trim:
                trim(0)  # hand back what the warm-up freed, or training would reuse it uncounted
        self.start = torch.cuda.memory_allocated(device) if self.cuda else resident("VmRSS")

    def restart(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        elif sys.platform == "linux":
            try:
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")  # the kernel then counts VmHWM from the present size
            except OSError:
                pass  # not allowed in some containers: VmHWM then counts from the process's start

    def read(self) -> int:
        peak = torch.cuda.max_memory_allocated(self.device) if self.cuda else resident("VmHWM")
        return max(0, peak - self.start)


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process in bytes."""
    if sys.platform == "linux":
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
    import resource  # macOS: only the peak, in bytes

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

"""Counts the memory of a training step by kind, and measures its peak.

Counted, in bytes of distinct storages (a view costs nothing, an allocation is counted once), are
parameters, gradients, optimizer state and saved activations. Gradients of parameters are counted at
the moment when most of them exist: all of them, or about one if they are released. Saved
activations are the storages that autograd keeps for the backward pass, without parameters, at the
moment when most of them are alive within one micro-batch. Under checkpointing these are the block
inputs that the forward pass kept and the activations of the one block that is being recomputed.
The same holds for Headroom's blocks, whose hooks drop tensors: one that is dropped counts while it
is alive, and again from when it has been computed again until it is released.
Under autocast they include the bf16 copies of the weights, which the backward pass keeps as well.

The measured peak is the allocator's on CUDA, and that of the process's resident memory on the CPU,
above what the process held after a first step that was thrown away. It includes what lives only for
a moment, such as gradients of activations and the buffers inside an operation. It can be less than
the sum of the four kinds, which reach their own peaks at different moments: gradients grow while
saved activations are released.
"""

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = (t.untyped_storage() for t in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def tensors_in(value) -> Iterable[Tensor]:
    """Yields every tensor in nested dicts, lists and tuples, such as an optimizer's state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def gradient_bytes(run: Callable[[], None], parameters: Iterable[Tensor]) -> int:
    """Peak bytes of the parameters' gradients while `run()` goes backward."""
    parameters = list(parameters)
    peak = 0

    def note(arriving: Tensor) -> None:
        nonlocal peak
        there = [p.grad for p in parameters if p.grad is not None]
        peak = max(peak, bytes_of([*there, arriving]))

    hooks = [p.register_hook(note) for p in parameters]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return peak


def saved_bytes(run: Callable[[], None], parameters: Iterable[Tensor]) -> int:
    """Peak bytes of live storages saved for backward while `run()` goes forward and backward."""
    ignored = {p.untyped_storage().data_ptr() for p in parameters}
    live: dict[int, int] = {}
    peak = 0

    def note(tensor: Tensor) -> None:
        nonlocal peak
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in ignored and key not in live and storage.nbytes() > 0:
            live[key] = storage.nbytes()
            weakref.finalize(storage, live.pop, key).atexit = False
            peak = max(peak, sum(live.values()))

    # Only the innermost hooks see a tensor, and checkpointing brings its own: listen inside those.
    hooks_init = saved_tensors_hooks.__init__

    def listening_init(self, pack, unpack) -> None:
        hooks_init(self, lambda tensor: (note(tensor), pack(tensor))[1], unpack)

    with mock.patch.object(saved_tensors_hooks, "__init__", listening_init):
        # detach: a saved output that kept its graph node would keep itself alive.
        with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
            run()
    return peak


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

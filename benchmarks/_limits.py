"""What the machine can do: memory streams and a matrix product, measured beside the contenders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ._timing import Contender


class Rotation:
    """Hands out the next of several equal data sets, so that no call finds its data in the cache.

    All contenders of a case share one rotation: the set that a call gets is the one whose last use
    lies furthest back, whoever used it.
    """

    def __init__(self, sets: Sequence):
        self.sets = list(sets)
        self.turn = -1

    def next(self):
        self.turn = (self.turn + 1) % len(self.sets)
        return self.sets[self.turn]


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [1 << 20]
    for index in range(5):
        try:
            with open(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size") as file:
                sizes.append(int(file.read().strip().rstrip("K")) << 10)
        except (OSError, ValueError):
            continue
    return max(sizes)


def memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def sets_needed(set_bytes: int, device: torch.device) -> int:
    """How many data sets make a rotation four times as large as the last-level cache.

    One does if it is as large itself: a call then finds nothing of the call before. At most 64:
    sets that would need more are too small to measure the memory with.
    """
    return min(_most_sets, -(-4 * cache_bytes(device) // set_bytes))


_most_sets = 64


@contextmanager
def at_most_sets(count: int) -> Iterator[None]:
    """Keeps rotations short where nothing is timed in earnest."""
    global _most_sets
    before, _most_sets = _most_sets, count
    try:
        yield
    finally:
        _most_sets = before


def filled(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random values in [0.5, 1.5): nothing under- or overflows, however often it is updated."""
    # The parallel fill touches the pages first: on several sockets each lies near its thread.
    return torch.empty(numel, dtype=dtype, device=device).fill_(1).uniform_(0.5, 1.5)


def streams(numel: int, device: torch.device) -> dict[str, Contender]:
    """Memory streams over f32 arrays: on CUDA the copy, on the CPU several mixes.

    A plain store to a line that is not in the cache reads the line first, so on a CPU a copy can
    move three bytes for every two that are counted. An update in place does not pay that. The
    fastest stream is taken as the limit.
    """
    size = 4 * numel
    count = 4 * sets_needed(4 * size, device)
    arrays = [filled(numel, torch.float32, device) for _ in range(count)]
    groups = [
        Rotation([arrays[i : i + width] for i in range(0, count - width + 1, width)])
        for width in range(1, 5)
    ]
    step = torch.ones((), device=device)

    def copy():
        source, target = groups[1].next()
        target.copy_(source)

    if device.type == "cuda":
        return {"copy_ (1 read, 1 write)": Contender(copy, work=2 * size)}

    def triad():
        a, b, out = groups[2].next()
        torch.maximum(a, b, out=out)

    def scale():
        groups[0].next()[0].mul_(1.0)

    def triad_in_place():
        a, b = groups[1].next()
        torch.maximum(a, b, out=a)

    def adamw():
        p, g, m, v = groups[3].next()
        torch._fused_adamw_(
            [p],
            [g],
            [m],
            [v],
            [],
            [step],
            amsgrad=False,
            lr=0.0,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )

    return {
        "copy_ (1 read, 1 write)": Contender(copy, work=2 * size),
        "maximum out= (2 reads, 1 write)": Contender(triad, work=3 * size),
        "mul_ in place (1 read, 1 write)": Contender(scale, work=2 * size),
        "maximum in place (2 reads, 1 write)": Contender(triad_in_place, work=3 * size),
        "torch fused adamw f32 (4 reads, 3 writes)": Contender(adamw, work=7 * size),
    }


def product(size: int, dtype: torch.dtype, device: torch.device) -> dict[str, Contender]:
    """A square matrix product on random data: the FLOP rate that torch's own GEMM reaches."""
    a, b = (filled(size * size, dtype, device).reshape(size, size) for _ in range(2))
    out = torch.empty_like(a)
    name = f"matmul {size} x {size} x {size} {str(dtype).removeprefix('torch.')}"
    return {name: Contender(lambda: torch.matmul(a, b, out=out), work=2 * size**3)}

"""The peak rate of matrix products of a device, which utilization is a fraction of."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ..step.clock import Stopwatch

__all__ = ["PUBLISHED", "PeakRate", "peak_rate"]


@dataclass(frozen=True)
class Published:
    """Rates without sparsity that the maker publishes, in FLOP/s, by dtype and for TF32."""

    name: str
    rates: dict[str, float]
    source: str


def _published(name: str, half: float, tf32: float, single: float, source: str) -> Published:
    """Returns the published rates in TFLOP/s. ``half`` is for float16 and bfloat16 with sums in
    float32."""
    rates = {"float16": half, "bfloat16": half, "tf32": tf32, "float32": single}
    return Published(name, {kind: rate * 1e12 for kind, rate in rates.items()}, source)


_SITE = "https://www.nvidia.com/en-us/data-center/"
_HALVED = ", halved: it counts with sparsity"
# By a part of what torch.cuda.get_device_name() says; the first that fits.
PUBLISHED = (
    _published("H100 PCIe", 756.5, 378, 51, f"{_SITE}h100 (PCIe){_HALVED}"),
    _published("H100 NVL", 835.5, 417.5, 60, f"{_SITE}h100 (NVL){_HALVED}"),
    _published("H100", 989.5, 494.5, 67, f"{_SITE}h100 (SXM){_HALVED}"),
    _published("H200", 989.5, 494.5, 67, f"{_SITE}h200{_HALVED}"),
    _published("A100", 312, 156, 19.5, f"{_SITE}a100"),
    _published("L40S", 362.05, 183, 91.6, f"{_SITE}l40s"),
    _published("L4", 121, 60, 30.3, f"{_SITE}l4{_HALVED}"),
)


@dataclass(frozen=True)
class PeakRate:
    """The peak rate of products on a device.

    Attributes:
        source: "given", "published", "measured" or "unknown".
        about: where it is from, in words.
        by_dtype: FLOP/s by the dtype of the factors.
    """

    source: str
    about: str
    by_dtype: dict[str, float] = field(default_factory=dict)

    def seconds(self, flops: dict[str, int]) -> float | None:
        """Returns how long FLOPs of several dtypes take at this rate, or None if one has none."""
        if not all(self.by_dtype.get(dtype) for dtype, count in flops.items() if count):
            return None
        return sum(count / self.by_dtype[dtype] for dtype, count in flops.items() if count)


def peak_rate(device: torch.device, dtypes: Iterable[str], given: float | None) -> PeakRate:
    """Returns the peak rate for some dtypes: the one that the user gave, that of the table, or a
    measured one. A process measures a dtype once, in about 0.3 seconds."""
    dtypes = sorted(set(dtypes))
    if given is not None:
        return PeakRate("given", "peak_flops", dict.fromkeys(dtypes, float(given)))
    if not dtypes:
        return PeakRate("unknown", "no matrix products were seen")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        row = next((row for row in PUBLISHED if row.name in name), None)
        kinds = {dtype: _kind(dtype) for dtype in dtypes}
        if row is not None and all(kind in row.rates for kind in kinds.values()):
            found = {dtype: row.rates[kind] for dtype, kind in kinds.items()}
            return PeakRate("published", f"{name}: {row.source}", found)
    threads = torch.get_num_threads()
    about = f"a product of square matrices on {device.type}"
    if device.type == "cpu":
        about += f" with {threads} thread{'s' * (threads > 1)}"
    return PeakRate("measured", about, {d: _measured(device, d, threads) for d in dtypes})


def _kind(dtype: str) -> str:
    if dtype == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return dtype


@functools.lru_cache
def _measured(device: torch.device, dtype: str, threads: int) -> float:
    """Returns the FLOP/s of the fastest of several products."""
    kind = getattr(torch, dtype)
    largest = 8192 if device.type == "cuda" else 1024
    best, size, began = 0.0, 256, time.perf_counter()
    with torch.no_grad():
        while True:
            a, b = (torch.ones(size, size, dtype=kind, device=device) for _ in range(2))
            torch.mm(a, b)
            watch = Stopwatch(device)
            for _ in range(4):
                watch.lap()
                torch.mm(a, b)
            watch.lap()
            took = max(min(watch.seconds()), 1e-9)
            best = max(best, 2 * size**3 / took)
            spent = time.perf_counter() - began
            if spent > 0.3:
                return best
            if size < largest and spent + 5 * 8 * took < 0.3:  # the next takes eight times as long
                size *= 2

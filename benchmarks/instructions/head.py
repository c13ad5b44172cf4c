"""Predicts what `linear_cross_entropy` takes on a GPU, from the operations and bytes of each of its
kernels: `python -m benchmarks.instructions.head`. Needs no GPU: sizes and order of computation are
those that the library would choose on it.
"""

from __future__ import annotations

import argparse
import ctypes
from dataclasses import dataclass
from pathlib import Path

from .gpus import GPUS, Gpu

TOKENS, VOCABULARY = 1, 2
MODES = {0: "auto", TOKENS: "tokens", VOCABULARY: "vocabulary"}
BF16 = 1  # hr_dtype


ON = [GPUS[name] for name in ("H200", "H100", "A100", "RTX 4090")]
OF_BANDWIDTH = 0.85  # what kernels of rows and logits reach of a copy's


@dataclass(frozen=True)
class Kernel:
    """All launches of a kernel: how often, and the operations and bytes of all together."""

    name: str
    calls: float
    operations: float
    bytes: float

    def seconds(self, gpu: Gpu) -> float:
        reached = 1.0 if self.operations else OF_BANDWIDTH
        return max(self.operations / gpu.products, self.bytes / (gpu.copies * reached))


class Config(ctypes.Structure):
    """``hr_linear_cross_entropy_config``."""

    _fields_ = (
        [("size", ctypes.c_size_t), ("dtype", ctypes.c_int), ("grad_dtype", ctypes.c_int)]
        + [("target_bytes", ctypes.c_int32), ("reduction", ctypes.c_int), ("mode", ctypes.c_int)]
        + [(f"flag_{i}", ctypes.c_int32) for i in range(4)]
        + [("ignore_index", ctypes.c_int64)]
        + [(name, ctypes.c_double) for name in ("smoothing", "softcap", "z_loss", "logit_scale")]
        + [("sequence", ctypes.c_int64), ("workspace_limit", ctypes.c_size_t)]
        + [("check_target", ctypes.c_int32), ("capability", ctypes.c_int32)]
    )


class Needs(ctypes.Structure):
    """``hr_linear_cross_entropy_needs``."""

    _fields_ = (
        ("workspace", ctypes.c_size_t),
        ("rows", ctypes.c_int64),
        ("classes", ctypes.c_int64),
        ("mode", ctypes.c_int),
    )


def needs_of(library: Path, gpu: Gpu, rows: int, features: int, classes: int, mode: int) -> Needs:
    """Returns what the library would do on the GPU for bfloat16, with all gradients."""
    config = Config(dtype=BF16, grad_dtype=BF16, target_bytes=8, mode=mode, logit_scale=1.0)
    config.size, config.capability = ctypes.sizeof(Config), gpu.capability
    needs, where = Needs(), (ctypes.c_int64 * 2)(0, 0)  # device 0, no stream
    query = ctypes.CDLL(str(library)).hr_linear_cross_entropy_query
    sizes = [ctypes.c_int64(size) for size in (rows, features, classes)]
    status = query(ctypes.byref(needs), *sizes, ctypes.c_uint32(3), ctypes.byref(config), where)
    if status:
        raise RuntimeError(f"hr_linear_cross_entropy_query returned {status}")
    return needs


def kernels(rows: int, features: int, classes: int, needs: Needs) -> list[Kernel]:
    """Returns the kernels of the loss with its gradients, in bfloat16."""
    chunks, tiles = -(-rows // needs.rows), -(-classes // needs.classes)
    parts = chunks * tiles
    hidden, weight, logits = rows * features, classes * features, rows * classes
    one = 2.0 * logits * features  # operations of a product
    times = 2 - 1 / tiles  # that logits are computed: not the last tile of a chunk once more
    read = 2.0 * (hidden * tiles + weight * chunks)  # of both factors of logits
    halves = chunks > 1  # of sums of the weight's gradient
    found = [
        Kernel("gather rows", chunks, 0, 4.0 * hidden),
        Kernel("logits", parts * times, one * times, times * (read + 4.0 * logits)),
        Kernel("see logits", parts, 0, 4.0 * logits),
        Kernel("gradients of logits", parts, 0, 6.0 * logits),
        Kernel(
            "gradient of hidden",
            parts,
            one,
            2.0 * logits + 2.0 * weight * chunks + 4.0 * hidden * (2 * tiles - 1),
        ),
        Kernel("scatter rows", chunks, 0, 6.0 * hidden),
        Kernel(
            "gradient of weight",
            parts,
            one,
            2.0 * (logits + hidden * tiles) + (4.0 * chunks if halves else 2.0) * weight,
        ),
    ]
    if halves:
        found.append(Kernel("add to sums", parts, 0, (12.0 * chunks - 4.0) * weight))
    return found


def predicted(
    library: Path, gpu: Gpu, sizes: tuple[int, int, int], mode: int
) -> tuple[Needs, list[Kernel], float]:
    """Returns what is needed, the kernels, and the seconds of all."""
    needs = needs_of(library, gpu, *sizes, mode)
    found = kernels(*sizes, needs)
    return needs, found, sum(kernel.seconds(gpu) for kernel in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs=3, default=(8192, 4096, 128256))
    sizes = tuple(parser.parse_args().sizes)
    import headroom

    library = next(Path(headroom.get_library_dir()).glob("libheadroom.so.*"))
    print("rows x features x classes: {:,} x {:,} x {:,}, bfloat16, all gradients".format(*sizes))
    for gpu in ON:
        chosen = needs_of(library, gpu, *sizes, 0).mode
        for mode in (TOKENS, VOCABULARY):
            needs, found, seconds = predicted(library, gpu, sizes, mode)
            print(
                f"\n{gpu.name}, {MODES[mode]}{', chosen' if mode == chosen else ''}: "
                f"{needs.rows:,} rows x {needs.classes:,} classes at a time, workspace "
                f"{needs.workspace / 1e9:.2f} GB, {1e3 * seconds:.1f} ms"
            )
            print(f"  {'kernel':<22}{'launches':>9}{'TFLOP':>8}{'GB':>8}{'ms':>8}")
            for k in found:
                print(
                    f"  {k.name:<22}{k.calls:>9.0f}{k.operations / 1e12:>8.2f}"
                    f"{k.bytes / 1e9:>8.2f}{1e3 * k.seconds(gpu):>8.2f}"
                )
    print(
        "\nA product takes its operations or its bytes, whichever is longer; others their bytes. "
        "Left out: launches, what caches hold from one kernel to the next, and waves of products."
    )


if __name__ == "__main__":
    main()

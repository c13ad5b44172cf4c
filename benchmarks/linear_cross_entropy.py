"""The cross entropy of a linear layer: forward and backward, beside torch's fused loss and beside a
linear layer with torch's cross entropy.

`python -m benchmarks.linear_cross_entropy` measures, for each in a process of its own, how far the
resident memory rises above the inputs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _report
from ._layers import trained
from .harness import Bar, Case, Rotation, Unavailable, filled, sets_needed
from .instructions.call import Call, Step
from .instructions.row import ADD, Row, evenly

F32, BF16 = torch.float32, torch.bfloat16
NAMES = {F32: "f32", BF16: "bf16"}


class Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor


class Sizes(NamedTuple):
    rows: int
    features: int
    classes: int
    ignored: float = 0.0  # the share of rows

    def allocate(self, dtype: torch.dtype, device: torch.device) -> Head:
        def made(rows: int, scale: float) -> Tensor:
            values = filled(rows * self.features, dtype, device).view(rows, self.features)
            return (values - 1).mul_(scale).requires_grad_()

        target = torch.arange(self.rows, device=device) * 7919 % self.classes
        if self.ignored:
            places = torch.arange(self.rows, device=device) * 0.618 % 1
            target[places < self.ignored] = -100
        return Head(made(self.rows, 1.0), made(self.classes, self.features**-0.5), target)

    @property
    def flops(self) -> int:
        """Of forward and backward, when no logit is computed twice and no ignored row at all."""
        return round(6 * self.rows * (1 - self.ignored) * self.features * self.classes)


def headroom_loss(d: Head, **options: str) -> Tensor:
    from headroom import linear_cross_entropy

    return linear_cross_entropy(*d, **options)


def headroom_vocabulary(d: Head) -> Tensor:
    return headroom_loss(d, mode="vocabulary")


def torch_fused(d: Head) -> Tensor:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable("this torch has no linear_cross_entropy")
    from torch.nn import LinearCrossEntropyOptions

    return F.linear_cross_entropy(*d, options=LinearCrossEntropyOptions())


def torch_plain(d: Head) -> Tensor:
    return F.cross_entropy(F.linear(d.hidden, d.weight), d.target)


FUSED = "torch, linear_cross_entropy"
CONTENDERS: dict[str, Callable[[Head], Tensor]] = {
    "headroom": headroom_loss,
    "headroom, vocabulary": headroom_vocabulary,
    "torch": torch_plain,
    FUSED: torch_fused,
}
SIZES = Sizes(2048, 512, 50257)
MASKED = Sizes(8192, 512, 50257, 0.7)


def cases(device: torch.device, quick: bool) -> list[Case]:
    def case(sizes: Sizes, dtype: torch.dtype) -> Case:
        used = Sizes(9, 16, 96, sizes.ignored) if quick else sizes
        # torch's fused loss computes ignored rows too; beside it once is enough.
        names = [name for name in CONTENDERS if not sizes.ignored or "," not in name]

        def setup(device):
            held = sum(t.nbytes for t in used.allocate(dtype, torch.device("meta")))
            sets = range(sets_needed(held, device))
            data = Rotation([used.allocate(dtype, device) for _ in sets])
            return {
                name: lambda loss=CONTENDERS[name]: trained(data, loss, lambda d: d[:2])
                for name in names
            }

        share = f", {sizes.ignored:.0%} ignored" if sizes.ignored else ""
        what = (
            f"linear_cross_entropy forward and backward, {used.rows:,} rows{share}, "
            f"{used.features:,} features, {used.classes:,} classes, {NAMES[dtype]}"
        )
        bars = [Bar("ratio", 2.5, "cpu")] if sizes.ignored else [Bar("ratio", 1.0, "cpu")]
        if not sizes.ignored:
            bars.append(Bar("ratio", 1.1, "cpu", FUSED))
        name = NAMES[dtype] + ("-ignored" if sizes.ignored else "")
        return Case(name, what, setup, "torch", used.flops, "flop", dtype, bars)

    return [case(sizes, dtype) for sizes in (SIZES, MASKED) for dtype in (F32, BF16)]


SEE, COUNT, REDUCE = "lce_see_kernel", "lce_count_kernel", "lce_reduce_kernel"
SEE_MORE, ENTROPY = "lce_see_more_kernel", "cross_entropy_entropy_kernel"
BUDGETS = [
    # The gradient of a bfloat16 weight, summed in two halves: those are read and written, and what
    # is added is read.
    Row("lce_add_kernel", "bf16 in halves", 12, 8, 4, ADD, 1, evenly(15)),
    Row(SEE, "f32", 4, 4, 0, ("FMNMX",), 1, evenly(6.7)),
    # With the sums of entropies, of squares and of logits; and the gradient with that of entropies.
    Row(SEE_MORE, "f32", 4, 4, 0, ("LDG",), 0.25, evenly(13.1)),
    Row(ENTROPY, "f32 to bf16", 6, 4, 2, ("FFMA",), 8, {"90": 24, "86": 24, "75": 32.3}),
    # Of a row its target and weights of token and class; and its loss, weight and lse.
    Row(COUNT, "rows", 16, 16, 0, ("DADD",), 3, {"90": 49.5, "86": 48.5, "75": 50}),
    Row(REDUCE, "rows", 12, 12, 0, ("DADD",), 2, evenly(17)),
]


def seen(rows: int, classes: int) -> Call:
    """A block a row of a tile of logits; it waits for its target and what it saw before, too."""
    numel = rows * classes
    turns = classes / (256 * 16)  # of two groups of eight of a thread
    step = Step(SEE, (("f32", numel),), rows, 256, turns + 2, 4 * numel)
    return Call(f"linear_cross_entropy, {rows:,} x {classes:,} logits seen", 4 * numel, (step,))


def listed(rows: int) -> Call:
    """Rows are counted, listed and in the end reduced, in parts of 2,048, a block each. Where they
    are listed each turn of a block waits for targets, and for what is then put into the list."""
    parts = -(-rows // 2048)
    sums = 32 * parts
    steps = (
        Step(COUNT, (("rows", rows),), parts, 512, 2, 8 * rows + sums),
        Step("lce_list_kernel", (), parts, 512, 1 + 2 * 4, (8 + 36) * rows + sums),
        Step(REDUCE, (("rows", rows),), parts, 512, 1, 12 * rows + sums),
        Step("lce_parts_kernel", (), 1, 512, 1, sums),
    )
    return Call(f"linear_cross_entropy, {rows:,} rows listed and added", 64 * rows, steps)


CALLS = [seen(8192, 9216), listed(131072)]


# ---- Memory --------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def rise(name: str, dtype: torch.dtype, sizes: Sizes) -> int:
    """How far the resident memory of this process rises until the gradients are there."""
    d, cpu = sizes.allocate(dtype, torch.device("cpu")), torch.device("cpu")
    few = Sizes(64, sizes.features, 1000).allocate(dtype, cpu)
    CONTENDERS[name](few).backward()  # what is loaded at a first call
    before, most, ended = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            most[0] = max(most[0], resident_bytes())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    CONTENDERS[name](d).backward()
    ended.set()
    thread.join()
    return most[0] - before


MOST = {"torch": 0.25, FUSED: 0.5}  # of theirs, as bars


def risen(dtype: torch.dtype) -> dict[str, Any]:
    """Returns the rise of each contender, in a process of its own, and the bars."""
    rose = {}
    for name in CONTENDERS:
        run = [sys.executable, "-m", __spec__.name, "--rise", name, str(dtype).split(".")[1]]
        rose[name] = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    inputs = SIZES.allocate(dtype, torch.device("meta"))[:2]
    shares = {of: rose["headroom"] / rose[of] for of in MOST}
    return {
        "name": NAMES[dtype],
        "gradients": sum(t.nbytes for t in inputs),
        "bytes": rose,
        "bars": [
            {"of": of, "value": share, "at_most": MOST[of], "met": share <= MOST[of]}
            for of, share in shares.items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rise", nargs=2, metavar=("CONTENDER", "DTYPE"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the results")
    options = parser.parse_args()
    if options.rise:
        name, dtype = options.rise
        print(rise(name, getattr(torch, dtype), SIZES))
        return
    head = _report.header("linear_cross_entropy memory", torch.device("cpu"), quick=False)
    _report.show_header(head)
    print(f"resident memory above the inputs, with the gradients, in MB: {SIZES}")
    rows = []
    for dtype in (F32, BF16):
        rows.append(row := risen(dtype))
        print(f"  {row['name']}: gradients alone {row['gradients'] / 1e6:.0f}")
        for name, rose in row["bytes"].items():
            print(f"    {name:30} {rose / 1e6:8.0f}")
        for bar in row["bars"]:
            verdict = "met" if bar["met"] else "NOT MET"
            print(f"    {bar['value']:.2f} of {bar['of']}, wanted {bar['at_most']}: {verdict}")
        _report.save(options.json, {**head, "cases": rows})


if __name__ == "__main__":
    main()

"""Distillation from hidden states: forward and backward of a divergence of student and teacher,
beside linear layers and log-softmaxes in torch.

`python -m benchmarks.divergence` prints the peak of memory above the inputs, of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._layers import held_bytes, trained
from .harness import Bar, Case, Rotation, filled, sets_needed
from .instructions.call import Call, Step
from .instructions.row import Row, evenly

F32, BF16 = torch.float32, torch.bfloat16
KINDS = ("forward_kl", "reverse_kl", "js")


class Heads(NamedTuple):
    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor


class Sizes(NamedTuple):
    tokens: int
    student: int
    teacher: int
    classes: int

    def allocate(self, dtype: torch.dtype, device: torch.device) -> Heads:
        def made(*shape: int) -> Tensor:
            values = filled(torch.Size(shape).numel(), dtype, device).view(shape)
            return (values - 1).mul_(shape[1] ** -0.25)

        tokens, student, teacher, classes = self
        return Heads(
            made(tokens, student).requires_grad_(),
            made(classes, student).requires_grad_(),
            made(tokens, teacher),
            made(classes, teacher),
        )

    @property
    def flops(self) -> int:
        """The student's logits and two gradients, and the teacher's logits."""
        return 2 * self.tokens * self.classes * (3 * self.student + self.teacher)


def headroom_loss(kind: str) -> Callable[[Heads], Tensor]:
    def loss(d: Heads) -> Tensor:
        from headroom import linear_distillation_loss

        return linear_distillation_loss(*d, divergence=kind)

    return loss


def torch_loss(kind: str) -> Callable[[Heads], Tensor]:
    """What trainers do, in float32 from the logits on."""

    def loss(d: Heads) -> Tensor:
        p = F.linear(d.hidden, d.weight).float().log_softmax(-1)
        q = F.linear(d.teacher_hidden, d.teacher_weight).float().log_softmax(-1)

        def kl(of: Tensor, to: Tensor) -> Tensor:
            return F.kl_div(to, of, reduction="batchmean", log_target=True)

        if kind == "forward_kl":
            return kl(q, p)
        if kind == "reverse_kl":
            return kl(p, q)
        half = torch.tensor(0.5, device=p.device).log()
        m = torch.logaddexp(p + half, q + half)
        return (kl(q, m) + kl(p, m)) / 2

    return loss


SIZES = Sizes(512, 512, 768, 50257)
QUICK = Sizes(7, 16, 24, 96)


def cases(device: torch.device, quick: bool) -> list[Case]:
    sizes = QUICK if quick else Sizes(8192, 2048, 4096, 128256) if device.type == "cuda" else SIZES

    def case(kind: str, dtype: torch.dtype) -> Case:
        def setup(device):
            sets = range(sets_needed(sizes.classes * sizes.student * dtype.itemsize, device))
            data = Rotation([sizes.allocate(dtype, device) for _ in sets])
            return {
                name: lambda of=of: trained(data, of(kind), lambda d: [d.hidden, d.weight])
                for name, of in (("headroom", headroom_loss), ("torch", torch_loss))
            }

        name = "f32" if dtype == F32 else "bf16"
        what = (
            f"{kind} of {sizes.tokens:,} tokens, sizes {sizes.student:,} and {sizes.teacher:,}, "
            f"{sizes.classes:,} classes, forward and backward, {name}"
        )
        bars = [Bar("ratio", 1.0, "cpu")]
        return Case(
            f"{kind}-{name}", what, setup, "torch", sizes.flops, unit="flop", dtype=dtype, bars=bars
        )

    return [case(kind, dtype) for kind in KINDS for dtype in (F32, BF16)]


def peaks(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Returns the most bytes that a forward and backward pass holds above its inputs."""
    found = {}
    for name, of in (("headroom", headroom_loss), ("torch", torch_loss)):
        data = Rotation([sizes.allocate(dtype, device)])
        found[name] = held_bytes(
            trained(data, of("js"), lambda d: [d.hidden, d.weight]).call, device
        )[1]
    return found


EXP, LARGEST, FORWARD, BACKWARD = (
    ("FFMA",),
    ("FMNMX",),
    "divergence_forward_kernel",
    "divergence_backward_kernel",
)
BUDGETS = [
    # The loop of log-sum-exps, and what follows it where the mixture has to be computed.
    Row(FORWARD, "f32, log-sum-exp", 4, 4, 0, LARGEST, 1, evenly(6.6)),
    Row(FORWARD, "bf16, log-sum-exp", 2, 2, 0, LARGEST, 1, evenly(7.5)),
    Row(FORWARD, "f32, mixture", 8, 8, 0, EXP, 25, {"90": 98, "86": 98.1, "75": 99}),
    Row(FORWARD, "bf16, mixture", 4, 4, 0, EXP, 25, {"90": 98, "86": 98.1, "75": 99.3}),
    Row(BACKWARD, "f32, forward", 12, 8, 4, EXP, 19, {"90": 59, "86": 58.5, "75": 60.9}),
    Row(BACKWARD, "bf16, forward", 6, 4, 2, EXP, 19, {"90": 59, "86": 58.6, "75": 68.8}),
    Row(BACKWARD, "f32, mixture", 12, 8, 4, EXP, 34, {"90": 103.7, "86": 103.9, "75": 105.8}),
    Row(BACKWARD, "bf16, mixture", 6, 4, 2, EXP, 34, {"90": 102.6, "86": 102.8, "75": 111.9}),
]

PAIRS, CLASSES = 4096 * 128256, 128256


def call(name: str, kernel: str, mixes: tuple[tuple[str, int], ...], traffic: int, waits: float):
    """A block a row; it waits `waits` times for each eight elements of a thread."""
    rows = tuple((mix, times * PAIRS) for mix, times in mixes)
    turns = waits * CLASSES / (256 * 8)
    step = Step(kernel, rows, PAIRS // CLASSES, 256, turns, traffic * PAIRS)
    return Call(f"{name}, 4,096 x 128,256, bf16", traffic * PAIRS, (step,))


CALLS = [
    # Both rows are read twice: for their log-sum-exps, two groups at a time, and for the mixture.
    call("divergence", FORWARD, (("bf16, mixture", 1), ("bf16, log-sum-exp", 2)), 8, 2),
    call("divergence backward", BACKWARD, (("bf16, mixture", 1),), 6, 1),
]


if __name__ == "__main__":
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for tokens in (512, 2048):
        for dtype in (F32, BF16):
            found = peaks(SIZES._replace(tokens=tokens), dtype, here)
            ratio = found["headroom"] / found["torch"]
            print(tokens, dtype, found, f"headroom / torch: {ratio:.3f}")

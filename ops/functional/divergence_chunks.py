"""Divergences and gradients from hidden states, in chunks of tokens: the loop of
``headroom::linear_divergence``, in which only the logits of one chunk exist."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .gemm import gemm_into

PITCH = 8  # elements to which rows of logits are padded, so that each begins at 16 bytes


def pitch_of(classes: int) -> int:
    """Returns the elements from one row of logits to the next."""
    return (classes + PITCH - 1) // PITCH * PITCH


def gain_of(dtype: torch.dtype, temperature: float) -> float:
    """Returns what the gradient of a sum is multiplied by while it is computed.

    In float16 most of a row's gradient, whose elements are at most about 1 / temperature, would
    else round to 0, and the loss scale comes too late.
    """
    return 1024.0 * temperature if dtype == torch.float16 else 1.0


def counting_rows(ignored: Tensor) -> Tensor:
    """Returns the numbers of the rows that count."""
    return ignored.flatten().logical_not().nonzero().flatten()


@dataclass
class Head:
    """Holds what logits come from: hidden states as a matrix, weight and bias."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def __post_init__(self) -> None:
        self.hidden = self.hidden.unsqueeze(0).flatten(0, -2)
        if self.bias is not None:
            self.bias = self.bias.float()

    @property
    def kept_dtype(self) -> torch.dtype:
        """Returns the dtype of the gradient of the hidden states, until it is scaled."""
        dtype = self.hidden.dtype
        return torch.float32 if dtype == torch.float16 else dtype

    def take(self, index: Tensor) -> None:
        self.hidden = self.hidden.index_select(0, index)

    def logits(self, out: Tensor, begin: int, end: int) -> Tensor:
        z = out[: end - begin]
        gemm_into(z, self.hidden[begin:end], self.weight, transpose_b=True, bias=self.bias)
        return z


@dataclass
class Gradients:
    """Holds the student's gradients: of the hidden states, and sums over the chunks in float32."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, head: Head, wants: tuple[bool, bool, bool]) -> Gradients:
        classes = head.weight.shape[0]
        float32 = {"dtype": torch.float32, "device": head.weight.device}
        return cls(
            torch.zeros(head.hidden.shape, dtype=head.kept_dtype, device=head.hidden.device)
            if wants[0]
            else None,
            torch.zeros(head.weight.shape, **float32) if wants[1] else None,
            torch.zeros(classes, **float32) if wants[2] else None,
        )

    def add(self, head: Head, dlogits: Tensor, begin: int, end: int, spare: Tensor) -> None:
        """Adds what a chunk of tokens gives. ``spare`` is float32 memory of the size of its logits,
        because torch would allocate as much to sum 16-bit numbers in float32."""
        if self.hidden is not None:
            gemm_into(self.hidden[begin:end], dlogits, head.weight)
        if self.weight is not None:
            chunk = head.hidden[begin:end]
            gemm_into(self.weight, dlogits, chunk, transpose_a=True, beta=1.0)
        if self.bias is not None:
            wide = dlogits if dlogits.dtype == torch.float32 else spare.copy_(dlogits)
            self.bias += wide.sum(0)


@torch.no_grad()
def over_chunks(
    student: Head,
    teacher: Head,
    ignored: Tensor | None,
    dloss: Tensor | None,
    numbers: tuple[float, float],
    chunk_rows: int,
    wants: tuple[bool, bool, bool],
    find: Callable[[Tensor], Tensor] = counting_rows,
) -> tuple[Tensor, Gradients]:
    """Returns the divergence of each token, and gradients: of the sum times :func:`gain_of`, or of
    the tokens times ``dloss``. A chunk has at most ``chunk_rows`` tokens, and each as many, as far
    as that goes.

    ``find`` is given ``ignored`` on the CPU, where tokens that do not count are left out: on CUDA,
    one would have to wait for their number.
    """
    rows, classes = len(student.hidden), student.weight.shape[0]
    if rows > 0:
        chunk_rows = math.ceil(rows / math.ceil(rows / chunk_rows))
    ops, dtype, device = torch.ops.headroom, student.hidden.dtype, student.hidden.device
    counting = None
    if ignored is not None and device.type == "cpu":
        counting = find(ignored)
        student.take(counting)
        teacher.take(counting)
        ignored, dloss = None, None if dloss is None else dloss.flatten()[counting]
    count = len(student.hidden)
    losses = torch.zeros(count, device=device)
    grads = Gradients.of(student, wants)
    if dloss is None:
        dloss = torch.full((), gain_of(dtype, numbers[1]), device=device)
    buffers = [
        torch.empty(min(chunk_rows, count), pitch_of(classes), device=device) for _ in range(2)
    ]
    for begin in range(0, count, chunk_rows):
        end = min(begin + chunk_rows, count)
        z, other = (
            head.logits(buffer[:, :classes], begin, end)
            for head, buffer in zip((student, teacher), buffers)
        )
        chunk_ignored = None if ignored is None else ignored.flatten()[begin:end]
        losses[begin:end], statistics = ops.divergence(z, other, chunk_ignored, *numbers, False)
        if any(wants):
            # The gradient lies over the logits, in the narrower type of the products.
            dlogits = buffers[0].view(dtype)[: end - begin, :classes]
            chunk_dloss = dloss if dloss.dim() == 0 else dloss.flatten()[begin:end]
            ops.divergence_backward_(
                chunk_dloss, z, other, chunk_ignored, statistics, *numbers, dlogits
            )
            grads.add(student, dlogits, begin, end, spare=other)
    if counting is None:
        return losses, grads
    if grads.hidden is not None:
        whole = grads.hidden.new_zeros(rows, grads.hidden.shape[1])
        grads.hidden = whole.index_copy_(0, counting, grads.hidden)
    return losses.new_zeros(rows).index_copy_(0, counting, losses), grads

"""Attention of sequences that are packed into a row, and in windows: forward and backward of a
module, beside the same module with a mask of tokens x tokens, and, if all sequences are equally
long, with a batch of them. The bytes that it keeps for the backward pass are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._layers import held_bytes
from .harness import Bar, Case, Contender, Unavailable

F32, BF16 = torch.float32, torch.bfloat16
KEPT = "bytes kept per token, with the mask"


class Shape(NamedTuple):
    lengths: tuple[int, ...]
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 4
    window: int | None = None


class Packed:
    """One module and one row of sequences, for all contenders."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        from headroom.nn import Attention

        self.shape, self.device = shape, device
        size = 1, sum(shape.lengths), shape.hidden
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            self.attention = Attention(
                shape.hidden, shape.heads, kv_heads=shape.kv_heads, window=shape.window
            ).to(device, dtype)
            self.x = torch.randn(size).to(device, dtype).requires_grad_()
            self.dy = torch.randn(size).to(device, dtype)
        self.ends = torch.tensor([0, *shape.lengths]).cumsum(0)

    def headroom(self) -> Contender:
        return self._contender(lambda x: self.attention(x, cu_seqlens=self.ends))

    def mask(self) -> Contender:
        from headroom.nn import Pattern

        x, window = self.x, self.shape.window
        sequence = torch.searchsorted(self.ends[1:], torch.arange(x.shape[1]), right=True)
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        seen = (sequence[:, None] == sequence) & (distance >= 0)
        if window is not None:
            seen &= distance < window
        added = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        added = added.to(x)
        pattern = Pattern(added, causal=False)
        return self._contender(lambda x: self.attention(x, mask=pattern), added.nbytes)

    def batch(self) -> Contender:
        count, length = len(self.shape.lengths), self.shape.lengths[0]
        if count == 1 or len(set(self.shape.lengths)) > 1:
            raise Unavailable("sequences of several lengths are no batch, nor is one sequence")

        def forward(x: Tensor) -> Tensor:
            return self.attention(x.view(count, length, -1)).view(x.shape)

        return self._contender(forward)

    def _contender(self, forward: Callable[[Tensor], Tensor], shared: int = 0) -> Contender:
        leaves = [self.x, *self.attention.parameters()]

        def call() -> None:
            torch.autograd.grad(forward(self.x), leaves, self.dy)

        def counts() -> dict[str, float]:
            held, _ = held_bytes(lambda: forward(self.x.clone()), self.device)
            held -= self.dy.nbytes  # the result
            return {KEPT: (held + shared) / self.x.shape[1]}

        return Contender(call, counts=counts)


EQUAL, LONG = (128,) * 32, (4096,)
MIXED = (60, 196, 40, 350, 128, 250) * 4
CASES = {
    "packed-f32": (Shape(EQUAL), F32, 3.0),
    "packed-bf16": (Shape(EQUAL), BF16, 3.0),
    "packed-gqa-f32": (Shape(EQUAL, kv_heads=1), F32, 3.0),
    "mixed-f32": (Shape(MIXED), F32, 3.0),
    "window-256-f32": (Shape(LONG, window=256), F32, 2.0),
}


def cases(device: torch.device, quick: bool) -> list[Case]:
    def case(name: str, shape: Shape, dtype: torch.dtype, ratio: float) -> Case:
        used = shape
        if quick:
            few = tuple(length // 16 for length in shape.lengths[:6])
            used = shape._replace(lengths=few, hidden=64, window=shape.window and 16)

        def setup(device: torch.device) -> dict[str, Any]:
            packed = Packed(used, dtype, device)
            return {"headroom": packed.headroom, "mask": packed.mask, "batch": packed.batch}

        lengths = sorted(set(used.lengths))
        of = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
        window = "" if used.window is None else f", window {used.window}"
        what = (
            f"attention forward and backward, {len(used.lengths)} sequences of {of} tokens, "
            f"{used.heads} heads of {used.hidden // used.heads}{window}, "
            f"{'f32' if dtype == F32 else 'bf16'}"
        )
        return Case(name, what, setup, "mask", bars=[Bar("ratio", ratio, "cpu")])

    return [case(name, *given) for name, given in CASES.items()]

"""Rotary embeddings of queries and keys: forward and backward through autograd, beside what models
do in eager torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._layers import trained
from .harness import Bar, Case, Rotation, filled, sets_needed
from .instructions.call import Call, Step
from .instructions.row import ADD, Row

F32, BF16 = torch.float32, torch.bfloat16
HEAD_DIM, GROUP = 128, 4  # query heads per key head


class Heads(NamedTuple):
    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    dq: Tensor
    dk: Tensor


class Layout(NamedTuple):
    tokens: int
    cols: int  # of the queries
    dtype: torch.dtype
    head_dim: int = HEAD_DIM

    @property
    def numel(self) -> int:
        heads = self.cols // self.head_dim
        return self.tokens * (heads + -(-heads // GROUP)) * self.head_dim

    def allocate(self, device: torch.device) -> Heads:
        """As models have them: [1, heads, tokens, head_dim], views of [1, tokens, heads, head_dim],
        and tables with both halves alike in their dtype."""
        from headroom.functional import rope_tables

        def heads(count: int) -> Tensor:
            x = filled(self.tokens * count * self.head_dim, self.dtype, device)
            return x.view(1, self.tokens, count, self.head_dim).transpose(1, 2)

        q_heads = self.cols // self.head_dim
        k_heads = -(-q_heads // GROUP)
        tables = rope_tables(self.head_dim, self.tokens, dtype=self.dtype, device=device)
        cos, sin = (table.repeat(1, 2)[None] for table in tables)
        q, k = (heads(count).requires_grad_() for count in (q_heads, k_heads))
        return Heads(q, k, cos, sin, heads(q_heads), heads(k_heads))


def headroom(d: Heads) -> tuple[Tensor, Tensor]:
    from headroom.functional import rope

    return rope(d.q, d.k, d.cos, d.sin)


def eager(d: Heads) -> tuple[Tensor, Tensor]:
    """The operations of apply_rotary_pos_emb in transformers' models."""
    cos, sin = d.cos.unsqueeze(1), d.sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return turned(d.q), turned(d.k)


def cases(device: torch.device, quick: bool) -> list[Case]:
    def case(dtype: torch.dtype, tokens: int, cols: int) -> Case:
        used = Layout(7, 64, dtype, 16) if quick else Layout(tokens, cols, dtype)

        def setup(device):
            held = 2 * used.numel * dtype.itemsize
            data = Rotation([used.allocate(device) for _ in range(sets_needed(held, device))])
            return {
                "headroom": lambda: trained(
                    data, headroom, lambda d: (d.q, d.k), lambda d: (d.dq, d.dk)
                ),
                "torch": lambda: trained(data, eager, lambda d: (d.q, d.k), lambda d: (d.dq, d.dk)),
            }

        # Forward reads and writes each element of q and k, and backward those of their gradients.
        work = 4 * used.numel * dtype.itemsize
        bars = [
            Bar("ratio", 2.0, "cpu"),
            Bar("fraction", 0.7, "cpu"),
            Bar("fraction", 0.85, "cuda"),
        ]
        name = "f32" if dtype == F32 else "bf16"
        what = (
            f"rope forward and backward on {used.tokens:,} tokens, queries of {used.cols:,} and "
            f"keys of a {GROUP}th of it, {name}"
        )
        return Case(f"{name}-{cols}", what, setup, "torch", work, bars=bars)

    return [
        case(dtype, tokens, cols)
        for dtype in (F32, BF16)
        for tokens, cols in ((4096, 2048), (512, 8192))
    ]


BUDGETS = [
    Row("rope_kernel", "f32", 8, 4, 4, ADD, 1, {"90": 8, "86": 8.2, "75": 8.1}),
    Row("rope_kernel", "bf16", 4, 2, 2, ADD, 1, {"90": 6, "86": 6.1, "75": 13.5}),
    Row("rope_kernel", "f16", 4, 2, 2, ADD, 1, {"90": 6, "86": 6.1, "75": 7.1}, f16=True),
]

HELD = 8  # heads of a thread, two at a time; before them it waits for its position and its table


def call(tokens: int, q_heads: int, k_heads: int) -> Call:
    numel = tokens * (q_heads + k_heads) * HEAD_DIM
    parts = -(-q_heads // HELD) + -(-k_heads // HELD)
    blocks = tokens * (HEAD_DIM // 16) // 256 * parts
    step = Step("rope_kernel", (("bf16", numel),), blocks, 256, 1 + HELD / 2, 4 * numel)
    name = f"rope, {tokens:,} tokens, {q_heads} and {k_heads} heads of {HEAD_DIM}, bf16"
    return Call(name, 4 * numel, (step,))


CALLS = [call(4096, 32, 8)]

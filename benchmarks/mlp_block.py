"""The MLP block: forward and backward through autograd, beside the same block in torch.

`python -m benchmarks.mlp_block` prints what is kept for the backward pass, beside the formula, and
the peak of memory for two numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ._layers import held_bytes, trained
from .harness import Bar, Case, Rotation, filled, sets_needed
from .instructions.call import Call, Step

F32, BF16 = torch.float32, torch.bfloat16
SAVES = ("gate_up", "all", "input")
EPS = 1e-6


class Block(NamedTuple):
    x: Tensor
    norm: Tensor
    gate_up: Tensor
    down: Tensor
    dy: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self[:4]


class Sizes(NamedTuple):
    tokens: int
    hidden: int
    features: int

    def allocate(self, dtype: torch.dtype, device: torch.device) -> Block:
        def made(*shape: int, scale: float = 1.0) -> Tensor:
            values = filled(torch.Size(shape).numel(), dtype, device).view(shape)
            return (values - 1).mul_(scale).requires_grad_()

        tokens, hidden, features = self
        return Block(
            made(tokens, hidden),
            filled(hidden, dtype, device).requires_grad_(),
            made(2 * features, hidden, scale=hidden**-0.5),
            made(hidden, features, scale=features**-0.5),
            made(tokens, hidden).detach(),
        )

    @property
    def flops(self) -> int:
        """Of forward and backward, when no product is computed twice."""
        return 18 * self.tokens * self.hidden * self.features

    def kept(self, save: str, dtype: torch.dtype) -> int:
        """Bytes, with the statistics of the norm."""
        tokens, hidden, features = self
        elements = {
            "all": 2 * hidden + 3 * features,
            "gate_up": hidden + 2 * features,
            "input": hidden,
        }
        return tokens * (elements[save] * dtype.itemsize + 4)


def headroom_block(save: str) -> Callable[[Block], Tensor]:
    def block(d: Block) -> Tensor:
        from headroom.nn.functional import mlp_block

        return mlp_block(*d.leaves, eps=EPS, casting="once", save=save)

    return block


def torch_block(d: Block) -> Tensor:
    normed = F.rms_norm(d.x, d.norm.shape, d.norm, EPS)
    gate, up = F.linear(normed, d.gate_up).chunk(2, -1)
    return d.x + F.linear(F.silu(gate) * up, d.down)


def torch_checkpoint(d: Block) -> Tensor:
    return checkpoint(torch_block, d, use_reentrant=False)


CONTENDERS = {
    "headroom": headroom_block("gate_up"),
    "headroom, all kept": headroom_block("all"),
    "headroom, input kept": headroom_block("input"),
    "torch": torch_block,
    "torch, checkpoint": torch_checkpoint,
}
SIZES = (Sizes(2048, 1024, 2816), Sizes(512, 2048, 5632))


def cases(device: torch.device, quick: bool) -> list[Case]:
    def case(sizes: Sizes, dtype: torch.dtype) -> Case:
        used = Sizes(9, 16, 24) if quick else sizes

        def setup(device):
            held = sum(t.nbytes for t in used.allocate(dtype, torch.device("meta")))
            sets = range(sets_needed(held, device))
            data = Rotation([used.allocate(dtype, device) for _ in sets])
            return {
                n: lambda b=b: trained(data, b, lambda d: d.leaves, lambda d: d.dy)
                for n, b in CONTENDERS.items()
            }

        name = "f32" if dtype == F32 else "bf16"
        what = (
            f"mlp_block forward and backward, {used.tokens:,} tokens of {used.hidden:,}, "
            f"{used.features:,} features, {name}"
        )
        bars = [Bar("ratio", 1.0, "cpu"), Bar("ratio", 1.0, "cuda")]
        return Case(f"{name}-{sizes.hidden}", what, setup, "torch", used.flops, "flop", dtype, bars)

    return [case(sizes, dtype) for sizes in SIZES for dtype in (F32, BF16)]


# ---- Memory --------------------------------------------------------------------------------------


def kept_bytes(block: Callable[[Block], Tensor], d: Block) -> int:
    """What autograd holds between the passes, without the weights."""
    kept: list[Tensor] = []
    weights = {t.untyped_storage().data_ptr() for t in d.leaves[1:]}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        block(d)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for address, size in storages.items() if address not in weights)


def main() -> None:
    cpu, sizes = torch.device("cpu"), Sizes(2048, 1024, 2816)
    d = sizes.allocate(BF16, cpu)
    print(f"kept for backward by {sizes}, bf16, in MB: measured, formula")
    for save in SAVES:
        measured, formula = kept_bytes(headroom_block(save), d), sizes.kept(save, BF16)
        print(f"  {save:8} {measured / 1e6:8.2f} {formula / 1e6:8.2f} {measured / formula:.4f}")
    print(f"  torch    {kept_bytes(torch_block, d) / 1e6:8.2f}")
    print("peak of forward and backward, tiles of 256 tokens, input kept, in MB")
    from headroom.nn.functional import mlp_block

    for tokens in (1024, 4096):
        few = Sizes(tokens, 256, 704).allocate(BF16, cpu)
        outputs = 2 * few.x.nbytes + 4 * tokens + sum(t.nbytes for t in few.leaves[1:])
        _, peak = held_bytes(
            lambda few=few: torch.autograd.grad(
                mlp_block(*few.leaves, save="input", tile_tokens=256), few.leaves, few.dy
            ),
            cpu,
        )
        print(f"  {tokens} tokens: {peak / 1e6:.2f}, of it {outputs / 1e6:.2f} results")


def glu_call(name: str, mix: str, traffic: int, rows: int = 4096, cols: int = 11008) -> Call:
    """What lies between a block's products: a thread takes eight elements of a row."""
    blocks = rows * -(-cols // (256 * 8))
    numel = rows * cols
    step = Step("glu_kernel", ((mix, numel),), blocks, 256, 1, traffic * numel)
    return Call(f"{name}, {rows:,} x {cols:,}, bf16", traffic * numel, (step,))


CALLS = [
    glu_call("glu silu", "silu, bf16", 6),
    glu_call("glu silu backward", "silu, bf16, backward", 10),
]


if __name__ == "__main__":
    main()

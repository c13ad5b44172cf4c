"""Experts of a mixture: forward and backward through autograd, beside transformers' default, which
calls `torch.nn.functional.grouped_mm` with a copy of a token's row for each of its experts.

`python -m benchmarks.experts` prints what is kept for the backward pass, beside the formula, and
the peak of memory above the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._layers import held_bytes, trained
from .harness import Bar, Case, Rotation, filled, sets_needed

F32, BF16 = torch.float32, torch.bfloat16
SAVES = ("L0", "L1", "L2")


class Mixture(NamedTuple):
    x: Tensor
    weight: Tensor
    gate_up: Tensor
    down: Tensor
    chosen: Tensor
    dy: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Those that are trained: the stacks may be frozen."""
        return tuple(t for t in self[:4] if t.requires_grad)


class Sizes(NamedTuple):
    tokens: int
    slots: int
    experts: int
    hidden: int
    features: int

    def allocate(self, dtype: torch.dtype, trains: bool, device: torch.device) -> Mixture:
        def made(*shape: int, scale: float = 1.0) -> Tensor:
            values = filled(torch.Size(shape).numel(), dtype, device).view(shape)
            return (values - 1).mul_(scale)

        tokens, slots, experts, hidden, features = self
        rows = torch.arange(tokens * slots, device=device).view(tokens, slots)
        start = rows[:, :1] // slots * 7  # each token has distinct experts, all as many rows
        return Mixture(
            made(tokens, hidden).requires_grad_(),
            made(tokens, slots).abs().requires_grad_(),
            made(experts, 2 * features, hidden, scale=hidden**-0.5).requires_grad_(trains),
            made(experts, hidden, features, scale=features**-0.5).requires_grad_(trains),
            (start + torch.arange(slots, device=device)) % experts,
            made(tokens, hidden),
        )

    def flops(self, trains: bool) -> int:
        """Of forward and backward, when no product is computed twice."""
        return (18 if trains else 12) * self.tokens * self.slots * self.hidden * self.features

    def kept(self, save: str, dtype: torch.dtype) -> int:
        """Bytes with trained stacks, with the routing: numbers of rows, weights, offsets."""
        elements = self.hidden + {"L0": 3, "L1": 2, "L2": 0}[save] * self.slots * self.features
        routing = self.slots * (4 + dtype.itemsize)
        return self.tokens * (elements * dtype.itemsize + routing) + 4 * (self.experts + 1)


def headroom_experts(save: str) -> Callable[[Mixture], Tensor]:
    def mixture(d: Mixture) -> Tensor:
        from headroom.functional import experts

        return experts(d.x, d.chosen, d.weight, d.gate_up, d.down, save=save)

    return mixture


def grouped_mm(d: Mixture) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    def apply_gate(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    module = SimpleNamespace(
        num_experts=len(d.down),
        gate_up_proj=d.gate_up,
        down_proj=d.down,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        has_post_expert_norm=False,
        _is_expert_parallel=False,
        _apply_gate=apply_gate,
    )
    return grouped_mm_experts_forward(module, d.x, d.chosen, d.weight)  # pyright: ignore


CONTENDERS = {
    "headroom": headroom_experts("L1"),
    "headroom, all kept": headroom_experts("L0"),
    "headroom, input kept": headroom_experts("L2"),
    "grouped_mm": grouped_mm,
}
BLOCK = Sizes(1024, 4, 32, 512, 256)


def cases(device: torch.device, quick: bool) -> list[Case]:
    def case(dtype: torch.dtype, trains: bool) -> Case:
        used = Sizes(9, 2, 4, 16, 24) if quick else BLOCK

        def setup(device):
            held = sum(t.nbytes for t in used.allocate(dtype, trains, torch.device("meta")))
            sets = range(sets_needed(held, device))
            data = Rotation([used.allocate(dtype, trains, device) for _ in sets])
            return {
                n: lambda b=b: trained(data, b, lambda d: d.leaves, lambda d: d.dy)
                for n, b in CONTENDERS.items()
            }

        name = "f32" if dtype == F32 else "bf16"
        state = "trained" if trains else "frozen"
        what = (
            f"experts forward and backward, {used.tokens:,} tokens of {used.hidden:,}, "
            f"{used.slots} of {used.experts} experts of {used.features:,}, {state}, {name}"
        )
        bars = [Bar("ratio", 1.0, "cpu"), Bar("ratio", 1.0, "cuda")]
        flops = used.flops(trains)
        return Case(f"{name}-{state}", what, setup, "grouped_mm", flops, "flop", dtype, bars)

    return [case(dtype, trains) for dtype in (F32, BF16) for trains in (False, True)]


# ---- Memory --------------------------------------------------------------------------------------


def kept_bytes(mixture: Callable[[Mixture], Tensor], d: Mixture) -> int:
    """What autograd holds between the passes, without the stacks."""
    kept: list[Tensor] = []
    stacks = {t.untyped_storage().data_ptr() for t in (d.gate_up, d.down, d.chosen)}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mixture(d)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for address, size in storages.items() if address not in stacks)


def main() -> None:
    cpu = torch.device("cpu")
    for dtype, name in ((F32, "f32"), (BF16, "bf16")):
        d = BLOCK.allocate(dtype, True, cpu)
        print(f"kept for backward by {BLOCK}, {name}, in MiB: measured, formula")
        for save in SAVES:
            measured, formula = kept_bytes(headroom_experts(save), d), BLOCK.kept(save, dtype)
            print(f"  {save:8} {measured / 2**20:8.2f} {formula / 2**20:8.2f}")
        print(f"  grouped  {kept_bytes(grouped_mm, d) / 2**20:8.2f}")
        for trains in (False, True):
            d = BLOCK.allocate(dtype, trains, cpu)
            print(f"peak above the inputs, {'trained' if trains else 'frozen'}, {name}, in MiB")
            for contender, mixture in CONTENDERS.items():
                _, peak = held_bytes(
                    lambda d=d, mixture=mixture: torch.autograd.grad(mixture(d), d.leaves, d.dy),
                    cpu,
                )
                print(f"  {contender:22} {peak / 2**20:8.2f}")


if __name__ == "__main__":
    main()

"""Experts of a mixture: forward and backward through autograd, beside transformers' default, which
calls `torch.nn.functional.grouped_mm` with a copy of a token's row for each of its experts; with
frozen stacks in NF4, beside the same with bitsandbytes' parametrization, and with adapters, beside
PEFT's of parameters, both of which make whole stacks.

`python -m benchmarks.experts` prints what is kept for the backward pass, beside the formula, and
the peak of memory above the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._layers import held_bytes, trained
from .harness import Bar, Case, Contender, Rotation, Share, Unavailable, filled, sets_needed
from .lora import PEAK, Layer

F32, BF16 = torch.float32, torch.bfloat16
RANK = 8
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


def apply_gate(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


# What experts of transformers have besides their stacks.
LAYOUT = dict(
    has_gate=True,
    has_bias=False,
    is_transposed=False,
    has_post_expert_norm=False,
    _is_expert_parallel=False,
    _apply_gate=apply_gate,
)


def grouped_mm(d: Mixture) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    stacks = {"gate_up_proj": d.gate_up, "down_proj": d.down}
    module = SimpleNamespace(num_experts=len(d.down), **stacks, **LAYOUT)
    return grouped_mm_experts_forward(module, d.x, d.chosen, d.weight)  # pyright: ignore


# ---- Frozen stacks in NF4, or with adapters ------------------------------------------------------


class Experts(nn.Module):
    """Experts as transformers holds them."""

    def __init__(self, d: Mixture) -> None:
        super().__init__()
        self.num_experts = len(d.down)
        self.gate_up_proj = nn.Parameter(d.gate_up.detach(), requires_grad=False)
        self.down_proj = nn.Parameter(d.down.detach(), requires_grad=False)
        vars(self).update(LAYOUT)

    def forward(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(self, x, chosen, weight)


Made = tuple[Callable[[Tensor], Tensor], list[Tensor]]  # a function of x, and adapters


def few_bits(save: str) -> Callable[[Mixture], Made]:
    def make(d: Mixture) -> Made:
        from headroom.functional import experts, quantize_matrix

        gate_up, down = quantize_matrix(d.gate_up), quantize_matrix(d.down)
        return lambda x: experts(x, d.chosen, d.weight, gate_up, down, save=save), []

    return make


def bitsandbytes(d: Mixture) -> Made:
    try:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit
    except ImportError as error:
        raise Unavailable("bitsandbytes is not installed") from error
    module = Experts(d)
    for name in ("gate_up_proj", "down_proj"):
        replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")
    return lambda x: module(x, d.chosen, d.weight), []


def adapters(save: str) -> Callable[[Mixture], Made]:
    def make(d: Mixture) -> Made:
        from headroom.functional import experts

        def pair(stack: Tensor) -> list[Tensor]:
            count, outputs, inputs = stack.shape
            sizes = (count, RANK, inputs), (count, outputs, RANK)
            return [filled(torch.Size(s).numel(), F32, stack.device).view(s) for s in sizes]

        a, b, second_a, second_b = (
            t.mul_(0.01).requires_grad_() for t in (*pair(d.gate_up), *pair(d.down))
        )
        own = {"gate_up_adapter": (a, b, 1.0), "down_adapter": (second_a, second_b, 1.0)}

        def call(x: Tensor) -> Tensor:
            return experts(x, d.chosen, d.weight, d.gate_up, d.down, **own, save=save)

        return call, [a, b, second_a, second_b]

    return make


def peft(d: Mixture) -> Made:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise Unavailable("not installed") from error
    config = LoraConfig(
        r=RANK, lora_alpha=RANK, init_lora_weights=False, target_modules=[],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    model: nn.Module = nn.ModuleDict({"experts": Experts(d)})
    model = inject_adapter_in_model(config, model)
    own = [p.requires_grad_() for n, p in model.named_parameters() if "lora" in n]
    for p in own:
        p.data = p.data.float() * 0.01
    module = model.get_submodule("experts")
    return lambda x: module(x, d.chosen, d.weight), own


FROZEN = {
    "nf4": {
        "headroom": few_bits("L1"),
        "headroom, input kept": few_bits("L2"),
        "bitsandbytes": bitsandbytes,
    },
    "lora": {"headroom": adapters("L1"), "headroom, input kept": adapters("L2"), "PEFT": peft},
}


def layer_of(
    make: Callable[[Mixture], Made], sizes: Sizes, dtype: torch.dtype, device: Any
) -> Layer:
    d = sizes.allocate(dtype, False, device)
    call, own = make(d)
    return Layer(d.x, d.dy, call, [d.weight, *own])


def step(d: Layer) -> tuple[Tensor, ...]:
    return torch.autograd.grad(d.call(d.x), (d.x, *d.trained), d.dy)


def frozen_case(kind: str, dtype: torch.dtype, used: Sizes) -> Case:
    *_, rival = FROZEN[kind]

    def setup(device: torch.device) -> dict[str, Callable[[], Contender]]:
        held = sum(t.nbytes for t in used.allocate(dtype, False, torch.device("meta")))

        def contender(make: Callable[[Mixture], Made]) -> Contender:
            sets = range(sets_needed(held, device))
            data = Rotation([layer_of(make, used, dtype, device) for _ in sets])
            call = trained(data, lambda d: d.call(d.x), lambda d: (d.x, *d.trained), lambda d: d.dy)
            call.counts = lambda: {PEAK: held_bytes(lambda: step(data.next()), device)[1]}
            return call

        return {n: lambda make=make: contender(make) for n, make in FROZEN[kind].items()}

    name = "f32" if dtype == F32 else "bf16"
    what = (
        f"experts forward and backward, {used.tokens:,} tokens of {used.hidden:,}, {used.slots} of "
        f"{used.experts} experts of {used.features:,}, frozen, "
        + ("in NF4" if kind == "nf4" else f"with adapters of rank {RANK}")
    )
    bars = [
        Bar("ratio", 1.0 if kind == "nf4" else 1.4, "cpu"),
        Share(PEAK, "headroom, input kept", rival, 0.35, "cpu"),
    ]
    flops = used.flops(False)
    return Case(f"{kind}-{name}", f"{what}, {name}", setup, rival, flops, "flop", dtype, bars)


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

    dense = [case(dtype, trains) for dtype in (F32, BF16) for trains in (False, True)]
    small = Sizes(9, 2, 4, 16, 24) if quick else BLOCK
    return dense + [frozen_case(kind, dtype, small) for kind in FROZEN for dtype in (F32, BF16)]


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
        for kind, makers in FROZEN.items():
            print(f"peak above the inputs, {kind}, {name}, in MiB")
            for contender, make in makers.items():
                d = layer_of(make, BLOCK, dtype, cpu)
                step(d)
                print(f"  {contender:22} {held_bytes(lambda d=d: step(d), cpu)[1] / 2**20:8.2f}")


if __name__ == "__main__":
    main()

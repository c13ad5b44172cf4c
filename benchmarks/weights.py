"""Times AdamW on bfloat16 weights with each way of keeping what rounding drops: the ops on a large
tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import adamw, adamw8bit
from .harness import Bar, Case, Contender, Rotation, Unavailable, filled, sets_needed, sized

F32, BF16, I16, I8 = torch.float32, torch.bfloat16, torch.int16, torch.int8
FUSED, OPTIMI = "torch fused f32", "optimi kahan"


@dataclass
class Layout:
    """bfloat16 parameters and gradients, residuals, and moments: a dtype, or None for 8 bits."""

    numel: int
    mode: int
    residual: torch.dtype | None
    moment: torch.dtype | None

    @property
    def plain(self) -> adamw.Layout | adamw8bit.Layout:
        if self.moment is None:
            return adamw8bit.Layout(1, self.numel, BF16)
        return adamw.Layout(1, self.numel, BF16, self.moment)

    @property
    def residual_bytes(self) -> int:
        return self.numel * (self.residual.itemsize if self.residual else 0)

    @property
    def bytes_moved(self) -> int:
        return self.plain.bytes_moved + 2 * self.residual_bytes

    def allocate(self, device: torch.device) -> tuple:
        if self.residual is None:
            residuals = []
        elif self.residual.is_floating_point:
            residuals = [filled(self.numel, self.residual, device)]
        else:
            residuals = [torch.randint(-100, 100, (self.numel,), device=device).to(self.residual)]
        return self.plain.allocate(device), residuals

    def rotation(self, device: torch.device) -> Rotation:
        held = self.plain.bytes_held + self.residual_bytes
        return Rotation([self.allocate(device) for _ in range(sets_needed(held, device))])


def headroom_op(layout: Layout, data: Rotation) -> Contender:
    import headroom  # noqa: F401  (registers the ops)

    seeds = [7] if layout.mode in (1, 6) else None
    options = dict(adamw8bit.HYPER, decoupled=True, weights_mode=layout.mode, weight_seeds=seeds)
    op = torch.ops.headroom.adamw8bit_.default
    if layout.moment is not None:
        op, options["amsgrad"] = torch.ops.headroom.adamw_.default, False

    def call():
        lists, residuals = data.next()
        op(*lists, residuals, **options)

    return Contender(call)


def optimi_step(data: Rotation) -> Contender:
    """optimi keeps moments and compensation in bfloat16, as the case does."""
    try:
        import optimi
    except ImportError as error:
        raise Unavailable("not installed") from error

    def make(params, lr, weight_decay):
        return optimi.AdamW(params, lr=lr, weight_decay=weight_decay, kahan_sum=True)

    return adamw8bit.optimizer_step(Rotation([lists for lists, _ in data.sets]), make)


def case(name: str, what: str, layout: Layout, *bars: Bar) -> Case:
    """A case of the op. Torch, which has no such modes, runs its fastest step, all float32."""
    fused = adamw.Layout(1, layout.numel, F32, F32)

    def setup(device):
        data, wide = layout.rotation(device), fused.rotation(device)
        contenders = {
            "headroom": lambda: headroom_op(layout, data),
            FUSED: lambda: adamw.torch_fused(wide, fused.bytes_moved),
        }
        if layout.mode == 2:
            contenders[OPTIMI] = lambda: optimi_step(data)
        return contenders

    return Case(name, what, setup, FUSED, layout.bytes_moved, bars=bars)


def cases(device: torch.device, quick: bool) -> list[Case]:
    n = 1 << 14 if quick else sized(1 << (28 if device.type == "cuda" else 25), 4 * 16, device)
    one = f"one tensor of {n:,}, bf16"
    wide, eight = f"{one}, f32 moments", f"{one}, 8-bit moments"
    return [
        case(
            "remainder16",
            f"{wide}, 16-bit remainders",
            Layout(n, 4, I16, F32),
            Bar("ratio", 1.1, "cpu"),
        ),
        case(
            "remainder16-8bit",
            f"{eight}, 16-bit remainders",
            Layout(n, 4, I16, None),
            Bar("ratio", 1.3, "cpu"),
            Bar("fraction", 0.8, "cuda"),
        ),
        case("remainder8-8bit", f"{eight}, 8-bit remainders", Layout(n, 5, I8, None)),
        case("master", f"{wide}, f32 masters", Layout(n, 3, F32, F32)),
        case("stochastic", f"{one}, bf16 moments, stochastic", Layout(n, 1, None, BF16)),
        case(
            "kahan",
            f"{one}, bf16 moments, Kahan",
            Layout(n, 2, BF16, BF16),
            Bar("ratio", 4.0, "cpu", OPTIMI),
        ),
    ]

"""AdamW on bfloat16 weights that keep what rounding takes off: the whole `step()`
on a model, the op alone beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import adamw, adamw8bit
from ._model import OP_ONLY, Shapes, filled_like, model_for, optimizer_step
from .harness import Bar, Case, Contender, Rotation, Unavailable, by_level, sets_needed

F32, BF16, I16, I8 = torch.float32, torch.bfloat16, torch.int16, torch.int8
FUSED, OPTIMI = "torch fused f32", "optimi kahan"


# As users ask for them, by hr_weights_mode.
OPTIONS = {
    1: {"rounding": "stochastic"},
    2: {"rounding": "kahan"},
    3: {"master": "f32"},
    4: {"master": "remainder16"},
    5: {"master": "remainder8"},
}


class Data(NamedTuple):
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    rest: list[list[torch.Tensor]]  # what the op gets beside them
    residuals: list[torch.Tensor]


@dataclass
class Layout:
    """bfloat16 parameters and gradients, residuals, and moments: a dtype, or None for 8 bits."""

    shapes: Shapes
    mode: int
    residual: torch.dtype | None
    moment: torch.dtype | None

    @property
    def plain(self) -> adamw.Layout | adamw8bit.Layout:
        if self.moment is None:
            return adamw8bit.Layout(self.shapes, BF16)
        return adamw.Layout(self.shapes, BF16, self.moment)

    @property
    def residual_bytes(self) -> int:
        numel = sum(map(math.prod, self.shapes))
        return numel * (self.residual.itemsize if self.residual else 0)

    @property
    def bytes_moved(self) -> int:
        plain = self.plain
        moved = plain.bytes_moved if self.moment is not None else plain.bytes_of_step
        return moved + 2 * self.residual_bytes

    def allocate(self, device: torch.device) -> Data:
        if self.residual is None:
            residuals = []
        elif self.residual.is_floating_point:
            residuals = filled_like(self.shapes, self.residual, device)
        else:
            residuals = [
                torch.randint(-100, 100, shape, device=device).to(self.residual)
                for shape in self.shapes
            ]
        params, grads, *rest = self.plain.allocate(device)
        return Data(params, grads, rest, residuals)

    def rotation(self, device: torch.device) -> Rotation:
        held = self.plain.bytes_held + self.residual_bytes
        return Rotation([self.allocate(device) for _ in range(sets_needed(held, device))])


def headroom_step(layout: Layout, data: Rotation) -> Contender:
    import headroom

    options = dict(OPTIONS[layout.mode])
    if layout.moment is None:
        return optimizer_step(data, lambda ps: headroom.optim.AdamW8bit(ps, **options))
    options["state_dtype"] = layout.moment
    return optimizer_step(data, lambda ps: headroom.optim.AdamW(ps, **options))


def headroom_op(layout: Layout, data: Rotation) -> Contender:
    import headroom  # noqa: F401  (registers the ops)

    seeds = [7] * len(layout.shapes) if layout.mode in (1, 6) else None
    options = dict(adamw8bit.HYPER, decoupled=True, weights_mode=layout.mode, weight_seeds=seeds)
    op = torch.ops.headroom.adamw8bit_.default
    if layout.moment is not None:
        op, options["amsgrad"] = torch.ops.headroom.adamw_.default, False

    def call():
        d = data.next()
        op(d.params, d.grads, *d.rest, d.residuals, **options)

    return Contender(call, work=layout.plain.bytes_moved + 2 * layout.residual_bytes)


def optimi_step(data: Rotation) -> Contender:
    """optimi keeps moments and compensation in bfloat16, as the case does."""
    try:
        import optimi
    except ImportError as error:
        raise Unavailable("not installed") from error

    return optimizer_step(data, lambda ps: optimi.AdamW(ps, lr=1e-3, kahan_sum=True))


def case(name: str, what: str, layout: Layout, *bars: Bar) -> Case:
    """`step()` with one option. Torch has no such modes: it gets its fastest, all float32."""
    fused = adamw.Layout(layout.shapes, F32, F32)

    def setup(device):
        data, wide = layout.rotation(device), fused.rotation(device)
        contenders = {
            "headroom": lambda: headroom_step(layout, data),
            OP_ONLY: lambda: headroom_op(layout, data),
            FUSED: lambda: adamw.torch_step(wide, fused.bytes_moved, fused=True),
        }
        if layout.mode == 2:
            contenders[OPTIMI] = lambda: optimi_step(data)
        return contenders

    return Case(name, what, setup, FUSED, layout.bytes_moved, bars=bars)


def cases(device: torch.device, quick: bool) -> list[Case]:
    whole = model_for(device, quick)
    shapes, one = whole.shapes, f"step() on {whole}, bf16"
    wide, eight = f"{one}, f32 moments", f"{one}, 8-bit moments"
    return [
        case(
            "remainder16",
            f"{wide}, 16-bit remainders",
            Layout(shapes, 4, I16, F32),
            Bar("ratio", by_level(1.25, 1.4), "cpu"),
        ),
        case(
            "remainder16-8bit",
            f"{eight}, 16-bit remainders",
            Layout(shapes, 4, I16, None),
            Bar("ratio", by_level(0.8, 1.2), "cpu"),
            Bar("fraction", 0.8, "cuda"),
        ),
        case("remainder8-8bit", f"{eight}, 8-bit remainders", Layout(shapes, 5, I8, None)),
        case("master", f"{wide}, f32 masters", Layout(shapes, 3, F32, F32)),
        case(
            "stochastic",
            f"{one}, bf16 moments, stochastic",
            Layout(shapes, 1, None, BF16),
            Bar("ratio", by_level(0.8, 1.0), "cpu"),
        ),
        case(
            "kahan",
            f"{one}, bf16 moments, Kahan",
            Layout(shapes, 2, BF16, BF16),
            Bar("ratio", by_level(0.9, 1.1), "cpu"),
            Bar("ratio", 4.0, "cpu", OPTIMI),
        ),
    ]

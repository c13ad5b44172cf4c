"""Mixed precision steps and clipping of a model as users call them; the ops alone beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ._model import OP_ONLY, Shapes, filled_like, model_for
from .harness import Bar, Case, Contender, Rotation, sets_needed
from .instructions.row import SQUARE, Row, evenly

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TORCH_OP = "torch, op only"

# Every call must write what it would write in training, but values have to stay in range over
# thousands of calls: so each shrinks its gradients, by little.
SHRINK = 1 - 2.0**-16
SCALE = 1 + 2.0**-23
LR = 1e-4


@dataclass
class Data:
    params: list[torch.nn.Parameter]
    grads: list[torch.Tensor]
    norm: float

    def max_norm(self, clips: bool = True) -> float:
        """Just below the norm of the gradients, so that the next call clips, or well above."""
        if not clips:
            return 2 * self.norm
        self.norm *= SHRINK
        return self.norm


@dataclass
class Layout:
    shapes: Shapes
    dtype: torch.dtype

    @property
    def grad_bytes(self) -> int:
        return sum(map(math.prod, self.shapes)) * self.dtype.itemsize

    def allocate(self, device: torch.device) -> Data:
        def tensors():
            return filled_like(self.shapes, self.dtype, device)

        params, grads = [torch.nn.Parameter(tensor) for tensor in tensors()], tensors()
        for param, grad in zip(params, grads):
            param.grad = grad
        norm = torch.stack([g.float().norm() for g in grads]).norm().item()
        return Data(params, grads, norm)

    def rotation(self, device: torch.device, tensors_used: int = 1) -> Rotation:
        """`tensors_used`: what a call touches, in gradients' sizes; 0: too little to rotate."""
        count = sets_needed(tensors_used * self.grad_bytes, device) if tensors_used else 2
        return Rotation([self.allocate(device) for _ in range(count)])


# ---- contenders: measure -------------------------------------------------------------------------


def headroom_norm(data: Rotation) -> Contender:
    import headroom

    norm = torch.zeros((), device=data.sets[0].grads[0].device)

    def call():
        headroom.functional.grad_norm(data.next().grads, norm=norm)
        return norm

    return Contender(call)


def torch_norm(data: Rotation) -> Contender:
    return Contender(lambda: torch.nn.utils.get_total_norm(data.next().grads))


# ---- contenders: unscale and check ---------------------------------------------------------------


def _scalars(data: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    device = data.sets[0].grads[0].device
    return torch.full((), 1 / SCALE, device=device), torch.zeros((), device=device)


def headroom_unscale(data: Rotation) -> Contender:
    import headroom

    factor, found_inf = _scalars(data)
    return Contender(
        lambda: headroom.functional.unscale_norm_(
            data.next().grads, clip_coef=factor, found_inf=found_inf
        )
    )


def torch_unscale(data: Rotation) -> Contender:
    factor, found_inf = _scalars(data)
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    return Contender(lambda: unscale(data.next().grads, found_inf, factor))


# ---- contenders: clip ----------------------------------------------------------------------------


def _clip(data: Rotation, clip: Callable[..., torch.Tensor], clips: bool) -> Contender:
    def call():
        d = data.next()
        return clip(d.params, d.max_norm(clips))

    return Contender(call)


def headroom_clip(data: Rotation, clips: bool = True) -> Contender:
    import headroom

    return _clip(data, headroom.clip_grad_norm_, clips)


def torch_clip(data: Rotation, clips: bool = True) -> Contender:
    return _clip(data, torch.nn.utils.clip_grad_norm_, clips)


def torch_clip_loop(data: Rotation, clips: bool = True) -> Contender:
    return _clip(data, partial(torch.nn.utils.clip_grad_norm_, foreach=False), clips)


# ---- contenders: a step with a scaler ------------------------------------------------------------


def _step(
    data: Rotation,
    kind: type[torch.amp.GradScaler],
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    clip: Callable[..., torch.Tensor] | None,
) -> Contender:
    """Unscales and clips, explicitly or in the step; steps; updates the scale."""
    device = data.sets[0].grads[0].device
    optimizers = {id(d): make(d.params) for d in data.sets}
    scaler = kind(device.type, init_scale=SCALE, growth_interval=1 << 30)
    scaler.scale(torch.ones((), device=device))  # makes the scale

    def call(d: Data | None = None):
        d = d or data.next()
        optimizer = optimizers[id(d)]
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(d.params, d.max_norm())
        scaler.step(optimizer)
        scaler.update()

    for d in data.sets:  # makes the states: the first step of an optimizer is like no other
        call(d)
    return Contender(call)


def headroom_step(data: Rotation) -> Contender:
    import headroom

    make = partial(headroom.optim.AdamW, lr=LR, max_grad_norm=1.0)
    return _step(data, headroom.amp.GradScaler, make, None)


def headroom_explicit_step(data: Rotation) -> Contender:
    import headroom

    make = partial(headroom.optim.AdamW, lr=LR)
    return _step(data, headroom.amp.GradScaler, make, headroom.clip_grad_norm_)


def torch_step(data: Rotation, **kind: bool) -> Contender:
    make = partial(torch.optim.AdamW, lr=LR, **kind)
    return _step(data, torch.amp.GradScaler, make, torch.nn.utils.clip_grad_norm_)


# ---- cases ---------------------------------------------------------------------------------------


def norm_case(name: str, layout: Layout, *bars: Bar) -> Case:
    def setup(device):
        data = layout.rotation(device)
        return {OP_ONLY: lambda: headroom_norm(data), TORCH_OP: lambda: torch_norm(data)}

    what = f"global L2 norm of {_describe(layout)}"
    return Case(name, what, setup, TORCH_OP, layout.grad_bytes, bars=bars, subject=OP_ONLY)


def unscale_case(name: str, layout: Layout, *bars: Bar) -> Case:
    def setup(device):
        data = layout.rotation(device)
        return {OP_ONLY: lambda: headroom_unscale(data), TORCH_OP: lambda: torch_unscale(data)}

    what, work = f"{_describe(layout)} unscaled and checked", 2 * layout.grad_bytes
    return Case(name, what, setup, TORCH_OP, work, bars=bars, subject=OP_ONLY)


def clip_case(
    name: str, layout: Layout, *bars: Bar, clips: bool = True, tiny: bool = False
) -> Case:
    """In place: two reads and a write, or one read where there is nothing to clip."""

    def setup(device):
        data = layout.rotation(device, 0 if tiny else 1)
        factories = {
            "headroom": lambda: headroom_clip(data, clips),
            "torch": lambda: torch_clip(data, clips),
        }
        if device.type == "cpu":  # on CUDA it is a launch for each tensor
            factories["torch for-loop"] = lambda: torch_clip_loop(data, clips)
        return factories

    work = None if tiny else (3 if clips else 1) * layout.grad_bytes
    what = f"clip_grad_norm_ on {_describe(layout)}" + ("" if clips else ", nothing to clip")
    return Case(name, what, setup, "torch", work, bars=bars)


def step_case(name: str, layout: Layout, *bars: Bar, explicit: bool = False) -> Case:
    """With `explicit`, unscale_() and clip_grad_norm_() as a loop written for torch calls them.

    The work counts the bytes of a step that reads gradients twice, once for the norm and once
    for the update, and writes none.
    """

    def setup(device):
        data = layout.rotation(device, 4)
        ours = headroom_explicit_step if explicit else headroom_step
        return {
            "headroom": lambda: ours(data),
            "torch fused": lambda: torch_step(data, fused=True),
            "torch foreach": lambda: torch_step(data, foreach=True),
        }

    calls = "unscale_, clip_grad_norm_, step" if explicit else "step that unscales and clips"
    what = f"GradScaler: {calls}, AdamW on {_describe(layout)}"
    return Case(name, what, setup, "torch fused", 8 * layout.grad_bytes, bars=bars)


def _describe(layout: Layout) -> str:
    dtype = str(layout.dtype).removeprefix("torch.")
    return f"{sum(map(math.prod, layout.shapes)):,} {dtype} in {len(layout.shapes):,} tensors"


def cases(device: torch.device, quick: bool) -> list[Case]:
    shapes = model_for(device, quick).shapes
    f32, bf16, f16 = (Layout(shapes, dtype) for dtype in (F32, BF16, F16))
    many = Layout(((64,),) * (40 if quick else 10_000), F32)
    return [
        step_case("step", f32, Bar("ratio", 1.5, "cpu")),
        step_case("step-explicit", f32, Bar("ratio", 1.5, "cpu"), explicit=True),
        clip_case("clip-f32", f32, Bar("ratio", 2.0, "cpu")),
        clip_case("clip-f32-within", f32, Bar("ratio", 2.0, "cpu"), clips=False),
        clip_case("clip-bf16", bf16),
        clip_case("clip-f16", f16),
        clip_case("clip-10000x64", many, Bar("ratio", 5.0, "cpu"), tiny=True),
        unscale_case("unscale-f32", f32),
        unscale_case("unscale-f16", f16, Bar("ratio", 1.0, "cpu")),
        norm_case("norm-f32", f32),
        norm_case("norm-bf16", bf16),
        norm_case("norm-f16", f16),
    ]


F32_NORM, NORM = evenly(4.1), evenly(4.9)
UNSCALE_BF16 = {"90": 6.2, "86": 6.2, "75": 13.5}
UNSCALE = {"90": 8.3, "86": 8.3, "75": 9.4}
BUDGETS = [
    Row("unscale_norm_kernel", "f32, norm", 4, 4, 0, SQUARE, 0.5, F32_NORM),
    Row("unscale_norm_kernel", "bf16, norm", 2, 2, 0, SQUARE, 0.5, NORM, 6),
    Row("unscale_norm_kernel", "f16, norm", 2, 2, 0, SQUARE, 0.5, NORM, 6, f16=True),
    Row("unscale_norm_kernel", "bf16, norm and unscale", 4, 2, 2, SQUARE, 0.5, UNSCALE_BF16),
    Row("unscale_norm_kernel", "f16, norm and unscale", 4, 2, 2, SQUARE, 0.5, UNSCALE, f16=True),
]

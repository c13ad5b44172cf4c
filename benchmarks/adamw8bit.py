"""Times AdamW with 8-bit moments: the op on large tensors, `step()` on many small ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import adamw
from .harness import Bar, Case, Contender, Rotation, Unavailable, filled, sets_needed, sized

BLOCK = 256
HYPER = {name: value for name, value in adamw.HYPER.items() if name != "amsgrad"}
CONSTRUCTOR = {"lr": HYPER["lr"], "weight_decay": HYPER["weight_decay"]}
F32, BF16 = torch.float32, torch.bfloat16
FUSED, TORCHAO, BNB = "torch fused f32", "torchao 8-bit", "bitsandbytes 8-bit"


class Data(NamedTuple):
    """One set of tensors for a step, in the order of the op's arguments."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_absmaxs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    exp_avg_sq_absmaxs: list[torch.Tensor]
    steps: list[torch.Tensor]


@dataclass
class Layout:
    tensors: int
    numel: int
    param: torch.dtype

    @property
    def blocks(self) -> int:
        return -(-self.numel // BLOCK)

    @property
    def bytes_held(self) -> int:
        return self.tensors * (2 * self.numel * (self.param.itemsize + 1) + 8 * self.blocks)

    @property
    def bytes_moved(self) -> int:
        """Reads parameter, gradient, codes and scales; writes all but the gradient."""
        return self.tensors * (self.numel * (3 * self.param.itemsize + 4) + 16 * self.blocks)

    def allocate(self, device: torch.device) -> Data:
        def floats(numel, dtype):
            return [filled(numel, dtype, device) for _ in range(self.tensors)]

        def moment():
            codes = torch.randint(256, (self.tensors, self.numel), dtype=torch.uint8, device=device)
            return list(codes), floats(self.blocks, F32)

        steps = [torch.ones((), device=device) for _ in range(self.tensors)]
        params, grads = floats(self.numel, self.param), floats(self.numel, self.param)
        return Data(params, grads, *moment(), *moment(), steps)

    def rotation(self, device: torch.device) -> Rotation:
        return Rotation(
            [self.allocate(device) for _ in range(sets_needed(self.bytes_held, device))]
        )


def headroom_op(data: Rotation) -> Contender:
    import headroom  # noqa: F401  (registers the op)

    op = torch.ops.headroom.adamw8bit_.default
    return Contender(lambda: op(*data.next(), [], decoupled=True, block_size=BLOCK, **HYPER))


def optimizer_step(data: Rotation, make: Callable[..., torch.optim.Optimizer]) -> Contender:
    """Times `step()` of an optimizer that has its own states for each set of the rotation."""
    optimizers = {}
    for d in data.sets:
        params = [torch.nn.Parameter(param) for param in d.params]
        for param, grad in zip(params, d.grads):
            param.grad = grad
        optimizers[id(d)] = make(params, **CONSTRUCTOR)
    return Contender(lambda: optimizers[id(data.next())].step())


def headroom_step(data: Rotation) -> Contender:
    import headroom

    return optimizer_step(data, headroom.optim.AdamW8bit)


def torch_step(data: Rotation) -> Contender:
    return optimizer_step(
        data, lambda *args, **options: torch.optim.AdamW(*args, fused=True, **options)
    )


def torchao_step(data: Rotation) -> Contender:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise Unavailable("not installed") from error
    return optimizer_step(data, AdamW8bit)


def bitsandbytes_step(data: Rotation) -> Contender:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise Unavailable("not installed") from error
    return optimizer_step(data, AdamW8bit)


def large(name: str, what: str, layout: Layout, *bars: Bar) -> Case:
    """A case of the op on data that is not in the cache. Torch, which has no 8-bit moments, runs
    its fastest step, all float32."""
    fused = adamw.Layout(layout.tensors, layout.numel, F32, F32)

    def setup(device):
        data, wide = layout.rotation(device), fused.rotation(device)
        return {
            "headroom": lambda: headroom_op(data),
            FUSED: lambda: adamw.torch_fused(wide, fused.bytes_moved),
            TORCHAO: lambda: torchao_step(data),
            BNB: lambda: bitsandbytes_step(data),
        }

    return Case(name, what, setup, FUSED, layout.bytes_moved, bars=bars)


def many_step(name: str, what: str, layout: Layout, *bars: Bar) -> Case:
    """A case of `optimizer.step()`. It leaves out torchao, whose moments are 8-bit only if the
    block size divides the number of elements."""

    def setup(device):
        data = layout.rotation(device)
        return {
            "headroom": lambda: headroom_step(data),
            FUSED: lambda: torch_step(data),
            BNB: lambda: bitsandbytes_step(data),
        }

    return Case(name, what, setup, FUSED, bars=bars)


def cases(device: torch.device, quick: bool) -> list[Case]:
    cuda = device.type == "cuda"
    n = 1 << 14 if quick else sized(1 << (28 if cuda else 25), 4 * 16, device)
    f32, bf16 = Layout(1, n, F32), Layout(1, n, BF16)
    many = Layout(20 if quick else 10_000, 5_000, F32)
    one = f"one tensor of {n:,}, 8-bit moments"
    # On CPUs with AVX2 and no AVX-512, 0.6 of these bars is good.
    f32_bars = [
        Bar("ratio", 1.2, "cpu"),
        Bar("ratio", 30.0, "cpu", TORCHAO),
        Bar("ratio", 60.0, "cpu", BNB),
    ]
    bf16_bars = [
        Bar("ratio", 1.5, "cpu"),
        Bar("ratio", 60.0, "cpu", BNB),
        Bar("fraction", 0.85, "cuda"),
        Bar("ratio", 2.0, "cuda", TORCHAO),
        Bar("ratio", 2.0, "cuda", BNB),
    ]
    what = f"step() on {many.tensors:,} f32 tensors of {many.numel:,}"
    return [
        large("f32", f"{one}, f32 parameters", f32, *f32_bars),
        large("bf16", f"{one}, bf16 parameters", bf16, *bf16_bars),
        many_step("step-10000x5000", what, many, Bar("ratio", 60.0, "cpu", BNB)),
    ]

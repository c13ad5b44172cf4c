"""Times AdamW: the op on large tensors, and the whole `step()` on many tiny ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw as torch_adamw

from .harness import Bar, Case, Contender, Rotation, Unavailable, filled, sets_needed, sized

HYPER = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 1e-2,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Data(NamedTuple):
    """One set of tensors for an AdamW step, in the order of the ops' arguments."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    max_exp_avg_sqs: list[torch.Tensor]
    steps: list[torch.Tensor]


@dataclass
class Layout:
    tensors: int
    numel: int
    param: torch.dtype
    moment: torch.dtype

    @property
    def bytes_held(self) -> int:
        return self.tensors * self.numel * 2 * (self.param.itemsize + self.moment.itemsize)

    @property
    def bytes_moved(self) -> int:
        """Reads parameter, gradient and both moments; writes all but the gradient."""
        return self.tensors * self.numel * (3 * self.param.itemsize + 4 * self.moment.itemsize)

    def allocate(self, device: torch.device) -> Data:
        def tensors(dtype):
            return [filled(self.numel, dtype, device) for _ in range(self.tensors)]

        steps = [torch.ones((), device=device) for _ in range(self.tensors)]
        moments = tensors(self.moment), tensors(self.moment)
        return Data(tensors(self.param), tensors(self.param), *moments, [], steps)

    def rotation(self, device: torch.device) -> Rotation:
        return Rotation(
            [self.allocate(device) for _ in range(sets_needed(self.bytes_held, device))]
        )


def headroom_op(data: Rotation) -> Contender:
    import headroom  # noqa: F401  (registers the op)

    op = torch.ops.headroom.adamw_.default
    return Contender(lambda: op(*data.next(), [], decoupled=True, **HYPER))


def torch_fused(data: Rotation, work: int | None = None) -> Contender:
    def call():
        d = data.next()
        torch._foreach_add_(d.steps, 1)  # torch.optim counts before it calls the op
        torch._fused_adamw_(*d, **HYPER)

    return Contender(call, work=work)


def torch_foreach(data: Rotation) -> Contender:
    on_cuda = data.sets[0].params[0].is_cuda
    return Contender(lambda: torch_adamw(*data.next(), foreach=True, capturable=on_cuda, **HYPER))


def deepspeed_cpu(data: Rotation) -> Contender:
    """DeepSpeedCPUAdam on the same tensors, one optimizer for each set of the rotation."""
    if data.sets[0].params[0].is_cuda:
        raise Unavailable("works on CPU tensors only")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(1))])  # compiles its op at first use
    except (ImportError, RuntimeError) as error:
        raise Unavailable(f"not usable: {error}") from error
    optimizers = {}
    for d in data.sets:
        params = [torch.nn.Parameter(p) for p in d.params]
        optimizer = DeepSpeedCPUAdam(params, lr=HYPER["lr"], weight_decay=HYPER["weight_decay"])
        for p, g, m, v in zip(params, d.grads, d.exp_avgs, d.exp_avg_sqs):
            p.grad = g
            optimizer.state[p] = {"step": int(d.steps[0]), "exp_avg": m, "exp_avg_sq": v}
        optimizers[id(d)] = optimizer
    return Contender(lambda: optimizers[id(data.next())].step())


def large(name: str, what: str, layout: Layout, *bars: Bar, against: Layout | None = None) -> Case:
    """A case of the op on data that is not in the cache.

    `against` is the layout that torch's fused op gets if it does not support ours, which has two
    dtypes.
    """
    rival = "torch fused" if against is None else "torch fused f32"

    def setup(device):
        data = layout.rotation(device)
        theirs = data if against is None else against.rotation(device)
        factories = {
            "headroom": lambda: headroom_op(data),
            rival: lambda: torch_fused(theirs, (against or layout).bytes_moved),
        }
        if against is None:
            factories["torch foreach"] = lambda: torch_foreach(data)
        if layout.moment in (layout.param, F32):
            factories["deepspeed"] = lambda: deepspeed_cpu(data)
        return factories

    return Case(name, what, setup, rival, layout.bytes_moved, bars=bars)


def tiny_op(name: str, what: str, layout: Layout) -> Case:
    def setup(device):
        data = Rotation([layout.allocate(device) for _ in range(2)])
        return {"headroom": lambda: headroom_op(data), "torch fused": lambda: torch_fused(data)}

    return Case(name, what, setup, "torch fused")


def tiny_step(name: str, what: str, layout: Layout, *bars: Bar, new_grads: bool) -> Case:
    """A case of `optimizer.step()`, with the gradients of the last step, or with new ones at new
    addresses, as after `zero_grad()` and a backward pass."""

    def setup(device):
        data = layout.allocate(device)
        params = [torch.nn.Parameter(p) for p in data.params]

        def assign_grads():
            # All are allocated before the first old one is freed, so that no address is reused.
            for p, g in zip(params, [g.clone() for g in data.grads]):
                p.grad = g

        assign_grads()

        def contender(make: Callable[[], torch.optim.Optimizer]) -> Contender:
            return Contender(make().step, prepare=assign_grads if new_grads else None)

        def headroom_step():
            import headroom.optim

            return contender(lambda: headroom.optim.AdamW(params))

        def torch_step(**kind):
            return contender(lambda: torch.optim.AdamW(params, **kind))

        factories = {
            "headroom": headroom_step,
            "torch fused": lambda: torch_step(fused=True),
            "torch foreach": lambda: torch_step(foreach=True),
        }
        if device.type == "cpu":  # on CUDA it is 100,000 launches a step
            factories["torch for-loop"] = lambda: torch_step(foreach=False)
        return factories

    return Case(name, what, setup, "torch fused", bars=bars)


def cases(device: torch.device, quick: bool) -> list[Case]:
    cuda = device.type == "cuda"
    n = 1 << 14 if quick else sized(1 << (28 if cuda else 25), 2 * 32, device)
    f32, bf16, f16 = (Layout(1, n, dtype, dtype) for dtype in (F32, BF16, F16))
    f32_bf16, bf16_f32 = Layout(1, n, F32, BF16), Layout(1, n, BF16, F32)
    some = Layout(20, 1 << 10 if quick else 1 << 20, F32, F32)
    many = Layout(40 if quick else 10_000, 64, F32, F32)

    f32_bars = Bar("ratio", 0.97, "cpu"), Bar("ratio", 1.15, "cuda"), Bar("fraction", 0.93, "cuda")
    bf16_bar, mixed_bar, step_bar = (Bar("ratio", least, "cpu") for least in (1.3, 1.2, 4.0))
    one, tiny = f"one tensor of {n:,}", f"{many.tensors:,} f32 tensors of 64"
    return [
        large("f32", f"{one}, all f32", f32, *f32_bars),
        large("bf16", f"{one}, all bf16", bf16, bf16_bar),
        large("f32-bf16moments", f"{one}, f32, bf16 moments", f32_bf16, mixed_bar, against=f32),
        large("bf16-f32moments", f"{one}, bf16, f32 moments", bf16_f32, against=f32),
        large("f16", f"{one}, all f16", f16),
        large("f32-20x1M", f"20 tensors of {some.numel:,}, all f32", some),
        tiny_step("step-10000x64", f"step() on {tiny}", many, step_bar, new_grads=False),
        tiny_step(
            "step-10000x64-newgrads",
            f"step() on {tiny}, with new gradients before each",
            many,
            step_bar,
            new_grads=True,
        ),
        tiny_op("op-10000x64", f"the op on {tiny}", many),
    ]

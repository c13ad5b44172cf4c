"""AdamW: the whole `step()` on a model and on many tiny tensors, the op alone beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw as torch_adamw

from ._model import OP_ONLY, Shapes, filled_like, model_for, optimizer_step
from .harness import Bar, Case, Contender, Rotation, Unavailable, by_level, sets_needed
from .instructions.row import SQRT, Row

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
FUSED, FOREACH = "torch fused", "torch foreach"


class Data(NamedTuple):
    """One set of tensors that an AdamW step works on, in the order of the ops' arguments."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    max_exp_avg_sqs: list[torch.Tensor]
    steps: list[torch.Tensor]


@dataclass
class Layout:
    shapes: Shapes
    param: torch.dtype
    moment: torch.dtype

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def bytes_held(self) -> int:
        return self.numel * 2 * (self.param.itemsize + self.moment.itemsize)

    @property
    def bytes_moved(self) -> int:
        """Reads parameter, gradient and both moments; writes all but the gradient."""
        return self.numel * (3 * self.param.itemsize + 4 * self.moment.itemsize)

    def allocate(self, device: torch.device) -> Data:
        def tensors(dtype):
            return filled_like(self.shapes, dtype, device)

        steps = [torch.ones((), device=device) for _ in self.shapes]
        moments = tensors(self.moment), tensors(self.moment)
        return Data(tensors(self.param), tensors(self.param), *moments, [], steps)

    def rotation(self, device: torch.device) -> Rotation:
        return Rotation(
            [self.allocate(device) for _ in range(sets_needed(self.bytes_held, device))]
        )


def headroom_step(data: Rotation, state_dtype: torch.dtype | None = None) -> Contender:
    import headroom

    options = {} if state_dtype is None else {"state_dtype": state_dtype}
    return optimizer_step(data, lambda params: headroom.optim.AdamW(params, **options))


def torch_step(data: Rotation, work: int | None = None, **kind: bool) -> Contender:
    return optimizer_step(data, lambda params: torch.optim.AdamW(params, **kind), work)


def headroom_op(data: Rotation) -> Contender:
    import headroom  # noqa: F401  (registers the op)

    op = torch.ops.headroom.adamw_.default
    return Contender(lambda: op(*data.next(), [], decoupled=True, **HYPER))


def torch_fused(data: Rotation) -> Contender:
    def call():
        d = data.next()
        torch._foreach_add_(d.steps, 1)  # torch.optim counts before it calls the op
        torch._fused_adamw_(*d, **HYPER)

    return Contender(call)


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


def model(name: str, what: str, layout: Layout, *bars: Bar, against: Layout | None = None) -> Case:
    """`step()` of each optimizer with its defaults. Moments of another dtype than the parameters
    are the one option that is given.

    `against` is the layout given to torch's fused step where it cannot take ours: it wants one
    dtype.
    """
    rival = FUSED if against is None else f"{FUSED} f32"
    state_dtype = None if layout.moment == layout.param else layout.moment

    def setup(device):
        data = layout.rotation(device)
        theirs = data if against is None else against.rotation(device)
        work = (against or layout).bytes_moved
        factories = {
            "headroom": lambda: headroom_step(data, state_dtype),
            OP_ONLY: lambda: headroom_op(data),
            rival: lambda: torch_step(theirs, work, fused=True),
        }
        if against is None:
            factories[f"{FUSED}, op only"] = lambda: torch_fused(data)
            factories[FOREACH] = lambda: torch_step(data, foreach=True)
        if layout.moment in (layout.param, F32):
            factories["deepspeed"] = lambda: deepspeed_cpu(data)
        return factories

    return Case(name, what, setup, rival, layout.bytes_moved, bars=bars)


def tiny_op(name: str, what: str, layout: Layout) -> Case:
    rival = f"{FUSED}, op only"

    def setup(device):
        data = Rotation([layout.allocate(device) for _ in range(2)])
        return {OP_ONLY: lambda: headroom_op(data), rival: lambda: torch_fused(data)}

    return Case(name, what, setup, rival, subject=OP_ONLY)


def tiny_step(name: str, what: str, layout: Layout, *bars: Bar, new_grads: bool) -> Case:
    """`optimizer.step()` with the gradients of the last step, or with new ones, which also have new
    addresses, as after `zero_grad()` and a backward pass."""

    def setup(device):
        data = layout.allocate(device)
        params = [torch.nn.Parameter(p) for p in data.params]

        def assign_grads():
            # All are made before the first old one is freed, so that none gets its old place back.
            for p, g in zip(params, [g.clone() for g in data.grads]):
                p.grad = g

        assign_grads()

        def contender(make: Callable[[], torch.optim.Optimizer]) -> Contender:
            return Contender(make().step, prepare=assign_grads if new_grads else None)

        def headroom_step():
            import headroom.optim

            return contender(lambda: headroom.optim.AdamW(params))

        def torch_kind(**kind):
            return contender(lambda: torch.optim.AdamW(params, **kind))

        factories = {
            "headroom": headroom_step,
            FUSED: lambda: torch_kind(fused=True),
            FOREACH: lambda: torch_kind(foreach=True),
        }
        if device.type == "cpu":  # on CUDA it is 100,000 launches a step
            factories["torch for-loop"] = lambda: torch_kind(foreach=False)
        return factories

    return Case(name, what, setup, FUSED, bars=bars)


def cases(device: torch.device, quick: bool) -> list[Case]:
    whole = model_for(device, quick)
    f32, bf16, f16 = (Layout(whole.shapes, dtype, dtype) for dtype in (F32, BF16, F16))
    f32_bf16, bf16_f32 = Layout(whole.shapes, F32, BF16), Layout(whole.shapes, BF16, F32)
    many = Layout(((64,),) * (40 if quick else 10_000), F32, F32)

    f32_bars = Bar("ratio", 0.97, "cpu"), Bar("ratio", 1.15, "cuda"), Bar("fraction", 0.93, "cuda")
    bf16_bar, f16_bar, mixed_bar, step_bar = (
        Bar("ratio", least, "cpu") for least in (by_level(1.2, 1.4), 1.0, 1.2, 4.0)
    )
    step, tiny = f"step() on {whole}", f"{len(many.shapes):,} f32 tensors of 64"
    return [
        model("f32", f"{step}, all f32", f32, *f32_bars),
        model("bf16", f"{step}, all bf16", bf16, bf16_bar),
        model("f32-bf16moments", f"{step}, f32, bf16 moments", f32_bf16, mixed_bar, against=f32),
        model("bf16-f32moments", f"{step}, bf16, f32 moments", bf16_f32, against=f32),
        model("f16", f"{step}, all f16", f16, f16_bar),
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


ADAMW, REMAINDER16 = {"90": 43.9, "86": 44.1}, {"90": 59.2, "86": 59.3, "75": 61.1}
BUDGETS = [
    Row("adamw_kernel", "f32", 28, 16, 12, SQRT, 1, ADAMW | {"75": 45.5}, 55),
    Row("adamw_kernel", "all bf16", 14, 8, 6, SQRT, 1, ADAMW | {"75": 65.8}, 58),
    Row("adamw_kernel", "all f16", 14, 8, 6, SQRT, 1, ADAMW | {"75": 47.2}, 58, f16=True),
    Row("adamw_kernel", "bf16, f32 moments", 22, 12, 10, SQRT, 1, ADAMW | {"75": 53.2}, 58),
    Row("adamw_kernel", "f16, f32 moments", 22, 12, 10, SQRT, 1, ADAMW | {"75": 47}, 58, f16=True),
    Row("adamw_kernel", "f32, bf16 moments", 20, 12, 8, SQRT, 1, ADAMW | {"75": 58.9}),
    Row("adamw_kernel", "remainder16", 18, 10, 8, SQRT, 1, REMAINDER16 | {"75": 73.4}, 75),
    Row("adamw_kernel", "remainder16, f32 moments", 26, 14, 12, SQRT, 1, REMAINDER16, 75),
]

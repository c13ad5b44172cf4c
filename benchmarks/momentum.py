"""SGD and Lion, and both with 8-bit moments: the whole `step()` on a model, the op beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ._lists import Lists, on_next
from ._model import OP_ONLY, Shapes, model_for, optimizer_step
from .harness import Bar, Case, Contender, Rotation, SameWork, Unavailable
from .instructions.row import FACTOR, Row

F32, BF16 = torch.float32, torch.bfloat16
SGD = {"lr": 0.01, "momentum": 0.9}
LION = {"lr": 1e-4, "weight_decay": 0.1}
FUSED, FOREACH, BNB = "torch fused", "foreach", "bitsandbytes 8-bit"


def lists(shapes: Shapes, dtype: torch.dtype) -> Lists:
    dtypes = dict.fromkeys(("params", "grads", "moments"), dtype)
    return Lists(shapes, dtypes, {"params": 2, "grads": 1, "moments": 2})


def headroom_step(data: Rotation, name: str, **options: Any) -> Contender:
    import headroom

    make = getattr(headroom.optim, name)
    return optimizer_step(data, lambda params: make(params, **options))


def torch_step(data: Rotation, **kind: bool) -> Contender:
    return optimizer_step(data, lambda params: torch.optim.SGD(params, **SGD, **kind))


def bitsandbytes_step(data: Rotation, name: str, **options: Any) -> Contender:
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise Unavailable("not installed") from error
    return optimizer_step(data, lambda params: getattr(optim, name)(params, **options))


def headroom_sgd(data: Rotation) -> Contender:
    from headroom.functional import sgd_

    steps = [torch.ones((), device=p.device) for p in data.sets[0].params]
    return on_next(data, lambda d: sgd_(d.params, d.grads, d.moments, steps, **SGD))


def headroom_lion(data: Rotation) -> Contender:
    from headroom.functional import lion_

    steps = [torch.ones((), device=p.device) for p in data.sets[0].params]
    return on_next(data, lambda d: lion_(d.params, d.grads, d.moments, steps, **LION))


def foreach_lion(data: Rotation) -> Contender:
    """The rule as torch's foreach functions have it; torch has no Lion."""
    lr, decay, beta1, beta2 = LION["lr"], LION["weight_decay"], 0.9, 0.99

    def call(d):
        updates = torch._foreach_mul(d.moments, beta1)
        torch._foreach_add_(updates, d.grads, alpha=1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(d.params, 1 - lr * decay)
        torch._foreach_add_(d.params, updates, alpha=-lr)
        torch._foreach_mul_(d.moments, beta2)
        torch._foreach_add_(d.moments, d.grads, alpha=1 - beta2)

    return on_next(data, call)


def after_lion(d: Any) -> list[torch.Tensor]:
    params = []
    for param, grad, moment in zip(d.params, d.grads, d.moments):
        sign = (0.9 * moment.double() + 0.1 * grad.double()).sign()
        params.append(param.double() * (1 - 1e-4 * 0.1) - 1e-4 * sign)
    return params


SAME_WORK = SameWork(
    [headroom_lion, foreach_lion],
    [lists(((1000,),) * 3, F32)],
    expected=after_lion,
    left=lambda d: d.params,
    tolerance=2 * torch.finfo(F32).eps,
)


def case(
    name: str,
    what: str,
    of: Lists,
    makes: dict[str, Callable[[Rotation], Contender]],
    rival: str,
    *bars: Bar,
    moved: int | None = None,
) -> Case:
    def setup(device):
        data = of.rotation(device)
        return {key: partial(make, data) for key, make in makes.items()}

    return Case(name, what, setup, rival, moved or of.bytes_moved, bars=bars)


def cases(device: torch.device, quick: bool) -> list[Case]:
    model = model_for(device, quick)
    sgd = partial(headroom_step, name="SGD", **SGD)
    lion = partial(headroom_step, name="Lion", **LION)
    sgds = {
        "headroom": sgd,
        OP_ONLY: headroom_sgd,
        FUSED: partial(torch_step, fused=True),
        FOREACH: partial(torch_step, foreach=True),
    }
    lions = {"headroom": lion, OP_ONLY: headroom_lion, FOREACH: foreach_lion}
    small_sgd = {
        "headroom": partial(headroom_step, name="SGD8bit", **SGD),
        FUSED: sgds[FUSED],
        BNB: partial(bitsandbytes_step, name="SGD8bit", **SGD),
        "headroom AdamW8bit": partial(headroom_step, name="AdamW8bit"),
    }
    small_lion = {
        "headroom": partial(headroom_step, name="Lion8bit", **LION),
        FOREACH: foreach_lion,
        BNB: partial(bitsandbytes_step, name="Lion8bit", **LION),
        "headroom AdamW8bit": small_sgd["headroom AdamW8bit"],
    }
    sgd_bar, lion_bar = Bar("ratio", 1.1, "cpu"), Bar("ratio", 3.0, "cpu")
    bnb_bar = Bar("ratio", 3.0, "cpu", BNB)
    all_cases = []
    for dtype, word in ((F32, "f32"), (BF16, "bf16")):
        plain, codes = lists(model.shapes, dtype), model.numel * (3 * dtype.itemsize + 2)
        all_cases += [
            case(f"sgd-{word}", f"SGD.step() on {model}, {word}", plain, sgds, FUSED, sgd_bar),
            case(
                f"lion-{word}", f"Lion.step() on {model}, {word}", plain, lions, FOREACH, lion_bar
            ),
            case(
                f"sgd8bit-{word}",
                f"SGD8bit.step(), {word}",
                plain,
                small_sgd,
                FUSED,
                bnb_bar,
                moved=codes,
            ),
            case(
                f"lion8bit-{word}",
                f"Lion8bit.step(), {word}",
                plain,
                small_lion,
                FOREACH,
                lion_bar,
                bnb_bar,
                moved=codes,
            ),
        ]
    return all_cases


# The instances of momentum_codes_kernel: its first parameter is the rule.
SGD_CODES, LION_CODES = "kernelILi1E", "kernelILi0E"
BUDGETS = [
    Row("momentum_kernel", "f32, SGD", 20, 12, 8, FACTOR, 2, {"90": 13.9, "86": 13.9, "75": 13.9}),
    Row("momentum_kernel", "f32, Lion", 20, 12, 8, FACTOR, 7, {"90": 20.2, "86": 20.2, "75": 20.2}),
    Row(
        "momentum_kernel",
        "f32, SGD without momentum",
        12,
        8,
        4,
        FACTOR,
        1,
        {"90": 7.1, "86": 7.1, "75": 7.1},
    ),
    Row("momentum_kernel", "bf16, SGD", 10, 6, 4, FACTOR, 2, {"90": 13.3, "86": 13.3, "75": 27.7}),
    Row("momentum_kernel", "bf16, Lion", 10, 6, 4, FACTOR, 7, {"90": 19.6, "86": 19.6, "75": 34}),
    Row(
        "momentum_kernel",
        "remainder16, f32 moments, SGD",
        22,
        10,
        8,
        FACTOR,
        2,
        {"90": 28.4, "86": 28.2, "75": 27.7},
    ),
    Row(
        "momentum_codes_kernel",
        "f32, SGD",
        14.03,
        10,
        5,
        FACTOR,
        5,
        {"90": 35.8, "86": 34.8, "75": 36.7},
        instance=SGD_CODES,
    ),
    Row(
        "momentum_codes_kernel",
        "f32, Lion",
        14.03,
        10,
        5,
        FACTOR,
        10,
        {"90": 41.8, "86": 40.8, "75": 42.1},
        instance=LION_CODES,
    ),
    Row(
        "momentum_codes_kernel",
        "bf16, SGD",
        8.03,
        5.5,
        3,
        FACTOR,
        5,
        {"90": 34, "86": 33, "75": 42},
        instance=SGD_CODES,
    ),
    Row(
        "momentum_codes_kernel",
        "bf16, Lion",
        8.03,
        5.5,
        3,
        FACTOR,
        10,
        {"90": 39.8, "86": 38.7, "75": 48},
        instance=LION_CODES,
    ),
]

"""A tensor on the meta device among real ones: torch then runs the op's fake, which computes
nothing, so the fake has to refuse it. (Those of list ops are tested by helpers.list_op.)"""

import headroom
import pytest
import torch

from helpers.bits import bits

F32 = torch.float32


def lists(count=2):
    torch.manual_seed(0)
    return [torch.randn(4, 3) for _ in range(count)]


def steps(count=2):
    return [torch.zeros((), dtype=torch.float64) for _ in range(count)]


ADAM = dict(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8)
STEP_SCALARS = ("lr", "grad_scale", "found_inf", "clip_coef", "stalled")


def adamw():
    args = (lists(), lists(), lists(), [x.abs() for x in lists()], [], steps())
    return headroom.functional.adamw_, args, ADAM


def adamw8bit():
    codes = [[torch.zeros(4, 3, dtype=torch.uint8) for _ in range(2)] for _ in range(2)]
    scales = [[torch.ones(1) for _ in range(2)] for _ in range(2)]
    args = (lists(), lists(), codes[0], scales[0], codes[1], scales[1], steps())
    return headroom.functional.adamw8bit_, args, ADAM


def adafactor():
    rows, cols = ([torch.ones(n) for _ in range(2)] for n in (4, 3))
    args = (lists(), lists(), rows, cols, [], [], [], steps())
    return headroom.functional.adafactor_, args, dict(lr=0.1)


def norm():
    return headroom.functional.grad_norm, (lists(),), dict(norm=torch.zeros(()))


def unscale():
    return headroom.functional.unscale_norm_, (lists(),), dict(grad_scale=torch.full((), 2.0))


def update_scale():
    one = torch.ones((), dtype=torch.int32)
    return headroom.functional.update_scale_, (torch.ones(()), one, torch.ones(())), {}


RESULTS = ("norm", "found_inf", "culprit", "clip", "grad_scale", "clip_coef")
CASES = [
    *((op, name) for op in (adamw, adamw8bit, adafactor) for name in STEP_SCALARS),
    *((op, name) for op in (norm, unscale) for name in RESULTS),
    *((update_scale, name) for name in ("found_inf", "growth_tracker", "hysteresis_tracker")),
]
DTYPES = {"culprit": torch.int64, "stalled": torch.int64}
DTYPES |= dict.fromkeys(("growth_tracker", "hysteresis_tracker"), torch.int32)
PLACES = {"growth_tracker": 1, "found_inf": 2}  # of what update_scale_ takes by place


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("make, name", CASES, ids=[f"{op.__name__}-{name}" for op, name in CASES])
def test_a_scalar_on_meta_is_refused(make, name):
    op, args, options = make()
    everything = tensors([args, list(options.values())])
    kept = [bits(t).clone() for t in everything]
    scalar = torch.ones((), dtype=DTYPES.get(name, F32), device="meta")
    if make is update_scale and name in PLACES:
        args = (*args[: PLACES[name]], scalar, *args[PLACES[name] + 1 :])
    else:
        options = options | {name: scalar}
    with (
        torch.no_grad(),
        pytest.raises((RuntimeError, NotImplementedError), match="meta|device|on"),
    ):
        op(*args, **options)
    assert all(torch.equal(bits(t), k) for t, k in zip(everything, kept))
    op, args, options = make()
    with torch.no_grad():
        op(*args, **options)  # without it, the op works


@pytest.mark.parametrize("name", ["join_weights_", "split_weights_"])
def test_residuals_on_meta_are_refused(name):
    params = [torch.randn(3).bfloat16()]
    values, residuals = [torch.ones(3)], [torch.zeros(3, dtype=torch.int16, device="meta")]
    lists_ = (values, params) if name == "join_weights_" else (params, residuals, values)
    lists_ = (*lists_, residuals) if name == "join_weights_" else lists_
    kept = [bits(t).clone() for t in (*values, *params)]
    with pytest.raises(RuntimeError, match=r"residuals\[0\] is on meta"):
        getattr(torch.ops.headroom, name)(*lists_, 3)
    assert all(torch.equal(bits(t), k) for t, k in zip((*values, *params), kept))


@pytest.mark.parametrize("name", ["grad_scale", "found_inf", "clip_coef"])
@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("cls", [headroom.optim.AdamW, headroom.optim.AdamW8bit])
def test_an_optimizer_with_a_scalar_on_meta(cls, name, limit):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = cls([param], max_grad_norm=limit)
    setattr(optimizer, name, torch.ones((), device="meta"))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        optimizer.step()
    assert param.eq(1).all()

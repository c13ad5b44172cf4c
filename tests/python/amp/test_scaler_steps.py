"""Steps under headroom.amp.GradScaler: the bits of torch's scaler and of an unscaled run, with
torch's optimizers and with ours; steps that are skipped, and no waiting for the device."""

import math
from functools import partial

import headroom
import pytest
import torch
from torch.amp import GradScaler as TorchScaler

from helpers.bits import assert_same_bits, bits
from helpers.scalers import (
    OURS,
    OVERFLOWS,
    TORCHS,
    VALUES,
    Scaler,
    parameters,
    run,
    set_grads,
    start,
)

OPTIMIZERS = pytest.mark.parametrize(  # the second with 8-bit and float32 moments
    "make", [OURS, partial(headroom.optim.AdamW8bit, min_8bit_size=6)], ids=["32-bit", "8-bit"]
)
BOTH = pytest.mark.parametrize("cls", [Scaler, TorchScaler], ids=["ours", "torch"])


def states(optimizer):
    return [v for entry in optimizer.state.values() for v in entry.values() if torch.is_tensor(v)]


def snapshot(params, optimizer):
    return [bits(t).clone() for t in (*params, *states(optimizer))]


def unchanged(params, optimizer, before):
    now = snapshot(params, optimizer)
    return len(now) == len(before) and all(map(torch.equal, now, before))


# ---- Beside torch's ------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("name", TORCHS)
def test_torchs_optimizers_get_the_bits_of_torchs_scaler(name, unscale, device):
    sides = []
    for cls in (Scaler, TorchScaler):
        params = parameters(device=device)
        optimizer = TORCHS[name](params)
        scaler = cls(device, growth_interval=3)
        scales = run(scaler, optimizer, params, unscale=unscale)
        sides.append((params, states(optimizer), [p.grad for p in params], scales, scaler))
    (params, state, grads, scales, scaler), torchs = sides[0], sides[1]
    assert_same_bits(params, torchs[0])
    assert_same_bits(state, torchs[1])
    assert_same_bits(grads, torchs[2])
    assert scales == torchs[3] and len(set(scales)) >= 3
    assert scaler.get_scale() == torchs[4].get_scale()


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@BOTH
@OPTIMIZERS
def test_ours_has_the_bits_of_an_unscaled_run_without_the_skipped_steps(make, cls, unscale, device):
    """Under our scaler, and under torch's. Scales are powers of two: scaling rounds nothing."""
    params, plain = parameters(device=device), parameters(device=device)
    optimizer, reference = make(params, lr=0.01), make(plain, lr=0.01)
    scaler = cls(device, growth_interval=3)
    scales = run(scaler, optimizer, params, unscale=unscale)
    for step, overflow in enumerate(OVERFLOWS):
        if not overflow:
            set_grads(plain, 1.0, step)
            reference.step()
    assert_same_bits(params, plain)
    assert_same_bits(states(optimizer), states(reference))
    other = parameters(device=device)
    assert scales == run(
        TorchScaler(device, growth_interval=3), TORCHS["adamw"](other), other, unscale=unscale
    )


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("max_norm", [0.1, 1e5])
@OPTIMIZERS
def test_clipping_in_the_step_has_the_bits_of_clipping_before_it(make, max_norm, unscale, device):
    params, plain = parameters(device=device), parameters(device=device)
    optimizer, reference = make(params, lr=0.01, max_grad_norm=max_norm), make(plain, lr=0.01)
    run(Scaler(device, growth_interval=3), optimizer, params, unscale=unscale)
    scaler = start(Scaler(device, growth_interval=3), device)
    for step, overflow in enumerate(OVERFLOWS):
        set_grads(plain, scaler.get_scale(), step, VALUES[step % 3] if overflow else None)
        scaler.unscale_(reference)
        headroom.clip_grad_norm_(plain, max_norm)
        scaler.step(reference)
        scaler.update()
    assert_same_bits(params, plain)
    assert_same_bits(states(optimizer), states(reference))


def test_clipping_over_several_groups_with_the_scaler(device):
    def groups(params):
        return [{"params": [p], "lr": 0.1 / (k + 1)} for k, p in enumerate(params)]

    params, plain = parameters(device=device), parameters(device=device)
    optimizer, reference = OURS(groups(params)), OURS(groups(plain))
    scaler = start(Scaler(device), device)
    for step in range(3):
        set_grads(params, scaler.get_scale(), step)
        scaler.step(optimizer, max_grad_norm=0.2)
        scaler.update()
        set_grads(plain, 1.0, step)
        assert headroom.clip_grad_norm_(plain, 0.2) == optimizer.grad_norm
        reference.step()
    assert_same_bits(params, plain)


def test_a_scale_that_is_not_a_power_of_two(device):
    """The gradient is multiplied by the inverse, rounded once, as torch's kernel does it."""
    params, plain = parameters(device=device), parameters(device=device)
    optimizer, reference = OURS(params), OURS(plain)
    scaler = start(Scaler(device, init_scale=1000.0), device)
    set_grads(params, 1.0, 0)
    set_grads(plain, 1.0, 0)
    scaler.step(optimizer)
    for p in plain:
        p.grad *= torch.tensor(1 / 1000.0)
    reference.step()
    assert_same_bits(params, plain)
    assert_same_bits(states(optimizer), states(reference))


# ---- A skipped step ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", VALUES)
@BOTH
@pytest.mark.parametrize(
    "make",
    [
        partial(OURS, amsgrad=True),
        partial(headroom.optim.AdamW8bit, min_8bit_size=6),
        partial(headroom.optim.AdamW8bit, min_8bit_size=6, nonfinite="skip_step"),
    ],
    ids=["32-bit", "8-bit", "8-bit propagate"],
)
def test_a_skipped_step_moves_no_byte(make, cls, value, device):
    params = parameters(device=device)
    optimizer = make(params)
    scaler = start(cls(device), device)
    set_grads(params, scaler.get_scale(), 0)
    scaler.step(optimizer)
    scaler.update()
    before = snapshot(params, optimizer)
    set_grads(params, scaler.get_scale(), 1, value)
    scaler.step(optimizer)
    scaler.update()
    assert unchanged(params, optimizer, before)
    assert scaler.get_scale() == 2.0**15
    set_grads(params, scaler.get_scale(), 2)
    scaler.step(optimizer)
    assert not unchanged(params, optimizer, before)
    assert all(optimizer.state[p]["step"] == 2 for p in params)


@pytest.mark.parametrize("bad", [None, math.inf])
def test_step_leaves_gradients_scaled_and_unscale_does_not(bad, device):
    """As documented, whether the step is skipped or not."""
    params = parameters(device=device)
    optimizer, scaler = OURS(params), start(Scaler(device), device)
    set_grads(params, 2.0**16, 0, bad)
    scaled = [p.grad.clone() for p in params]
    scaler.step(optimizer)
    scaler.update()
    assert_same_bits([p.grad for p in params], scaled)
    set_grads(params, scaler.get_scale(), 0, bad)
    scaled = [p.grad.clone() for p in params]
    inverse = 1 / scaler.get_scale()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert_same_bits([p.grad for p in params], [g * inverse for g in scaled])


def test_step_returns_the_flag(device):
    params = parameters(device=device)
    optimizer, scaler = OURS(params), start(Scaler(device), device)
    for step, overflow in enumerate(OVERFLOWS):
        for unscale in (False, True):
            set_grads(params, scaler.get_scale(), step, math.nan if overflow else None)
            if unscale:
                scaler.unscale_(optimizer)
            flag = scaler.step(optimizer)
            assert flag.dtype == torch.float32 and flag.shape == () and flag == overflow
            scaler.update()


def test_one_optimizer_of_two_overflows(device):
    """Only that one skips, and the shared scale falls."""
    first, second = parameters(device=device), parameters(device=device, seed=1)
    optimizers = OURS(first), OURS(second)
    scaler = start(Scaler(device), device)
    for params, bad in ((first, None), (second, math.inf)):
        set_grads(params, 2.0**16, 0, bad)
    before = snapshot(first, optimizers[0]), snapshot(second, optimizers[1])
    flags = [scaler.step(optimizer).item() for optimizer in optimizers]
    scaler.update()
    assert flags == [0.0, 1.0] and scaler.get_scale() == 2.0**15
    assert not unchanged(first, optimizers[0], before[0])
    assert all(torch.equal(bits(p), b) for p, b in zip(second, before[1]))
    assert all(entry["step"] == 0 for entry in optimizers[1].state.values())


@pytest.mark.parametrize("place", ["first", "last of the last"])
def test_one_nan_among_many_tensors(place, device):
    params = parameters([(7,)] * 50, device)
    optimizer, scaler = OURS(params), start(Scaler(device), device)
    set_grads(params, 2.0**16, 0)
    params[0 if place == "first" else -1].grad[0 if place == "first" else -1] = math.nan
    assert scaler.step(optimizer) == 1


@pytest.mark.parametrize("value", [-0.0, 1e-45, 3.4e38])
def test_unusual_but_finite_gradients_are_no_overflow(value, device):
    params = parameters(device=device)
    optimizer, scaler = OURS(params), start(Scaler(device), device)
    set_grads(params, 1.0, 0, value)
    assert scaler.step(optimizer) == 0
    assert all(p.isfinite().all() for p in params)


# ---- No waiting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("bad", [None, math.inf])
def test_nothing_asks_the_device(bad, unscale, monkeypatch, device):
    params = parameters(device=device)
    optimizer, scaler = OURS(params, max_grad_norm=1.0), start(Scaler(device), device)
    set_grads(params, 2.0**16, 0)
    scaler.step(optimizer)
    scaler.update()
    set_grads(params, 2.0**16, 0, bad)

    def refuse(self, *_):
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patch:
        for name in (
            "item",
            "__bool__",
            "__float__",
            "__int__",
            "__index__",
            "tolist",
            "cpu",
            "numpy",
        ):
            patch.setattr(torch.Tensor, name, refuse)
        if unscale:
            scaler.unscale_(optimizer)
        flag = scaler.step(optimizer)
        scaler.update()
        with pytest.raises(AssertionError, match="the host waits"):
            bool(flag)
    assert flag == (bad is not None)


def test_synchronize_skips_the_call(device):
    """As torch does it, for code that counts the calls."""
    params = parameters(device=device)
    optimizer = OURS(params)
    scaler = start(Scaler(device, synchronize=True), device)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for step, bad in enumerate([None, math.inf, None]):
        set_grads(params, scaler.get_scale(), step, bad)
        assert scaler.step(optimizer) is None
        scaler.update()
    assert len(calls) == 2 and scaler.get_scale() == 2.0**15


# ---- What the kernels do not take ----------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, math.inf])
def test_float64_and_sparse_gradients_are_torchs(bad):
    sides = []
    for cls in (Scaler, TorchScaler):
        torch.manual_seed(0)
        model = torch.nn.Embedding(6, 3, sparse=True)
        wide = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        optimizer = torch.optim.SGD([*model.parameters(), wide], lr=0.1)
        scaler = start(cls("cpu"))
        loss = model(torch.tensor([1, 4, 1])).square().sum() + wide.square().sum()
        scaler.scale(loss).backward()
        if bad is not None:
            wide.grad[2] = bad
        scaler.step(optimizer)
        scaler.update()
        sides.append(([model.weight, wide], scaler.get_scale()))
    assert_same_bits(sides[0][0], sides[1][0])
    assert sides[0][1] == sides[1][1] == (2.0**16 if bad is None else 2.0**15)


# ---- A run in float16 ----------------------------------------------------------------------------


def half_precision_run(scaler_class, optimizer_class, steps, **scaler_options):
    """A small model under float16 autocast, with a batch that overflows every 37 steps. Gradients
    are unscaled before the step where the optimizer is torch's, and within it where it is ours."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    scaler = scaler_class("cpu", growth_interval=20, **scaler_options)
    generator = torch.Generator().manual_seed(1)
    scales, skips = [], []
    for step in range(steps):
        optimizer.zero_grad()
        batch = torch.randn(32, 8, generator=generator)
        with torch.autocast("cpu", torch.float16):
            loss = (model(batch).float() - batch.sum(1, keepdim=True).sin()).square().mean()
            loss = loss * (1e30 if step % 37 == 36 else 1.0)
        scaler.scale(loss).backward()
        skips.append(any(not p.grad.isfinite().all() for p in model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, skips, [p.detach() for p in model.parameters()], loss.item()


@pytest.mark.parametrize("steps", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_run_in_float16_with_overflows_is_torchs(steps):
    """Torch's optimizer gets torch's bits. Ours rounds an update differently now and then, by parts
    in 10^7, and float16 activations make more of it: the trajectories stay within 1e-3."""
    scales, skips, weights, _ = half_precision_run(TorchScaler, torch.optim.AdamW, steps)
    assert sum(skips) >= steps // 37 and len(set(scales)) >= 3
    same = half_precision_run(Scaler, torch.optim.AdamW, steps)
    assert same[:2] == (scales, skips)
    assert_same_bits(same[2], weights)
    ours = half_precision_run(Scaler, OURS, steps)
    assert ours[:2] == (scales, skips)
    for a, b in zip(ours[2], weights):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)

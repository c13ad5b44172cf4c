"""Adafactor's options, layouts of parameters, scaling, schedules, and weights in 16 bits."""

import headroom
import pytest
import torch

from helpers.adafactors import ADAFACTOR, BOTH, make, set_grads, start, train
from helpers.bad_inputs import assert_untouched, snapshot
from helpers.bits import assert_same_bits
from helpers.modes import WEIGHTS
from helpers.samples import scalar

# ---- Options and layouts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"semantics": "jax"}, "semantics must be 'torch' or 'hf'"),
        ({"semantics": "torch", "decay_rate": -0.8}, "decay_rate is not an option of .*'torch'"),
        ({"semantics": "hf", "d": 1.0}, "d is not an option of semantics='hf'"),
        ({"semantics": "hf", "lr": 1e-3}, "Cannot combine manual `lr`"),
        ({"semantics": "hf", "relative_step": False}, "lr is None"),
        ({"semantics": "hf", "lr": 1e-3, "relative_step": False, "warmup_init": True}, "warmup"),
        ({"lr": -1.0}, "Learning rate should be >= 0"),
        ({"lr": float("nan")}, "Learning rate should be >= 0"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"beta2_decay": 0.1}, "beta2_decay should be <= 0"),
        ({"beta2_decay": -float("inf")}, "beta2_decay should be <= 0"),
        ({"eps": (-1.0, 1e-3)}, "epsilon1 should be >= 0"),
        ({"eps": (None, -1.0)}, "epsilon2 should be >= 0"),
        ({"d": 0.5}, "Clipping threshold d should be >= 1"),
        ({"weight_decay": -1.0}, "weight_decay should be >= 0"),
        ({"semantics": "hf", "beta1": 1.0}, "beta1 should be in"),
        ({"semantics": "hf", "clip_threshold": 0.0}, "clip_threshold should be > 0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ADAFACTOR(start(((2, 2),)), **options)
    if "semantics" not in options:
        with pytest.raises(ValueError, match=words):
            ADAFACTOR(start(((2, 2),))).add_param_group({"params": start(((3,),)), **options})


def moved(p, how):
    """The values of a parameter in other memory."""
    if how == "channels_last":
        return p.contiguous(memory_format=torch.channels_last)
    if how == "transposed":
        return p.transpose(0, 1).contiguous().transpose(0, 1)
    room = torch.empty(*p.shape[:-1], 2 * p.shape[-1], dtype=p.dtype)
    return room[..., ::2].copy_(p)


@BOTH
@pytest.mark.parametrize("how", ["channels_last", "transposed", "strided"])
def test_rows_and_columns_are_those_of_the_indices(how, semantics):
    plain = start(((6, 5, 3, 3), (4, 7, 1, 5)))
    others = [torch.nn.Parameter(moved(p.detach(), how)) for p in plain]
    assert not any(p.is_contiguous() for p in others)
    optimizers = make(semantics, plain), make(semantics, others)
    for step in range(3):
        set_grads(plain, step)
        for p, q in zip(plain, others):
            q.grad = moved(p.grad, how) if step else p.grad
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits(plain, [p.contiguous() for p in others])


@BOTH
def test_empty_tensors_and_tied_ones(semantics, device):
    params = start(((0, 4), (3, 0), (2, 3, 0, 5), (0,), (4, 4)), device=device)
    params[0].requires_grad_()
    optimizer = make(semantics, [*params, params[-1]])
    reference = start(((0, 4), (3, 0), (2, 3, 0, 5), (0,), (4, 4)), device=device)[-1:]
    train(params, optimizer, range(2))
    other = make(semantics, reference)
    for step in range(2):
        set_grads(params, step)
        reference[0].grad = params[-1].grad
        other.step()
    assert_same_bits(params[-1:], reference)
    assert all(optimizer.state[p]["step"] == 2 for p in params)


@BOTH
def test_clipping_and_scaling(semantics, device):
    """Gradients divided by a scale and clipped in the step are those divided and clipped before."""
    params, others = start(device=device), start(device=device)
    optimizer, other = make(semantics, params, max_grad_norm=1.0), make(semantics, others)
    optimizer.grad_scale = scalar(1024.0, device)
    for step in range(3):
        set_grads(params, step)
        set_grads(others, step)
        for p in params:
            p.grad *= 1024
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        optimizer.step()
        other.step()
    for p, q in zip(params, others):
        torch.testing.assert_close(p, q, rtol=2**-18, atol=2**-22)


@BOTH
def test_a_step_with_an_infinite_gradient_changes_nothing(semantics, device):
    params = start(device=device)
    optimizer = make(semantics, params)
    scaler = headroom.amp.GradScaler(device)
    train(params, optimizer, range(1))
    kept = snapshot([*params, *(v for p in params for v in optimizer.state[p].values())])
    set_grads(params, 1)
    params[0].grad[0, 0] = float("inf")
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    assert_untouched(kept)


@BOTH
def test_a_tensor_as_learning_rate(semantics, device):
    options = {"relative_step": False} if semantics == "hf" else {}
    rate = torch.tensor(1e-3, device=device)
    params, others = start(device=device), start(device=device)
    optimizer, other = make(semantics, params, lr=rate, **options), None
    other = make(semantics, others, lr=rate.item(), **options)
    train(params, optimizer, range(2))
    train(others, other, range(2))
    assert_same_bits(params, others)


def test_the_schedule_of_transformers():
    from transformers.optimization import AdafactorSchedule

    rates = []
    for ours in (True, False):
        params = start()
        optimizer = make("hf", params, ours, warmup_init=True)
        schedule = AdafactorSchedule(optimizer)
        for step in range(3):
            train(params, optimizer, [step])
            schedule.step()
        rates.append([float(rate) for rate in schedule.get_lr()])
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)


def test_memory_says_that_there_is_next_to_none():
    optimizer = ADAFACTOR([torch.nn.Parameter(torch.zeros(1000, 1000))])
    (row,) = optimizer.memory()
    assert row.bytes_per_parameter < 0.01
    assert "row_var 4,000" in repr(optimizer)


# ---- Weights in 16 bits --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", WEIGHTS, ids=lambda mode: "-".join(mode.values()))
@BOTH
def test_weights_of_16_bits(semantics, mode, device):
    """With all bits kept a run is that of float32 weights, bit for bit; else it is near."""
    start16 = start(dtype=torch.bfloat16, device=device)
    wide = [torch.nn.Parameter(p.detach().float()) for p in start16]
    optimizer = make(semantics, start16, **mode)
    reference = make(semantics, wide)
    for step in range(20):
        set_grads(start16, step)
        for p, q in zip(start16, wide):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
    weights = headroom.optim.master_weights(optimizer)
    for p, q in zip(start16, wide):
        if mode.get("master") in ("f32", "remainder16") and device == "cpu":
            assert_same_bits([weights[p]], [q])
        elif mode.get("master") in ("f32", "remainder16"):  # on a GPU sums take another order
            torch.testing.assert_close(weights[p], q.detach(), rtol=1e-5, atol=0)
        else:
            bits_kept = 7 if mode == {"rounding": "stochastic"} else 13
            atol = 20 * 2.0**-bits_kept * max(q.abs().max().item(), 1e-2)
            torch.testing.assert_close(weights[p], q.detach(), rtol=0, atol=atol)


def test_stalled_weights_are_counted():
    params = [torch.nn.Parameter(torch.ones(20, 30, dtype=torch.bfloat16))]
    optimizer = ADAFACTOR(params, lr=1e-6, count_stalled=True)
    set_grads(params, 0)
    optimizer.step()
    assert 0.5 < optimizer.stalled_fraction() <= 1


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"eps": 1e-3}, ValueError, "eps must be two numbers, got 0.001"),
        ({"eps": (1e-3,)}, ValueError, "eps must be two numbers"),
        ({"eps": ("a", 1e-3)}, TypeError, r"eps\[0\] must be a number or None, got 'a'"),
        ({"eps": (None, None)}, TypeError, r"eps\[1\] must be a number, got None"),
        ({"eps": (None, 1e-3), "semantics": "hf"}, TypeError, r"eps\[0\] must be a number, got"),
        ({"weight_decay": "0.1"}, TypeError, "weight_decay must be a number, got '0.1'"),
        ({"d": "1"}, TypeError, "d must be a number"),
        ({"beta2_decay": "a"}, TypeError, "beta2_decay must be a number"),
        ({"beta1": "a", "semantics": "hf"}, TypeError, "beta1 must be a number or None"),
    ],
)
def test_options_of_another_kind(options, error, words):
    with pytest.raises(error, match=words):
        ADAFACTOR([torch.nn.Parameter(torch.ones(2))], **options)

"""headroom.release_gradients with a scaler, with clipping, and with gradients that are not
finite."""

import copy
import functools
import math

import headroom
import pytest
import torch
from headroom._core.names import name_of

from helpers.bits import assert_same_bits
from helpers.released import (
    BUCKETS,
    EVERY,
    OPTIM,
    OPTIMIZERS,
    SCALER,
    TORCH_SCALER,
    Net,
    assert_equal,
    groups,
    loss_of,
    pair,
    train,
)


@pytest.mark.parametrize("make_scaler", [SCALER, TORCH_SCALER], ids=["ours", "torch"])
@EVERY
@BUCKETS
def test_a_scaler(make, make_scaler, bucket_bytes):
    """With an overflow in the parameters before `middle`: those behind are stepped."""
    scalers = make_scaler(), make_scaler()
    nets, optimizers, _ = pair(make, scaler=scalers[1], bucket_bytes=bucket_bytes)
    for step in range(4):
        before = copy.deepcopy(nets[1].state_dict())
        for net, optimizer, scaler in zip(nets, optimizers, scalers):
            hook = None
            if step == 1 and net is nets[1]:
                hook = net.norm.register_full_backward_hook(lambda m, i, o: (i[0] * math.inf,))
            if step != 1 or net is nets[1]:
                scaler.scale(loss_of(net, step)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if hook:
                hook.remove()
        if step == 1:
            assert scalers[1].get_scale() == scalers[0].get_scale() / 2
            changed = {k for k, v in nets[1].state_dict().items() if not torch.equal(v, before[k])}
            assert changed == {"norm.weight", "norm.bias", "last.weight", "last.bias"}
            if make_scaler is SCALER:
                middle = name_of(optimizers[1].param_groups, nets[1].middle.weight)
                assert scalers[1].culprit() == middle
            nets[1].load_state_dict(before)
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            scalers[0].load_state_dict(scalers[1].state_dict())
    assert_equal(nets, optimizers)


@BUCKETS
@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW8bit, skip_step"]])
def test_skip_step_skips_a_parameter(make, bucket_bytes):
    nets, optimizers, _ = pair(make, bucket_bytes=bucket_bytes)
    for net, optimizer in zip(nets, optimizers):
        train(net, optimizer, range(2))
    for net, optimizer in zip(nets, optimizers):
        net.norm.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([2]), math.nan))
        loss_of(net, 5).backward()
        if net is nets[0]:
            net.norm.weight.grad = None
        optimizer.step()
    assert_equal(nets, optimizers)
    culprit = name_of(optimizers[1].param_groups, nets[1].norm.weight)
    with pytest.warns(UserWarning, match=f"1 steps were skipped .* that of {culprit}"):
        assert optimizers[1].skipped_steps == 1


def clipped_by_previous(net, optimizer, steps, norm=None):
    for step in steps:
        loss_of(net, step).backward()
        before, grads = norm, [p.grad for p in net.parameters() if p.grad is not None]
        norm = headroom.clip_grad_norm_(net.parameters(), math.inf)
        assert norm > 0.5
        coef = 1.0 if before is None else (0.5 / (before.double() + 1e-6)).clamp(max=1.0).float()
        for grad in grads:
            grad.mul_(coef)
        optimizer.step()
        optimizer.zero_grad()
    return norm


@EVERY
@BUCKETS
def test_clipping_by_the_previous_norm(make, bucket_bytes):
    make = functools.partial(make, max_grad_norm=0.5)
    nets = Net(), Net()
    optimizers = [make(groups(net)) for net in nets]
    for group in optimizers[0].param_groups:
        group["max_grad_norm"] = None
    options, saved = dict(clip="previous", bucket_bytes=bucket_bytes), {"norm": None}
    norm = clipped_by_previous(nets[0], optimizers[0], range(4))
    for steps in (range(2), range(2, 4)):  # resumed in between
        with OPTIM.release_gradients(nets[1], optimizers[1], **options) as handle:
            handle.load_state_dict(saved)
            for step in steps:
                loss_of(nets[1], step).backward()
                optimizers[1].step()
            saved = handle.state_dict()
    torch.testing.assert_close(optimizers[1].grad_norm, norm, rtol=2**-20, atol=0)
    for p, q in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(p, q, rtol=2**-20, atol=1e-2 * 2**-10)


def test_clipping_by_the_previous_norm_has_bits_that_buckets_do_not_change():
    results = []
    for bucket_bytes in (0, 200, 1 << 22):
        net = Net()
        optimizer = OPTIM.AdamW(net.parameters(), lr=1e-2, max_grad_norm=0.5)
        OPTIM.release_gradients(net, optimizer, clip="previous", bucket_bytes=bucket_bytes)
        train(net, optimizer, range(4))
        results.append(net)
    assert_same_bits(results[0].parameters(), results[1].parameters())
    assert_same_bits(results[0].parameters(), results[2].parameters())


def test_a_norm_that_is_not_finite_does_not_count():
    net = Net()
    optimizer = OPTIM.AdamW(net.parameters(), max_grad_norm=0.5)
    handle = OPTIM.release_gradients(net, optimizer, clip="previous")
    train(net, optimizer, range(1))
    norm = handle.state_dict()["norm"]
    before = copy.deepcopy(net.state_dict())
    train(net, optimizer, range(1), scale=math.nan)
    assert optimizer.grad_norm.isnan() and handle.state_dict()["norm"] == norm > 0
    assert_same_bits(before.values(), net.state_dict().values())


def test_measuring_alone_skips_nothing():
    """Where an ordinary step would not."""
    nets, optimizers, handle = pair(OPTIMIZERS["AdamW"])
    with handle.measure():
        loss_of(nets[1], 0, scale=math.inf).backward()
    for net, optimizer in zip(nets, optimizers):
        loss_of(net, 0, scale=math.inf).backward()
        optimizer.step()
    assert_equal(nets, optimizers)
    assert optimizers[1].grad_norm.isnan() and nets[1].last.weight.isnan().any()


def scaled_loss(net, scaler, step, scale):
    return scaler.scale(loss_of(net, step, scale))


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("make_scaler", [None, SCALER, TORCH_SCALER], ids=["", "ours", "torch"])
@EVERY
def test_two_passes_clip_and_skip_exactly(make, make_scaler, retain):
    make = functools.partial(make, max_grad_norm=0.05)
    disabled = functools.partial(SCALER, enabled=False)
    scalers = [(make_scaler or disabled)() for _ in range(2)]
    nets, optimizers, handle = pair(make, clip="two-pass", scaler=scalers[1])
    for net in nets:
        net.drop.p = 0.5
    for step in range(4):
        for net, optimizer, scaler in zip(nets, optimizers, scalers):
            torch.manual_seed(step)

            scale = math.inf if make_scaler and step == 2 else 1.0
            loss = functools.partial(scaled_loss, net, scaler, step, scale)

            if net is nets[1]:
                with handle.measure():
                    value = loss()
                    value.backward(retain_graph=retain)
                assert all(p.grad is None for p in net.parameters())
                (value if retain else loss()).backward()
            else:
                loss().backward()
                if make_scaler is TORCH_SCALER:
                    scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        if not make_scaler or step != 2:
            assert optimizers[0].grad_norm > 0.05
            norms = [optimizer.grad_norm for optimizer in optimizers]
            torch.testing.assert_close(*norms, rtol=2**-20, atol=0)
    for p, q in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(p, q, rtol=2**-18, atol=1e-2 * 2**-10)
        steps = [o.state[x]["step"] for o, x in zip(optimizers, (p, q)) if x in o.state]
        assert all(count == (3 if make_scaler else 4) for count in steps)


@pytest.mark.parametrize("make_scaler", [SCALER, TORCH_SCALER], ids=["ours", "torch"])
@pytest.mark.parametrize("bucket_bytes", [0, 200])
def test_an_overflow_in_the_first_bucket_alone_lowers_the_scale(make_scaler, bucket_bytes):
    """Buckets behind it are finite, and do not take the flag back."""
    net, scaler = Net(), make_scaler()
    optimizer = OPTIM.AdamW(net.parameters(), lr=1e-2)
    OPTIM.release_gradients(net, optimizer, scaler=scaler, bucket_bytes=bucket_bytes)
    net.last.bias.register_hook(lambda grad: grad * math.inf)  # whose gradient comes first
    before = copy.deepcopy(net.state_dict())
    scaler.scale(loss_of(net, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**7
    changed = {k for k, v in net.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == before.keys() - {"last.bias", "unused"}


@pytest.mark.parametrize("clip", ["previous", "two-pass"])
@EVERY
def test_a_norm_below_the_limit_scales_nothing_up(make, clip):
    """The bits of the step without a limit."""
    nets, optimizers = [Net(), Net()], []
    for net, limit in zip(nets, (None, 1e3)):
        optimizers.append(make(groups(net), max_grad_norm=limit))
    handle = OPTIM.release_gradients(nets[1], optimizers[1], clip=clip)
    for step in range(3):
        for net, optimizer in zip(nets, optimizers):
            if net is nets[1] and clip == "two-pass":
                with handle.measure():
                    loss_of(net, step).backward()
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert 0 < optimizers[1].grad_norm < 1e3
    assert_equal(nets, optimizers)


@pytest.mark.parametrize("clip", ["previous", "two-pass"])
@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_step_scalars_of_the_optimizer_beside_clipping(flag, clip):
    """A flag that is set on the optimizer skips, and its coefficient multiplies that of the clip,
    as in an ordinary step."""
    nets = Net(), Net()
    optimizers = [OPTIM.AdamW(n.parameters(), lr=1e-2, max_grad_norm=0.05) for n in nets]
    handle = OPTIM.release_gradients(nets[1], optimizers[1], clip=clip)
    before = copy.deepcopy(nets[1].state_dict())
    for step in range(2):
        for net, optimizer in zip(nets, optimizers):
            optimizer.clip_coef = torch.tensor(0.25)
            optimizer.found_inf = torch.tensor(flag)
            if net is nets[1] and clip == "two-pass":
                with handle.measure():
                    loss_of(net, 0).backward()
            if clip == "previous" and step == 0:  # as if nothing were clipped
                optimizers[0].param_groups[0]["max_grad_norm"] = math.inf
            loss_of(net, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert (optimizer.clip_coef, optimizer.found_inf) == (0.25, flag)
            optimizers[0].param_groups[0]["max_grad_norm"] = 0.05
        if flag:
            assert_same_bits(before.values(), nets[1].state_dict().values())
        if clip == "previous":
            break  # the second step's norms differ
    for name, value in nets[0].state_dict().items():
        torch.testing.assert_close(nets[1].state_dict()[name], value, rtol=2**-18, atol=2**-20)
    exps = [
        [o.state[p]["exp_avg"] for p in n.parameters() if o.state.get(p)]
        for o, n in zip(optimizers, nets)
    ]
    for left, right in zip(*exps):
        torch.testing.assert_close(left, right, rtol=2**-18, atol=1e-9)

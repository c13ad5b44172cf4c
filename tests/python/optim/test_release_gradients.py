"""headroom.optim.release_gradients: steps inside backward, with the bits of the ordinary step."""

import copy
import functools
import gc
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path

import headroom
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from helpers.bits import assert_same_bits
from helpers.training import Nested

OPTIM = headroom.optim
SCALER = functools.partial(headroom.amp.GradScaler, "cpu", init_scale=2.0**8, growth_interval=2)
TORCH_SCALER = functools.partial(torch.amp.GradScaler, "cpu", init_scale=2.0**8, growth_interval=2)
BUCKETS = pytest.mark.parametrize("bucket_bytes", [0, 200, 1 << 22])
OPTIMIZERS = {
    "AdamW": functools.partial(OPTIM.AdamW, lr=1e-2, weight_decay=0.1),
    "Adam, amsgrad, bf16": functools.partial(
        OPTIM.Adam, weight_decay=0.1, amsgrad=True, maximize=True, state_dtype=torch.bfloat16
    ),
    "AdamW8bit": functools.partial(OPTIM.AdamW8bit, lr=1e-2, min_8bit_size=10),
    "AdamW8bit, skip_step": functools.partial(
        OPTIM.AdamW8bit, lr=1e-2, min_8bit_size=10, nonfinite="skip_step"
    ),
    "AdamW8bit, skip_element": functools.partial(
        OPTIM.AdamW8bit,
        lr=1e-2,
        min_8bit_size=0,
        nonfinite="skip_element",
        code_rounding="stochastic",
    ),
}
EVERY = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))


class Net(torch.nn.Module):
    """A weight used twice and one in a checkpoint, odd shapes, one parameter without a gradient."""

    def __init__(self, reentrant=False):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(5, 17)
        self.middle = torch.nn.Linear(17, 17, bias=False)
        self.norm = torch.nn.LayerNorm(17)
        self.last = torch.nn.Linear(17, 3)
        self.unused = torch.nn.Parameter(torch.randn(4))
        self.reentrant = reentrant
        self.drop = torch.nn.Dropout(0.0)

    def forward(self, x):
        x = self.middle(torch.tanh(self.middle(self.first(x))))
        x = checkpoint(self.norm, x, use_reentrant=self.reentrant)
        return self.last(self.drop(x))


def loss_of(net, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 5, generator=generator).to(net.first.weight)
    y = torch.randn(6, 3, generator=generator).to(net.first.weight)
    return scale * mse_loss(net(x.requires_grad_()), y)


def pair(make, net=Net, **options):
    """The same model and optimizer twice, the second released."""
    nets = net(), net()
    optimizers = [make(groups(n)) for n in nets]
    return nets, optimizers, OPTIM.release_gradients(nets[1], optimizers[1], **options)


def groups(net):
    params = list(net.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}]


def assert_equal(nets, optimizers):
    assert_same_bits(nets[0].parameters(), nets[1].parameters())
    for p, q in zip(nets[0].parameters(), nets[1].parameters()):
        left, right = (o.state.get(x, {}) for o, x in zip(optimizers, (p, q)))
        assert left.keys() == right.keys()
        assert_same_bits(left.values(), right.values())


def train(net, optimizer, steps=range(3), **options):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in steps:
        loss_of(net, step, **options).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


# ---- The step ------------------------------------------------------------------------------------


@EVERY
@BUCKETS
def test_the_bits_of_the_ordinary_step(make, bucket_bytes):
    nets, optimizers, handle = pair(make, bucket_bytes=bucket_bytes)
    for net, optimizer in zip(nets, optimizers):
        train(net, optimizer)
    assert_equal(nets, optimizers)
    assert nets[1].unused not in optimizers[1].state
    handle.remove()
    assert not handle.active
    for net, optimizer in zip(nets, optimizers):
        loss_of(net, 7).backward()
        assert net.last.weight.grad is not None
        optimizer.step()
    assert_equal(nets, optimizers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_parameters(dtype):
    make = functools.partial(OPTIM.AdamW, state_dtype=torch.float32)
    nets, optimizers, _ = pair(make, net=lambda: Net().to(dtype))
    for net, optimizer in zip(nets, optimizers):
        train(net, optimizer)
    assert_equal(nets, optimizers)


@pytest.mark.parametrize("reentrant", [False, True])
@BUCKETS
def test_gradients_are_there_one_at_a_time(bucket_bytes, reentrant):
    net = Net(reentrant)
    params = list(net.parameters())
    peak = 0

    def sample(_):
        nonlocal peak
        peak = max(peak, sum(p.grad.nbytes for p in params if p.grad is not None))

    for p in params:
        p.register_post_accumulate_grad_hook(sample)
    optimizer = OPTIM.AdamW(params)
    OPTIM.release_gradients(net, optimizer, bucket_bytes=bucket_bytes)
    loss_of(net, 0).backward()
    assert all(p.grad is None for p in params)
    sizes = [p.nbytes for p in params if p is not net.unused]
    assert max(sizes) <= peak <= max(sizes) + bucket_bytes
    assert peak < sum(sizes) or bucket_bytes > sum(sizes)


def test_a_model_and_its_optimizer_are_freed_without_remove():
    def trained():
        net = Net()
        optimizer = OPTIM.AdamW(net.parameters())
        OPTIM.release_gradients(net, optimizer)
        train(net, optimizer)
        return [weakref.ref(kept) for kept in (net.first.weight, optimizer, optimizer._release)]

    refs = trained()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_small_parameters_share_a_launch():
    net = torch.nn.ParameterList(torch.randn(16) for _ in range(1000))
    optimizer = OPTIM.AdamW(net.parameters())
    OPTIM.release_gradients(net, optimizer, bucket_bytes=250 * 64)
    calls = []
    prepared = optimizer._prepared
    optimizer._prepared = lambda *args: calls.append(len(args[1].params)) or prepared(*args)
    sum(p.sum() for p in net).backward()
    assert calls == [250] * 4


def test_a_compiled_model():
    nets, optimizers, _ = pair(OPTIMIZERS["AdamW"], net=lambda: torch.nn.Linear(5, 3))
    nets = [nets[0], torch.compile(nets[1], backend="aot_eager", fullgraph=True)]
    nets[1].load_state_dict({f"_orig_mod.{k}": v for k, v in nets[0].state_dict().items()})
    for net, optimizer in zip(nets, optimizers):
        for step in range(2):
            net(torch.full((2, 5), step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(nets, optimizers)


def test_parameters_that_come_later():
    """Unfrozen, or of a new group: stepped by step() once, released from then on."""
    nets, optimizers = [Net(), Net()], []
    for net in nets:
        net.first.requires_grad_(False)
        optimizers.append(OPTIM.AdamW(net.parameters()))
    OPTIM.release_gradients(nets[1], optimizers[1])
    for net, optimizer in zip(nets, optimizers):
        train(net, optimizer)
        net.first.requires_grad_(True)
        net.extra = torch.nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [net.extra]})
        for step in range(2):
            (loss_of(net, step) + net.extra.square().sum()).backward()
            released = net.first.weight.grad is None and net.extra.grad is None
            assert released == (net is nets[1] and step == 1)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(nets, optimizers)


def test_gradients_set_by_hand_are_stepped_by_step():
    nets, optimizers, _ = pair(OPTIMIZERS["AdamW"])
    for net, optimizer in zip(nets, optimizers):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert_equal(nets, optimizers)


# ---- Micro-batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("make_scaler", [None, SCALER, TORCH_SCALER], ids=["", "ours", "torch"])
@EVERY
def test_an_accumulator(make, make_scaler):
    """With clipping and, in one step, an overflow, as without release."""
    make = functools.partial(make, max_grad_norm=0.5)
    nets, optimizers = [Net().to(torch.bfloat16), Net().to(torch.bfloat16)], []
    for i, net in enumerate(nets):
        optimizer = make(net.parameters())
        optimizers.append(optimizer)
        accumulator = headroom.GradAccumulator(net)
        if i:
            OPTIM.release_gradients(net, optimizer, accumulator=accumulator)
        scaler = (make_scaler or functools.partial(SCALER, enabled=False))()
        for step in range(3):
            for micro in range(3):
                with accumulator.micro_batch(weight=micro + 1):
                    overflow = make_scaler and step == micro == 1
                    loss = loss_of(net, 3 * step + micro, scale=math.inf if overflow else 1.0)
                    scaler.scale(loss).backward()
                    assert (net.last.weight.grad is None) == bool(i)
            accumulator.finish()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_equal(nets, optimizers)


def test_an_error_in_a_micro_batch_drops_the_sums():
    net = Net()
    optimizer = OPTIM.AdamW(net.parameters())
    accumulator = headroom.GradAccumulator(net)
    OPTIM.release_gradients(net, optimizer, accumulator=accumulator)
    with pytest.raises(ZeroDivisionError), accumulator.micro_batch():
        loss_of(net, 0).backward()
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="without a micro-batch"):
        accumulator.finish()
    with pytest.raises(RuntimeError, match=r"outside the micro_batch\(\) of the accumulator"):
        loss_of(net, 0).backward()


def test_accumulation_into_the_moments():
    """The first moment is that of the mean gradient, the second has the squares of the parts."""
    options = dict(lr=1e-2, weight_decay=0.1)
    net, shares = Net(), (0.5, 0.2, 0.3)
    optimizer = OPTIM.AdamW(net.parameters(), **options)
    handle = OPTIM.release_gradients(net, optimizer, accumulate_into_state=True)
    twin = Net()
    moments = {
        p: [torch.zeros_like(p, dtype=torch.float64) for _ in "mv"] for p in net.parameters()
    }
    for step in range(4):
        twin.load_state_dict(net.state_dict())
        total, squares = {}, {}
        for k, share in enumerate(shares):
            twin.zero_grad()
            extra = twin.unused.square().sum() if k == 0 else 0  # a gradient in the first only
            (loss_of(twin, 3 * step + k) + extra).backward()
            for p, q in zip(net.parameters(), twin.parameters()):
                grad = share * q.grad.double() if q.grad is not None else torch.zeros(())
                total[p] = total.get(p, 0) + grad
                squares[p] = squares.get(p, 0) + grad.square()
            with handle.micro_batch(share):
                extra = net.unused.square().sum() if k == 0 else 0
                (loss_of(net, 3 * step + k) + extra).backward()
            assert all(p.grad is None for p in net.parameters())
        optimizer.step()
        for p, q in zip(net.parameters(), twin.parameters()):
            m, v = moments[p]
            m.mul_(0.9).add_(total[p], alpha=0.1)
            v.mul_(0.999).add_(squares[p], alpha=0.001)
            entry = optimizer.state[p]
            for got, want in ((entry["exp_avg"], m), (entry["exp_avg_sq"], v)):
                assert (got - want).abs().max() <= 8 * 2**-24 * want.abs().max()
            update = m / (1 - 0.9 ** (step + 1)) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
            want = q.double() * (1 - 1e-3) - 1e-2 * update
            torch.testing.assert_close(p.double(), want, rtol=2**-20, atol=1e-2 * 2**-17)
            assert entry["step"] == step + 1


def test_one_micro_batch_in_the_moments_is_the_ordinary_step():
    nets, optimizers, handle = pair(OPTIMIZERS["AdamW"], accumulate_into_state=True)
    for step in range(3):
        for net, optimizer in zip(nets, optimizers):
            with handle.micro_batch(1.0) if net is nets[1] and step else torch.enable_grad():
                loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(nets, optimizers)


def test_shares_must_be_complete():
    net = Net()
    optimizer = OPTIM.AdamW(net.parameters())
    handle = OPTIM.release_gradients(net, optimizer, accumulate_into_state=True)
    with handle.micro_batch(0.5):
        loss_of(net, 0).backward()
    with pytest.raises(RuntimeError, match="shares of 0.5"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"outside micro_batch\(\)"):
        loss_of(net, 0).backward()
    with pytest.raises(ValueError, match="share of 0.6"), handle.micro_batch(0.6):
        pass


# ---- Scalers, clipping, gradients that are not finite --------------------------------------------


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
                assert scalers[1].culprit() == optimizers[1]._name_of(nets[1].middle.weight)
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
    culprit = optimizers[1]._name_of(nets[1].norm.weight)
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


# ---- What it refuses -----------------------------------------------------------------------------


def test_a_limit_that_comes_later_is_not_passed_over():
    """Loaded or set in the groups, where a step would clip by it."""
    net = Net()
    optimizer = OPTIM.AdamW(net.parameters())
    OPTIM.release_gradients(net, optimizer)
    kept = copy.deepcopy(net.state_dict())
    optimizer.param_groups[0]["max_grad_norm"] = 0.5
    with pytest.raises(ValueError, match="the optimizer has max_grad_norm: say clip="):
        loss_of(net, 0).backward()
    assert_same_bits(net.state_dict().values(), kept.values())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_what_does_not_work_says_so():
    net = Net()
    released = functools.partial(OPTIM.release_gradients, net)
    params = list(net.parameters())
    clipping = OPTIM.AdamW(params, max_grad_norm=1.0)
    cases = [
        (TypeError, "optimizer of headroom", torch.optim.AdamW(params), {}),
        (ValueError, "'first.bias' of the model", OPTIM.AdamW(params[:2] + params[3:]), {}),
        (ValueError, "clip must be one of", OPTIM.AdamW(params), {"clip": "exact"}),
        (ValueError, "needs an optimizer with max_grad", OPTIM.AdamW(params), {"clip": "previous"}),
        (ValueError, "say clip='previous' or", clipping, {}),
        (ValueError, "bucket_bytes", OPTIM.AdamW(params), {"bucket_bytes": -1}),
        (
            ValueError,
            "does not have parameter 0 of group 0",
            OPTIM.AdamW(params),
            {"accumulator": headroom.GradAccumulator(params[1:])},
        ),
        *(
            (ValueError, match, optimizer, {"accumulate_into_state": True} | options)
            for match, optimizer, options in [
                ("does not go with scaler=", OPTIM.AdamW(params), {"scaler": SCALER()}),
                ("does not go with clip=", clipping, {"clip": "previous"}),
                ("nonfinite='propagate'", OPTIM.AdamW8bit(params, nonfinite="skip_step"), {}),
                (
                    "are torch.uint8",
                    OPTIM.AdamW8bit(params, min_8bit_size=0),
                    {},
                ),
                ("are torch.bfloat16", OPTIM.AdamW(params, state_dtype=torch.bfloat16), {}),
                ("betas above 0", OPTIM.AdamW(params, betas=(0.0, 0.9)), {}),
                ("decoupled", OPTIM.Adam(params, weight_decay=0.1), {}),
            ]
        ),
    ]
    for error, match, optimizer, options in cases:
        with pytest.raises(error, match=match):
            released(optimizer, **options)
        assert not any(p._post_accumulate_grad_hooks for p in params)
    view = torch.nn.Parameter(net.last.weight.data.view(-1))
    with pytest.raises(ValueError, match="share memory"):
        released(OPTIM.AdamW([*params, view]))
    optimizer = OPTIM.AdamW(params)
    handle = released(optimizer)
    with pytest.raises(ValueError, match="has a handle"):
        released(optimizer)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: loss_of(net, 0))
    with pytest.raises(RuntimeError, match="create_graph"):
        loss_of(net, 0).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="needs accumulate_into_state"), handle.micro_batch(0.5):
        pass


def test_ddp_is_refused(monkeypatch):
    net = Net()
    optimizer = OPTIM.AdamW(net.parameters())
    OPTIM.release_gradients(net, optimizer)
    ddp = torch.nn.parallel.DistributedDataParallel
    monkeypatch.setattr(ddp, "_active_ddp_module", object())
    with pytest.raises(RuntimeError, match="under DistributedDataParallel"):
        loss_of(net, 0)


class TwoSegments(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_a_second_gradient_before_the_step_is_an_error():
    """It would be stepped on its own. Nothing is stepped twice."""
    net, segments = Net(), TwoSegments()
    optimizer = OPTIM.AdamW(net.parameters())
    OPTIM.release_gradients(net, optimizer)
    loss_of(net, 0).backward()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError, match=r"second gradient .*: the first has been stepped"):
        loss_of(net, 1).backward()
    assert_same_bits(before.values(), net.state_dict().values())
    optimizer = OPTIM.AdamW(segments.parameters())
    OPTIM.release_gradients(segments, optimizer)
    with pytest.raises(RuntimeError, match="reentrant checkpoints"):
        segments(torch.ones(2, 3, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 22])
def test_a_nested_backward_with_the_same_parameters_is_an_error(bucket_bytes):
    """Which says whether the first gradient was stepped or waits in the bucket. After it, training
    goes on."""
    layer = torch.nn.Linear(3, 3)
    optimizer = OPTIM.AdamW(layer.parameters())
    OPTIM.release_gradients(layer, optimizer, bucket_bytes=bucket_bytes)
    before = copy.deepcopy(layer.state_dict())
    first = "waits to be stepped" if bucket_bytes else "has been stepped, and is gone"
    with pytest.raises(RuntimeError, match=f"second gradient .*: the first {first}"):
        layer(Nested.apply(torch.ones(2, 3, requires_grad=True), layer)).sum().backward()
    stepped = [not torch.equal(p, before[name]) for name, p in layer.named_parameters()]
    assert stepped == [not bucket_bytes] * 2
    optimizer.step()
    assert all(entry["step"] == 1 for entry in optimizer.state.values())
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert all(entry["step"] == 2 for entry in optimizer.state.values())


def test_exit_after_a_nested_backward():
    """An interpreter that ends with the error prints it, and no more of C++."""
    script = """
import headroom, torch
from helpers.training import Nested
layer = torch.nn.Linear(3, 3)
optimizer = headroom.optim.AdamW(layer.parameters())
headroom.optim.release_gradients(layer, optimizer)
layer(Nested.apply(torch.ones(2, 3, requires_grad=True), layer)).sum().backward()
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1 and "the first waits to be stepped" in done.stderr
    assert "terminate called" not in done.stderr


def test_a_value_that_is_still_needed_is_not_stepped_silently():
    net = torch.nn.ParameterDict({"p": torch.ones(3), "q": torch.ones(3)})
    optimizer = OPTIM.AdamW(net.parameters())
    OPTIM.release_gradients(net, optimizer, bucket_bytes=0)
    x = net.q * net.p.detach()
    with pytest.raises(RuntimeError, match="inplace operation"):
        (x.exp().sum() + net.p.sum()).backward()


def test_an_error_in_backward_can_be_finished():
    """What was stepped is stepped; step() steps what waits, and training goes on."""
    net = Net()
    optimizer = OPTIM.AdamW(net.parameters())
    OPTIM.release_gradients(net, optimizer)

    def fail(grad):
        raise ZeroDivisionError

    hook = net.first.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(net, 0).backward()
    hook.remove()
    optimizer.step()
    optimizer.zero_grad()
    train(net, optimizer)
    assert optimizer.state[net.last.weight]["step"] == 4
    assert optimizer.state[net.first.weight]["step"] == 3


def test_a_sparse_gradient_is_named():
    net = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = OPTIM.AdamW(net.named_parameters())
    OPTIM.release_gradients(net, optimizer)
    with pytest.raises(RuntimeError, match="'weight' has one"):
        net(torch.tensor([1])).sum().backward()

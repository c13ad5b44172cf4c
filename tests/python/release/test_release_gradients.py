"""headroom.release_gradients: steps inside backward, with the bits of the ordinary step."""

import functools
import gc
import math
import weakref

import headroom
import pytest
import torch
from headroom.release.adama import WHOLE

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
    loss_of,
    pair,
    train,
)

# ---- The step ------------------------------------------------------------------------------------


@EVERY
@BUCKETS
def test_the_bits_of_the_ordinary_step(make, bucket_bytes):
    nets, optimizers, handle = pair(make, bucket_bytes=bucket_bytes)
    for net, optimizer in zip(nets, optimizers):
        train(net, optimizer)
    assert_equal(nets, optimizers)
    assert nets[1].unused not in optimizers[1].state
    assert handle.active
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
        return [
            weakref.ref(kept) for kept in (net.first.weight, optimizer, optimizer._release_handle)
        ]

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
    assert not handle.has_stepped
    with handle.micro_batch(0.5):
        loss_of(net, 0).backward()
    assert handle.has_stepped
    with pytest.raises(RuntimeError, match="shares of 0.5"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"outside micro_batch\(\)"):
        loss_of(net, 0).backward()
    with pytest.raises(ValueError, match="share of 0.6"), handle.micro_batch(0.6):
        pass


def test_shares_that_miss_one_by_rounding_are_complete():
    net = Net()
    optimizer = OPTIM.AdamW(net.parameters())
    handle = OPTIM.release_gradients(net, optimizer, accumulate_into_state=True)
    with handle.micro_batch(WHOLE):
        loss_of(net, 0).backward()
    optimizer.step()
    assert all(entry["step"] == 1 for entry in optimizer.state.values())


def test_a_bucket_that_cannot_be_stepped_is_abandoned():
    """Running out of memory before the first write has changed nothing: backward may run again."""
    nets, optimizers = [Net(), Net()], []
    for net in nets:
        optimizers.append(OPTIM.AdamW(net.parameters(), lr=1e-2))
    handle = OPTIM.release_gradients(nets[0], optimizers[0], bucket_bytes=0)
    errors, prepared_part = [MemoryError("no room")], optimizers[0]._prepared_part

    def failing(*arguments):
        if errors:
            raise errors.pop()
        return prepared_part(*arguments)

    optimizers[0]._prepared_part = failing
    with pytest.raises(MemoryError):
        loss_of(nets[0], 0).backward()
    assert not handle.has_stepped
    with pytest.raises(RuntimeError, match="did not end: it raised MemoryError: no room. After"):
        loss_of(nets[0], 0).backward()
    handle.abandon()
    assert all(param.grad is None for param in nets[0].parameters())
    for net, optimizer in zip(nets, optimizers):
        loss_of(net, 0).backward()
        optimizer.step()
    assert_same_bits(list(nets[0].parameters()), list(nets[1].parameters()))

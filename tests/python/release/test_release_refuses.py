"""What headroom.release_gradients refuses, and how a run goes on after an error."""

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path

import headroom
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers.bits import assert_same_bits
from helpers.released import OPTIM, SCALER, Net, loss_of, train
from helpers.training import Nested


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


def test_a_measurement_before_the_step_of_another_backward_is_an_error():
    net = Net()
    optimizer = OPTIM.AdamW(net.parameters(), max_grad_norm=1.0)
    handle = OPTIM.release_gradients(net, optimizer, clip="two-pass")
    with handle.measure():
        loss_of(net, 0).backward()
    loss_of(net, 0).backward()
    with pytest.raises(RuntimeError, match="gradient since the last optimizer"), handle.measure():
        loss_of(net, 1).backward()


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


@pytest.mark.slow
def test_exit_after_a_nested_backward():
    """An interpreter that ends with the error prints it, and no more of C++."""
    script = """
import headroom, torch
from helpers.training import Nested
layer = torch.nn.Linear(3, 3)
optimizer = headroom.optim.AdamW(layer.parameters())
headroom.release_gradients(layer, optimizer)
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


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 22])
def test_a_backward_after_one_that_raised_says_what_to_do(bucket_bytes):
    net = Net()
    optimizer = OPTIM.AdamW(net.parameters())
    handle = OPTIM.release_gradients(net, optimizer, bucket_bytes=bucket_bytes)
    hook = net.first.weight.register_hook(lambda grad: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(net, 0).backward()
    hook.remove()
    optimizer.zero_grad()
    then = r"optimizer.step\(\)" if handle.has_stepped else r"handle.abandon\(\)"
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=f"before this one did not end. After .* call {then}"
        ):
            loss_of(net, 0).backward()
    if handle.has_stepped:
        with pytest.raises(RuntimeError, match=r"cannot be taken back: call optimizer.step\(\)"):
            handle.abandon()
        optimizer.step()
    else:
        handle.abandon()
    train(net, optimizer)
    loss_of(net, 0).backward()
    with pytest.raises(RuntimeError, match="second gradient") as error:  # after one that ended
        loss_of(net, 0).backward()
    assert "abandon" not in str(error.value) and "did not end" not in str(error.value)


def test_a_gradient_outside_of_backward_is_stepped_at_once():
    """FSDP2 hands gradients out when backward is over; here, one that raised was before it."""
    net = Net()
    optimizer = OPTIM.AdamW(net.parameters())
    OPTIM.release_gradients(net, optimizer)
    before = net.unused.detach().clone()
    net.first.weight.register_hook(lambda grad: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(net, 0).backward()
    net.unused.grad = torch.ones(4)
    for hook in net.unused._post_accumulate_grad_hooks.values():
        hook(net.unused)
    assert net.unused.grad is None and not torch.equal(net.unused, before)


def test_a_sparse_gradient_is_named():
    net = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = OPTIM.AdamW(net.named_parameters())
    OPTIM.release_gradients(net, optimizer)
    with pytest.raises(RuntimeError, match="'weight' has one"):
        net(torch.tensor([1])).sum().backward()

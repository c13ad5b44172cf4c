"""SGD, SGD8bit, Lion and Lion8bit: bits and checkpoints of torch, states, and options."""

import copy

import headroom
import pytest
import torch
from headroom.optim import SGD, Lion, Lion8bit, SGD8bit
from torch import nn

from helpers.bits import assert_same_bits

EIGHT_BIT = {"min_8bit_size": 0}
MAKES = {
    "sgd": (SGD, {"momentum": 0.9, "dampening": 0.1}),
    "sgd8bit": (SGD8bit, {"momentum": 0.9} | EIGHT_BIT),
    "lion": (Lion, {"weight_decay": 0.1}),
    "lion8bit": (Lion8bit, {"weight_decay": 0.1} | EIGHT_BIT),
}
EACH = pytest.mark.parametrize("cls, options", MAKES.values(), ids=MAKES)


def params(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s).to(dtype)) for s in ((40, 30), (7,), ())]


def set_grads(step, *lists):
    for owners in lists:
        torch.manual_seed(100 + step)
        for param in owners:
            param.grad = torch.randn(param.shape).to(param.dtype)


def run(optimizer, owners, steps):
    for step in steps:
        set_grads(step, owners)
        optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
def test_a_run_in_float32_has_the_bits_of_torch(foreach):
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch has other bits on this processor")
    ours, theirs = params(), params()
    groups = [lambda ps: {"params": ps[:1], "lr": 0.3, "nesterov": True}, lambda ps: ps[1:]]

    def made(cls, ps, **more):
        first, rest = groups[0](ps), {"params": groups[1](ps)}
        return cls([first, rest], lr=0.1, momentum=0.9, weight_decay=0.01, **more)

    optimizer, reference = made(SGD, ours), made(torch.optim.SGD, theirs, foreach=foreach)
    run(optimizer, ours, range(5))
    run(reference, theirs, range(5))
    assert_same_bits(ours, theirs)


def test_a_state_without_a_buffer_is_that_of_before_the_first_step():
    (param, *_) = params()
    optimizer = SGD([param], lr=0.1, momentum=0.9, dampening=0.5)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {0: {"momentum_buffer": None}}})
    assert optimizer.state[param]["step"] == 0


@pytest.mark.parametrize("offload", [None, "state"])
@pytest.mark.parametrize("cls", [SGD, SGD8bit])
@pytest.mark.parametrize("source", [torch.optim.SGD, SGD])
def test_momentum_may_return_after_a_load_without_it(source, cls, offload):
    """The buffer of before goes on, with its dampening, as in a run of torch's that was not
    loaded."""
    theirs, ours = params(), params()
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    saved, reference = source(theirs, **options), torch.optim.SGD(params(), **options)
    optimizer = cls(ours, offload=offload, **options)
    for each in (saved, reference):
        run(each, each.param_groups[0]["params"], range(2))
        each.param_groups[0]["momentum"] = 0
    optimizer.load_state_dict(saved.state_dict())
    for param, other in zip(ours, theirs):
        param.data.copy_(other)
    for each in (optimizer, reference):
        run(each, each.param_groups[0]["params"], range(2, 4))
        each.param_groups[0]["momentum"] = 0.9
        run(each, each.param_groups[0]["params"], range(4, 6))
    for param, other in zip(ours, reference.param_groups[0]["params"]):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-6)


def test_a_buffer_that_is_not_used_moves_to_the_device_of_its_parameter():
    """torch's loader moves it, too."""
    with torch.device("meta"):
        param = torch.nn.Parameter(torch.ones(3))
    optimizer = SGD([param], lr=0.1)
    entry = {"momentum_buffer": torch.ones(3)}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {0: entry}})
    assert optimizer.state[param]["momentum_buffer"].is_meta


@pytest.mark.parametrize("cls, options", [(SGD, {}), (SGD8bit, EIGHT_BIT)])
def test_momentum_may_end(cls, options):
    """As with torch's, the buffers stay, and are not used."""
    ours, theirs = params(), params()
    pairs = [(ours, cls(ours, lr=0.1, momentum=0.9, **options)), (theirs, SGD(theirs, lr=0.1))]
    for owners, optimizer in pairs:
        set_grads(0, owners)
        for param in owners:
            param.grad.zero_()
        optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0
        run(optimizer, owners, range(1, 3))
    assert_same_bits(ours, theirs)


def test_sgd_without_momentum_keeps_no_state():
    owners = params()
    optimizer = SGD(owners, lr=0.1)
    run(optimizer, owners, range(2))
    assert all(not optimizer.state[p] for p in owners)
    assert sum(sum(row.bytes.values()) for row in optimizer.memory()) == 0
    assert "No state for 1,208 parameters in 3 tensors" in repr(optimizer)
    assert optimizer.state_dict()["state"].keys() <= {0, 1, 2}


@pytest.mark.parametrize("budget", [None, "1 MiB"])
def test_without_momentum_nothing_is_on_the_host(budget):
    """Beside parameters with a state, in groups that come later, and alone."""
    lists = [params() for _ in range(2)]
    optimizers = [
        SGD([{"params": ps[1:2], "momentum": 0.9}, {"params": ps[:1]}], lr=0.1, **more)
        for ps, more in zip(lists, ({}, {"offload": "state", "budget": budget}))
    ]
    for ps, optimizer in zip(lists, optimizers):
        run(optimizer, ps, range(2))
        optimizer.add_param_group({"params": ps[2:]})
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run(optimizer, ps, range(2, 4))
    assert_same_bits(*lists)
    alone = SGD(lists[0], lr=0.1, offload="state", budget=budget)
    run(alone, lists[0], range(1))
    memory = alone.offload_handle.memory()
    assert memory.host == memory.resident == 0 and not alone.offload_handle.reduce_memory()


def test_a_bfloat16_model_does_not_stall():
    """A step of 2^-10 of a weight is lost in bfloat16, and kept by what completes it."""
    stuck, moving = (nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2))
    optimizers = torch.optim.SGD([stuck], lr=2**-10), SGD([moving], lr=2**-10, master="remainder16")
    for _ in range(64):
        for param, optimizer in zip((stuck, moving), optimizers):
            param.grad = torch.ones_like(param)
            optimizer.step()
    assert (stuck == 1).all() and (moving == 1 - 64 * 2**-10).all()


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("momentum", [0, 0.9])
def test_stalled_weights_of_the_last_step_are_counted(momentum, release):
    """Without a state too, and where backward makes the steps."""
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = SGD(model.parameters(), lr=2**-10, momentum=momentum, count_stalled=True)
    with pytest.raises(RuntimeError, match="after a step"):
        optimizer.stalled_fraction()
    if release:
        headroom.release_gradients(model, optimizer)
    for rows in (4, 8):
        model.weight[:rows].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.stalled_fraction() == rows / 8


@pytest.mark.parametrize("master, size", [(None, 3.02), ("remainder16", 5.02)])
@pytest.mark.parametrize("cls, options", [(SGD8bit, {"momentum": 0.9}), (Lion8bit, {})])
def test_bytes_of_8_bits(cls, options, master, size):
    param = nn.Parameter(torch.zeros(1000, 1000, dtype=torch.bfloat16))
    (row,) = cls([param], master=master, **options).memory()
    assert row.bytes_per_parameter + 2 == pytest.approx(size, abs=0.01)


def test_8_bits_follow_32():
    """Sixty steps on a quadratic end about where those with float32 moments end."""
    for cls, wide, options in ((SGD8bit, SGD, {"momentum": 0.9}), (Lion8bit, Lion, {})):
        torch.manual_seed(0)
        target = torch.randn(5000)
        losses = []
        for kind in (cls, wide):
            param = nn.Parameter(torch.zeros(5000))
            optimizer = kind([param], lr=0.02, **options)
            for _ in range(60):
                param.grad = param.detach() - target
                optimizer.step()
            losses.append((param - target).square().mean().item())
        begin = target.square().mean().item()
        assert max(losses) < 0.2 * begin and abs(losses[0] - losses[1]) < 0.06 * begin

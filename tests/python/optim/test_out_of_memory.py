"""A step that runs out of memory has changed nothing, whichever of its allocations fails."""

import functools

import headroom
import pytest
import torch
from torch import nn

from helpers.failing_allocator import failing_allocator

AdamW, AdamW8bit, Adafactor = (
    getattr(headroom.optim, name) for name in ("AdamW", "AdamW8bit", "Adafactor")
)
OPTIMIZERS = {
    "adamw": functools.partial(AdamW, count_stalled=True),
    "clipped": functools.partial(AdamW, max_grad_norm=0.1),
    "amsgrad": functools.partial(AdamW, amsgrad=True),
    "remainder16": functools.partial(AdamW, master="remainder16"),
    "master": functools.partial(AdamW, master="f32"),
    "kahan": functools.partial(AdamW, rounding="kahan"),
    "stochastic": functools.partial(AdamW, rounding="stochastic"),
    "8bit": functools.partial(AdamW8bit, min_8bit_size=20, code_rounding="stochastic"),
    "8bit skipping": functools.partial(AdamW8bit, min_8bit_size=20, nonfinite="skip_step"),
    "adafactor": Adafactor,
    "adafactor hf": functools.partial(Adafactor, lr=0.01, semantics="hf", relative_step=False),
    "tensor lr": functools.partial(AdamW, lr=torch.tensor(0.01)),
}


def model_and_optimizer(name):
    """Two groups of parameters, of one and two dimensions, some of them in bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 9).bfloat16(), nn.Linear(9, 3))
    groups = [{"params": model[:2].parameters()}, {"params": model[2].parameters()}]
    return model, OPTIMIZERS[name](groups)


def set_grads(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def versions(model):
    """How often each parameter has been written."""
    return [param._version for param in model.parameters()]


def contents(model, optimizer):
    found = [param.detach().clone() for param in model.parameters()]
    for entry in optimizer.state.values():
        found += [value.clone() for value in entry.values()]
    return found


def assert_same(got, wanted):
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted):
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def new_states_are_zeros(optimizer):
    return all(not entry["step"].any() for entry in optimizer.state.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2], ids=["first", "third"])
def test_a_failure_at_every_allocation(name, steps):
    wanted_model, wanted_optimizer = model_and_optimizer(name)
    for k in range(steps + 1):
        set_grads(wanted_model, k)
        wanted_optimizer.step()
    wanted, number = contents(wanted_model, wanted_optimizer), 1
    with failing_allocator() as allocator:
        while True:
            model, optimizer = model_and_optimizer(name)
            for k in range(steps):
                set_grads(model, k)
                optimizer.step()
            set_grads(model, steps)
            before, written = contents(model, optimizer), versions(model)
            with allocator.failing_at(number):
                try:
                    optimizer.step()
                    failed = False
                except RuntimeError as error:
                    assert "can't allocate memory" in str(error)
                    failed = True
            if not failed:  # a table of addresses is not needed, and is left out
                assert_same(contents(model, optimizer), wanted)
                if allocator.count < number:
                    break
                number += 1
                continue
            assert versions(model) == written
            after = contents(model, optimizer)
            if steps:
                assert_same(after, before)
            else:
                params = len(list(model.parameters()))
                assert_same(after[:params], before)
                assert new_states_are_zeros(optimizer)
            optimizer.step()
            assert_same(contents(model, optimizer), wanted)
            number += 1
    assert number > 2


def test_a_skipped_step_is_counted_once():
    """The count of skipped steps is made before the step, too."""
    with failing_allocator() as allocator:
        number = 1
        while True:
            model, optimizer = model_and_optimizer("clipped")
            optimizer.max_consecutive_skips = 1  # sends its count in every step
            set_grads(model, 0)
            next(model.parameters()).grad.fill_(float("inf"))
            written = versions(model)
            with allocator.failing_at(number), pytest.warns(UserWarning, match="skipped"):
                try:
                    optimizer.step()
                except RuntimeError:
                    assert versions(model) == written
                    optimizer.step()
            assert int(optimizer._skips.total()) == 1
            if allocator.count < number:
                break
            number += 1
    assert number > 2


def normed(x):
    headroom.functional.rms_norm(x, torch.ones(8))


def stepped(x):
    """A tensor with gaps, of which the op makes a copy."""
    param, grad = x[:, :6], torch.ones(8, 6)
    headroom.functional.accumulate_([param], [grad])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("call", [normed, stepped])
def test_ops_raise_the_error_of_a_device_that_loops_catch(call, context):
    number = 1
    with failing_allocator(as_device=True) as allocator, context():
        while True:
            x, error = torch.zeros(8, 8), None
            with allocator.failing_at(number):
                try:
                    call(x)
                except BaseException as raised:
                    error = raised
            if error is None:
                break
            assert type(error) is torch.OutOfMemoryError, repr(error)
            assert "Tried to allocate 2.00 KiB" in str(error)
            number += 1
    assert number > 1

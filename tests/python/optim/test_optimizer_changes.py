"""A step takes the addresses of parameters, gradients and states without asking the dispatcher.
Whatever is done to them between two steps, the next must see it: each change is made to the
reference as well."""

import gc
import weakref
from collections import defaultdict

import headroom
import pytest
import torch

from helpers.bits import bits
from helpers.optimizer_suite import (
    CLOSE,
    EACH,
    Twins,
    assert_frozen,
    everything,
    frozen,
    named,
    rows,
)
from helpers.samples import DEFAULTS

ADAMW = named(headroom.optim.AdamW)


def like(param, optimizer):
    """The states with the shape of a parameter, but for what counts or scales, by name."""
    entry = optimizer.state[param]
    return {k: v for k, v in entry.items() if v.shape == param.shape and k not in ("step", "RMS")}


def move_gradients(params, optimizer):
    for p in params:
        p.grad = None if p.grad is None else p.grad.clone()


def move_parameters(params, optimizer):
    for p in params:
        p.data = p.data.clone()


def load_parameters(params, optimizer):
    for p in params:
        p.data.copy_(torch.ones_like(p))


def shrink_with_states(params, optimizer):
    values, p = like(params[0], optimizer), params[0]
    p.data = p.data[:2].clone()
    optimizer.state[p].update({k: v[:2].clone() for k, v in values.items()})


def shrink_to_views(params, optimizer):
    """The same addresses, but fewer rows."""
    for tensor in [*like(params[0], optimizer).values(), params[0]]:
        tensor.data = tensor.data[:2]


def grow_with_states(params, optimizer):
    for tensor in [*like(params[1], optimizer).values(), params[1]]:
        tensor.data = torch.cat([tensor.data, tensor.data])


def resize_in_place(params, optimizer):
    for tensor in like(params[1], optimizer).values():
        tensor.resize_(5)
    params[1].data = params[1].data[:5]


def transpose_everything(params, optimizer):
    for tensor in like(params[0], optimizer).values():
        tensor.t_()
    params[0].data = params[0].data.t()


def transpose_parameter(params, optimizer):
    params[0].data = params[0].data.t()


def stride_a_state(params, optimizer):
    for state in like(params[1], optimizer).values():
        state.data = torch.stack([state.data, state.data], dim=1)[:, 0]


def replace_entry(params, optimizer):
    entry = optimizer.state[params[0]]
    optimizer.state[params[0]] = {key: value.clone() for key, value in entry.items()}


def replace_states(params, optimizer):
    for name, value in like(params[0], optimizer).items():
        optimizer.state[params[0]][name] = value.flip(0)


def swap_state_data(params, optimizer):
    for value in like(params[0], optimizer).values():
        value.data = value.data.flip(0)


def set_state_storage(params, optimizer):
    for value in like(params[0], optimizer).values():
        value.set_(value.flip(0))


def write_to_states(params, optimizer):
    for value in like(params[0], optimizer).values():
        value.copy_(value.flip(0))


def set_step(params, optimizer):
    for value in optimizer.state[params[0]].values():
        if value.shape == ():
            value.fill_(1000)


def replace_step(params, optimizer):
    entry = optimizer.state[params[0]]
    if "step" in entry:
        entry["step"] = entry["step"] + 500


def drop_entry(params, optimizer):
    del optimizer.state[params[1]]


def clear_states(params, optimizer):
    optimizer.state.clear()


def replace_all_states(params, optimizer):
    optimizer.state = defaultdict(dict)


def swap_entries_of_equal_shape(params, optimizer):
    a, b = params[1], params[3]
    optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]


def load_own_state(params, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def drop_parameter(params, optimizer):
    optimizer.param_groups[0]["params"].remove(params[0])


def reorder_parameters(params, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def split_groups(params, optimizer):
    last = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [last], "lr": 0.05})
    optimizer.param_groups.reverse()


OF_ELEMENTS = [shrink_with_states, shrink_to_views, grow_with_states, resize_in_place]
OF_ELEMENTS += [transpose_everything, stride_a_state]
SEEN_AT_ONCE = [move_gradients, move_parameters, swap_state_data, replace_entry, write_to_states]
CHANGES = [load_parameters, transpose_parameter, replace_states, set_state_storage, set_step]
CHANGES += [replace_step, drop_entry, clear_states, replace_all_states, swap_entries_of_equal_shape]
CHANGES += [load_own_state, drop_parameter, reorder_parameters, split_groups, *SEEN_AT_ONCE]


@EACH
def test_a_change_between_steps(row, device):
    """Or between backward and step; and of options."""
    for change in CHANGES + OF_ELEMENTS * row.by_element:
        twins = Twins(row, device=device).step(3)
        twins.both(change)
        twins.step(2).check(change.__name__)
    twins = Twins(row, device=device).step(2)
    for change in SEEN_AT_ONCE:
        twins.random_grads()
        twins.both(change)
        twins.both(lambda params, optimizer: optimizer.step())
        twins.check(change.__name__)
    for options in row.varied:
        twins.both(lambda params, optimizer, new=options: optimizer.param_groups[0].update(new))
        if "amsgrad" not in options:  # a maximum that begins late begins otherwise in torch
            twins.step().check(f"{options}")


def resize_parameter(params, optimizer):
    params[0].data = params[0].data[:2].clone()


def shrink_parameter_to_view(params, optimizer):
    params[0].data = params[0].data[:2]


def reshape_parameter(params, optimizer):
    params[0].data = params[0].data.reshape(2, 8)


def first_state(params, optimizer):
    return [*like(params[0], optimizer).values()][-1]


def shrink_a_state(params, optimizer):
    state = first_state(params, optimizer)
    state.data = state.data[:2]


def shrink_a_state_in_place(params, optimizer):
    first_state(params, optimizer).resize_(2, 4)


def narrow_a_state(params, optimizer):
    """The same address and element count; only the type differs."""
    state = first_state(params, optimizer)
    wide = (
        state.data.view(torch.int16)[:, ::2] if state.itemsize > 1 else state.data.to(torch.int16)
    )
    state.data = wide.contiguous()


@rows(lambda row: row.by_element)
def test_states_that_no_longer_fit_are_refused(row, device):
    """torch fails as well, or broadcasts. Nothing is written, and the name is given. With a fresh
    state the next step works."""
    for change in (
        resize_parameter,
        shrink_parameter_to_view,
        reshape_parameter,
        shrink_a_state,
        shrink_a_state_in_place,
        narrow_a_state,
    ):
        twins = Twins(row, device=device).step(2)
        change(twins.ours, twins.optimizer)
        for param in twins.ours:
            param.grad = torch.randn_like(param)
        before = frozen(twins.optimizer)
        with pytest.raises(RuntimeError, match=r"parameter 0 of group 0"):
            twins.optimizer.step()
        assert_frozen(twins.optimizer, before, change.__name__)
        del twins.optimizer.state[twins.ours[0]]
        twins.optimizer.step()
        assert twins.optimizer.state[twins.ours[0]]["step"] == 1


def test_gradients_of_another_dtype_at_one_address(device):
    """float32, then bfloat16, then float32 again in the same memory."""
    param = torch.nn.Parameter(torch.randn(16, device=device))
    param.grad_dtype = None  # any dtype
    optimizer = headroom.optim.AdamW([param], lr=1e-2, weight_decay=0.1)
    lists = [param.detach().clone()], [torch.zeros_like(param)], [torch.zeros_like(param)]
    step = torch.zeros((), dtype=torch.float64, device=device)
    memory = torch.randn(16, device=device)
    for grad in (memory, memory.view(torch.bfloat16)[:16], memory):
        (grad if grad.dtype == torch.bfloat16 else memory).copy_(torch.randn(16))
        param.grad = grad
        optimizer.step()
        headroom.functional.adamw_(lists[0], [grad], lists[1], lists[2], [], [step], **DEFAULTS)
        assert torch.equal(bits(param), bits(lists[0][0]))


def test_dtypes_may_change(device):
    """Of states; and of a parameter, as by model.to(bfloat16), whose states keep theirs."""
    twins = Twins(ADAMW, device=device).step(2)
    for k, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        for entry in twins.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                entry[name].data = entry[name].data.to(dtype)
        twins.step()
        assert all(e["exp_avg"].dtype == dtype for e in twins.optimizer.state.values()), k
    # A rounding to 8 bits; a misread dtype is off by far more.
    twins.check(rtol=0.02, atol=0.01)
    param = twins.ours[0]
    param.data, moment = param.data.bfloat16(), twins.optimizer.state[param]["exp_avg"]
    before = param.detach().clone(), moment.clone()
    for p in twins.ours:
        p.grad = torch.ones_like(p)
    twins.optimizer.step()
    assert moment.dtype == torch.float32 and param.dtype == torch.bfloat16
    torch.testing.assert_close(moment, 0.9 * before[1] + 0.1, rtol=2**-21, atol=2**-24)
    assert not torch.equal(param, before[0])


def test_amsgrad_may_be_switched_on_and_off(device):
    twins = Twins(ADAMW, device=device).step(2)
    twins.optimizer.param_groups[0]["amsgrad"] = True
    twins.random_grads()
    twins.optimizer.step()
    for entry in twins.optimizer.state.values():
        assert torch.equal(entry["max_exp_avg_sq"], entry["exp_avg_sq"])
    for amsgrad in (False, True):
        twins.optimizer.param_groups[0]["amsgrad"] = amsgrad
        maxima = [entry["max_exp_avg_sq"].clone() for entry in twins.optimizer.state.values()]
        for p in twins.ours:
            p.grad = torch.full_like(p, 10.0)  # raises every maximum
        twins.optimizer.step()
        for entry, before in zip(twins.optimizer.state.values(), maxima):
            assert torch.equal(entry["max_exp_avg_sq"], before) != amsgrad
    assert all(entry["step"] == 5 for entry in twins.optimizer.state.values())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_parameter_may_move_to_a_gpu_if_its_states_do():
    """As model.cuda() moves it. Addresses of the CPU must not reach a kernel of the GPU."""
    twins = Twins(ADAMW).step(2)
    for p in twins.ours:
        p.grad = None
        p.data = p.data.cuda()
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="on another device|is on cpu"):
        twins.optimizer.step()
    for tensor in everything(twins.optimizer)[len(twins.ours) :]:
        tensor.data = tensor.data.cuda()
    twins.step(2)
    for p, q in zip(twins.ours, twins.theirs):
        torch.testing.assert_close(p.cpu(), q, **CLOSE)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_alive(fails, device):
    """Of a group that was removed, or by the error of a step."""
    kept, gone = (torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    optimizer = headroom.optim.AdamW([{"params": [kept]}, {"params": [gone]}])
    kept.grad, gone.grad = torch.ones_like(kept), torch.ones_like(gone)
    optimizer.step()
    if fails:
        optimizer.param_groups[1]["lr"] = float("nan")
        with pytest.raises(RuntimeError):
            optimizer.step()
    optimizer.param_groups.pop()
    moment = weakref.ref(optimizer.state.pop(gone)["exp_avg"])
    parameter = weakref.ref(gone)
    del gone
    optimizer.step()
    gc.collect()
    assert parameter() is None and moment() is None

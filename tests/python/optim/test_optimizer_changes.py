"""A step takes the addresses of parameters, gradients and states without asking the dispatcher.
Whatever is done to them between two steps, the next must see it: each change is made to torch's
optimizer as well."""

import gc
import weakref
from collections import defaultdict

import headroom
import pytest
import torch

from helpers.bits import bits
from helpers.samples import DEFAULTS
from helpers.twins import CLOSE, NAMES, Twins


def replace_gradient_tensors(params, optimizer):
    for p in params:
        p.grad = p.grad.clone()


def move_parameters(params, optimizer):
    for p in params:
        p.data = p.data.clone()


def load_parameters(params, optimizer):
    for p in params:
        p.data.copy_(torch.ones_like(p))


def shrink_with_states(params, optimizer):
    p = params[0]
    p.data = p.data[:2].clone()
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name] = optimizer.state[p][name][:2].clone()


def shrink_to_views(params, optimizer):
    """The same addresses, but fewer rows."""
    p = params[0]
    p.data = p.data[:2]
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name].data = optimizer.state[p][name].data[:2]


def grow_with_states(params, optimizer):
    p = params[1]
    p.data = torch.cat([p.data, p.data])
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name].data = optimizer.state[p][name].data.repeat(2)


def resize_in_place(params, optimizer):
    for tensor in (params[1].data, *list(optimizer.state[params[1]].values())):
        if tensor.shape == (7,):
            tensor.resize_(5)
    params[1].data = params[1].data[:5]


def transpose_parameter(params, optimizer):
    params[0].data = params[0].data.t()


def transpose_everything(params, optimizer):
    params[0].data = params[0].data.t()
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[params[0]][name].t_()


def stride_a_state(params, optimizer):
    state = optimizer.state[params[1]]["exp_avg"]
    state.data = torch.stack([state.data, state.data], dim=1)[:, 0]


def replace_entry(params, optimizer):
    entry = optimizer.state[params[0]]
    optimizer.state[params[0]] = {key: value.clone() for key, value in entry.items()}


def replace_state_tensor(params, optimizer):
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"] * 0.5


def swap_state_data(params, optimizer):
    state = optimizer.state[params[0]]["exp_avg_sq"]
    state.data = state.data.clone() * 4


def set_state_storage(params, optimizer):
    state = optimizer.state[params[0]]["exp_avg"]
    state.set_(state.clone() * 2)


def write_to_state(params, optimizer):
    optimizer.state[params[0]]["exp_avg"].mul_(-1)


def set_step(params, optimizer):
    optimizer.state[params[0]]["step"].fill_(1000)


def replace_step(params, optimizer):
    entry = optimizer.state[params[0]]
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


def change_options(params, optimizer):
    optimizer.param_groups[0].update(lr=0.05, betas=(0.5, 0.9), weight_decay=0.0, eps=0.1)
    optimizer.param_groups[0]["maximize"] = True


def drop_parameter(params, optimizer):
    optimizer.param_groups[0]["params"].remove(params[0])


def reorder_parameters(params, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def split_groups(params, optimizer):
    group = optimizer.param_groups[0]
    last = group["params"].pop()
    optimizer.add_param_group({"params": [last], "lr": 0.05})
    optimizer.param_groups.reverse()


CHANGES = [
    replace_gradient_tensors,
    move_parameters,
    load_parameters,
    shrink_with_states,
    shrink_to_views,
    grow_with_states,
    resize_in_place,
    transpose_parameter,
    transpose_everything,
    stride_a_state,
    replace_entry,
    replace_state_tensor,
    swap_state_data,
    set_state_storage,
    write_to_state,
    set_step,
    replace_step,
    drop_entry,
    clear_states,
    replace_all_states,
    swap_entries_of_equal_shape,
    load_own_state,
    change_options,
    drop_parameter,
    reorder_parameters,
    split_groups,
]


# A code times 0.5 is no code, and torch's loader, which the loop of the twins has, casts codes.
NOT_OF_CODES = (replace_state_tensor, load_own_state)


@pytest.mark.parametrize(
    "change, name",
    [(c, n) for n in NAMES for c in CHANGES if n == "AdamW" or c not in NOT_OF_CODES],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_change_between_steps(change, name, device):
    twins = Twins(((4, 4), (7,), (), (7,)), name=name, device=device)
    twins.step(3).check()
    twins.both(change)
    twins.step(2).check()


@pytest.mark.parametrize("name", NAMES)
def test_a_change_between_backward_and_step(name, device):
    twins = Twins(name=name, device=device).step(2)
    for change in (replace_gradient_tensors, move_parameters, swap_state_data, replace_entry):
        twins.random_grads()
        twins.both(change)
        twins.both(lambda params, optimizer: optimizer.step())
        twins.check()


@pytest.mark.parametrize("name", NAMES)
def test_absent_gradients_come_and_go(name, device):
    twins = Twins(name=name, device=device)
    for absent in ((), (0,), (0,), (), (1, 2), (0, 1, 2), (), ()):
        twins.step(absent=absent)
    twins.check()
    assert [twins.optimizer.state[p]["step"].item() for p in twins.ours] == [5, 6, 6]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_other_strides_at_one_address(name, device):
    twins = Twins(((4, 4),), name=name, device=device)
    memory = torch.randn(16, device=device)
    for view in (memory.view(4, 4), memory.view(4, 4).t(), memory[0].expand(4, 4)):
        twins.ours[0].grad, twins.theirs[0].grad = view, view
        twins.both(lambda params, optimizer: optimizer.step())
        twins.check()


def test_gradients_of_another_dtype_at_one_address(device):
    """float32, then bfloat16, then float32 again in the same memory."""
    param = torch.nn.Parameter(torch.randn(16, device=device))
    param.grad_dtype = None  # any dtype
    optimizer = headroom.optim.AdamW([param], lr=1e-2, weight_decay=0.1)
    lists = [param.detach().clone()], [torch.zeros_like(param)], [torch.zeros_like(param)]
    step = torch.zeros((), dtype=torch.float64, device=device)
    memory = torch.randn(16, device=device)
    for grad in (memory, memory.view(torch.bfloat16)[:16], memory):
        if grad.dtype == torch.bfloat16:
            grad.copy_(torch.randn(16))
        else:
            memory.normal_()
        param.grad = grad
        optimizer.step()
        headroom.functional.adamw_(lists[0], [grad], lists[1], lists[2], [], [step], **DEFAULTS)
        assert torch.equal(bits(param), bits(lists[0][0]))


def test_a_parameter_may_change_its_dtype(device):
    """As model.to(bfloat16) does between steps. Its states keep theirs; torch cannot step then."""
    twins = Twins(device=device).step(2)
    param = twins.ours[0]
    param.data = param.data.bfloat16()
    moment = twins.optimizer.state[param]["exp_avg"]
    before = param.detach().clone(), moment.clone()
    for p in twins.ours:
        p.grad = torch.ones_like(p)
    twins.optimizer.step()
    assert moment.dtype == torch.float32 and param.dtype == torch.bfloat16
    torch.testing.assert_close(moment, 0.9 * before[1] + 0.1, rtol=2**-21, atol=2**-24)
    assert not torch.equal(param, before[0])


def test_states_may_change_their_dtype(device):
    twins = Twins(device=device).step(2)
    for k, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        for entry in twins.optimizer.state.values():
            entry["exp_avg"].data = entry["exp_avg"].data.to(dtype)
            entry["exp_avg_sq"].data = entry["exp_avg_sq"].data.to(dtype)
        twins.step()
        assert all(e["exp_avg"].dtype == dtype for e in twins.optimizer.state.values()), k
    twins.check(rtol=0.02, atol=0.01)  # a rounding to 8 bits; a misread dtype is off by far more


def test_amsgrad_may_be_switched_on_and_off(device):
    twins = Twins(device=device).step(2)
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
    twins = Twins().step(2)
    for p in twins.ours:
        p.grad = None
        p.data = p.data.cuda()
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="on another device|is on cpu"):
        twins.optimizer.step()
    for p in twins.ours:
        for value in twins.optimizer.state[p].values():
            value.data = value.data.cuda()
    twins.step(2)
    for p, q in zip(twins.ours, twins.theirs):
        torch.testing.assert_close(p.cpu(), q, **CLOSE)


def test_a_removed_group_is_let_go(device):
    kept, gone = (torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    optimizer = headroom.optim.AdamW([{"params": [kept]}, {"params": [gone]}])
    kept.grad, gone.grad = torch.ones_like(kept), torch.ones_like(gone)
    optimizer.step()
    optimizer.param_groups.pop()
    moment = weakref.ref(optimizer.state.pop(gone)["exp_avg"])
    parameter = weakref.ref(gone)
    del gone
    optimizer.step()
    gc.collect()
    assert parameter() is None and moment() is None


def resize_parameter(params, optimizer):
    params[0].data = params[0].data[:2].clone()


def shrink_parameter_to_view(params, optimizer):
    params[0].data = params[0].data[:2]


def reshape_parameter(params, optimizer):
    params[0].data = params[0].data.reshape(2, 8)


def shrink_a_state(params, optimizer):
    state = optimizer.state[params[0]]["exp_avg"]
    state.data = state.data[:2]


def shrink_a_state_in_place(params, optimizer):
    optimizer.state[params[0]]["exp_avg_sq"].resize_(2, 4)


def narrow_a_state(params, optimizer):
    """The same address and element count; only the type differs."""
    state = optimizer.state[params[0]]["exp_avg_sq"]
    state.data = state.data.view(torch.bfloat16)[:, ::2].contiguous()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "change",
    [
        resize_parameter,
        shrink_parameter_to_view,
        reshape_parameter,
        shrink_a_state,
        shrink_a_state_in_place,
        narrow_a_state,
    ],
    ids=lambda change: change.__name__,
)
def test_states_that_no_longer_fit_are_refused(change, name, device):
    """torch fails as well, or broadcasts. Nothing is written, and the name is given."""
    twins = Twins(name=name, device=device).step(2)
    change(twins.ours, twins.optimizer)
    for param in twins.ours:
        param.grad = torch.randn_like(param)
    tensors = [*twins.ours, *(t for e in twins.optimizer.state.values() for t in e.values())]
    before = [bits(tensor).clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0"):
        twins.optimizer.step()
    assert all(torch.equal(bits(now), then) for now, then in zip(tensors, before))
    del twins.optimizer.state[twins.ours[0]]  # a fresh state for it: the next step works
    twins.optimizer.step()
    assert twins.optimizer.state[twins.ours[0]]["step"] == 1

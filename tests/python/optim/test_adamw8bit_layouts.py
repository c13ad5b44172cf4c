"""AdamW8bit on parameters, gradients and states of any layout, by either of the ways a step hands
them to the op, and its random rounding, which depends on neither."""

import math

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits, same_bits
from helpers.layouts import LAYOUTS, rest_of_storage
from helpers.optimizers8bit import (
    ADAMW8BIT,
    grads,
    mixed,
    set_grads,
    start,
    states,
    trained,
)
from helpers.samples import FLOATS


def in_memory_order(tensor):
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, dtype, device):
    """Bits are those of a contiguous parameter whose elements come in the order in memory."""
    values = start().to(device, dtype)
    param = torch.nn.Parameter(LAYOUTS[layout](values))
    dense = layout != "sliced"
    like = in_memory_order(param.detach()).contiguous() if dense else values.clone()
    flat = torch.nn.Parameter(like)
    given = [LAYOUTS[grad_layout](grad.to(device, dtype)) for grad in grads()]
    order = sorted(range(4), key=param.stride, reverse=True) if dense else range(4)
    optimizer = trained(param, given)
    reference = trained(flat, [grad.permute(*order).contiguous() for grad in given])
    assert same_bits(param.detach().permute(*order).contiguous(), flat.detach())
    for name, value in reference.state[flat].items():
        mine = optimizer.state[param][name]
        mine = mine.permute(*order).contiguous() if mine.shape == param.shape else mine
        assert same_bits(mine, value), name
    if not dense:
        assert (rest_of_storage(param.detach()) == 7).all()


@pytest.mark.parametrize("later", [name for name in LAYOUTS if name != "sliced"])
@pytest.mark.parametrize("first", [name for name in LAYOUTS if name != "sliced"])
def test_a_parameter_that_is_moved_between_steps(first, later, device):
    """As model.to(memory_format=...) does: blocks stay what they were when the state was made."""
    moved, kept = (torch.nn.Parameter(LAYOUTS[first](start().to(device))) for _ in range(2))
    optimizer, reference = trained(moved, grads()), trained(kept, grads())
    moved.data = LAYOUTS[later](moved.data)
    for grad in grads(3):
        moved.grad, kept.grad = grad.to(device), grad.to(device)
        version = moved._version
        optimizer.step()
        reference.step()
        assert moved._version > version
    assert_same_bits([moved.detach()], [kept.detach()])
    assert moved.stride() == LAYOUTS[later](start()).stride()
    assert_same_bits(states(optimizer), states(reference))


def test_threads_do_not_matter():
    runs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        shapes = ((300, 1000), (3, 3), (5000,))
        params, optimizer = mixed("cpu", shapes, code_rounding="stochastic", max_grad_norm=1.0)
        for seed in range(2):
            set_grads(params, seed)
            optimizer.step()
        runs.append([*params, *states(optimizer)])
    assert_same_bits(*runs)


def test_expanded_parameters_are_refused(device):
    param = torch.nn.Parameter(torch.randn(50, 1, device=device).expand(50, 100))
    param.grad = torch.ones(50, 100, device=device)
    optimizer = ADAMW8BIT([("tall", param)], nonfinite="propagate")
    before = param.detach().clone()
    with pytest.raises(RuntimeError, match="'tall'"):
        optimizer.step()
    assert torch.equal(param, before)


def test_empty_parameters(device):
    """Alone, and among others, below and above the threshold."""
    shapes = ((0,), (70, 60), (0, 5000), (5,), (3, 0))
    for chosen in (shapes, shapes[:1], shapes[2:3]):
        params, optimizer = mixed(device, chosen, min_8bit_size=0)
        for seed in range(2):
            set_grads(params, seed)
            optimizer.step()
        assert all(optimizer.state[p]["step"] == 2 for p in params)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()


def test_overlapping_parameters_are_refused(device):
    """Of both kinds together too: one would be written by two ops."""
    memory = torch.randn(6000, device=device)
    large, small = (torch.nn.Parameter(memory[a:b]) for a, b in ((0, 5000), (4990, 5010)))
    large.grad, small.grad = torch.ones_like(large), torch.ones_like(small)
    optimizer = ADAMW8BIT([("large", large), ("small", small)])
    with pytest.raises(ValueError, match="'large' and parameter 'small' share memory"):
        optimizer.step()


# ---- Stochastic rounding -------------------------------------------------------------------------


def rounded(seed, device, shapes=((70, 60), (70, 60)), order=1, on_lists=False, **options):
    """Codes after two steps of equal parameters with equal gradients."""
    generator = torch.Generator().manual_seed(0)
    value, *grads = (torch.randn(shapes[0], generator=generator).to(device) for _ in range(3))
    params = [torch.nn.Parameter(value.clone()) for _ in shapes]
    optimizer = ADAMW8BIT(params[::order], seed=seed, code_rounding="stochastic", **options)
    for grad in grads:
        for p in params:
            p.grad = grad.clone()
        optimizer.step()
    return [optimizer.state[p]["exp_avg"] for p in params[::order]]


def test_random_codes_are_those_of_seed_and_place(device):
    codes = rounded(1, device)
    assert not same_bits(*codes)  # two parameters draw different numbers
    assert_same_bits(codes, rounded(1, device))
    assert_same_bits(codes, rounded(1, device, order=-1))  # by place, not by tensor
    for seed in (0, 2, 2**32 - 1):
        others = rounded(seed, device)
        differ = [(a != b).float().mean().item() for a, b in zip(codes, others)]
        assert all(0.1 < share < 0.9 for share in differ), differ


def test_random_codes_do_not_depend_on_who_else_steps(device):
    """A parameter without gradient, in this step, keeps its place."""
    codes = {}
    for absent in (False, True):
        params, optimizer = mixed(device, ((70, 60), (80, 60)), code_rounding="stochastic")
        set_grads(params, 0)
        if absent:
            params[0].grad = None
        optimizer.step()
        codes[absent] = optimizer.state[params[1]]["exp_avg_sq"]
    assert_same_bits([codes[False]], [codes[True]])


def test_random_codes_lie_beside_the_nearest(device):
    """And on average nothing is gained or lost: the mean of many is that of the moment itself."""
    values = headroom.functional.dynamic_map(True).double()
    grad = torch.full((50, 100), 0.3, device=device)
    grad[0, ::9] = 1.0  # the largest of their blocks
    param = torch.nn.Parameter(torch.zeros(50, 100, device=device))
    optimizer = ADAMW8BIT([param], code_rounding="stochastic")
    param.grad = grad
    grad[:, ::50] = 1.0
    optimizer.step()
    state = optimizer.state[param]
    codes = state["exp_avg"][grad == 0.3].cpu()
    scale = state["exp_avg_absmax"].flatten()[0].item()
    wanted = 0.1 * 0.3 / scale
    below = int((values <= wanted).sum()) - 1
    assert set(codes.tolist()) == {below, below + 1}
    gap = (values[below + 1] - values[below]).item()
    error = (values[codes.int()].mean() - wanted).abs().item()
    assert error < 4 * gap / 2 / math.sqrt(codes.numel())


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_elements_than_32_bits_count():
    """Blocks at both ends and around element 2^31 are as if they were alone."""
    near, count = 1024, 2**31 + 4096
    free, _ = torch.cuda.mem_get_info()
    if free < 7 * count:
        pytest.skip("needs 15 GB of GPU memory")
    values = torch.randn(2, near).to("cuda", torch.bfloat16)
    alone, large = (torch.nn.Parameter(values.new_zeros(n)) for n in (near, count))
    alone.data.copy_(values[0])
    alone.grad, large.grad = values[1].clone(), torch.zeros_like(large)
    places = (0, 2**31 - near // 2, count - near)
    for place in places:
        large.data[place : place + near] = values[0]
        large.grad[place : place + near] = values[1]
    small, optimizer = (ADAMW8BIT([p], min_8bit_size=0) for p in (alone, large))
    for _ in range(2):
        small.step()
        optimizer.step()
    for place in places:
        assert same_bits(large[place : place + near], alone)
        for name in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[large][name][place : place + near]
            assert same_bits(state, small.state[alone][name])
            blocks = optimizer.state[large][f"{name}_absmax"][place // 256 :][: near // 256]
            assert same_bits(blocks, small.state[alone][f"{name}_absmax"])

"""The op headroom::adamw8bit_ on tensors of any strides, sizes and addresses."""

from dataclasses import fields

import pytest
import torch

from helpers.bits import assert_same_bits, same_bits
from helpers.layouts import channels_last, contiguous, offset, rest_of_storage, sliced, transposed
from helpers.reference8bit import (
    Sample,
    run,
    sample,
)
from helpers.samples import name_of

# How the dimensions of a 4-dim parameter lie in memory; what is not dense is taken row by row.
ORDERS = {
    contiguous: (0, 1, 2, 3),
    transposed: (3, 2, 1, 0),
    channels_last: (0, 2, 3, 1),
    sliced: (0, 1, 2, 3),
    offset: (0, 1, 2, 3),
}


@pytest.mark.parametrize("state", ORDERS)
@pytest.mark.parametrize("grad", ORDERS)
@pytest.mark.parametrize("param", ORDERS)
def test_strides_do_not_matter(param, grad, state, device):
    """Blocks follow the parameter's order in memory, wherever the codes lie."""
    lists = sample([(3, 4, 5, 7)], device=device, block_size=64)
    order = ORDERS[param]
    want = run(lists.shaped(lambda t: t.permute(order).contiguous()).clone(), block_size=64)
    laid = lists.clone()
    for layout, column in zip(
        (param, grad, state, state), lists.lists()[:2] + lists.lists()[2:6:2]
    ):
        name = next(f.name for f in fields(lists) if getattr(lists, f.name) is column)
        setattr(laid, name, [layout(t) for t in column])
    run(laid, block_size=64)
    assert_same_bits(laid.shaped(lambda t: t.permute(order)).tensors(), want.tensors())
    shaped = (laid.params, laid.grads, laid.exp_avgs, laid.exp_avg_sqs)
    assert all((rest_of_storage(tensor) == 7).all() for (tensor,) in shaped)


def test_expanded_gradients(device):
    lists = sample([(6, 4), (5,), (2, 3, 4)], device=device)
    lists.grads = [g.flatten()[0].expand(g.shape) for g in lists.grads]
    dense = lists.clone()
    dense.grads = [g.contiguous() for g in lists.grads]
    assert_same_bits(run(lists).params, run(dense).params)
    assert lists.grads[0].stride() == (0, 0)


@pytest.mark.parametrize("position", range(5))
def test_empty_tensors_anywhere(position, device):
    full = sample([(7,), (3, 5), (), (333,)], device=device)
    empty = sample([(0, 3)], device=device)
    columns = zip(full.clone().lists(), empty.clone().lists())
    got = run(Sample(*(a[:position] + b + a[position:] for a, b in columns)))
    want = run(full)
    for column, expected in zip(got.lists()[:-1], want.lists()):
        assert column.pop(position).numel() == 0
        assert_same_bits(column, expected)
    assert got.steps[position] == empty.steps[0] + 1


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)])
def test_an_empty_tensor_alone(shape, device):
    assert run(sample([shape], device=device)).steps[0] == 4


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 255, 256, 257, 511, 513, 1021, 4097])
@pytest.mark.parametrize("block_size", [64, 256])
def test_sizes(count, block_size, device):
    """Each block is as if it were alone, whatever lies beside it."""
    before = sample([(count,)], device=device, block_size=block_size)
    whole = run(before.clone(), block_size=block_size)
    for k in range(-(-count // block_size)):
        part = slice(k * block_size, (k + 1) * block_size)
        one = before.clone().shaped(lambda t, part=part: t[part])
        one.exp_avg_absmaxs[0] = one.exp_avg_absmaxs[0][k : k + 1]
        one.exp_avg_sq_absmaxs[0] = one.exp_avg_sq_absmaxs[0][k : k + 1]
        run(one, block_size=block_size)
        for name in ("params", "exp_avgs", "exp_avg_sqs"):
            assert same_bits(getattr(whole, name)[0][part], getattr(one, name)[0])
        for name in ("exp_avg_absmaxs", "exp_avg_sq_absmaxs"):
            assert same_bits(getattr(whole, name)[0][k : k + 1], getattr(one, name)[0])


@pytest.mark.parametrize("shift", [1, 3, 7, 15])
@pytest.mark.parametrize("which", ["params", "grads", "codes", "absmaxs", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_unaligned_storage(dtype, which, shift, device):
    """Views that start `shift` elements into their memory and end before it does."""
    lists = sample([(1003,)], dtype, dtype, device=device)
    want = run(lists.clone())
    kinds = {
        "params": ["params"],
        "grads": ["grads"],
        "codes": ["exp_avgs", "exp_avg_sqs"],
        "absmaxs": ["exp_avg_absmaxs", "exp_avg_sq_absmaxs"],
    }
    room = {}
    for name in sum(kinds.values(), []) if which == "all" else kinds[which]:
        (tensor,) = getattr(lists, name)
        count = tensor.numel()
        room[name] = torch.full((count + 16,), 7).to(device, tensor.dtype)
        view = room[name][shift : shift + count]
        getattr(lists, name)[0] = view.copy_(tensor)
    assert_same_bits(run(lists).tensors(), want.tensors())
    for name, memory in room.items():
        end = shift + getattr(lists, name)[0].numel()
        assert (memory[:shift] == 7).all() and (memory[end:] == 7).all()

"""The op headroom::adamw8bit_: its registration, its codes and updates against float64, options,
tensors of any layout, what it refuses, and that its updates are bounded."""

import io
import itertools
import math
import re
import sys
from dataclasses import fields
from pathlib import Path

import headroom
import pytest
import torch
from headroom._core.table import table_of
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from helpers.bad_inputs import (
    assert_untouched,
    expanded,
    misaligned,
    of_dtype,
    one,
    option,
    overlapping,
    put,
    snapshot,
)
from helpers.bits import assert_same_bits, same_bits, ulps
from helpers.layouts import channels_last, contiguous, offset, rest_of_storage, sliced, transposed
from helpers.reference8bit import (
    EXACT,
    MAPS,
    OPTIONS,
    TINY,
    Sample,
    check_moments,
    check_params,
    published_map,
    run,
    sample,
    step64,
)
from helpers.samples import FLOATS, mix_name, name_of, scalar

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

import bounded_updates  # noqa: E402

NAN, INF = float("nan"), float("inf")
BNB_EXACT = {"bnb_exact": True}
SHAPES = ((31, 17), (256,), (255,), (257,), (1,), (), (40, 100))


# --- The reference -------------------------------------------------------------------------------


# --- The schema, the fake and the registrations --------------------------------------------------


def opcheck_inputs(device):
    options = OPTIONS | {"lr": 0.01}
    for param, grad in itertools.product(FLOATS, FLOATS[:2]):
        yield sample(param=param, grad=grad, device=device), options
    yield sample([(0,), (3, 4), ()], device=device), options
    yield sample(device=device), options | BNB_EXACT
    yield sample(device=device, block_size=64), options | {"block_size": 64, "seeds": [1, 2, -3]}
    scalars = {name: scalar(0.5, device) for name in ("lr_tensor", "grad_scale", "clip_coef")}
    yield sample(device=device), options | scalars | {"found_inf": scalar(0.0, device)}
    turned = sample([(5, 7), (2, 3, 4)], device=device)
    yield turned.shaped(lambda t: t.transpose(0, -1)), options


def test_opcheck(device):
    for lists, options in opcheck_inputs(device):
        torch.library.opcheck(torch.ops.headroom.adamw8bit_.default, (*lists.lists(), []), options)


def table(lists):
    """The lists as the internal op takes them, or None if they are not plain."""
    names = ("exp_avgs", "exp_avg_sqs", "exp_avg_absmaxs", "exp_avg_sq_absmaxs", "steps")
    columns = zip(*(getattr(lists, name) for name in names))
    state = {param: dict(zip(names, row)) for param, row in zip(lists.params, columns)}
    return table_of((lists.params, lists.grads), state, names[:2], names[2:])


def test_opcheck_of_the_table_form(device):
    """Addresses mean nothing for a fake tensor, and nothing traces them."""
    lists = sample(device=device)
    torch.library.opcheck(
        torch.ops.headroom._adamw8bit_table_.default,
        (lists.params[0], table(lists)),
        OPTIONS,
        test_utils=("test_schema", "test_autograd_registration"),
    )


@pytest.mark.parametrize("options", [{}, BNB_EXACT, {"seeds": [1, 2, 3]}], ids=str)
def test_the_table_form_does_the_same(options, device):
    lists = sample(param=torch.bfloat16, device=device).shaped(transposed)
    by_list = run(lists.clone(), **options)
    by_table = lists.clone()
    torch.ops.headroom._adamw8bit_table_(by_table.params[0], table(by_table), **(OPTIONS | options))
    assert_same_bits(by_table.tensors(), by_list.tensors())


def test_the_table_form_refuses():
    lists = sample()
    kept = snapshot(lists.tensors())
    rows = table(lists)
    op = torch.ops.headroom._adamw8bit_table_
    for wrong in (rows[:6].contiguous(), rows.int(), rows[:, :2].contiguous()):
        with pytest.raises(RuntimeError, match="table must be"):
            op(lists.params[0], wrong, **OPTIONS)
    with pytest.raises(RuntimeError, match="seeds has 2 numbers, wanted 3"):
        op(lists.params[0], rows, **OPTIONS, seeds=[1, 2])
    lists.exp_avgs[0] = lists.exp_avgs[0].float()
    with pytest.raises(RuntimeError, match=r"exp_avgs\[0\] has dtype f32"):
        op(lists.params[0], table(lists), **OPTIONS)
    lists.exp_avgs[0] = lists.exp_avgs[0].byte()
    assert_untouched((lists.tensors(), kept[1]))


@pytest.mark.parametrize("signed", [True, False])
def test_opcheck_of_dynamic_map(signed):
    torch.library.opcheck(torch.ops.headroom.dynamic_map.default, (signed,))


def test_the_version_counters_of_all_that_is_written_grow(device):
    lists = sample(device=device)
    before = [tensor._version for tensor in lists.tensors()]
    run(lists)
    grown = [tensor._version > version for tensor, version in zip(lists.tensors(), before)]
    assert grown == [column is not lists.grads for column in lists.lists() for _ in column]


def test_no_parameters():
    assert headroom.functional.adamw8bit_([], [], [], [], [], [], [], **OPTIONS) is None


# --- The map -------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_published_one(signed):
    with torch.device("meta"):  # a default device changes nothing
        values = headroom.functional.dynamic_map(signed)
    assert same_bits(values, published_map(signed))
    assert values.shape == (256,) and (values.diff() > 0).all()
    assert values[127 if signed else 0] == 0 and values[-1] == 1
    values.fill_(7)  # the caller's own
    assert same_bits(headroom.functional.dynamic_map(signed), published_map(signed))


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_stays_what_it_is(signed, device):
    """Decoding and encoding are inverse: with a gradient of zero and beta 1 - 2^-20, the moments
    shrink by one part in a million and with them their scale."""
    lists = sample([(256,)], device=device)
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    if signed:
        lists.exp_avgs[0].copy_(codes)
    else:
        lists.exp_avg_sqs[0].copy_(codes)
    lists.grads[0].zero_()
    run(lists, beta1=1 - 2**-20, beta2=1 - 2**-20)
    assert torch.equal(lists.exp_avgs[0] if signed else lists.exp_avg_sqs[0], codes)


# --- Accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [64, 128, 256, 512])
def test_a_step_against_float64(block_size, device):
    before = sample(SHAPES, device=device, block_size=block_size)
    got = run(before.clone(), block_size=block_size)
    check_moments(got, before, block_size=block_size)
    check_params(got, before, block_size=block_size)
    assert_same_bits(got.grads, before.grads)


def test_the_first_step(device):
    """Codes mean nothing while their scales are zero."""
    before = sample(SHAPES, device=device, steps=-0)
    for column in (before.exp_avg_absmaxs, before.exp_avg_sq_absmaxs, before.steps):
        for tensor in column:
            tensor.zero_()
    other = before.clone()
    for codes in (*other.exp_avgs, *other.exp_avg_sqs):
        codes.zero_()
    got = run(before.clone())
    check_moments(got, before)
    check_params(got, before)
    assert_same_bits(got.tensors(), run(other).tensors())


@pytest.mark.parametrize("bnb_exact", [False, True])
@pytest.mark.parametrize("mix", list(itertools.product(FLOATS, FLOATS)), ids=mix_name)
def test_every_mix_of_dtypes(mix, bnb_exact, device):
    """A mix gives what float32 gives on the same values, rounded once; twice by bitsandbytes, which
    stores the parameter before it decays it."""
    before = sample(SHAPES, *mix, device=device)
    got, wide = (run(x, bnb_exact=bnb_exact) for x in (before.clone(), before.wide()))
    for param, exact in zip(got.params, wide.params):
        if bnb_exact and param.dtype != torch.float32:
            assert ulps(param, exact.to(param.dtype)).max() <= 1
        else:
            assert same_bits(param, exact.to(param.dtype))
    assert_same_bits(sum(got.lists()[2:], []), sum(wide.lists()[2:], []))
    assert_same_bits(got.grads, before.grads)
    check_moments(got, before, bnb_exact=bnb_exact)


def test_dtypes_may_differ_from_parameter_to_parameter(device):
    mixes = list(itertools.product(FLOATS, FLOATS))
    alone = [sample([(300,)], *mix, device=device) for mix in mixes]
    together = Sample(*(sum(columns, []) for columns in zip(*(x.clone().lists() for x in alone))))
    run(together)
    for k, lists in enumerate(alone):
        assert_same_bits(together.at(slice(k, k + 1)).tensors(), run(lists).tensors())


CHANGED = {
    "no weight decay": {"weight_decay": 0.0},
    "L2": {"decoupled": False},
    "L2, maximize": {"decoupled": False, "maximize": True},
    "maximize": {"maximize": True},
    "large eps": {"eps": 0.1},
    "lr 0": {"lr": 0.0},
    "beta1 0": {"beta1": 0.0},
    "beta2 0": {"beta2": 0.0},
    "slow betas": {"beta1": 0.99, "beta2": 0.99999},
}


@pytest.mark.parametrize("steps", [0, 1000])
@pytest.mark.parametrize("options", CHANGED.values(), ids=CHANGED)
def test_options(options, steps, device):
    before = sample(SHAPES, device=device, steps=steps)
    got = run(before.clone(), **options)
    check_moments(got, before, **options)
    check_params(got, before, **options)


SCALARS = {
    "grad_scale": ({"grad_scale": 1024.0}, 1 / 1024),
    "grad_scale, not a power of 2": ({"grad_scale": 3.0}, 1 / 3),
    "clip_coef": ({"clip_coef": 0.25}, 0.25),
    "both": ({"clip_coef": 0.25, "grad_scale": 7.0}, 0.25 / 7),
    "found_inf 0": ({"found_inf": 0.0}, 1.0),
}


@pytest.mark.parametrize("bnb_exact", [False, True])
@pytest.mark.parametrize("scalars, factor", SCALARS.values(), ids=SCALARS)
def test_scalars_on_the_device(scalars, factor, bnb_exact, device):
    before = sample(SHAPES, device=device)
    tensors = {name: scalar(value, device) for name, value in scalars.items()}
    got = run(before.clone(), bnb_exact=bnb_exact, **tensors)
    check_moments(got, before, factor=factor, bnb_exact=bnb_exact)
    if not bnb_exact:
        check_params(got, before, factor=factor)


@pytest.mark.parametrize("flag", [1.0, -1.0, INF, NAN, 1e-45])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_found_inf_changes_no_byte(flag, strided, device):
    lists = sample(SHAPES, device=device)
    lists.grads[0][3] = INF
    if strided:
        lists = lists.shaped(lambda t: t.t() if t.dim() == 2 else t)
        lists.grads[0] = lists.grads[0].contiguous()
    kept = snapshot(lists.tensors())
    run(lists, found_inf=scalar(flag, device))
    assert_untouched(kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_lr_tensor(dtype, device):
    before = sample(device=device)
    for lr in (torch.tensor(0.03, dtype=dtype), torch.tensor([0.03], dtype=dtype, device=device)):
        by_tensor, by_number = run(before.clone(), lr=lr), run(before.clone(), lr=lr.item())
        assert_same_bits(by_tensor.tensors(), by_number.tensors())
        lr.fill_(0.5)  # read anew at every call
        assert_same_bits(run(by_tensor, lr=lr).tensors(), run(by_number, lr=0.5).tensors())


def test_every_tensor_has_its_own_step(device):
    before = sample([(300,)] * 4, device=device)
    for step, count in zip(before.steps, (0, 1, 99, 2**24)):
        step.fill_(count)
    together = run(before.clone())
    for k in range(4):
        alone = run(before.clone().at(slice(k, k + 1)))
        assert_same_bits(alone.tensors(), together.at(slice(k, k + 1)).tensors())
    check_moments(together, before)


# --- Zeros, and what is not finite ---------------------------------------------------------------


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_positive_second_moment_never_becomes_zero(stochastic, device):
    """Gradients over 24 powers of ten, and exact zeros among them."""
    lists = sample([(4096,)], device=device, steps=0)
    grad = lists.grads[0].copy_(10 ** (torch.rand(4096) * 24 - 20))
    grad[::7] = 0
    for scales in (*lists.exp_avg_absmaxs, *lists.exp_avg_sq_absmaxs):
        scales.zero_()
    second = run(lists.clone(), bnb_exact=True).exp_avg_sqs[0]
    positive = grad.square() > 0
    assert (second[positive] == 0).double().mean() > 0.5
    for _ in range(3):
        run(lists, seeds=[1] if stochastic else None)
        assert (lists.exp_avg_sqs[0][positive] > 0).all()
        assert (lists.exp_avg_sqs[0][grad == 0] == 0).all()
        assert (lists.exp_avgs[0][grad == 0] == 127).all()


@pytest.mark.parametrize("seeds", [None, [5]], ids=["nearest", "stochastic"])
def test_a_block_of_zeros_stays_zero(seeds, device):
    lists = sample([(300,)], device=device)
    lists.grads[0].zero_()
    for scales in (*lists.exp_avg_absmaxs, *lists.exp_avg_sq_absmaxs):
        scales.zero_()
    before = lists.params[0].clone()
    run(lists, weight_decay=0.0, seeds=seeds)
    assert (lists.exp_avgs[0] == 127).all() and (lists.exp_avg_sqs[0] == 0).all()
    assert (lists.exp_avg_absmaxs[0] == 0).all() and (lists.exp_avg_sq_absmaxs[0] == 0).all()
    assert same_bits(lists.params[0], before)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bad_gradient_spoils_its_block_alone(value, device):
    before = sample([(1000,)], device=device)
    bad = before.clone()
    bad.grads[0][300] = value
    clean, spoiled = run(before.clone()), run(bad)
    for name in ("exp_avg_absmaxs", "exp_avg_sq_absmaxs"):
        scales, others = (getattr(x, name)[0] for x in (spoiled, clean))
        assert not scales[1].isfinite()
        assert same_bits(scales[[0, 2, 3]], others[[0, 2, 3]])
    elsewhere = torch.arange(1000, device=device) != 300
    assert same_bits(spoiled.params[0][elsewhere], clean.params[0][elsewhere])
    run(spoiled)
    block = torch.arange(1000, device=device) // 256 == 1
    assert torch.equal(spoiled.params[0].isnan(), block)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("rule", ["skip_nonfinite", "bnb_exact"])
def test_elements_with_bad_gradients_are_left_out(rule, value, device):
    before = sample(SHAPES, device=device)
    for grad in before.grads:
        grad.view(-1)[::5] = value
    got = run(before.clone(), **{rule: True})
    check_moments(got, before, **{rule: True})
    for new, old, grad in zip(got.params, before.params, before.grads):
        assert same_bits(new.view(-1)[::5], old.view(-1)[::5])
        assert torch.equal(new != old, grad.isfinite())


# --- bitsandbytes' rule --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"weight_decay": 0.0}], ids=str)
@pytest.mark.parametrize("steps", [0, 1000])
def test_bnb_exact_against_float64(steps, options, device):
    before = sample(SHAPES, device=device, steps=steps)
    got = run(before.clone(), bnb_exact=True, **options)
    check_moments(got, before, bnb_exact=True, **options)
    for k, param in enumerate(got.params):
        old, new = (
            before.params[k].cpu().double(),
            step64(before, k, EXACT | options | BNB_EXACT)[0],
        )
        assert ((param.cpu() - new).abs() <= TINY * (old.abs() + (new - old).abs())).all()


def test_bnb_exact_keeps_a_block_of_zeros(device):
    """Whatever its codes are, 0 / 0, they stand for zero."""
    lists = sample([(300,)], device=device)
    lists.grads[0].zero_()
    for scales in (*lists.exp_avg_absmaxs, *lists.exp_avg_sq_absmaxs):
        scales.zero_()
    before = lists.params[0].clone()
    for _ in range(2):
        run(lists, bnb_exact=True, weight_decay=0.0)
        assert (lists.exp_avg_absmaxs[0] == 0).all() and (lists.exp_avg_sq_absmaxs[0] == 0).all()
        assert same_bits(lists.params[0], before)


# --- Bounded updates -----------------------------------------------------------------------------


def test_updates_are_bounded_and_those_of_bnb_exact_are_not():
    """Heavy-tailed gradients: see examples/bounded_updates.py. [seeds, settings]"""
    exact, ours, bnb = (bounded_updates.worst(rule, seeds=8) for rule in bounded_updates.RULES)
    assert (exact < 1.5).all()
    ratio = ours / exact
    assert (ratio.quantile(0.5, 0) <= 1.7).all() and (ratio <= 3).all(), ratio
    mild, *heavy = (bnb / exact).quantile(0.5, 0)
    assert mild < 3 and all(ratio > 1000 for ratio in heavy), bnb / exact


# --- Stochastic rounding -------------------------------------------------------------------------


def stochastic(count=1 << 16, y=0.0437, steps=0, seed=1, device="cpu"):
    """First moments that are y in a block whose largest is 1; the first of each block is that."""
    grad = torch.full((count,), y)
    grad[::256] = 1
    zeros = [torch.zeros(count, dtype=torch.uint8), torch.zeros(-(-count // 256))]
    step = torch.tensor(float(steps), dtype=torch.float64)
    tensors = [torch.ones(count), grad * 10, *zeros, *(t.clone() for t in zeros), step]
    lists = Sample(*([tensor.to(device)] for tensor in tensors))
    return run(lists, seeds=[seed], weight_decay=0.0)


@pytest.mark.parametrize("y", [0.0437, -0.3333, 0.9, 3e-5, -1e-7])
def test_stochastic_codes_are_neighbors_and_right_on_average(y, device):
    lists = stochastic(y=y, device=device)
    codes = lists.exp_avgs[0].cpu()
    rest = torch.arange(len(codes)) % 256 != 0
    assert (codes[~rest] == 255).all()
    values = MAPS[True]
    y = (lists.grads[0][1] / lists.grads[0][0]).cpu().double().item()
    high = torch.searchsorted(values, y).item()
    chance = ((y - values[high - 1]) / (values[high] - values[high - 1])).item()
    assert set(codes[rest].tolist()) <= {high - 1, high}
    share = (codes[rest] == high).double().mean().item()
    deviation = math.sqrt(chance * (1 - chance) / rest.sum().item())
    assert abs(share - chance) < 5 * deviation + 1e-5


def test_stochastic_codes_depend_on_seed_step_and_element_alone(device):
    codes = stochastic(device=device).exp_avgs[0]
    assert torch.equal(codes, stochastic(device=device).exp_avgs[0])
    shorter = stochastic(count=1 << 12, device=device).exp_avgs[0]
    assert torch.equal(codes[: 1 << 12], shorter)
    others = {"seed": {"seed": 2}, "step": {"steps": 1}, "high half": {"seed": 1 + 2**63}}
    for name, options in others.items():
        same = (codes == stochastic(device=device, **options).exp_avgs[0]).double().mean()
        assert same < 0.95, name
    assert (codes[256:512] != codes[512:768]).any()


def test_stochastic_codes_do_not_depend_on_the_list(device):
    before = sample([(500,), (300,), (0,), (4000,)], device=device)
    together = run(before.clone(), seeds=[7, 2**64 - 1, 3, -1])
    for k, seed in enumerate([7, -1, 3, 2**64 - 1]):
        alone = run(before.clone().at(slice(k, k + 1)), seeds=[seed])
        assert_same_bits(alone.tensors(), together.at(slice(k, k + 1)).tensors())


def test_stochastic_rounding_changes_codes_alone(device):
    """The parameter sees the moments before they are rounded."""
    before = sample(SHAPES, device=device)
    nearest, rounded = run(before.clone()), run(before.clone(), seeds=range(len(SHAPES)))
    for name in ("params", "exp_avg_absmaxs", "exp_avg_sq_absmaxs", "steps"):
        assert_same_bits(getattr(nearest, name), getattr(rounded, name))
    for name in ("exp_avgs", "exp_avg_sqs"):
        far = [
            (a.int() - b.int()).abs().max().item()
            for a, b in zip(getattr(nearest, name), getattr(rounded, name))
        ]
        assert max(far) == 1, name


# --- Layouts -------------------------------------------------------------------------------------

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


# --- torch.compile -------------------------------------------------------------------------------


def step_op(*lists, **options):
    headroom.functional.adamw8bit_(*lists, **(OPTIONS | options))


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
COMPILED = {
    "default": {},
    "bnb_exact": BNB_EXACT,
    "stochastic": {"seeds": [2**64 - 1, 3, 4]},
    "L2, skip_nonfinite": {"decoupled": False, "skip_nonfinite": True},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_compiled(backend, options, fresh_dynamo):
    eager = sample(param=torch.bfloat16)
    compiled = eager.clone()
    addresses = [t.data_ptr() for t in compiled.tensors()]
    step = torch.compile(step_op, backend=backend, fullgraph=True)
    for lr in (1e-2, 1e-2, 1e-3):
        step_op(*eager.lists(), lr=lr, **options)
        step(*compiled.lists(), lr=lr, **options)
        assert_same_bits(eager.tensors(), compiled.tensors())
    assert addresses == [t.data_ptr() for t in compiled.tensors()]


def test_compiled_with_dynamic_shapes(fresh_dynamo):
    step = torch.compile(step_op, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (5, 90, 300):
        eager = sample([(n, 3), (n,)])
        compiled = eager.clone()
        step_op(*eager.lists())
        step(*compiled.lists())
        assert_same_bits(eager.tensors(), compiled.tensors())


def test_the_map_in_a_compiled_function(fresh_dynamo):
    decode = torch.compile(
        lambda codes: headroom.functional.dynamic_map(True)[codes.int()],
        backend="aot_eager",
        fullgraph=True,
    )
    codes = torch.arange(256, dtype=torch.uint8)
    assert same_bits(decode(codes), headroom.functional.dynamic_map(True))


class Stepper(torch.nn.Module):
    """An update whose parameters and states are buffers."""

    def __init__(self):
        super().__init__()
        for name, (tensor,) in zip("pgmavbt", sample([(20, 30)]).lists()):
            self.register_buffer(name, tensor)

    def forward(self, grad):
        step_op(*([t] for t in (self.p, grad, self.m, self.a, self.v, self.b, self.t)))
        return self.p * 2


def test_export():
    module = Stepper()
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, (torch.ones(20, 30),)), file)
    file.seek(0)
    exported = torch.export.load(file).module()
    for _ in range(3):
        grad = torch.randn(20, 30)
        assert torch.equal(module(grad), exported(grad))
    assert_same_bits(module.buffers(), exported.buffers())


# --- Bad inputs ----------------------------------------------------------------------------------


NAMES = [f.name for f in fields(Sample)]
SHAPED = ("params", "grads", "exp_avgs", "exp_avg_sqs")
CODES = ("exp_avgs", "exp_avg_sqs")
ABSMAXS = ("exp_avg_absmaxs", "exp_avg_sq_absmaxs")


def bad_lists():
    for name in NAMES[1:]:
        words = f"{'state_steps' if name == 'steps' else name} has 2 tensors"
        yield f"{name} too short", lambda lists, _, n=name: getattr(lists, n).pop(), words
    yield "params too short", lambda lists, _: lists.params.pop(), "grads has 3 tensors"
    for name in NAMES[:-1]:
        kinds = {torch.float64, torch.int32, torch.bool, torch.int8, torch.complex64, torch.uint8}
        kinds |= {torch.float32, torch.bfloat16}
        right = {torch.uint8} if name in CODES else {torch.float32}
        right |= {torch.bfloat16} if name in ("params", "grads") else set()
        for dtype in sorted(kinds - right, key=str):
            yield f"{name} {dtype}", put(name, 2, of_dtype(dtype)), rf"{name}\[2\]"
    for name in SHAPED:
        if name != "params":
            words = rf"{name}\[0\] has another shape than params\[0\]"
            yield f"{name} of another shape", put(name, 0, lambda t: t.reshape(-1)), words
            yield f"{name} broadcastable", put(name, 0, lambda t: t[:1]), words
        if name != "grads":
            for make in (expanded, overlapping):
                words = rf"{name}\[0\] has elements that share memory"
                yield f"{name} {make.__name__}", put(name, 0, make), words
    for name in ("params", "grads"):
        yield f"{name} misaligned", put(name, 0, misaligned), rf"{name}\[0\] is at"
    for name in ABSMAXS:
        for wrong in (1, 3):
            words = rf"{name}\[0\] has numel {wrong}, wanted 2"
            yield f"{name} of {wrong}", put(name, 0, lambda t, n=wrong: t.new_zeros(n)), words
        words = rf"{name}\[0\] must be float32 and contiguous"
        yield f"{name} strided", put(name, 0, lambda t: t.new_zeros(4)[::2]), words
        yield f"{name} expanded", put(name, 0, lambda t: t[:1].expand(2)), words
        yield f"{name} misaligned", put(name, 0, misaligned), rf"{name}\[0\] is at"


def bad_steps():
    for value in (-1.0, NAN, INF, 2.0**53):
        make = put("steps", 1, lambda s, v=value: one(v, torch.float64))
        yield f"step {value}", make, r"steps\[1\]"
    yield "step of integers", put("steps", 1, of_dtype(torch.int64)), r"steps\[1\]"
    yield "step of 2", put("steps", 1, lambda s: torch.zeros(2, dtype=s.dtype)), r"steps\[1\]"
    yield "step of 0", put("steps", 1, lambda s: torch.zeros(0, dtype=s.dtype)), r"steps\[1\]"


def bad_options():
    for name, values in {
        "lr": (-1.0, NAN, INF),
        "beta1": (1.0, -0.1, NAN),
        "beta2": (1.0, -0.1, NAN),
        "eps": (-1.0, NAN, INF),
        "weight_decay": (-1.0, NAN, INF),
        "block_size": (0, -256, 1, 255, 1024, 2**32 + 256),
    }.items():
        for value in values:
            yield f"{name} {value}", option(**{name: value}), f"{name} is"
    for value in (-1.0, NAN, INF):
        yield f"lr tensor {value}", option(lr=one(value)), "lr_ptr is"
    yield "lr tensor of 2", option(lr=torch.ones(2)), "lr_tensor has 2 elements"
    yield "lr tensor bfloat16", option(lr=one(1.0, torch.bfloat16)), "lr_tensor must be"
    for value in (0.0, -1.0, NAN, INF):
        yield f"grad_scale {value}", option(grad_scale=one(value)), "grad_scale is"
    for name in ("grad_scale", "found_inf", "clip_coef"):
        wanted = f"{name} must be a float32 tensor of one element"
        yield f"{name} float64", option(**{name: one(1.0, torch.float64)}), wanted
        yield f"{name} of 2", option(**{name: torch.ones(2)}), wanted
    for more in ({"decoupled": False}, {"skip_nonfinite": True}, {"seeds": [1, 2, 3]}):
        yield f"bnb_exact, {more}", option(bnb_exact=True, **more), "bnb_exact"
    for seeds in ([], [1], [1, 2, 3, 4]):
        yield (
            f"{len(seeds)} seeds",
            option(seeds=seeds),
            f"seeds has {len(seeds)} numbers, wanted 3",
        )


BAD_CALLS = [*bad_lists(), *bad_steps(), *bad_options()]


@pytest.mark.parametrize(
    "change, words", [case[1:] for case in BAD_CALLS], ids=[c[0] for c in BAD_CALLS]
)
def test_the_op_refuses(change, words):
    lists, options = sample([(30, 14), (), (5,)]), dict(OPTIONS)
    change(lists, options)
    kept = snapshot(lists.tensors())
    with pytest.raises(RuntimeError, match=words):
        headroom.functional.adamw8bit_(*lists.lists(), **options)
    assert_untouched(kept)


def test_bnb_exact_refuses_other_blocks():
    lists = sample([(300,)], block_size=64)
    kept = snapshot(lists.tensors())
    with pytest.raises(RuntimeError, match="block_size is 64, but bnb_exact needs 256"):
        run(lists, block_size=64, bnb_exact=True)
    assert_untouched(kept)


def of_values(name):
    return re.search(
        r"nan|inf|-1|2\.0|9007|grad_scale 0|misaligned|beta|eps|decay|overlap|expanded", name
    )


TRACED = [case for case in BAD_CALLS if not of_values(case[0])]


@pytest.mark.parametrize("change", [case[1] for case in TRACED], ids=[c[0] for c in TRACED])
def test_what_eager_mode_refuses_is_refused_while_tracing(change):
    lists, options = sample([(30, 14), (), (5,)]), dict(OPTIONS)
    change(lists, options)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError):
        columns, options = tree_map_only(torch.Tensor, mode.from_tensor, (lists.lists(), options))
        headroom.functional.adamw8bit_(*columns, **options)


def test_a_derivative_is_refused_and_nothing_is_written():
    lists = sample([(5,)])
    lists.params[0].requires_grad_()
    kept = snapshot(lists.tensors())
    with pytest.raises(RuntimeError, match="no derivative.*no_grad"):
        run(lists)
    assert_untouched(kept)
    with torch.no_grad():
        run(lists)


def test_the_op_refuses_a_list_on_two_devices(device):
    if device == "cpu":
        pytest.skip("needs a second device")
    for name in NAMES:
        lists = sample([(30, 14), (5,)], device=device)
        getattr(lists, name)[1] = getattr(lists, name)[1].cpu()
        kept = snapshot(lists.tensors())
        with pytest.raises(RuntimeError, match=r"\[1\] is on"):
            run(lists)
        assert_untouched(kept)

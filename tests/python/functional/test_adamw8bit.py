"""The op headroom::adamw8bit_: its registration, codes and updates against float64, options, and
bounded updates."""

import itertools

import headroom
import pytest
import torch
from headroom._core.table import table_of

import bounded_updates
from helpers.bad_inputs import (
    assert_untouched,
    snapshot,
)
from helpers.bits import assert_same_bits, same_bits, ulps
from helpers.layouts import transposed
from helpers.reference8bit import (
    EXACT,
    OPTIONS,
    SHAPES,
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

NAN, INF = float("nan"), float("inf")
BNB_EXACT = {"bnb_exact": True}

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

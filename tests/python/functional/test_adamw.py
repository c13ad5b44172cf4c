"""The op headroom::adamw_: its registration, its accuracy, and its options."""

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits, bits, same_bits, ulps
from helpers.reference import error, reference_step, torch_fused
from helpers.samples import (
    DEFAULTS,
    FLOATS,
    MIXES,
    Sample,
    mix_name,
    name_of,
    run,
    sample,
    scalar,
    table,
)

OPS = sorted(
    schema.name
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("headroom::") and "adamw_" in schema.name
)


# --- The schema, the fake and the registrations --------------------------------------------------


def opcheck_inputs(op, device):
    """(args, kwargs) of calls that opcheck should look at."""
    options = DEFAULTS | {"lr": 0.01}
    samples = [(sample(device=device, param=p, grad=g, state=s), {}) for p, g, s in MIXES[::4]]
    samples.append((sample(shapes=[(0,), (3, 4), ()], device=device), {}))
    samples.append((sample(device=device, amsgrad=True), {"amsgrad": True, "maximize": True}))
    scalars = {name: scalar(0.5, device) for name in ("lr_tensor", "grad_scale", "clip_coef")}
    samples.append((sample(device=device), scalars | {"found_inf": scalar(0.0, device)}))
    for lists, more in samples:
        if op == "headroom::adamw_":
            yield (*lists.lists(), []), options | more
        elif op == "headroom::_adamw_table_":
            yield (lists.params[0], table(lists)), options | more
        else:
            pytest.fail(f"{op} has no sample inputs; add some")
    if op == "headroom::adamw_":
        turned = sample(shapes=[(5, 7), (2, 3, 4)], device=device)
        turned = turned.map(lambda t: t.transpose(0, -1) if t.dim() else t)
        yield (*turned.lists(), []), options


# The internal op deals in addresses, which mean nothing for a fake tensor. Nothing traces it.
OPCHECKS = {"headroom::_adamw_table_": ("test_schema", "test_autograd_registration")}
EVERY_CHECK = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, device):
    namespace, name = op.split("::")
    overload = getattr(getattr(torch.ops, namespace), name).default
    count = 0
    for args, kwargs in opcheck_inputs(op, device):
        torch.library.opcheck(overload, args, kwargs, test_utils=OPCHECKS.get(op, EVERY_CHECK))
        count += 1
    assert count > 0


def test_the_op_is_registered():
    assert "headroom::adamw_" in OPS


def test_the_version_counters_of_all_that_is_written_grow(device):
    lists = sample(device=device, amsgrad=True)
    before = [tensor._version for tensor in lists.tensors()]
    run(lists, amsgrad=True)
    grown = [tensor._version > version for tensor, version in zip(lists.tensors(), before)]
    written = [column is not lists.grads for column in lists.lists() for _ in column]
    assert grown == written


# --- Accuracy ------------------------------------------------------------------------------------


SHAPES = ((31, 17),) * 24  # every tensor at another step, so that no constant is lucky


@pytest.mark.parametrize("amsgrad", [False, True], ids=["plain", "amsgrad"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_error_is_at_most_twice_that_of_torch(dtype, amsgrad, device):
    lists = sample(SHAPES, dtype, dtype, dtype, device, amsgrad=amsgrad)
    exact = reference_step(lists, amsgrad=amsgrad)
    ours = error(run(lists.clone(), amsgrad=amsgrad), exact)
    torchs = error(torch_fused(lists.clone(), amsgrad=amsgrad), exact)
    for name, far in ours.items():
        assert far <= 2 * torchs[name], f"{name}: {far} against {torchs[name]}"


@pytest.mark.parametrize("amsgrad", [False, True], ids=["plain", "amsgrad"])
@pytest.mark.parametrize("mix", MIXES, ids=mix_name)
def test_every_mix_of_dtypes(mix, amsgrad, device):
    """A mix gives what float32 gives on the same values, rounded once. Torch has no such mixes:
    float32 is held against torch's float32, 16-bit results against the float64 reference."""
    lists = sample(SHAPES, *mix, device, amsgrad=amsgrad)
    exact = reference_step(lists, amsgrad=amsgrad)
    wide = run(lists.to(torch.float32), amsgrad=amsgrad)
    limits = error(torch_fused(lists.to(torch.float32), amsgrad=amsgrad), exact)
    got = run(lists.clone(), amsgrad=amsgrad)
    for name, far in error(wide, exact).items():
        assert far <= 2 * limits[name], name
        ours, ours32, best = (
            torch.cat([t.flatten() for t in getattr(of, name)]) for of in (got, wide, exact)
        )
        assert same_bits(ours, ours32.to(ours.dtype)), name
        if ours.dtype != torch.float32:
            # What nearly cancels has the last places of float32, which may be many of its own.
            whole = best.abs() > 1e-3 * best.square().mean().sqrt()
            assert ulps(ours, best.to(ours.dtype))[whole.cpu()].max() <= 1, name
    assert [step.item() for step in got.steps] == [step.item() + 1 for step in lists.steps]
    assert_same_bits(got.grads, lists.grads)


OPTIONS = {
    "no weight decay": {"weight_decay": 0.0},
    "L2": {"decoupled": False},
    "L2, amsgrad, maximize": {"decoupled": False, "amsgrad": True, "maximize": True},
    "maximize": {"maximize": True},
    "large eps": {"eps": 0.1},
    "eps 0": {"eps": 0.0},
    "lr 0": {"lr": 0.0},
    "beta1 0": {"beta1": 0.0},
    "beta2 0": {"beta2": 0.0},
    "slow betas": {"beta1": 0.99, "beta2": 0.99999},
}


@pytest.mark.parametrize("steps", [0, 1000])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, steps, device):
    lists = sample(SHAPES, device=device, amsgrad=options.get("amsgrad", False), steps=steps)
    exact = reference_step(lists, **options)
    ours = error(run(lists.clone(), **options), exact)
    torchs = error(torch_fused(lists.clone(), **options), exact)
    for name, far in ours.items():
        # One rounding is allowed where torch happens to be exact.
        assert far <= max(2 * torchs[name], 2**-24), f"{name}: {far} against {torchs[name]}"


SCALARS = {
    "grad_scale": ({"grad_scale": 1024.0}, 1 / 1024),
    "grad_scale, not a power of 2": ({"grad_scale": 3.0}, 1 / 3),
    "clip_coef": ({"clip_coef": 0.3}, 0.3),
    "both": ({"clip_coef": 0.25, "grad_scale": 7.0}, 0.25 / 7),
    "found_inf 0": ({"found_inf": 0.0}, 1.0),
}


@pytest.mark.parametrize("scalars, factor", SCALARS.values(), ids=SCALARS)
@pytest.mark.parametrize("maximize", [False, True])
def test_scalars_on_the_device(scalars, factor, maximize, device):
    factor = torch.tensor(factor).item() if "clip_coef" not in scalars else factor
    lists = sample(SHAPES, device=device)
    exact = reference_step(lists, factor=factor, maximize=maximize)
    tensors = {name: scalar(value, device) for name, value in scalars.items()}
    ours = error(run(lists.clone(), maximize=maximize, **tensors), exact)
    scaled = lists.clone()
    scaled.grads = [grad * factor for grad in scaled.grads]
    torchs = error(torch_fused(scaled, maximize=maximize), exact)
    for name, far in ours.items():
        # The factor is rounded to float32 once, and squared in the second moment.
        assert far <= 2 * torchs[name] + 2**-23, f"{name}: {far} against {torchs[name]}"


@pytest.mark.parametrize("flag", [1.0, -1.0, float("inf"), float("nan"), 1e-45])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_found_inf_changes_no_byte(flag, strided, device):
    lists = sample(SHAPES, device=device, amsgrad=True)
    lists.grads[0][3] = float("inf")
    if strided:
        lists = lists.map(lambda t: t.t() if t.dim() == 2 else t)
        lists.grads[0] = lists.grads[0].contiguous()
    before = [bits(tensor).clone() for tensor in lists.tensors()]
    run(lists, amsgrad=True, found_inf=scalar(flag, device))
    assert all(torch.equal(bits(now), then) for now, then in zip(lists.tensors(), before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-dim", "1-element"])
def test_lr_tensor(dtype, shape, device):
    lists = sample(device=device)
    lr = torch.full(shape, 0.03, dtype=dtype, device=device)
    by_tensor, by_number = run(lists.clone(), lr=lr), run(lists.clone(), lr=lr.item())
    assert_same_bits(by_tensor, by_number)
    lr.fill_(0.5)  # read anew at every call
    assert_same_bits(run(by_tensor, lr=lr), run(by_number, lr=0.5))


def test_lr_tensor_on_the_cpu_serves_any_device(device):
    lists = sample(device=device)
    lr = torch.tensor(0.03, dtype=torch.float64)
    assert_same_bits(run(lists.clone(), lr=lr), run(lists.clone(), lr=0.03))


def test_every_tensor_has_its_own_step(device):
    lists = sample([(100,)] * 4, device=device)
    for step, count in zip(lists.steps, (0, 1, 99, 2**24)):
        step.fill_(count)
    together = run(lists.clone())
    for k in range(4):
        alone = run(Sample(*(column[k : k + 1] for column in lists.clone().lists())))
        for one, all_ in zip(alone.lists(), together.lists()):
            assert_same_bits(one, all_[k : k + 1])
    exact = reference_step(lists)
    limit = error(torch_fused(lists.clone()), exact)
    assert error(together, exact)["params"] <= 2 * limit["params"]


@pytest.mark.parametrize(
    "dtype, before, after",
    [
        (torch.float32, 0, 1),
        (torch.float32, 2**24, 2**24),  # float32 has no 2^24 + 1
        (torch.float64, 2**24, 2**24 + 1),
        (torch.float64, 2**31, 2**31 + 1),
        (torch.float64, 2**52, 2**52 + 1),
    ],
)
def test_counters(dtype, before, after, device):
    lists = sample(device=device, step_dtype=dtype)
    for step in lists.steps:
        step.fill_(before)
    run(lists)
    assert [step.item() for step in lists.steps] == [after] * len(lists.steps)
    assert all(tensor.isfinite().all() for tensor in lists.tensors())


def test_no_parameters():
    assert headroom.functional.adamw_([], [], [], [], [], [], **DEFAULTS) is None

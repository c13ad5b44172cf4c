"""The ops headroom::unscale_norm_ and headroom::grad_norm as they are called: lists, layouts, what
is written and what is refused. What they compute is in test_unscale_norm_values.py."""

import math
from functools import partial

import headroom
import pytest
import torch
from headroom._core.table import table_of

from helpers.bits import assert_same_bits, bits
from helpers.gradient_norms import MEASURE, OPS, SHAPES, UNSCALE, gradients, results
from helpers.layouts import offset, sliced, transposed
from helpers.samples import FLOATS, scalar

EVERY_CHECK = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


# ---- Registration --------------------------------------------------------------------------------


def calls(device):
    grads = gradients(((3, 4), (), (0, 2), (17,)), device=device)
    yield (grads,), results(4, device)
    yield (grads,), {"norm": scalar(0.0, device)}
    more = {"grad_scale": scalar(8.0, device), "clip_coef": scalar(0.5, device)}
    yield (grads,), results(4, device) | more | {"p": 3.0, "max_norm": 1.0}
    yield ([g.t() if g.dim() == 2 else g for g in grads],), {"found_inf": scalar(0.0, device)}


@pytest.mark.parametrize("name", ["unscale_norm_", "grad_norm"])
def test_any_iterable_of_gradients_but_a_tensor(name):
    op, norm, grads = (
        getattr(headroom.functional, name),
        torch.zeros(()),
        [torch.ones(4), torch.ones(12)],
    )
    op((grad for grad in grads), norm=norm)
    assert norm == 4
    with pytest.raises(TypeError, match="grads must be a list of tensors, got a Tensor"):
        op(grads[0], norm=norm)


@pytest.mark.parametrize("name", ["unscale_norm_", "grad_norm"])
def test_opcheck(name, device):
    op = getattr(torch.ops.headroom, name).default
    for args, kwargs in calls(device):
        torch.library.opcheck(op, args, kwargs, test_utils=EVERY_CHECK)


@pytest.mark.parametrize("name", ["_unscale_norm_table_", "_grad_norm_table"])
def test_opcheck_of_tables(name, device):
    """They deal in addresses, which mean nothing for a fake tensor. Nothing traces them."""
    op = getattr(torch.ops.headroom, name).default
    for (grads,), kwargs in calls(device):
        if (table := table_of((grads,))) is not None:
            torch.library.opcheck(op, (grads[0], table), kwargs, test_utils=EVERY_CHECK[:2])


@OPS
def test_what_is_written_grows_a_version(op, device):
    grads, out = gradients(device=device), results(len(SHAPES), device)
    scale = scalar(2.0, device)
    before = [t._version for t in (*grads, *out.values(), scale)]
    op(grads, **out, grad_scale=scale)
    grown = [t._version > v for t, v in zip((*grads, *out.values(), scale), before)]
    assert grown == [op is UNSCALE] * len(grads) + [True] * len(out) + [False]


@OPS
def test_tensors_that_require_grad_are_refused(op):
    grads = gradients()
    grads[2].requires_grad_()
    norm = scalar(7.0)
    with pytest.raises(RuntimeError, match="has no derivative"):
        op(grads, norm=norm)
    assert norm == 7
    with torch.no_grad():
        op(grads, norm=norm)
    assert norm != 7


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@OPS
def test_compiled_whole(op, backend, device):
    torch._dynamo.reset()
    options = dict(p=1.0, max_norm=2.0, grad_scale=scalar(4.0, device))
    eager, compiled = gradients(device=device), gradients(device=device)
    want, got = results(len(SHAPES), device), results(len(SHAPES), device)
    op(eager, **want, **options)
    torch.compile(lambda g, o: op(g, **o, **options), backend=backend, fullgraph=True)(
        compiled, got
    )
    assert_same_bits(compiled, eager)
    assert_same_bits(got.values(), want.values())


@OPS
def test_profiler_knows_the_name(op):
    with torch.profiler.profile() as profile:
        op(gradients(), norm=scalar(0.0))
        op([torch.randn(4, 6)[:, ::2]], norm=scalar(0.0))
    names = {event.key for event in profile.key_averages()}
    assert f"headroom::{op.__name__}" in names
    assert {"headroom::_unscale_norm_table_", "headroom::_grad_norm_table"} & names


@pytest.mark.parametrize("position", range(4))
def test_empty_tensors_at_every_position(position, device):
    grads = gradients(((40,), (3, 3), ()), device=device)
    want = results(3, device)
    MEASURE(grads, **want)
    grads.insert(position, torch.empty((2, 0), device=device, dtype=torch.bfloat16))
    got = results(4, device)
    UNSCALE(grads, **got)
    assert got["norms"][position] == 0
    rest = torch.cat([got["norms"][:position], got["norms"][position + 1 :]])
    assert_same_bits([got["norm"], rest], [want["norm"], want["norms"]])


@pytest.mark.parametrize("count", [1, 3])
def test_only_empty_tensors(count, device):
    out = results(count, device)
    UNSCALE([torch.empty(0, device=device) for _ in range(count)], **out, max_norm=1.0)
    assert out["norm"] == 0 and out["clip"] == 1 and out["culprit"] == -1
    assert out["norms"].eq(0).all() and out["found_inf"] == 7


@OPS
def test_no_gradients_write_nothing(op):
    norm = scalar(7.0)
    assert op([], norm=norm) is None and norm == 7


def test_a_factor_of_one_writes_nothing(device):
    """Not even a NaN is made the usual one: a read-only page would do."""
    raw = torch.tensor([0x7FC12345, 0x3F800000, -0x80000000], dtype=torch.int32, device=device)
    grads = [raw.view(torch.float32)]
    UNSCALE(grads, clip_coef=scalar(1.0, device))
    UNSCALE(grads, norm=scalar(0.0, device), grad_scale=scalar(1.0, device))
    assert raw.tolist() == [0x7FC12345, 0x3F800000, -0x80000000]


# ---- Layouts -------------------------------------------------------------------------------------


LAYOUTS = {
    "transposed": transposed,
    "sliced": partial(sliced, fill=math.nan),
    "unaligned": partial(offset, fill=math.nan),
    "reversed rows": lambda t: t.contiguous()[:, ::3],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@OPS
def test_strides_do_not_matter(op, dtype, layout, device):
    grads = [layout(g) for g in gradients(((6, 9), (33, 66)), [dtype], device)]
    flat = [g.clone(memory_format=torch.contiguous_format) for g in grads]
    want, got = results(2, device), results(2, device)
    scale = scalar(3.0, device)
    op(flat, **want, grad_scale=scale)
    op(grads, **got, grad_scale=scale)
    assert_same_bits(grads, flat)
    for name, value in want.items():  # another order of summing
        assert (got[name] - value).abs().max() <= 2**-23 * value.abs().max(), name


def test_expanded_gradients_are_measured_but_not_written(device):
    """As `loss = params.sum()` gives them."""
    grad, out = scalar(2.0, device).expand(10, 10), results(1, device)
    MEASURE([grad], **out)
    assert out["norm"] == 20
    with pytest.raises(RuntimeError, match=r"grads\[0\] has elements that share memory"):
        UNSCALE([grad], clip_coef=scalar(0.5, device))
    assert grad[0, 0] == 2


# ---- Bad inputs ----------------------------------------------------------------------------------


CASES = {
    "float64 gradient": (lambda g, o: g.__setitem__(4, torch.ones(3).double()), r"grads\[4\]"),
    "integer gradient": (
        lambda g, o: g.__setitem__(4, torch.ones(3).int()),
        r"grads\[4\] has dtype Int",
    ),
    "meta gradient": (
        lambda g, o: g.__setitem__(4, torch.ones(3, device="meta")),
        r"meta|grads\[4\]",
    ),
    "norms of another length": (lambda g, o: o.update(norms=torch.zeros(4)), "norms must be"),
    "norms with gaps": (lambda g, o: o.update(norms=torch.zeros(10)[::2]), "contiguous"),
    "norm in float64": (
        lambda g, o: o.update(norm=torch.zeros((), dtype=torch.float64)),
        "norm must",
    ),
    "culprit in int32": (
        lambda g, o: o.update(culprit=torch.zeros((), dtype=torch.int32)),
        "culprit",
    ),
    "two grad_scales": (lambda g, o: o.update(grad_scale=torch.ones(2)), "grad_scale must be"),
    "grad_scale 0": (lambda g, o: o.update(grad_scale=scalar(0.0)), "finite number > 0"),
    "grad_scale NaN": (lambda g, o: o.update(grad_scale=scalar(math.nan)), "finite number > 0"),
    "p 0": (lambda g, o: o.update(p=0.0), "p is 0"),
    "p NaN": (lambda g, o: o.update(p=math.nan), "p is"),
    "max_norm < 0": (lambda g, o: o.update(max_norm=-1.0), "max_norm is -1"),
}


@pytest.mark.parametrize("spoil, message", CASES.values(), ids=CASES)
@OPS
def test_bad_inputs_change_no_byte(op, spoil, message):
    grads = gradients()
    options = results(len(SHAPES)) | {"grad_scale": scalar(2.0), "p": 2.0, "max_norm": 1.0}
    spoil(grads, options)
    tensors = [
        t for t in (*grads, *options.values()) if isinstance(t, torch.Tensor) and not t.is_meta
    ]
    before = [bits(t).clone() for t in tensors]
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        op(grads, **options)
    assert all(torch.equal(bits(t), b) for t, b in zip(tensors, before))


def test_the_fake_refuses_what_the_op_refuses():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        MEASURE([torch.ones(3)], norm=torch.zeros(()))
        for spoiled in ({"norm": torch.zeros(2)}, {"culprit": torch.zeros(())}):
            with pytest.raises(RuntimeError, match="must be a"):
                MEASURE([torch.ones(3)], **spoiled)
        with pytest.raises(RuntimeError, match="has dtype"):
            MEASURE([torch.ones(3).double()], norm=torch.zeros(()))

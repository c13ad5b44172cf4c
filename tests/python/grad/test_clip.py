"""clip_grad_norm_ and clip_grad_value_ against torch's, and max_grad_norm= of the optimizers.

Torch adds squares in float32 and rounds the norm and the coefficient to the dtype of the gradients;
ours is held against float64 to one rounding, and against torch's to torch's own error.
"""

import copy
import math
import re
import warnings

import headroom
import pytest
import torch
from headroom.grad.norm import clip_coef
from torch.nn.utils import clip_grad_norm_ as torch_clip

from helpers.bits import assert_same_bits, bits
from helpers.samples import FLOATS
from helpers.software_device import cannot_run

SHAPES = ((37, 5), (), (1,), (4097,), (64,))
ORDERS = (2.0, 1.0, 3.0, math.inf)
ULP = 2**-23
OPTIMIZERS = [headroom.optim.Adam, headroom.optim.AdamW]


def parameters(dtypes=(torch.float32,), device="cpu", seed=0, shapes=SHAPES, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    params = []
    for k, shape in enumerate(shapes):
        value = torch.randn(shape, generator=generator)
        param = torch.nn.Parameter(value.to(device, dtypes[k % len(dtypes)]))
        param.grad = (size * torch.randn(shape, generator=generator)).to(param)
        params.append(param)
    return params


def grads(params):
    return [p.grad for p in params]


def norm64(params, p):
    return torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in grads(params)]), p)


# ---- clip_grad_norm_ -----------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e4, 0.0])
@pytest.mark.parametrize("p", ORDERS)
def test_float32_as_torch(p, max_norm, device):
    ours, theirs = (parameters(device=device) for _ in range(2))
    exact = norm64(ours, p).item()
    norm = headroom.clip_grad_norm_(ours, max_norm, p)
    torch_norm = torch_clip(theirs, max_norm, p)
    assert norm.shape == torch_norm.shape and norm.dtype == torch_norm.dtype
    assert norm.item() == pytest.approx(exact, rel=ULP if device == "cpu" else 4 * ULP)
    # Torch's sum of 4097 squares in float32 is a few units off.
    for a, b in zip(grads(ours), grads(theirs)):
        torch.testing.assert_close(a, b, rtol=16 * ULP, atol=0)


@pytest.mark.parametrize("dtypes", [FLOATS, FLOATS[1:2], FLOATS[2:]], ids=["mixed", "bf16", "f16"])
@pytest.mark.parametrize("p", ORDERS)
def test_other_dtypes_against_float64(p, dtypes, device):
    params = parameters(dtypes, device)
    exact = norm64(params, p).item()
    coef = min(1.0, 0.5 / (exact + 1e-6))
    want = [(g.float() * torch.tensor(coef, device=device)).to(g.dtype) for g in grads(params)]
    norm = headroom.clip_grad_norm_(params, 0.5, p)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact, rel=ULP if device == "cpu" else 4 * ULP)
    for got, expected in zip(grads(params), want):
        # The coefficient is a float32 too, so a tie may round the other way.
        torch.testing.assert_close(got, expected, rtol=torch.finfo(got.dtype).eps, atol=1e-7)


@pytest.mark.parametrize("p", ORDERS)
def test_empty_gradients(p, device):
    """Of which torch refuses the infinity norm."""
    with_empty = parameters(device=device, shapes=((3, 4), (0, 2), (5,)))
    want = norm64(with_empty[:1] + with_empty[2:], p).item()
    assert headroom.clip_grad_norm_(with_empty, 0.5, p).item() == pytest.approx(want)
    assert norm64(with_empty[:1] + with_empty[2:], p).item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("p", (*ORDERS, 0.0, -1.0, -math.inf))
def test_empty_gradients_that_are_left_to_torch(p, dtype):
    """It refuses norms of them of order infinity and of orders below 0."""
    full, empty = (torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in (3, 0))
    full.grad, empty.grad = torch.full_like(full, 2), torch.ones_like(empty)
    alone = copy.deepcopy(full)
    alone.grad = full.grad.clone()
    assert headroom.grad_norm([empty, full], p) == headroom.grad_norm([alone], p)
    assert headroom.clip_grad_norm_([empty, full, empty], 1.0, p) == torch_clip(alone, 1.0, p)
    assert_same_bits([full.grad], [alone.grad])
    for norm in (headroom.clip_grad_norm_([empty], 1.0, p), headroom.grad_norm(empty, p)):
        assert norm == 0 and norm.dtype == dtype.to_real()


def test_a_gradient_of_torchs_that_is_given_twice_counts_once():
    (param,) = parameters((torch.float64,), shapes=((5,),))
    expected = param.grad.norm()
    assert headroom.clip_grad_norm_([param, param], 0.5 * expected) == expected
    torch.testing.assert_close(param.grad.norm(), 0.5 * expected, rtol=1e-5, atol=0)


def test_a_generator_that_was_used_before_is_noticed():
    """As torch does: nothing would be clipped in silence."""
    params = parameters()
    for call in (lambda p: headroom.clip_grad_norm_(p, 1.0), headroom.grad_norm):
        used = (param for param in params)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert call(used) > 0
            assert call([]) == 0
        with pytest.warns(UserWarning, match="empty generator") as noticed:
            assert call(used) == 0
        assert noticed[0].filename == __file__


def test_nothing_is_written_where_nothing_is_to_be_clipped(device):
    """The usual case late in training: the second pass does not touch memory."""
    params = parameters(FLOATS, device, size=1e-4)
    params[3].grad[5] = torch.tensor(-0.0)
    kept = [g.clone() for g in grads(params)]
    assert headroom.clip_grad_norm_(params, 1.0) < 1
    assert_same_bits(grads(params), kept)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("p", ORDERS)
def test_nonfinite(p, value, device):
    ours, theirs = (parameters(device=device) for _ in range(2))
    for params in (ours, theirs):
        params[3].grad[7] = value
    kept = [bits(g).clone() for g in grads(ours)]
    with pytest.raises(RuntimeError) as torchs:
        torch_clip(theirs, 1.0, p, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=re.escape(str(torchs.value))):
        headroom.clip_grad_norm_(ours, 1.0, p, error_if_nonfinite=True)
    assert all(torch.equal(bits(g), k) for g, k in zip(grads(ours), kept))
    norm, torch_norm = headroom.clip_grad_norm_(ours, 1.0, p), torch_clip(theirs, 1.0, p)
    torch.testing.assert_close(norm, torch_norm, equal_nan=True)
    for a, b in zip(grads(ours), grads(theirs)):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_a_finite_norm_with_error_if_nonfinite(device):
    params = parameters(device=device)
    assert headroom.clip_grad_norm_(params, 1.0, error_if_nonfinite=True) > 1


def test_the_forms_of_parameters(device):
    want = headroom.clip_grad_norm_(parameters(device=device), 1.0)
    lists = {
        "generator": lambda params: (p for p in params),
        "tuple": tuple,
        "dict values": lambda params: dict(enumerate(params)).values(),
        "twice": lambda params: [*params, *params],
        "some without": lambda params: [*params, torch.nn.Parameter(torch.ones(3, device=device))],
    }
    for name, form in lists.items():
        params = parameters(device=device)
        assert headroom.clip_grad_norm_(form(params), 1.0) == want, name
        assert norm64(params, 2).item() == pytest.approx(1.0, rel=1e-5), name
    single = parameters(device=device)[0]
    assert headroom.clip_grad_norm_(single, 1.0) == headroom.clip_grad_norm_(
        parameters(device=device)[:1], 1.0
    )


def test_the_factor_of_a_norm_that_several_parts_make(device):
    """Of parts on several devices or ranks, the factor is computed in torch."""
    for norm in (0.0, 0.25, 0.5, 2.0, math.inf, math.nan):
        param = torch.nn.Parameter(torch.ones(1, device=device))
        param.grad = torch.ones(1, device=device)
        norm = torch.tensor(norm, device=device)
        torch.nn.utils.clip_grads_with_norm_([param], 0.5, norm)
        assert_same_bits([clip_coef(norm, 0.5).reshape(1)], [param.grad])


def test_no_gradients():
    params = [torch.nn.Parameter(torch.ones(3))]
    for none in (params, []):
        norm = headroom.clip_grad_norm_(none, 1.0)
        torch_norm = torch_clip(none, 1.0)
        assert norm == torch_norm == 0 and norm.shape == torch_norm.shape


@pytest.mark.parametrize("p", ["inf", 2, -math.inf, 0])
def test_orders_as_torch_takes_them(p, device):
    ours, theirs = (parameters(device=device, shapes=SHAPES[:4]) for _ in range(2))
    norm, torch_norm = headroom.clip_grad_norm_(ours, 1.0, p), torch_clip(theirs, 1.0, p)
    torch.testing.assert_close(norm, torch_norm)
    for a, b in zip(grads(ours), grads(theirs)):
        torch.testing.assert_close(a, b)


def test_float64_is_left_to_torch(device):
    ours, theirs = (parameters((torch.float64, torch.float32), device) for _ in range(2))
    norm, torch_norm = headroom.clip_grad_norm_(ours, 1.0), torch_clip(theirs, 1.0)
    assert norm.dtype == torch_norm.dtype == torch.float64 and norm == torch_norm
    assert_same_bits(grads(ours), grads(theirs))


def test_sparse_is_left_to_torch():
    errors = []
    for clip in (headroom.clip_grad_norm_, torch_clip):
        embedding = torch.nn.Embedding(5, 3, sparse=True)
        embedding(torch.tensor([1, 2, 1])).sum().backward()
        try:
            clip(embedding.parameters(), 1.0)
            errors.append(None)
        except Exception as error:
            errors.append(str(error))
    assert errors[0] == errors[1]


def test_gradients_that_require_grad(device):
    """backward(create_graph=True) leaves such."""
    param = torch.nn.Parameter(torch.ones(3, device=device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (param**3).sum().backward(create_graph=True)
    assert param.grad.requires_grad
    norm = headroom.clip_grad_norm_([param], 1.0)
    assert norm.item() == pytest.approx(27**0.5) and not norm.requires_grad
    param.grad = None


def test_clip_grad_value(device):
    ours, theirs = (parameters(FLOATS, device) for _ in range(2))
    assert headroom.clip_grad_value_(iter(ours), 0.25) is None
    torch.nn.utils.clip_grad_value_(theirs, 0.25)
    assert_same_bits(grads(ours), grads(theirs))
    assert max(g.abs().max().item() for g in grads(ours) if g.numel()) == 0.25


# ---- max_grad_norm= ------------------------------------------------------------------------------


def groups(params):
    """Three groups of another lr each: the norm is that of all of them."""
    return [{"params": params[k::3], "lr": 0.1 / (k + 1)} for k in range(3)]


def states(optimizer, params):
    return [value for p in params for value in optimizer.state[p].values()]


@pytest.mark.parametrize("how", ["constructor", "step", "step over constructor"])
@pytest.mark.parametrize("max_norm", [0.3, 1e6])
@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_float32_bits_of_clip_and_step(cls, max_norm, how, device):
    """Clipping first rounds grad * coef to the dtype of the gradient; in float32 the update does
    too, so the bits are the same. Gradients stay as they are."""
    ours, theirs = (parameters(device=device) for _ in range(2))
    given = {"constructor": max_norm, "step": None, "step over constructor": 17.0}[how]
    fused = cls(groups(ours), max_grad_norm=given)
    plain = cls(groups(theirs))
    for step in range(3):
        for params in (ours, theirs):
            for p, like in zip(params, parameters(device=device, seed=step)):
                p.grad = like.grad
        kept = [g.clone() for g in grads(ours)]
        fused.step(**({} if how == "constructor" else {"max_grad_norm": max_norm}))
        norm = headroom.clip_grad_norm_(theirs, max_norm)
        plain.step()
        assert fused.grad_norm == norm
        assert_same_bits(grads(ours), kept)
    assert_same_bits(ours, theirs)
    assert_same_bits(states(fused, ours), states(plain, theirs))


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_16_bit_is_rounded_once_less(dtype, device):
    """Clipping first rounds the gradient to 16 bits again; the fused path does not, so it is nearer
    to float64 than that."""
    fused_params, plain_params = (parameters([dtype], device) for _ in range(2))
    wide = [torch.nn.Parameter(p.detach().double()) for p in fused_params]
    for p, q in zip(wide, fused_params):
        p.grad = q.grad.double()
    options = dict(lr=0.0, weight_decay=0.0)  # only the moments move
    fused = headroom.optim.AdamW(fused_params, **options, state_dtype=torch.float32)
    plain = headroom.optim.AdamW(plain_params, **options, state_dtype=torch.float32)
    exact = torch.optim.AdamW(wide, **options)
    fused.step(max_grad_norm=0.3)
    headroom.clip_grad_norm_(plain_params, 0.3)
    plain.step()
    torch_clip(wide, 0.3)
    exact.step()

    def error(optimizer, params):
        pairs = zip(params, wide)
        left, right = zip(
            *((optimizer.state[p]["exp_avg"], exact.state[q]["exp_avg"]) for p, q in pairs)
        )
        left, right = (torch.cat([t.double().flatten() for t in side]) for side in (left, right))
        return ((left - right).norm() / right.norm()).item()

    assert error(fused, fused_params) <= 4 * 2**-24
    assert error(plain, plain_params) > 10 * error(fused, fused_params)


def test_a_gradient_that_is_not_finite_skips_the_step(device):
    params = parameters(device=device)
    optimizer = headroom.optim.AdamW(params, max_grad_norm=1.0)
    optimizer.step()
    kept = [bits(t).clone() for t in (*params, *states(optimizer, params))]
    params[3].grad[11] = math.nan
    optimizer.step()
    assert optimizer.grad_norm.isnan()
    assert all(torch.equal(bits(t), k) for t, k in zip((*params, *states(optimizer, params)), kept))
    params[3].grad[11] = 0.0
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2


def test_some_parameters_without_gradient(device):
    params = parameters(device=device)
    params[3].grad = None
    optimizer = headroom.optim.AdamW(params, max_grad_norm=0.1)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(norm64(params[:3] + params[4:], 2).item())
    assert params[3] not in optimizer.state


def test_no_gradient_at_all():
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = headroom.optim.AdamW(params, max_grad_norm=1.0)
    optimizer.step()
    assert params[0].eq(1).all() and not optimizer.state


def test_gradients_that_cannot_be_measured_are_named():
    weight = torch.nn.Embedding(5, 3, sparse=True).weight
    optimizer = headroom.optim.AdamW([("bias", torch.nn.Parameter(torch.ones(2))), ("emb", weight)])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    torch.nn.functional.embedding(torch.tensor([1, 2]), weight, sparse=True).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients, but parameter 'emb' has"):
        optimizer.step(max_grad_norm=1.0)
    assert not optimizer.state


EVERY = [*OPTIMIZERS, headroom.optim.AdamW8bit, headroom.optim.Adafactor]


@pytest.mark.parametrize("cls", EVERY)
def test_a_limit_of_a_group_is_used_or_refused(cls):
    """The norm is that of all groups, so they have one limit: that of their options."""
    first, second, given = parameters(), parameters(), dict(lr=0.1, max_grad_norm=0.3)
    want = cls(groups(first), **given)
    got = cls([group | {"max_grad_norm": 0.3} for group in groups(second)], lr=0.1)
    assert [group["max_grad_norm"] for group in got.param_groups] == [0.3] * 3
    for optimizer in (want, got):
        optimizer.step()
    assert_same_bits(first, second)
    for groups_ in ([{}, {"max_grad_norm": 0.3}], [{"max_grad_norm": 0.5}, {"max_grad_norm": 0.3}]):
        params = parameters()
        with pytest.raises(ValueError, match="but group 0 has .* and group 1 has 0.3"):
            cls([{"params": params[k::2]} | group for k, group in enumerate(groups_)])


@pytest.mark.parametrize("cls", EVERY)
def test_limits_set_in_the_groups_later(cls):
    first, second = parameters(), parameters()
    want = cls(groups(first), lr=0.1, max_grad_norm=0.3)
    got = cls(groups(second), lr=0.1, max_grad_norm=7.0)
    kept = [bits(p).clone() for p in second]
    got.param_groups[1]["max_grad_norm"] = 0.3
    with pytest.raises(ValueError, match="group 0 has 7.0 and group 1 has 0.3"):
        got.step()
    assert all(torch.equal(bits(p), k) for p, k in zip(second, kept)) and not got.state
    for group in got.param_groups:
        group["max_grad_norm"] = 0.3
    for optimizer in (want, got):
        optimizer.step()
    assert_same_bits(first, second)
    for group in got.param_groups:
        group["max_grad_norm"] = None
    got.step()
    got.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert got.param_groups[-1]["max_grad_norm"] is None
    assert got._measured is None or cls is headroom.optim.AdamW8bit


@pytest.mark.parametrize("saved", [0.3, None])
@pytest.mark.parametrize("cls", EVERY)
def test_the_limit_after_loading_is_what_the_groups_show(cls, saved):
    """That of the checkpoint, or, where it has none, the constructor's."""
    first, second = parameters(), parameters()
    source = cls(groups(first), lr=0.1, max_grad_norm=saved)
    source.step()
    target = cls(groups(second), lr=0.1, max_grad_norm=7.0)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert [group["max_grad_norm"] for group in target.param_groups] == [saved or 7.0] * 3
    with torch.no_grad():
        for p, q in zip(first, second):
            q.copy_(p)
    source.step(max_grad_norm=saved or 7.0)
    target.step()
    assert_same_bits(first, second)
    bad = source.state_dict()
    bad["param_groups"][1]["max_grad_norm"] = 0.9
    with pytest.raises(ValueError, match="and group 1 has 0.9"):
        target.load_state_dict(bad)
    assert [group["max_grad_norm"] for group in target.param_groups] == [saved or 7.0] * 3


def test_a_limit_of_zero_is_that_of_torch_and_infinity_only_measures():
    for limit in (0.0, math.inf):
        ours, theirs = parameters(), parameters()
        fused = headroom.optim.AdamW(ours, lr=0.1, max_grad_norm=limit)
        plain = headroom.optim.AdamW(theirs, lr=0.1)
        fused.step()
        norm = torch_clip(theirs, limit)
        plain.step()
        torch.testing.assert_close(fused.grad_norm, norm, rtol=16 * ULP, atol=0)
        assert_same_bits(ours, theirs)
        assert (plain.state[theirs[0]]["exp_avg"] == 0).all() == (limit == 0.0)


@pytest.mark.parametrize("name", ["found_inf", "clip_coef", "both"])
@pytest.mark.parametrize("cls", EVERY)
def test_step_scalars_beside_max_grad_norm(cls, name):
    """A given flag still skips the step, and a given coefficient multiplies that of the clip."""
    ours, theirs = parameters(), parameters()
    fused, plain = cls(groups(ours), lr=0.1, max_grad_norm=0.3), cls(groups(theirs), lr=0.1)
    given = torch.tensor(0.25)
    for flag in (0.0, 1.0):
        if name != "clip_coef":
            fused.found_inf = torch.tensor(flag)
        if name != "found_inf":
            fused.clip_coef = given
        before = [bits(p).clone() for p in ours]
        fused.step()
        if name != "clip_coef" and flag:
            assert all(torch.equal(bits(p), k) for p, k in zip(ours, before))
            assert fused.found_inf == 1 and fused.grad_norm.isfinite()
            continue
        coef = (0.3 / (headroom_norm(theirs) + 1e-6)).clamp(max=1.0).float()
        plain.clip_coef = coef if name == "found_inf" else coef * given
        plain.step()
        assert_same_bits(ours, theirs)
        assert fused.clip_coef is (None if name == "found_inf" else given)  # as it was


def headroom_norm(params):
    norm = torch.zeros(())
    headroom.functional.grad_norm(grads(params), norm=norm)
    return norm.double()


@pytest.mark.parametrize("value", [-1.0, math.nan])
@pytest.mark.parametrize("cls", EVERY)
def test_bad_max_grad_norm(cls, value):
    with pytest.raises(ValueError, match="max_grad_norm must be a number >= 0"):
        cls(parameters(), max_grad_norm=value)
    with pytest.raises(ValueError, match="max_grad_norm must be a number >= 0"):
        cls([{"params": parameters(), "max_grad_norm": value}])
    with pytest.raises(TypeError, match="max_grad_norm must be a number or None, got str"):
        cls(parameters(), max_grad_norm="1")


def test_clipping_that_stands_in_for_torchs(monkeypatch):
    """Gradients that the kernels do not take go to torch's own, not to what was put in its place,
    which is ours again."""
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", headroom.clip_grad_norm_)
    monkeypatch.setattr(torch.nn.utils.clip_grad, "clip_grad_norm_", headroom.clip_grad_norm_)
    ours, theirs = parameters([torch.float64]), parameters([torch.float64])
    norm = torch.nn.utils.clip_grad_norm_(ours, 0.3)
    assert norm == torch_clip(theirs, 0.3)
    assert_same_bits(grads(ours), grads(theirs))


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_bad_max_grad_norm_of_a_step(value):
    params = parameters()
    optimizer = headroom.optim.AdamW(params)
    kept = [bits(p).clone() for p in params]
    with pytest.raises((ValueError, RuntimeError), match="max_(grad_)?norm"):
        optimizer.step(max_grad_norm=value)
    assert all(torch.equal(bits(p), k) for p, k in zip(params, kept)) and not optimizer.state


INDUCTOR = [pytest.mark.slow, cannot_run("Triton's kernels compute nothing there")]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_the_clipping_step_compiles_whole(backend, device):
    torch._dynamo.reset()
    shapes = SHAPES[:3]
    eager, compiled = (parameters(device=device, shapes=shapes) for _ in range(2))
    first, second = (headroom.optim.AdamW(p, max_grad_norm=0.1) for p in (eager, compiled))
    step = torch.compile(lambda: second.step(), backend=backend, fullgraph=True)
    for _ in range(3):
        first.step()
        step()
    assert_same_bits(eager, compiled)

"""Steps and parameters that optimizers refuse: the error names the parameter or the option, and no
byte has changed. And what only looks bad: it has a defined result."""

import gc
import math
import weakref

import headroom
import pytest
import torch

from helpers.bad_inputs import (
    INF,
    NAN,
    assert_untouched,
    snapshot,
)
from helpers.twins import Twins


def set_grad(make):
    def change(params, optimizer):
        params[1].grad = make(params[1])

    return change


def grad_of_another_shape(params, optimizer):
    """As when p.data is swapped between backward and step."""
    params[1].data = torch.ones(3, 2)


def group(**values):
    return lambda params, optimizer: optimizer.param_groups[0].update(values)


def attribute(name, value):
    return lambda params, optimizer: setattr(optimizer, name, value)


def expand_parameter(params, optimizer):
    params[1].data = torch.ones(1).expand(4)
    params[1].grad = torch.ones(4)
    del optimizer.state[params[1]]


def spoil_step(value):
    def change(params, optimizer):
        optimizer.state[params[1]]["step"].fill_(value)

    return change


def state_of_integers(params, optimizer):
    entry = optimizer.state[params[1]]
    entry["exp_avg"] = entry["exp_avg"].int()


NAMED = "parameter 1 of group 0"
BAD_STEPS = {
    "sparse gradient": (set_grad(lambda p: torch.ones_like(p).to_sparse()), f"sparse.*{NAMED}"),
    "gradient of another shape": (grad_of_another_shape, rf"grads\[1\] has another shape.*{NAMED}"),
    "expanded parameter": (expand_parameter, f"share memory.*{NAMED}"),
    "lr -1": (group(lr=-1.0), "lr is -1"),
    "lr nan": (group(lr=NAN), "lr is nan"),
    "lr inf": (group(lr=INF), "lr is inf"),
    "lr a string": (group(lr="1e-3"), "lr"),
    "lr of two elements": (group(lr=torch.ones(2)), "lr_tensor has 2 elements"),
    "lr tensor nan": (group(lr=torch.tensor(NAN)), "lr"),
    "beta1 1": (group(betas=(1.0, 0.9)), "beta1 is 1"),
    "beta2 nan": (group(betas=(0.9, NAN)), "beta2 is nan"),
    "eps -1": (group(eps=-1.0), "eps is -1"),
    "weight_decay nan": (group(weight_decay=NAN), "weight_decay is nan"),
    "grad_scale 0": (attribute("grad_scale", torch.zeros(())), "grad_scale is 0"),
    "grad_scale of two": (attribute("grad_scale", torch.ones(2)), "grad_scale must be"),
    "step -1": (spoil_step(-1), rf"steps\[1\] holds -1.*{NAMED}"),
    "step nan": (spoil_step(NAN), rf"steps\[1\] holds .*nan.*{NAMED}"),
    "state of integers": (state_of_integers, NAMED),
}


@pytest.mark.parametrize("steps_before", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize("change, words", BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_failed_step_changes_nothing_and_the_next_works(change, words, steps_before):
    twins = Twins(((3, 3), (4,), ())).step(steps_before)
    optimizer, params = twins.optimizer, twins.ours
    twins.random_grads()
    if steps_before == 0:
        for p in params:  # what a first step would make
            optimizer._entry(p, optimizer.param_groups[0])
    entries = {p: dict(optimizer.state[p]) for p in params}
    values = {p: {k: v.clone() for k, v in entry.items()} for p, entry in entries.items()}
    datas, grads, options = (
        [p.data for p in params],
        [p.grad for p in params],
        optimizer.param_groups[0],
    )
    before = dict(options)

    change(params, optimizer)
    tensors = [*params, *(t for entry in optimizer.state.values() for t in entry.values())]
    kept = snapshot(tensors)
    with pytest.raises((RuntimeError, TypeError), match=f"(?s){words}"):
        optimizer.step()
    assert_untouched(kept)

    for p, data, grad in zip(params, datas, grads):  # all put right again
        p.grad, p.data = None, data
        p.grad, optimizer.state[p] = grad, entries[p]
        for key, value in values[p].items():
            entries[p][key].copy_(value)
    options.update(before)
    for name in ("grad_scale", "found_inf", "clip_coef"):
        optimizer.__dict__.pop(name, None)
    optimizer.step()
    twins.other.step()
    twins.check()


REFUSED = {
    "float64": (torch.float64, r"is in torch.float64; convert it, for instance"),
    "float8": (torch.float8_e4m3fn, r"is in torch.float8_e4m3fn"),
    "complex": (torch.complex64, r"is complex; optimize torch.view_as_real of it"),
}
CLASSES = ["Adam", "AdamW", "AdamW8bit", "Adafactor"]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype, words", REFUSED.values(), ids=REFUSED)
def test_parameters_of_unsupported_dtypes_are_refused_when_given(dtype, words, name):
    cls = getattr(headroom.optim, name)
    good, bad = (torch.nn.Parameter(torch.ones(3).to(d)) for d in (torch.float32, dtype))
    with pytest.raises(ValueError, match=rf"^{name} .*{words}"):
        cls([good, bad])
    with pytest.raises(ValueError, match=rf"parameter 'bad' {words}"):
        cls([("good", good), ("bad", bad)])
    optimizer = cls([good])
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": (p for p in [bad])})
    assert len(optimizer.param_groups) == 1
    cls([good, bad.requires_grad_(False)])  # which gets no gradient


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_that_became_float64_leaves_no_states(name):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(headroom.optim, name)([("weight", param)])
    param.data = param.data.double()
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=rf"{name} takes .* parameter 'weight' is in .*float64"):
        optimizer.step()
    assert not optimizer.state and (param == 1).all()


KINDS = {
    "integers": torch.ones(3, dtype=torch.int32),
    "booleans": torch.ones(3, dtype=torch.bool),
    "meta": torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("tensor", KINDS.values(), ids=KINDS)
def test_parameters_of_unsupported_kinds_are_named_in_the_first_step(tensor):
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    bad = torch.nn.Parameter(tensor.clone(), requires_grad=differentiable)
    good = torch.nn.Parameter(torch.ones(3))
    optimizer = headroom.optim.AdamW([("good", good), ("bad", bad)])
    good.grad, bad.grad = torch.ones(3), torch.ones_like(bad)
    kept = snapshot([good] if bad.is_meta else [good, bad])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="bad"):
            optimizer.step()
        assert_untouched(kept)
    bad.grad = None
    optimizer.step()
    assert (good != 1).all()


def test_a_failure_in_a_later_group_leaves_that_group_alone(device):
    """Groups are stepped one after another, as in torch."""
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(4)]
    optimizer = headroom.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.param_groups[1]["lr"] = NAN
    with pytest.raises(RuntimeError, match="lr is nan"):
        optimizer.step()
    assert (params[2] == 1).all() and (params[3] == 1).all()
    assert all(optimizer.state[p]["step"] == 0 for p in params[2:])


def test_an_error_does_not_keep_tensors_alive():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = headroom.optim.AdamW([p], lr=1e-3)
    optimizer.param_groups[0]["lr"] = NAN
    p.grad = torch.ones(3)
    gone = weakref.ref(p)
    with pytest.raises(RuntimeError):
        optimizer.step()
    del p, optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_gradients_that_are_not_finite_spoil_their_elements_alone(value, device):
    """Without a scaler nothing is skipped: as in torch, and no other element is touched."""
    twins = Twins(((6,),), device=device).step(2)
    twins.random_grads()
    for p in (*twins.ours, *twins.theirs):
        p.grad[2] = value
    twins.both(lambda params, optimizer: optimizer.step())
    ours, theirs = twins.ours[0].detach(), twins.theirs[0].detach()
    assert ours[2].isnan() and theirs[2].isnan()
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=2**-21, atol=2**-24)
    for key in ("exp_avg", "exp_avg_sq"):
        mine, its = (o.state[p[0]][key] for p, o in twins.sides())
        torch.testing.assert_close(mine, its, equal_nan=True, rtol=2**-21, atol=2**-24)


def test_an_infinite_parameter_stays_infinite_without_decay(device):
    p = torch.nn.Parameter(torch.tensor([INF, -INF, 1.0], device=device))
    optimizer = headroom.optim.Adam([p], lr=0.1)
    p.grad = torch.ones(3, device=device)
    optimizer.step()
    assert p[0] == INF and p[1] == -INF and math.isclose(p[2].item(), 0.9, rel_tol=1e-6)

"""headroom.optim.Adam and AdamW in place of torch's: trajectories, arguments, groups, hooks."""

import copy
import inspect
import warnings
from functools import partial

import headroom
import pytest
import torch

from helpers.bad_arguments import BAD_OPTIONS, BAD_PARAMS, raised, shared
from helpers.bits import bits
from helpers.parameters import parameter, with_grads
from helpers.reference import reference_step
from helpers.roundtrip import through_pickle, through_save
from helpers.samples import DEFAULTS, Sample
from helpers.twins import NAMES as TWINS
from helpers.twins import Twins

NAMES = ["Adam", "AdamW"]
OURS = pytest.mark.parametrize(
    "make",
    [headroom.optim.AdamW, partial(headroom.optim.AdamW8bit, min_8bit_size=0)],
    ids=TWINS,
)


def pair(name):
    return getattr(headroom.optim, name), getattr(torch.optim, name)


# --- Trajectories --------------------------------------------------------------------------------


TRAJECTORIES = {
    "defaults": {},
    "no weight decay": {"weight_decay": 0.0},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "amsgrad, maximize": {"amsgrad": True, "maximize": True},
    "fast betas, large eps": {"betas": (0.5, 0.9), "eps": 1e-3},
    "beta1 0": {"betas": (0.0, 0.99)},
    "large lr": {"lr": 0.3},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", TRAJECTORIES.values(), ids=TRAJECTORIES)
def test_200_steps_follow_torch(name, options, device):
    """Gradients are given, so rounding errors add up and nothing magnifies them: each of 200 steps
    may add half an ulp of the parameter (2^-24) and a few of the update (lr)."""
    twins = Twins(((31,), (5, 4), ()), name=name, device=device, **options)
    twins.step(200)
    lr = options.get("lr", 1e-2)
    twins.check(rtol=200 * 2**-24, atol=200 * 2**-22 * lr + 2**-21)


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_200_steps_with_a_tensor_lr(dtype, name, device):
    twins = Twins(name=name, device=device)
    lrs = [torch.tensor(1e-2, dtype=dtype, device=device) for _ in range(2)]
    for (_, optimizer), lr in zip(twins.sides(), lrs):
        optimizer.param_groups[0]["lr"] = lr
    for step in range(200):
        for lr in lrs:
            lr.fill_(1e-2 / (1 + step / 50))
        twins.step()
    twins.check(rtol=200 * 2**-24, atol=200 * 2**-22 * 1e-2)
    assert twins.optimizer.param_groups[0]["lr"] is lrs[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_200_steps_stay_as_near_to_float64_as_torchs(dtype, device):
    """Training with feedback: the distance to the float64 trajectory is at most twice that of
    torch's fused optimizer in the same precision."""
    start = torch.randn(2000).to(device, dtype)
    ends = {}
    for kind in ("ours", "torch", "exact"):
        value = start.double() if kind == "exact" else start.clone()
        p = torch.nn.Parameter(value)
        generator = torch.Generator().manual_seed(3)
        options = {"lr": 2e-2, "weight_decay": 0.1}
        if kind == "ours":
            optimizer = headroom.optim.AdamW([p], **options)
        else:
            optimizer = torch.optim.AdamW([p], fused=kind == "torch", foreach=False, **options)
        target, weight = (torch.randn(2, 2000, generator=generator)).to(device, p.dtype)
        for _ in range(200):
            p.grad = (weight.abs() + 0.1) * (p.detach() - target)
            optimizer.step()
        ends[kind] = p.detach().double()
    far = {kind: (ends[kind] - ends["exact"]).norm().item() for kind in ("ours", "torch")}
    assert far["ours"] <= 2 * far["torch"], far
    assert far["torch"] < 0.2 * (ends["exact"] - start.double()).norm()  # and they went somewhere


STATE_MIXES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize("param, state", STATE_MIXES, ids=str)
def test_state_dtype(param, state, device):
    """The moments have the dtype asked for, and a step is the op's."""
    p = parameter(50, device=device, dtype=param)
    optimizer = headroom.optim.AdamW([p], lr=1e-2, weight_decay=0.1, state_dtype=state)
    zeros = torch.zeros(50, device=device, dtype=state)
    step = torch.zeros((), dtype=torch.float64, device=device)
    lists = Sample([p.detach().clone()], [None], [zeros.clone()], [zeros.clone()], [], [step])
    for _ in range(5):
        p.grad = torch.randn_like(p)
        lists.grads[0] = p.grad
        optimizer.step()
        headroom.functional.adamw_(*lists.lists(), **DEFAULTS)
    assert torch.equal(bits(p), bits(lists.params[0]))
    assert {optimizer.state[p][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {state}
    assert optimizer.state[p]["step"].dtype == torch.float64


GRADIENT_MIXES = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize("param, grad", GRADIENT_MIXES, ids=str)
def test_gradients_of_another_dtype(param, grad, device):
    """torch.optim cannot step these."""
    p = parameter(64, device=device, dtype=param)
    start = p.detach().clone()
    p.grad_dtype = grad
    p.grad = torch.randn(64, device=device).to(grad)
    optimizer = headroom.optim.AdamW([p], lr=1e-2, weight_decay=0.1, state_dtype=torch.float32)
    optimizer.step()
    zeros = torch.zeros_like(start, dtype=torch.float32)
    one = Sample([start], [p.grad], [zeros], [zeros], [], [torch.zeros(())])
    exact = reference_step(one)
    ulp = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}[param]
    torch.testing.assert_close(p.detach().double(), exact.params[0], rtol=ulp, atol=2**-24)
    moment = optimizer.state[p]["exp_avg"]
    torch.testing.assert_close(moment.double(), exact.exp_avgs[0], rtol=2**-22, atol=0)


def test_backward_into_a_float32_gradient(device):
    p = parameter(8, device=device, dtype=torch.bfloat16)
    p.grad_dtype = torch.float32
    before = p.detach().clone()
    (p.float() * torch.arange(8.0, device=device)).sum().backward()
    assert p.grad.dtype == torch.float32
    headroom.optim.AdamW([p], lr=0.1).step()
    assert not torch.equal(before[1:], p[1:])


# --- Construction --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_arguments_defaults_and_their_order_are_torchs(name):
    ours, theirs = (list(inspect.signature(of).parameters.values()) for of in pair(name))
    plain = [(p.name, p.kind, p.default) for p in ours]
    wanted = [(p.name, p.kind, p.default) for p in theirs]
    assert plain[: len(wanted)] == wanted
    more = {
        "state_dtype": None,
        "max_grad_norm": None,
        "master": None,
        "rounding": "nearest",
        "seed": 0,
        "count_stalled": False,
    }
    assert {p.name: p.default for p in ours[len(wanted) :]} == more


@pytest.mark.parametrize("name", NAMES)
def test_groups_and_defaults_have_torchs_keys(name):
    ours, theirs = (of([parameter(2)]) for of in pair(name))
    assert ours.defaults == theirs.defaults
    mine, its = ({**group, "params": None} for o in (ours, theirs) for group in o.param_groups)
    assert mine == its
    assert isinstance(ours, torch.optim.Optimizer)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_raise_torchs_errors(name, options):
    ours, theirs = (raised(of, [shared], **options) for of in pair(name))
    assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("params", BAD_PARAMS.values(), ids=BAD_PARAMS)
def test_bad_parameters_raise_torchs_errors(name, params):
    ours, theirs = (raised(of, params()) for of in pair(name))
    assert ours == theirs


@pytest.mark.parametrize("params", [[shared, shared], {shared}], ids=["duplicates", "a set"])
def test_warnings_are_torchs(params):
    seen = []
    for of in pair("AdamW"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            of(params)
        seen.append([(w.category, str(w.message)) for w in caught])
    assert seen[0] == seen[1]


STRICTER = {
    "lr inf": ({"lr": float("inf")}, ValueError, "learning rate"),
    "lr a string": ({"lr": "1e-3"}, TypeError, "lr"),
    "lr an integer tensor": ({"lr": torch.tensor(1)}, ValueError, "lr"),
    "eps inf": ({"eps": float("inf")}, ValueError, "epsilon"),
    "weight_decay inf": ({"weight_decay": float("inf")}, ValueError, "weight_decay"),
    "differentiable": ({"differentiable": True}, RuntimeError, "differentiable"),
    "state_dtype": ({"state_dtype": torch.int8}, ValueError, "state_dtype"),
    "state_dtype float64": ({"state_dtype": torch.float64}, ValueError, "state_dtype"),
}


@pytest.mark.parametrize("options, error, words", STRICTER.values(), ids=STRICTER)
def test_bad_options_that_torch_lets_through(options, error, words):
    with pytest.raises(error, match=words):
        headroom.optim.AdamW([shared], **options)
    good = headroom.optim.AdamW([shared])
    with pytest.raises(error, match=words):
        good.add_param_group({"params": [parameter(2)], **options})
    assert len(good.param_groups) == 1


@OURS
@pytest.mark.parametrize(
    "options",
    [
        {"foreach": True},
        {"foreach": False},
        {"fused": True},
        {"fused": False},
        {"capturable": True},
    ],
    ids=str,
)
def test_choices_of_an_implementation_have_no_effect(options, make, device):
    start, grad = torch.randn(2, 9, device=device)
    results = []
    for chosen in ({}, options):
        p = torch.nn.Parameter(start.clone())
        p.grad = grad.clone()
        make([p], **chosen).step()
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("lr", [0.01, 1, 0, "numpy"], ids=str)
def test_kinds_of_numbers_for_lr(lr):
    if lr == "numpy":
        lr = pytest.importorskip("numpy").float32(0.01)
    ours, theirs = parameter(3), parameter(3)
    theirs.data.copy_(ours.data)
    grad = torch.randn(3)
    for p, of in zip((ours, theirs), pair("AdamW")):
        p.grad = grad
        of([p], lr=lr).step()
    torch.testing.assert_close(ours, theirs, rtol=2**-22, atol=2**-22)


def test_betas_may_be_tensors():
    betas = torch.tensor(0.8), torch.tensor(0.9)
    ours, theirs = (of([shared], betas=betas) for of in pair("AdamW"))
    assert ours.defaults["betas"] == theirs.defaults["betas"]
    assert all(type(beta) is float for beta in ours.defaults["betas"])


# --- Groups and parameters -----------------------------------------------------------------------


def test_groups_with_their_own_options(device):
    twins = Twins(device=device)
    for params, optimizer in twins.sides():
        made = type(optimizer)(
            [
                {"params": params[:1], "lr": 0.1, "betas": (0.5, 0.6)},
                {"params": params[1:2], "weight_decay": 0.0, "maximize": True},
                {"params": params[2:], "amsgrad": True, "eps": 0.1},
            ],
            lr=0.01,
        )
        twins.optimizer, twins.other = (
            (made, twins.other) if params is twins.ours else (twins.optimizer, made)
        )
    twins.step(5).check()


@pytest.mark.parametrize("name", TWINS)
def test_add_param_group_in_mid_training(name, device):
    twins = Twins(name=name, device=device).step(3)
    more = torch.randn(6, device=device)
    for params, optimizer in twins.sides():
        params.append(torch.nn.Parameter(more.clone()))
        optimizer.add_param_group({"params": params[-1], "lr": 0.05})
    twins.step(3).check()
    assert twins.optimizer.state[twins.ours[-1]]["step"] == 3


@OURS
def test_an_empty_group(make, device):
    p = parameter(2, device=device)
    optimizer = make([{"params": []}, {"params": [p]}])
    with_grads(p)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize("name", TWINS)
def test_freeze_and_unfreeze(name, device):
    """A layer that is frozen for some steps, as fine-tuning does, is left alone in them."""
    twins = Twins(name=name, device=device)
    for frozen in (False, True, True, False):
        for params, _ in twins.sides():
            params[0].requires_grad_(not frozen)
        before = twins.ours[0].detach().clone()
        twins.step(2, absent=(0,) if frozen else ())
        assert torch.equal(before, twins.ours[0]) == frozen
    twins.check()


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none, name, device):
    twins = Twins(name=name, device=device).step(2)
    twins.both(lambda params, optimizer: optimizer.zero_grad(set_to_none=set_to_none))
    assert all((p.grad is None) == set_to_none for p in twins.ours)
    twins.both(lambda params, optimizer: optimizer.step())
    assert twins.check().optimizer.state[twins.ours[0]]["step"] == (2 if set_to_none else 3)


def test_the_default_device_and_dtype_do_not_matter(device):
    twins = Twins(device=device)
    torch.set_default_dtype(torch.float64)
    for _ in range(2):
        twins.random_grads()
        with torch.device("meta"):
            twins.optimizer.step()
        twins.other.step()
    twins.check()
    assert {v.device for e in twins.optimizer.state.values() for v in e.values()} == {
        twins.ours[0].device
    }


@OURS
def test_step_without_gradients_makes_no_state(make):
    p = parameter(3)
    optimizer = make([p])
    optimizer.step()
    assert not optimizer.state


def test_named_parameters(device):
    model = torch.nn.Linear(3, 2).to(device)
    optimizers = [of(model.named_parameters()) for of in pair("AdamW")]
    with_grads(*model.parameters())
    optimizers[0].step()
    saved = [o.state_dict()["param_groups"][0]["param_names"] for o in optimizers]
    assert saved[0] == saved[1] == ["weight", "bias"]


def test_tied_parameters_of_a_module_are_stepped_once(device):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(6, 4)
            self.head = torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

    models = [Tied().to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, of in zip(models, pair("AdamW")):
        optimizer = of(model.parameters(), lr=0.1)
        tokens = torch.arange(6, device=device)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model.head(model.embed(tokens)), tokens).backward()
            optimizer.step()
    assert len(optimizer.state) == 1
    torch.testing.assert_close(models[0].embed.weight, models[1].embed.weight, rtol=1e-5, atol=1e-5)


@OURS
@pytest.mark.parametrize("named", [False, True])
def test_a_parameter_given_twice_is_stepped_once(named, make, device):
    p, q, alone = (torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(3))
    given = [("a", p), ("b", q), ("a again", p)] if named else [p, q, p]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = make(given, lr=0.1)
    for tensor in (p, q, alone):
        tensor.grad = torch.ones(3, device=device)
    optimizer.step()
    make([alone], lr=0.1).step()
    assert torch.equal(p, alone) and torch.equal(q, alone)
    assert optimizer.state[p]["step"] == 1
    if named:
        assert optimizer.param_groups[0]["param_names"] == ["a", "b"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_parameters_on_two_devices_in_one_group():
    start = torch.randn(10)
    here, there = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.cuda())
    optimizer = headroom.optim.AdamW([here, there], lr=0.1)
    for _ in range(3):
        grad = torch.randn(10)
        here.grad, there.grad = grad, grad.cuda()
        optimizer.step()
    assert torch.equal(here, there.cpu())
    assert optimizer.state[there]["step"].is_cuda


# --- Hooks, closures, schedulers -----------------------------------------------------------------


@OURS
def test_closure_runs_with_gradients_enabled_and_its_loss_is_returned(make, device):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = make([p], lr=0.1)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 3.0
        assert not torch.is_grad_enabled()
    assert (p < 1).all() and p.requires_grad
    assert optimizer.step() is None


@OURS
def test_gradients_and_graph_are_left_alone(make, device):
    p = parameter(4, device=device)
    (p * 2).sum().backward()
    grad, version, before = p.grad, p.grad._version, p.grad.clone()
    make([p]).step()
    assert p.grad is grad and grad._version == version and torch.equal(grad, before)
    assert p.is_leaf and p.requires_grad and p.grad_fn is None


@OURS
def test_backward_through_what_the_step_overwrote_is_refused(make, device):
    """The version counter of a parameter tells autograd that a saved value is gone: in the first
    step and in those whose states are remembered."""
    p = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = make([p])
    for _ in range(3):
        loss = p.square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@OURS
def test_step_hooks(make, device):
    p = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer, seen = make([p], lr=0.1), []
    pre = optimizer.register_step_pre_hook(
        lambda o, args, kwargs: seen.append(("pre", p[0].item()))
    )
    post = optimizer.register_step_post_hook(lambda o, a, k: seen.append(("post", p[0].item())))
    with_grads(p)
    optimizer.step()
    assert [name for name, _ in seen] == ["pre", "post"] and seen[0][1] == 1.0 != seen[1][1]
    pre.remove()
    post.remove()
    optimizer.step()
    assert len(seen) == 2


def test_global_step_hooks(device):
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen = []
    handle = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(type(o)))
    try:
        headroom.optim.AdamW(with_grads(parameter(2, device=device))).step()
    finally:
        handle.remove()
    assert seen == [headroom.optim.AdamW]


def test_the_step_shows_in_the_profiler(device):
    optimizer = headroom.optim.AdamW(with_grads(parameter(2, device=device)))
    with torch.profiler.profile() as profile:
        optimizer.step()
    names = {event.name for event in profile.events()}
    assert "Optimizer.step#AdamW.step" in names
    assert any(name.startswith("headroom::") for name in names)


def metric(k):
    return [3.0, 2.0, 2.5, 2.6, 2.7, 2.8][k % 6]


SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=3),
}


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.filterwarnings("error")  # of a scheduler that did not see the step
def test_schedulers(make, tensor_lr, name, device):
    lr = torch.tensor(1e-2) if tensor_lr else 1e-2
    twins = Twins(name=name, device=device, lr=lr)
    schedulers = [make(optimizer) for _, optimizer in twins.sides()]
    for k in range(10):
        twins.step()
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([metric(k)] if plateau else []))
        ours, theirs = (o.param_groups[0] for o in (twins.optimizer, twins.other))
        assert ours["lr"] == theirs["lr"] and ours["betas"] == theirs["betas"]
    twins.check()
    if tensor_lr:
        assert twins.optimizer.param_groups[0]["lr"] is lr


# --- Scaling, clipping, skipping -----------------------------------------------------------------


@OURS
def test_scale_and_clip_attributes(make, device):
    start, grad = torch.randn(2, 20, device=device)
    p, q = (torch.nn.Parameter(start.clone()) for _ in range(2))
    scaled = make([p], lr=0.1)
    plain = make([q], lr=0.1)
    scaled.grad_scale = torch.full((), 1024.0, device=device)
    scaled.clip_coef = torch.full((1,), 0.25, device=device)
    for _ in range(3):
        p.grad, q.grad = grad * 1024, grad * 0.25  # powers of 2: no rounding
        scaled.step()
        plain.step()
        assert torch.equal(p, q) and torch.equal(p.grad, grad * 1024)
    del scaled.grad_scale, scaled.clip_coef
    p.grad = q.grad
    scaled.step()
    plain.step()
    assert torch.equal(p, q)


@OURS
def test_found_inf_attribute(make, device):
    p = parameter(5, device=device)
    optimizer = make([p], lr=0.1)
    with_grads(p)
    optimizer.step()
    tensors = [p, *optimizer.state[p].values()]
    before = [bits(tensor).clone() for tensor in tensors]
    optimizer.found_inf = torch.ones((), device=device)
    p.grad.fill_(float("inf"))
    optimizer.step()
    assert all(torch.equal(bits(now), then) for now, then in zip(tensors, before))
    optimizer.found_inf.zero_()
    p.grad.fill_(1.0)
    optimizer.step()
    assert optimizer.state[p]["step"] == 2 and p.isfinite().all()


@pytest.mark.parametrize("name", TWINS)
def test_torchs_grad_scaler(name, device):
    """The plain protocol: unscale, then skip the whole step on an infinite gradient."""
    twins = Twins(name=name, device=device)
    scalers = [torch.amp.GradScaler(device, init_scale=256.0, growth_interval=2) for _ in range(2)]
    for k in range(5):
        twins.random_grads()
        for (params, optimizer), scaler in zip(twins.sides(), scalers):
            scaler.scale(torch.ones((), device=device))
            for p in params:
                p.grad *= scaler.get_scale()
            if k == 2:
                params[1].grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert twins.check().optimizer.state[twins.ours[0]]["step"] == 4


# --- Copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_save])
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_goes_on_alone(duplicate, name, device):
    optimizer = pair(name)[0]([parameter(6, device=device)], lr=0.1, state_dtype=torch.bfloat16)
    (p,) = optimizer.param_groups[0]["params"]
    with_grads(p)
    optimizer.step()
    other = duplicate(optimizer)
    assert type(other) is type(optimizer) and other.defaults == optimizer.defaults
    (q,) = other.param_groups[0]["params"]
    assert q is not p and torch.equal(p, q)
    grad = torch.randn_like(p)
    p.grad, q.grad = grad, grad.clone()
    other.step()
    assert not torch.equal(p, q) and optimizer.state[p]["step"] == 1
    optimizer.step()
    assert torch.equal(p, q)
    assert other.state[q]["exp_avg"].dtype == torch.bfloat16


def test_repr():
    assert repr(headroom.optim.AdamW([shared])).startswith("AdamW (\nParameter Group 0\n")


# --- What copies keep ----------------------------------------------------------------------------


def public(optimizer):
    return {name for name in optimizer.__dict__ if not name.startswith("_")}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Adafactor"])
def test_copies_keep_all_public_attributes(name, duplicate, device):
    """torch's suite asks for them after deepcopy."""
    params = with_grads(parameter(3, device=device), parameter(2, device=device))
    optimizer = getattr(headroom.optim, name)(params, max_grad_norm=1.0, count_stalled=True)
    optimizer.grad_scale = torch.tensor(2.0, device=device)
    params[1].grad[0] = torch.nan
    optimizer.step()
    other = duplicate(optimizer)
    assert public(other) == public(optimizer) >= {"grad_norm", "measured", "measured_params"}
    assert other.grad_norm.isnan() and other.grad_scale == 2 and other.measured.culprit() == 1
    assert other.measured_params[1] is other.param_groups[0]["params"][1]
    assert other.stalled_fraction() == optimizer.stalled_fraction()
    assert type(other) is type(optimizer)


def test_a_scheduler_does_not_come_along(device):
    """It replaces step() on the optimizer by a function that no pickle can hold."""
    optimizer = headroom.optim.AdamW([parameter(3, device=device)])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" not in through_pickle(optimizer).__dict__


# --- Entries of the state that are no parameter's ------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Adafactor"])
def test_what_others_keep_in_the_state_is_carried_along(name, device, tmp_path):
    """Torch's classes carry it."""
    param = parameter(3, device=device)
    other = parameter(3, device=device)
    made, more = (
        getattr(headroom.optim, name)([p], count_stalled=True) for p in with_grads(param, other)
    )
    made.step()
    made.state["ema_steps"], made.state["ema"] = 7, {"decay": 0.5}
    for duplicate in (copy.deepcopy, through_pickle):
        copied = duplicate(made)
        assert copied.state["ema_steps"] == 7 and copied.state["ema"] == {"decay": 0.5}
    saved = made.state_dict()
    assert saved["state"]["ema_steps"] == 7 and saved["state"]["ema"] == {"decay": 0.5}
    more.load_state_dict(saved)
    assert more.state["ema_steps"] == 7 and more.state[other]["step"] == 1
    headroom.save_state(tmp_path / "state", optimizer=made)
    more.state.clear()
    headroom.load_state(tmp_path / "state", optimizer=more)
    assert more.state["ema_steps"] == 7 and more.state["ema"] == {"decay": 0.5}
    assert more.state[other]["step"] == 1
    made.step()
    assert 0 <= made.stalled_fraction() <= 1
    assert made.memory() and "State in" in repr(made)


# --- Reports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Adafactor"])
def test_frozen_and_lazy_parameters_take_no_memory(name, device):
    model = torch.nn.Sequential(
        torch.nn.Linear(100, 100), torch.nn.LazyLinear(5), torch.nn.Linear(5, 3)
    ).to(device)
    model[0].requires_grad_(False)
    optimizer = getattr(headroom.optim, name)(model.parameters())
    assert "State in" in repr(optimizer)
    assert sum(row.numel for row in optimizer.memory()) == 18
    model(torch.randn(2, 100, device=device)).sum().backward()
    with_grads(*model[1:].parameters())
    expected = {row.dtypes: row.bytes for row in optimizer.memory()}
    optimizer.step()
    assert {row.dtypes: row.bytes for row in optimizer.memory()} == expected
    held = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
    assert held == sum(sum(row.bytes.values()) for row in optimizer.memory())
    assert sum(row.numel for row in optimizer.memory()) == 18 + 505
    model[1].requires_grad_(False)  # what has a state has it still
    assert sum(row.numel for row in optimizer.memory()) == 18 + 505


# --- Options that are of another kind ------------------------------------------------------------


NOT_NUMBERS = {
    "eps None": ({"eps": None}, TypeError, "eps must be a number, got None"),
    "weight_decay a string": ({"weight_decay": "0.1"}, TypeError, "weight_decay must .* '0.1'"),
    "betas of one": ({"betas": (0.9,)}, ValueError, r"betas must be two numbers, got \(0.9,\)"),
    "betas of three": ({"betas": (0.9, 0.9, 0.9)}, ValueError, "betas must be two numbers"),
    "betas a number": ({"betas": 0.9}, ValueError, "betas must be two numbers, got 0.9"),
    "betas a string": ({"betas": "ab"}, ValueError, "betas must be two numbers, got 'ab'"),
    "betas None": ({"betas": None}, ValueError, "betas must be two numbers, got None"),
    "betas of strings": ({"betas": ("a", 0.9)}, TypeError, r"betas\[0\] must be a number"),
}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "AdamW8bit"])
@pytest.mark.parametrize("options, error, words", NOT_NUMBERS.values(), ids=NOT_NUMBERS)
def test_options_that_are_no_numbers(options, error, words, name):
    cls = getattr(headroom.optim, name)
    with pytest.raises(error, match=words):
        cls([shared], **options)
    with pytest.raises(error, match=words):
        cls([{"params": [shared], **options}])

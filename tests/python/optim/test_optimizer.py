"""headroom.optim.Adam and AdamW in place of torch's: groups, hooks, schedulers, scaling."""

import headroom
import pytest
import torch

from helpers.bits import bits
from helpers.parameters import parameter, with_grads
from helpers.torch_pairs import OURS, pair
from helpers.twins import NAMES as TWINS
from helpers.twins import Twins

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

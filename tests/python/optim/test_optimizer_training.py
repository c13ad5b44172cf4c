"""Every optimizer in a training loop: groups, hooks, schedulers, closures, scaling and clipping,
beside the original, or beside steps that remember nothing; and steps that are refused."""

import functools
import itertools

import headroom
import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from helpers.bits import assert_same_bits
from helpers.optimizer_suite import (
    EACH,
    Twins,
    assert_frozen,
    everything,
    frozen,
    named,
    rows,
    run,
    set_grads,
    start,
    trained,
)

# ---- Groups and parameters -----------------------------------------------------------------------


@EACH
def test_groups_with_their_own_options(row, device):
    twins = Twins(row, device=device)
    made = []
    for (params, _), make in zip(twins.sides(), (row.make, row.reference)):
        groups = [{"params": [p]} | options for p, options in zip(params, (*row.varied, {}))]
        made.append(make(groups))
    twins.optimizer, twins.other = made
    twins.step(5).check()


@EACH
def test_parameters_come_and_go(row, device):
    """Without gradients, frozen, with gradients of zeros, and in groups that are empty or come
    later. What has no gradient is left alone, and has no state before its first one."""
    twins = Twins(row, device=device)
    twins.both(lambda params, optimizer: optimizer.zero_grad())
    twins.optimizer.step()
    assert not twins.optimizer.state
    for absent in ((), (0,), (0,), (), (1, 2), (0, 1, 2, 3), ()):
        before = [p.detach().clone() for p in twins.ours]
        twins.step(absent=absent).check(f"without {absent}")
        same = [torch.equal(p, old) for p, old in zip(twins.ours, before)]
        assert same == [k in absent for k in range(4)]
    for frozen_too in (True, False):
        for params, _ in twins.sides():
            params[0].requires_grad_(not frozen_too)
        twins.step(2, absent=(0,) if frozen_too else ())
    for set_to_none in (False, True):
        for _, optimizer in twins.sides():
            optimizer.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in twins.ours)
        twins.both(lambda params, optimizer: optimizer.step())
    twins.check("zeros")
    more = torch.randn(row.shapes[1], device=device)
    for params, optimizer in twins.sides():
        params.append(torch.nn.Parameter(more.clone()))
        optimizer.add_param_group({"params": []})
        optimizer.add_param_group({"params": params[-1]} | row.varied[0])
    twins.step(3).check("a group more")
    step = twins.optimizer.state[twins.ours[-1]].get("step", 3)
    assert step == 3


@EACH
@pytest.mark.parametrize("with_names", [False, True])
def test_a_parameter_given_twice_is_stepped_once(row, with_names, device):
    p, q, alone = start(row, device=device, shapes=[(5, 3)] * 3)
    given = [("a", p), ("b", q), ("a again", p)] if with_names else [p, q, p]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = row.make(given)
    set_grads([p, q], 0)
    p.data.copy_(alone)
    alone.grad = p.grad.clone()
    optimizer.step()
    row.make([alone]).step()
    assert torch.equal(p, alone)
    if with_names:
        (group,) = optimizer.param_groups
        assert group["param_names"] == ["a", "b"]
        assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["a", "b"]


@EACH
def test_tensors_of_every_layout_are_stepped_alike(row, device):
    """Transposed, expanded, with gaps, in the middle of a storage: those of gradients in turns."""
    shapes = [(8, 6), (6, 8), (3, 5)]
    plain, others = (
        start(row, device=device, shapes=shapes),
        start(row, device=device, shapes=shapes),
    )
    others[0].data = others[0].data.t().contiguous().t()
    others[1].data = torch.empty(6, 16, device=device)[:, ::2].copy_(others[1].data)
    others[2].data = torch.empty(40, device=device)[3:18].view(3, 5).copy_(others[2].data)
    optimizers = row.make(plain), row.make(others)
    memory = torch.randn(48, device=device)
    for seed, view in enumerate(
        (memory.view(8, 6), memory.view(6, 8).t(), memory[:1].expand(8, 6))
    ):
        set_grads([*plain, others[1], others[2]], seed)
        plain[0].grad, others[0].grad = view.clone().contiguous(), view
        for p, q in zip(plain[1:], others[1:]):
            q.grad = p.grad if seed else p.grad.t().contiguous().t()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(plain, others):
        # Blocks of codes follow the memory order, so that they hold other elements.
        tolerance = {"rtol": 0.1, "atol": 0.05} if row.wide else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(p, q, **tolerance)


@pytest.mark.parametrize(
    "cls", [headroom.optim.AdamW, headroom.optim.Adafactor, headroom.optim.Muon]
)
def test_tied_parameters_of_a_module_have_one_state(cls, device):
    embed, head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
    head.weight = embed.weight
    model = torch.nn.ModuleDict({"embed": embed, "head": head}).to(device)
    optimizer = cls(model.named_parameters(), lr=0.1)
    alone = torch.nn.Parameter(embed.weight.detach().clone())
    other = type(optimizer)([("embed.weight", alone)], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        head(embed(torch.arange(6, device=device))).square().sum().backward()
        alone.grad = embed.weight.grad.clone()
        optimizer.step()
        other.step()
    assert len(optimizer.state) == 1
    assert_same_bits([head.weight], [alone])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_parameters_on_two_devices_in_one_group():
    value = torch.randn(10)
    here, there = torch.nn.Parameter(value.clone()), torch.nn.Parameter(value.cuda())
    optimizer = headroom.optim.AdamW([here, there], lr=0.1)
    for _ in range(3):
        grad = torch.randn(10)
        here.grad, there.grad = grad, grad.cuda()
        optimizer.step()
    assert torch.equal(here, there.cpu())
    assert optimizer.state[there]["step"].is_cuda


# ---- Around a step -------------------------------------------------------------------------------


@EACH
def test_the_default_device_and_dtype_do_not_matter(row, device):
    sides = [trained(row, 0, device=device, max_grad_norm=9.0) for _ in range(2)]
    run(*sides[0], range(3))
    for seed in range(3):
        set_grads(sides[1][0], seed)
        torch.set_default_dtype((torch.float64, torch.bfloat16)[seed % 2])
        with torch.device("meta"):
            sides[1][1].step()
        torch.set_default_dtype(torch.float32)
    assert_same_bits(*(everything(optimizer) for _, optimizer in sides))


@EACH
def test_a_closure_runs_with_gradients_and_only_parameters_and_states_change(row, device):
    """Versions grow, so that autograd refuses what the step overwrote; hooks are called around it;
    and it shows in the profiler under its name."""
    (p,) = params = start(row, device=device, shapes=[(4, 4)])
    optimizer, seen = row.make(params), []
    handles = [
        optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", p._version))),
        optimizer.register_step_post_hook(
            lambda o, args, kwargs: seen.append(("post", p._version))
        ),
        register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(type(o))),
    ]

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward(retain_graph=True)
        seen.append(loss)
        return loss

    for _ in range(3):
        seen.clear()
        with torch.no_grad(), torch.profiler.profile() as profile:
            loss = optimizer.step(closure)
            assert not torch.is_grad_enabled()
        (_, before), its, (_, after), kind = seen
        assert loss is its and before < after and kind is row.cls
        assert torch.equal(p.grad, 2 * p.grad / 2) and p.is_leaf and p.grad_fn is None
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        names = {event.name for event in profile.events()}
        assert f"Optimizer.step#{row.cls.__name__}.step" in names
        assert any(name.startswith("headroom::") for name in names)
    grad, version, value = p.grad, p.grad._version, p.grad.clone()
    assert optimizer.step() is None
    assert p.grad is grad and grad._version == version and torch.equal(grad, value)
    for handle in handles:
        handle.remove()
    seen.clear()
    optimizer.step()
    assert not seen


SCHEDULERS = {
    "LambdaLR": lambda o: LambdaLR(o, lambda k: 1 / (1 + k)),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=20, cycle_momentum=False),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, T_max=10),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=1),
    "StepLR": lambda o: StepLR(o, step_size=3),
}


@EACH
@pytest.mark.filterwarnings("error")  # of a scheduler that did not see the step
def test_schedulers(row, device):
    """Of a learning rate that is a number, or a tensor, which stays the same one."""
    kinds = itertools.cycle((None, torch.float32, torch.float64))
    for (name, make), dtype in zip(SCHEDULERS.items(), kinds):
        lr = 1e-2 if dtype is None else torch.tensor(1e-2, dtype=dtype)
        twins = Twins(row, device=device, lr=lr)
        schedulers = [make(optimizer) for _, optimizer in twins.sides()]
        for k in range(8):
            twins.step()
            for scheduler in schedulers:
                scheduler.step(*([3.0 + k % 2] if name == "ReduceLROnPlateau" else []))
            ours, theirs = (o.param_groups[0]["lr"] for o in (twins.optimizer, twins.other))
            assert ours == theirs
        twins.check(name)
        assert dtype is None or twins.optimizer.param_groups[0]["lr"] is lr


# ---- Scaling, clipping, skipping -----------------------------------------------------------------


@EACH
def test_gradients_are_divided_and_clipped_in_the_step(row, device):
    """By attributes, and by a limit of the constructor or of a step, as if they had been before.
    They stay as they are."""
    plain, by_step, by_group = (trained(row, 0, device=device) for _ in range(3))
    by_group = by_group[0], row.make(by_group[0], max_grad_norm=0.5)
    for seed in range(4):
        scale, coef = 1024.0 ** (seed % 2), 0.25 ** (seed // 2)  # powers of 2: no rounding
        for params, optimizer in (plain, by_step, by_group):
            set_grads(params, seed)
            if optimizer is not plain[1]:
                optimizer.grad_scale = torch.full((), scale, device=device) if seed % 2 else None
                optimizer.clip_coef = torch.full((1,), coef, device=device) if seed // 2 else None
        norm = headroom.clip_grad_norm_(plain[0], 0.5)
        for p in plain[0]:
            p.grad *= coef
        given = [[scale * p.grad for p in params] for params, _ in (by_step, by_group)]
        for grads, (params, _) in zip(given, (by_step, by_group)):
            for p, grad in zip(params, grads):
                p.grad = grad.clone()
        plain[1].step()
        by_step[1].step(max_grad_norm=0.5)
        by_group[1].step()
        for grads, (params, optimizer) in zip(given, (by_step, by_group)):
            assert_same_bits([p.grad for p in params], grads)
            assert optimizer.grad_norm == norm > 0.5
            if row.cls is headroom.optim.Adafactor:  # which divides in another place
                for a, b in zip(everything(optimizer), everything(plain[1])):
                    torch.testing.assert_close(a, b, rtol=2**-18, atol=2**-22)
            else:
                assert_same_bits(everything(optimizer), everything(plain[1]))


NAN, INF = float("nan"), float("inf")


@EACH
@pytest.mark.filterwarnings("ignore:the last 10 steps")
def test_a_step_that_is_skipped_changes_nothing(row, device):
    """By found_inf, by a limit of the norm, by our scaler and torch's: not even counters."""
    params, optimizer = trained(row, 2, device=device)

    def skipped(value, step):
        set_grads(params, 9)
        params[1].grad.view(-1)[2] = value
        before = frozen(optimizer)
        step()
        assert_frozen(optimizer, before)

    def by_scaler(kind, unscale):
        scaler = kind(device, init_scale=4.0)
        scaler.scale(torch.ones((), device=device))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2

    for value in (NAN, INF, -INF):
        skipped(value, functools.partial(optimizer.step, max_grad_norm=1.0))
        assert optimizer._measured.culprit() == 1 and optimizer._measured_params[1] is params[1]
        for kind in (headroom.amp.GradScaler, torch.amp.GradScaler):
            for unscale in (False, True):
                skipped(value, functools.partial(by_scaler, kind, unscale))
    optimizer.found_inf = torch.ones((), device=device)
    skipped(1.0, optimizer.step)
    skipped(1.0, functools.partial(optimizer.step, max_grad_norm=1.0))
    optimizer.found_inf.zero_()
    before = frozen(optimizer)
    optimizer.step()
    with pytest.raises(AssertionError):
        assert_frozen(optimizer, before)
    assert all(p.isfinite().all() for p in params)
    with pytest.warns(UserWarning, match="skipped"):
        assert optimizer.skipped_steps == 3 + 3 * 2 + 2


@rows(lambda row: row.follows)
def test_torchs_grad_scaler(row, device):
    """The plain protocol: unscale, then skip the whole step on an infinite gradient."""
    twins = Twins(row, device=device)
    scalers = [torch.amp.GradScaler(device, init_scale=256.0, growth_interval=2) for _ in range(2)]
    for k in range(5):
        twins.random_grads()
        for (params, optimizer), scaler in zip(twins.sides(), scalers):
            scaler.scale(torch.ones((), device=device))
            for p in params:
                p.grad *= scaler.get_scale()
            if k == 2:
                params[1].grad[0] = INF
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    twins.check()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_gradients_that_are_not_finite_spoil_their_elements_alone(value, device):
    """Without a scaler nothing is skipped: as in torch, and no other element is touched."""
    twins = Twins(named(headroom.optim.AdamW), ((6,),), device=device).step(2)
    twins.random_grads()
    for p in (*twins.ours, *twins.theirs):
        p.grad[2] = value
    twins.both(lambda params, optimizer: optimizer.step())
    assert twins.check().ours[0].isnan().tolist() == [k == 2 for k in range(6)]
    p = torch.nn.Parameter(torch.tensor([INF, -INF, 1.0], device=device))
    optimizer = headroom.optim.Adam([p], lr=0.1)
    p.grad = torch.ones(3, device=device)
    optimizer.step()  # an infinite parameter stays so without decay
    assert p[0] == INF and p[1] == -INF and p[2].item() == pytest.approx(0.9, rel=1e-6)


# ---- Steps that are refused ----------------------------------------------------------------------


def set_grad(make):
    return lambda params, optimizer: setattr(params[1], "grad", make(params[1]))


def swap_data(params, optimizer):
    """As when p.data is swapped between backward and step."""
    params[1].data = torch.ones(3, 2)


def expand_data(params, optimizer):
    params[1].data = torch.ones(1).expand(params[1].shape)
    optimizer.state.pop(params[1], None)


def option(**values):
    return lambda params, optimizer: optimizer.param_groups[0].update(values)


def attribute(name, value):
    return lambda params, optimizer: setattr(optimizer, name, value)


def of_integers(params, optimizer):
    entry = optimizer.state[params[1]]
    name = next(name for name, value in entry.items() if value.shape != ())
    entry[name] = entry[name].long()


def count(value):
    return lambda params, optimizer: optimizer.state[params[1]]["step"].fill_(value)


NAMED = "parameter 1 of group 0"
BAD_STEPS = [
    (set_grad(lambda p: torch.ones_like(p).to_sparse()), f"sparse.*{NAMED}"),
    (swap_data, NAMED),
    (expand_data, NAMED),
    (option(lr=-1.0), "lr is -1"),
    (option(lr=NAN), "lr is nan"),
    (option(lr="1e-3"), "lr"),
    (option(lr=torch.ones(2)), "lr_tensor has 2 elements"),
    (option(weight_decay=NAN), "weight_decay is nan"),
    (option(weight_decay=-1.0), "weight_decay is -1"),
    (attribute("grad_scale", torch.zeros(())), "grad_scale"),
    (attribute("grad_scale", torch.ones(2)), "grad_scale"),
    (attribute("found_inf", torch.ones(2)), "found_inf|shape"),
]
BAD_STATES = [
    (of_integers, NAMED),
    (count(-1), f"holds -1.*{NAMED}"),
    (count(NAN), f"nan.*{NAMED}"),
]


@rows(lambda row: row.by_element)  # others take several ops, of which the first may be done
def test_a_failed_step_changes_nothing_and_the_next_works(row):
    for begun, (change, words) in itertools.product((0, 2), BAD_STEPS + BAD_STATES):
        if not begun and (change, words) in BAD_STATES:
            continue
        twins = Twins(row).step(begun)
        optimizer, params = twins.optimizer, twins.ours
        twins.random_grads()
        was = [(p.data, p.grad, dict(optimizer.state.get(p, {}))) for p in params]
        values = [{k: v.clone() for k, v in entry.items()} for *_, entry in was]
        options = dict(optimizer.param_groups[0])
        change(params, optimizer)
        before = frozen(optimizer)
        with pytest.raises((RuntimeError, TypeError), match=f"(?s){words}"):
            optimizer.step()
        if begun and change is not expand_data:  # else states were made, of zeros
            assert_frozen(optimizer, before, words)
        for name in ("grad_scale", "found_inf"):
            optimizer.__dict__.pop(name, None)
        optimizer.param_groups[0].update(options)
        for p, (data, grad, entry), kept in zip(params, was, values):  # all put right again
            p.grad, p.data = None, data
            p.grad = grad
            for key, value in kept.items():
                entry[key].copy_(value)
            optimizer.state[p] = entry if begun else {}
        optimizer.step()
        twins.other.step()
        twins.check(words)


KINDS = {
    "integers": torch.ones(3, dtype=torch.int32),
    "booleans": torch.ones(3, dtype=torch.bool),
    "meta": torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("tensor", KINDS.values(), ids=KINDS)
def test_parameters_of_unsupported_kinds_are_named_in_the_first_step(tensor):
    bad = torch.nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point())
    good = torch.nn.Parameter(torch.ones(3))
    optimizer = headroom.optim.AdamW([("good", good), ("bad", bad)])
    good.grad, bad.grad = torch.ones(3), torch.ones_like(bad)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="bad"):
            optimizer.step()
        assert (good == 1).all() and (bad.is_meta or (bad == 1).all())
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

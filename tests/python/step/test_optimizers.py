"""Optimizers that take the place of others: which may, with which options, and at what size."""

import headroom
import pytest
import torch
from headroom.step.optimizers import (
    is_headroom,
    obstacle,
    optimizer_of,
    replacement,
    state_bytes,
)
from torch import nn

OPTIM = headroom.optim
PAIRS = [
    *((torch.optim.Adam, "headroom", OPTIM.Adam), (torch.optim.AdamW, "headroom", OPTIM.AdamW)),
    *((torch.optim.Adam, "8bit", OPTIM.Adam8bit), (torch.optim.AdamW, "8bit", OPTIM.AdamW8bit)),
    *((OPTIM.Adam, "8bit", OPTIM.Adam8bit), (OPTIM.AdamW8bit, "headroom", OPTIM.AdamW)),
    (OPTIM.Adam8bit, "headroom", OPTIM.Adam),
]


def params(count=3):
    return [nn.Parameter(torch.ones(4, 3)) for _ in range(count)]


@pytest.mark.parametrize("cls, kind, wanted", PAIRS)
def test_groups_and_options_stay(cls, kind, wanted):
    first, second, third = params()
    groups = [
        {"params": [first, second], "lr": 0.5, "name": "decayed"},
        {"params": [third], "weight_decay": 0.25, "betas": (0.5, 0.75)},
    ]
    given = cls(groups, lr=0.125, eps=1e-4)
    new = replacement(given, kind)
    assert type(new) is wanted and is_headroom(new) and new is not given
    assert [group["params"] for group in new.param_groups] == [[first, second], [third]]
    assert new.param_groups[0]["name"] == "decayed"
    for name in ("lr", "eps", "betas", "weight_decay"):
        assert [g[name] for g in new.param_groups] == [g[name] for g in given.param_groups]
        assert new.defaults[name] == given.defaults[name]
    master = replacement(given, kind, "f32")
    assert {group["master"] for group in master.param_groups} == {"f32"}
    assert not any("master" in group for group in new.param_groups)


@pytest.mark.parametrize(
    "cls, kind, wanted",
    [
        (torch.optim.SGD, "headroom", OPTIM.SGD),
        (torch.optim.SGD, "8bit", OPTIM.SGD8bit),
        (OPTIM.SGD8bit, "headroom", OPTIM.SGD),
        (OPTIM.Lion, "8bit", OPTIM.Lion8bit),
    ],
)
def test_groups_and_options_of_sgd_and_lion_stay(cls, kind, wanted):
    first, second = params(2)
    groups = [{"params": [first], "lr": 0.5, "name": "one"}, {"params": [second]}]
    own = {"betas": (0.5, 0.75)}
    if cls is not OPTIM.Lion:
        own = {"momentum": 0.25, "dampening": 0, "nesterov": True}
    given = cls(groups, lr=0.125, weight_decay=0.25, maximize=True, **own)
    new = replacement(given, kind)
    assert type(new) is wanted and new.param_groups[0]["name"] == "one"
    for name in ("lr", "weight_decay", "maximize", *own):
        assert [g[name] for g in new.param_groups] == [g[name] for g in given.param_groups]
    master = replacement(given, kind, "remainder16")
    assert {group["master"] for group in master.param_groups} == {"remainder16"}


def test_groups_and_options_of_muon_stay():
    """The same parameters are matrices, in the same parts, also in groups that are added later."""
    model = nn.ModuleDict(
        {"qkv": nn.Linear(4, 12), "out": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    )
    own = {"ns_steps": 3, "normuon": 0.5, "adjust_lr_fn": "match_rms_adamw", "nesterov": False}
    given = OPTIM.Muon(
        model, lr=0.125, adamw={"lr": 0.5, "betas": (0.5, 0.75)}, workspace="1 MiB",
        max_grad_norm=2.0, split={"out": 2}, **own,
    )  # fmt: skip
    new = replacement(given, "8bit", "remainder16")
    assert type(new) is OPTIM.Muon8bit
    names = {*own, "lr", "eps", "betas", "use_muon", "split", "transposed", "max_grad_norm"}
    for group, before in zip(new.param_groups, given.param_groups, strict=True):
        assert {name: group[name] for name in names} == {name: before[name] for name in names}
        assert group["params"] == before["params"] and group["master"] == "remainder16"
    assert [g["split"] for g in new.param_groups if g["use_muon"]] == [3, 2]
    assert new._whole_arguments == given._whole_arguments
    new.add_param_group({"params": [("late.out", nn.Parameter(torch.ones(4, 4)))]})
    assert new.param_groups[-1]["split"] == 2


@pytest.mark.parametrize("kind, wanted", [("headroom", OPTIM.Muon), ("8bit", OPTIM.Muon8bit)])
def test_matrices_of_torchs_muon_stay_its_matrices(kind, wanted):
    """Names do not move one to AdamW, nor split it."""
    wte, qkv = (nn.Parameter(torch.ones(12, 4)) for _ in range(2))
    groups = [{"params": [("wte", wte)], "lr": 0.5}, {"params": [("qkv", qkv)]}]
    given = torch.optim.Muon(groups, lr=0.125, ns_steps=3, weight_decay=0.25)
    new = replacement(given, kind)
    assert type(new) is wanted
    for group, lr, param in zip(new.param_groups, (0.5, 0.125), (wte, qkv), strict=True):
        assert group["use_muon"] and group["split"] is None and group["params"] == [param]
        assert (group["lr"], group["ns_steps"], group["weight_decay"]) == (lr, 3, 0.25)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, OPTIM.AdamW])
def test_adafactor_in_their_place(cls):
    (param,) = params(1)
    own = {} if cls is torch.optim.AdamW else {"max_grad_norm": 2.0, "rounding": "kahan"}
    given = cls([{"params": [param], "lr": 0.5, "name": "all"}], weight_decay=0.25, **own)
    new = replacement(given, "adafactor")
    (group,) = new.param_groups
    assert type(new) is OPTIM.Adafactor and group["params"] == [param]
    wanted = dict(lr=0.5, weight_decay=0.25, name="all")
    wanted |= dict(scale_parameter=False, relative_step=False)
    assert {name: group[name] for name in wanted} == wanted and new.semantics == "hf"
    assert group.get("max_grad_norm") == own.get("max_grad_norm")
    assert not {"betas", "amsgrad", "master", "rounding"} & group.keys()
    assert replacement(given, "adafactor", "f32").param_groups[0]["master"] == "f32"


def scheduled(optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def stepped(optimizer):
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()


def differentiable(optimizer):
    optimizer.param_groups[0]["differentiable"] = True


def wrapped(optimizer):
    """As a scheduler does, whose groups were replaced since."""
    scheduled(optimizer)
    del optimizer.param_groups[0]["initial_lr"]


OBSTACLES = {
    stepped: "the optimizer has state already: training has begun",
    scheduled: "a learning-rate scheduler was made for the optimizer",
    wrapped: "a learning-rate scheduler was made for the optimizer",
    (lambda o: o.register_step_pre_hook(print)): "the optimizer has hooks on its step",
    (lambda o: o.register_step_post_hook(print)): "the optimizer has hooks on its step",
    differentiable: "the optimizer is differentiable",
}


@pytest.mark.parametrize("change", OBSTACLES)
def test_what_stands_in_the_way(change):
    optimizer = torch.optim.AdamW(params())
    assert obstacle(optimizer) is None
    change(optimizer)
    assert obstacle(optimizer).startswith(OBSTACLES[change])


def test_which_have_counterparts():
    for cls in (OPTIM.Adam, OPTIM.AdamW, OPTIM.Adam8bit, OPTIM.AdamW8bit, torch.optim.Adam):
        assert obstacle(cls(params())) is None
    for cls in (torch.optim.RMSprop, torch.optim.NAdam, OPTIM.Adafactor):
        words = f"{cls.__name__} has no counterpart: only Adam, AdamW, SGD, Lion and Muon have"
        assert obstacle(cls(params(), lr=0.1)) == words
    for cls in (torch.optim.SGD, OPTIM.SGD, OPTIM.SGD8bit):
        assert obstacle(cls(params(), lr=0.1)) == f"{cls.__name__} without momentum has no state"
        assert obstacle(cls(params(), lr=0.1, momentum=0.9)) is None
    assert obstacle(OPTIM.Lion(params())) is None
    for cls in (torch.optim.Muon, OPTIM.Muon, OPTIM.Muon8bit):  # momentum 0 has a state, too
        assert obstacle(cls(params(), momentum=0.0)) is None
    assert not is_headroom(torch.optim.AdamW(params())) and not is_headroom(None)


def test_what_is_an_optimizer():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    given = torch.optim.AdamW(net.parameters())
    assert optimizer_of(given, net) is given
    made = optimizer_of(OPTIM.AdamW, net)
    assert made.param_groups[0]["params"] == list(net[1].parameters())
    with pytest.raises(
        TypeError, match="optimizer is int, wanted a torch.optim.Optimizer or a fun"
    ):
        optimizer_of(3, net)
    with pytest.raises(TypeError, match="the function optimizer returned 3, wanted a torch.optim"):
        optimizer_of(lambda params: 3, net)
    other = nn.Linear(5, 1)
    foreign = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
    words = r"the optimizer has 2 parameters that the model does not have, .* shape \[1, 5\]"
    with pytest.raises(ValueError, match=words):
        optimizer_of(foreign, net)
    net.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        optimizer_of(OPTIM.AdamW, net)


def test_bytes_of_states():
    """Two moments of four bytes for each element, and a step counter of eight."""
    first, second = params(2)
    optimizer = OPTIM.AdamW([first, second])
    whole = state_bytes(optimizer)
    assert whole == 2 * (2 * 4 * 12 + 8)
    assert state_bytes(optimizer, [second]) == whole // 2
    stepped(optimizer)
    assert state_bytes(optimizer) == whole

"""Arguments of every optimizer: those of the original with its errors, and stricter ones. What a
constructor refuses is refused of a group, and of a group that is loaded, and changes nothing."""

import inspect
import itertools
import typing
import warnings

import headroom
import pytest
import torch
from headroom.optim import Adafactor, Adam, AdamW, AdamW8bit, Muon, Muon8bit, Optimizer

from helpers.bad_arguments import BAD_OPTIONS, BAD_PARAMS, raised, shared
from helpers.bits import assert_same_bits
from helpers.optimizer_suite import (
    EACH,
    HF,
    ROWS,
    assert_frozen,
    everything,
    frozen,
    options_of,
    parameters,
    rows,
    set_grads,
    start,
    trained,
)

INF, NAN = float("inf"), float("nan")
WITH_ORIGINAL = rows(lambda row: row.theirs)
MATRIX = torch.nn.Parameter(torch.ones(2, 2))


def test_every_optimizer_has_a_row():
    found = [getattr(headroom.optim, name) for name in headroom.optim.__all__]
    classes = {one for one in found if isinstance(one, type) and issubclass(one, Optimizer)}
    assert {row.cls for row in ROWS} == classes - {Optimizer}


@WITH_ORIGINAL
def test_arguments_are_those_of_the_original(row):
    """Positional ones in its order, and all with its defaults, but for those that Adafactor takes
    from its rule; so are the options of groups."""
    ours, theirs = (inspect.signature(of).parameters for of in (row.cls, row.theirs))
    without = {"amsgrad", "capturable"} if row.theirs in (HF, torch.optim.Adafactor) else set()
    wanted = {name: p for name, p in theirs.items() if name not in without}
    assert wanted.keys() <= ours.keys()
    in_order = [name for name, p in wanted.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if row.cls is not Adafactor:
        assert list(ours)[: len(in_order)] == in_order
        for name, p in wanted.items():
            assert (ours[name].default, ours[name].kind) == (p.default, p.kind), name
    semantics = {"semantics": "hf"} if row.theirs is HF else {}
    mine, its = row.cls([MATRIX], **semantics), row.theirs([MATRIX])
    extra = mine.defaults.keys() - its.defaults.keys()
    assert extra == set() if row.follows else not extra & {"master", "rounding", "max_grad_norm"}
    shown = {k: v for k, v in its.defaults.items() if k not in without}
    assert {k: mine.defaults[k] for k in shown} == shown or row.cls.__name__.startswith("Muon")
    assert mine.param_groups[0].keys() - {"params"} == mine.defaults.keys()
    assert isinstance(mine, torch.optim.Optimizer)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_annotations_name_what_exists(row):
    """As command lines that are made from constructors need."""
    assert torch.Tensor in typing.get_args(typing.get_type_hints(row.cls.__init__)["lr"])


@pytest.mark.parametrize("cls", [AdamW, AdamW8bit])
def test_weight_decay_by_its_place(cls):
    optimizer = cls([shared], 1e-3, (0.9, 0.99), 1e-8, 0.5)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


@rows(lambda row: row.theirs and row.cls not in (Adafactor, Muon, Muon8bit))
def test_bad_arguments_raise_the_errors_of_the_original(row):
    """Of options that it has and refuses, and of parameters; and the same warnings."""
    for name, options in BAD_OPTIONS.items():
        is_taken = row.theirs is torch.optim.SGD and name.endswith("nan")
        if options.keys() <= {*row.arguments} and not is_taken:
            ours, theirs = (raised(of, [shared], **options) for of in (row.cls, row.theirs))
            assert ours == theirs, name
    for name, params in BAD_PARAMS.items():
        assert raised(row.cls, params()) == raised(row.theirs, params()), name
    for params in ([shared, shared], {shared}):
        seen = []
        for of in (row.cls, row.theirs):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                of(params)
            seen.append([(w.category, str(w.message)) for w in caught])
        assert seen[0] == seen[1]


# The values that an option may not have. Those of a group alone have no argument.
BAD = {
    "lr": [-1.0, INF, NAN, "1e-3", torch.tensor(1), torch.ones(2), torch.tensor(-1.0)],
    "betas": [
        (1.0, 0.9),
        (-0.1, 0.9),
        (0.9, NAN),
        (0.9,),
        (0.9, 0.9, 0.9),
        0.9,
        "ab",
        None,
        ("a", 0.9),
    ],
    "eps": [-1.0, INF, NAN, None, "a"],
    "weight_decay": [-1, INF, NAN, "0.1"],
    "momentum": [-0.1, INF, NAN, "a"],
    "dampening": [NAN, INF, "a"],
    "differentiable": [True],
    "state_dtype": [torch.int8, torch.float64],
    "max_grad_norm": [-1.0, NAN, "1"],
    "master": ["f16"],
    "rounding": ["up"],
    "min_8bit_size": [-1, None, "a"],
    "optim_bits": [4, 16, None],
    "block_size": [100, 256.0],
    "code_rounding": ["up", None],
    "nonfinite": ["ignore", None],
    "beta2_decay": [0.1, -INF, "a"],
    "decay_rate": [0.1, "a"],
    "d": [0.5, "1"],
    "clip_threshold": [0.0, "a"],
    "beta1": [1.0, -0.1, "a"],
    "ns_steps": [100, -1],
    "ns_coefficients": ["newton", (1, 2)],
    "adjust_lr_fn": ["other"],
    "normuon": [1.0, -0.1],
}
BAD_EPS_OF_ADAFACTOR = [
    1e-3,
    (1e-3,),
    (-1.0, 1e-3),
    (None, -1.0),
    ("a", 1e-3),
    (None, None),
    (INF, 1e-3),
]
PAIRS = {  # that do not go together
    "rounding": [
        {"master": "f32", "rounding": "stochastic"},
        {"master": "remainder16", "rounding": "kahan"},
    ],
    "seed": [{"rounding": "stochastic", "seed": seed} for seed in (-1, 2**32, 0.5)],
    "nesterov": [{"nesterov": True, "momentum": 0.0}, {"nesterov": True, "dampening": 0.5}],
    "bnb_exact": [
        {"bnb_exact": True, "block_size": 64},
        {"bnb_exact": True, "code_rounding": "stochastic"},
        {"bnb_exact": True, "nonfinite": "skip_element"},
        {"bnb_exact": True, "master": "remainder16"},
    ],
    "ns_dtype": [{"variant": "gram", "ns_dtype": "bfloat16"}],
    "relative_step": [{"relative_step": True}, {"lr": None}, {"warmup_init": True}],
}
SAID = {
    "lr": "lr|[lL]earning rate",
    "eps": "eps|epsilon",
    "betas": "beta",
    "d": "d should|d must|threshold d",
    "relative_step": "lr|warmup_init",
    "nesterov": "[nN]esterov",
    "ns_steps": "ns_steps|Number of steps",
}
LEFT_OUT = {  # of the other rule, or without a bad value
    "Adafactor": {"decay_rate", "clip_threshold", "beta1", "relative_step"},
    "Adafactor-hf": {"beta2_decay", "d"},
    "Muon": {"nesterov"},
    "Muon8bit": {"nesterov"},
}
OWN_ERRORS = (TypeError, ValueError, RuntimeError)


def bad_options(row):
    """Yields an option's name and options of a group that a row refuses."""
    own = {*row.arguments, *(["optim_bits"] if row.wide else [])} - LEFT_OUT.get(row.name, set())
    for name in filter(own.__contains__, BAD):
        is_pair = name == "eps" and row.cls is Adafactor
        for value in BAD_EPS_OF_ADAFACTOR if is_pair else BAD[name]:
            yield name, {name: value}
    for name in filter(own.__contains__, PAIRS):
        yield from ((name, options) for options in PAIRS[name] if options.keys() <= own)
    if row.wide and "amsgrad" in own:
        yield "amsgrad", {"amsgrad": True}
    if row.cls is Muon8bit:
        yield "nonfinite", {"nonfinite": "skip_element"}


@EACH
def test_bad_options_are_refused_wherever_they_come_from(row):
    """By the constructor, of a group there and later, and of a loaded group, but for the options in
    which it follows its optimizer."""
    params, optimizer = trained(row, 1)
    saved, before, groups = optimizer.state_dict(), frozen(optimizer), options_of(optimizer)
    more = torch.nn.Parameter(torch.ones(3, 3))
    refused = list(bad_options(row))
    for name, options in refused:
        ways = [
            lambda options=options: row.make([{"params": [more]} | options]),
            lambda options=options: optimizer.add_param_group({"params": [more]} | options),
        ]
        if name != "optim_bits":
            ways.append(lambda options=options: row.make([more], **options))
        if name != "amsgrad" and "nonfinite" not in options:
            loaded = saved | {"param_groups": [saved["param_groups"][0] | options]}
            ways.append(lambda loaded=loaded: optimizer.load_state_dict(loaded))
        for way in ways:
            with pytest.raises(OWN_ERRORS, match=SAID.get(name, name)):
                way()
    assert_frozen(optimizer, before)
    assert options_of(optimizer) == groups and parameters(optimizer) == params and len(refused) > 15


# What torch's groups, or older ones, lack.
OPTIONAL = {"amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused"}
OPTIONAL |= {"maximize", "params"}


@EACH
def test_a_loaded_group_without_an_option_or_with_another_type_is_refused(row):
    _, optimizer = trained(row, 1)
    (group,) = optimizer.state_dict()["param_groups"]
    optional = OPTIONAL - ({"maximize"} if row.cls is Adafactor else set())
    optional |= {*getattr(optimizer, "_own_options", ())}
    required = () if row.cls in (Muon, Muon8bit) else group.keys() - optional
    spoiled = [(name, {k: v for k, v in group.items() if k != name}) for name in required]
    flags = {name for name, value in group.items() if isinstance(value, bool)}
    flags -= {"decoupled_weight_decay", *(["amsgrad"] if row.wide else [])}
    spoiled += [(name, group | {name: "yes"}) for name in flags]
    spoiled += [(name, group | {name: 3}) for name in ("master", "rounding")]
    if "state_dtype" in row.arguments:
        spoiled.append(("state_dtype", group | {"state_dtype": "float7"}))
    before = frozen(optimizer)
    for name, changed in spoiled:
        with pytest.raises(OWN_ERRORS, match=name):
            optimizer.load_state_dict(optimizer.state_dict() | {"param_groups": [changed]})
        assert_frozen(optimizer, before, name)
    assert len(spoiled) > 3


def test_what_holds_for_all_groups_is_the_same_in_all():
    """Limits of the norm, given or loaded; a group that comes later has that of the others."""
    groups = [
        {"params": [MATRIX], "max_grad_norm": 0.5},
        {"params": [shared], "max_grad_norm": 0.3},
    ]
    for row in ROWS:
        pair = [
            {"params": [p], "max_grad_norm": limit} for p, limit in zip(start(row)[:2], (0.5, 0.3))
        ]
        with pytest.raises(ValueError, match="group 0 has 0.5 and group 1 has 0.3"):
            row.make(pair)
    optimizer = AdamW(groups[:1])
    optimizer.add_param_group({"params": [shared]})
    assert optimizer.param_groups[1]["max_grad_norm"] == 0.5
    saved = optimizer.state_dict()
    saved["param_groups"][1]["max_grad_norm"] = 2.0
    with pytest.raises(ValueError, match=r"group 0 has 0\.5 and group 1 has 2\.0"):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[1]["max_grad_norm"] = 1.0
    with pytest.raises(ValueError, match="group 1 has 1.0"):
        optimizer.step()
    with pytest.raises(ValueError, match="nonfinite holds for all groups"):
        AdamW8bit([{"params": [shared], "nonfinite": "skip_step"}])
    for cls, name in ((AdamW8bit, "decoupled_weight_decay"), (AdamW8bit, "state_dtype")):
        with pytest.raises(TypeError, match=name):
            cls([shared], **{name: None})


def test_options_of_the_other_rule_are_refused():
    for semantics, name in itertools.product(("torch", "hf"), ("decay_rate", "d")):
        if (semantics == "hf") == (name == "d"):
            with pytest.raises(
                ValueError, match=f"{name} is not an option of semantics='{semantics}'"
            ):
                Adafactor([MATRIX], semantics=semantics, **{name: 1.0})
    with pytest.raises(ValueError, match="semantics must be 'torch' or 'hf'"):
        Adafactor([MATRIX], semantics="jax")


@EACH
def test_choices_of_an_implementation_have_no_effect(row, device):
    sides = [trained(row, 1, device=device)]
    for name, value in itertools.product(("foreach", "fused", "capturable"), (True, False)):
        if name in row.arguments and row.theirs is not HF:
            sides.append(trained(row, 1, device=device, **{name: value}))
    for _, optimizer in sides[1:]:
        assert_same_bits(everything(sides[0][1]), everything(optimizer))


@pytest.mark.parametrize("lr", [0.01, 1, 0, "numpy"], ids=str)
def test_kinds_of_numbers(lr):
    """For the learning rate; and betas may be tensors, both of them."""
    if lr == "numpy":
        lr = pytest.importorskip("numpy").float32(0.01)
    sides = [start(ROWS[0]) for _ in range(2)]
    for params, of in zip(sides, (AdamW, torch.optim.AdamW)):
        set_grads(params, 0)
        optimizer = of(params, lr=lr, betas=(torch.tensor(0.8), torch.tensor(0.9)))
        optimizer.step()
        assert all(type(beta) is float for beta in optimizer.defaults["betas"]) or of is not AdamW
    for p, q in zip(*sides):
        torch.testing.assert_close(p, q, rtol=2**-21, atol=2**-21)


REFUSED = {
    torch.float64: r"is in torch.float64; convert it, for instance",
    torch.float8_e4m3fn: r"is in torch.float8_e4m3fn",
    torch.complex64: r"is complex; optimize torch.view_as_real of it",
}


@EACH
def test_parameters_of_unsupported_dtypes_are_refused(row):
    """When given, and where a model became float64 later: no state is made."""
    for dtype, words in REFUSED.items():
        good, bad = (torch.nn.Parameter(torch.ones(3, 3).to(d)) for d in (torch.float32, dtype))
        with pytest.raises(ValueError, match=rf"^{row.cls.__name__} .*{words}"):
            row.make([good, bad])
        with pytest.raises(ValueError, match=rf"parameter 'bad' {words}"):
            row.make([("good", good), ("bad", bad)])
        optimizer = row.make([good])
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group({"params": (p for p in [bad])})
        assert len(optimizer.param_groups) == 1
        row.make([good, bad.requires_grad_(False)])  # which gets no gradient
    param = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = row.make([("weight", param)])
    param.data = param.data.double()
    param.grad = torch.ones_like(param)
    words = rf"{row.cls.__name__} takes .* parameter 'weight' is in .*float64"
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert not optimizer.state and (param == 1).all()


def test_adam_may_decouple():
    ours, theirs = ([torch.nn.Parameter(torch.ones(3))] for _ in range(2))
    for params, optimizer in (
        (ours, Adam(ours, weight_decay=0.1, decoupled_weight_decay=True)),
        (theirs, AdamW(theirs, weight_decay=0.1)),
    ):
        set_grads(params, 0)
        optimizer.step()
    assert torch.equal(*ours, *theirs)

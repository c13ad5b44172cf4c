"""Arguments of headroom.optim.Adam and AdamW: torch's, with torch's errors, and stricter ones."""

import inspect
import typing
import warnings

import headroom
import pytest
import torch

from helpers.bad_arguments import BAD_OPTIONS, BAD_PARAMS, raised, shared
from helpers.parameters import parameter
from helpers.torch_pairs import NAMES, OURS, pair

# --- Construction --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_arguments_defaults_and_their_order_are_torchs(name):
    ours, theirs = (list(inspect.signature(of).parameters.values()) for of in pair(name))
    plain = [(p.name, p.kind, p.default) for p in ours[: len(theirs)]]
    wanted = [(p.name, p.kind, p.default) for p in theirs]
    assert plain[:6] == wanted[:6] and set(plain) == set(wanted)  # keywords have no order
    more = {
        "state_dtype": None,
        "max_grad_norm": None,
        "master": None,
        "rounding": "nearest",
        "seed": 0,
        "count_stalled": False,
        "offload": None,
        "budget": None,
    }
    assert {p.name: p.default for p in ours[len(theirs) :]} == more


@pytest.mark.parametrize("name", NAMES)
def test_annotations_name_what_exists(name):
    """As command lines that are made from constructors need."""
    assert typing.get_type_hints(pair(name)[0].__init__)["lr"] == float | torch.Tensor


def test_groups_with_different_limits_are_both_named():
    groups = [{"params": [parameter(2)], "max_grad_norm": limit} for limit in (0.5, 0.3)]
    with pytest.raises(ValueError, match="group 0 has 0.5 and group 1 has 0.3"):
        headroom.optim.AdamW(groups)


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

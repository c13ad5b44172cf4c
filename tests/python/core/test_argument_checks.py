"""Checks of arguments: what passes, and the error of what does not."""

from contextlib import nullcontext

import pytest
import torch
from headroom._core import checks
from headroom._core.rows import (
    autocast,
    autocast_dtype,
    cast,
    check_tensors,
    constant_factors,
    promoted,
)

ONE, TWO = torch.ones(1), torch.ones(2)
META = torch.ones(1, device="meta")
GOOD = {
    "number": lambda: [checks.check_number("lr", n) for n in (1, 0.5, True)],
    "flags": lambda: checks.check_flags(a=True, b=False),
    "count": lambda: [checks.check_count("n", 0), checks.check_count("n", -3)],
    "least": lambda: checks.check_count("n", 2, 2),
    "pair": lambda: [checks.check_pair("betas", pair) for pair in ((1, 2), [0.1, 0.2])],
    "list": lambda: checks.check_list("m", [TWO, ONE], [TWO, ONE], (torch.float32,)),
    "numels": lambda: checks.check_list("m", [TWO], [ONE], (torch.float32,), [2]),
    "choice": lambda: checks.check_choice("mode", "a", ("a", "b")),
    "scalars": lambda: checks.check_scalars(
        {"lr_tensor": ONE.double(), "grad_scale": ONE, "found_inf": None, "clip_coef": ONE[0]},
        [TWO],
    ),
    "no parameters": lambda: checks.check_scalars({"grad_scale": META}, []),
    "rate on the CPU": lambda: checks.check_scalars({"lr_tensor": ONE}, [META]),
    "tensors": lambda: check_tensors(x=ONE),
}


@pytest.mark.parametrize("call", GOOD.values(), ids=GOOD)
def test_what_passes(call):
    call()


F32 = (torch.float32,)
BAD = {
    "lr must be a number, got '1'": lambda: checks.check_number("lr", "1"),
    "lr must be a float, got None": lambda: checks.check_number("lr", None, "a float"),
    "b is 1, wanted True or False": lambda: checks.check_flags(a=True, b=1),
    "mode is 'c', wanted one of a, b": lambda: checks.check_choice("mode", "c", ("a", "b")),
    "f: mode is 'c', wanted": lambda: checks.check_choice("mode", "c", ("a", "b"), "f: "),
    "n is True, wanted an integer": lambda: checks.check_count("n", True),
    "n is 2.0, wanted an integer": lambda: checks.check_count("n", 2.0),
    "n is 1, wanted 2 or more": lambda: checks.check_count("n", 1, 2),
    "betas must be two numbers, got 'ab'": lambda: checks.check_pair("betas", "ab"),
    "betas must be two numbers, got (1,)": lambda: checks.check_pair("betas", (1,)),
    "betas must be two numbers, got 1": lambda: checks.check_pair("betas", 1),
    "m has 1 tensors, wanted 2": lambda: checks.check_list("m", [ONE], [ONE, ONE], F32),
    "m[1] is on meta, params[0] on cpu": lambda: checks.check_list(
        "m", [ONE, META], [ONE, META], F32
    ),
    "m[0] has another shape than grads[0]": lambda: checks.check_list(
        "m", [ONE], [TWO], F32, leader="grads"
    ),
    "m[0] has 1 elements, wanted 3": lambda: checks.check_list("m", [ONE], [TWO], F32, [3]),
    "m[0] is torch.float64, not among (torch.float32,)": lambda: checks.check_list(
        "m", [ONE.double()], [ONE], F32
    ),
    "grad_scale must be a tensor of one": lambda: checks.check_scalars({"grad_scale": TWO}, [ONE]),
    "clip_coef must be a tensor of one element with a dtype among (torch.float32,)": (
        lambda: checks.check_scalars({"clip_coef": ONE.double()}, [ONE])
    ),
    "found_inf is on meta, wanted cpu, of params[0]": lambda: checks.check_scalars(
        {"found_inf": META}, [ONE]
    ),
    "grad_scale is on cpu, wanted meta, of params[0]": lambda: checks.check_scalars(
        {"grad_scale": ONE}, [META]
    ),
    "lr_tensor is on meta, wanted cpu, of params[0]": lambda: checks.check_scalars(
        {"lr_tensor": META}, [ONE]
    ),
    "x is None, wanted a tensor": lambda: check_tensors(y=ONE, x=None),
    "x is a list, wanted a tensor": lambda: check_tensors(x=[ONE]),
    "w is a float, wanted a tensor": lambda: constant_factors(1.0, "w"),
    "w requires grad, but gets no gradient; detach it": lambda: constant_factors(
        torch.ones(1, requires_grad=True), "w"
    ),
    "w has dtype torch.complex64, wanted real numbers": lambda: constant_factors(ONE + 0j, "w"),
}


@pytest.mark.parametrize("words", BAD)
def test_what_is_refused(words):
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        BAD[words]()
    assert str(caught.value).startswith(words)


def test_the_learning_rate_of_an_op():
    rate = torch.tensor(0.5)
    assert checks.lr_arguments(0.5, torch.device("cpu")) == {"lr": 0.5}
    assert checks.lr_arguments(rate, torch.device("cpu")) == {"lr": 0.0, "lr_tensor": rate}


def test_factors_are_float32():
    assert constant_factors(None, "w") is None
    assert constant_factors(ONE, "w") is ONE
    for given in (torch.tensor([2]), torch.tensor([True]), torch.tensor([2.0]).double()):
        factors = constant_factors(given, "w")
        assert factors.dtype == torch.float32 and factors == given
    with torch.no_grad():
        assert constant_factors(torch.ones(1, requires_grad=True), "w") == 1


def test_dtypes_under_autocast():
    """As ``torch.nn.functional.linear`` casts its arguments; float64 and integers stay."""
    bf16, f32 = torch.bfloat16, torch.float32
    tensors = (
        torch.ones(1),
        None,
        torch.ones(1).double(),
        torch.ones(1).long(),
        torch.ones(1).half(),
    )
    same = [None if t is None else t.dtype for t in tensors]
    for on in (False, True):
        with torch.autocast("cpu", bf16) if on else nullcontext():
            assert autocast_dtype("cpu") == (bf16 if on else None)
            assert autocast_dtype("meta") is None
            got = [None if t is None else t.dtype for t in autocast(*tensors)]
            assert got == ([bf16, None, *same[2:4], bf16] if on else same)
            assert autocast(None, tensors[0])[1].dtype == f32
            pair = promoted(tensors[0].to(bf16), tensors[0])
            assert [t.dtype for t in pair] == ([f32, f32] if on else [bf16, f32])
            both = promoted(tensors[0], tensors[0])
            assert both[0] is both[1] is tensors[0]
    assert [t if t is None else t.dtype for t in cast(bf16, *tensors)] == [
        *(bf16, None, *same[2:4], bf16)
    ]

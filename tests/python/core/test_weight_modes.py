"""Modes of storing 16-bit weights: their names, their numbers, and what is refused."""

import pytest
import torch
from headroom._core.weight_modes import check_weight_options, mode_of, weight_seeds, weights_mode

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Of each pair of options the number in ``hr_weights_mode``, the residual and its dtype, the dtypes
# of parameters, and whether numbers are drawn.
MODES = {
    (None, "nearest"): (0, None, None, (F32, BF16, F16), False),
    (None, "stochastic"): (1, None, None, (BF16, F16), True),
    (None, "kahan"): (2, "compensation", None, (BF16, F16), False),
    ("f32", "nearest"): (3, "master", F32, (BF16, F16), False),
    ("remainder16", "nearest"): (4, "remainder", torch.int16, (BF16,), False),
    ("remainder8", "nearest"): (5, "remainder", torch.int8, (BF16,), False),
    ("remainder8", "stochastic"): (6, "remainder", torch.int8, (BF16,), True),
}


@pytest.mark.parametrize("master, rounding", MODES)
def test_modes(master, rounding):
    want = MODES[master, rounding]
    mode = weights_mode(master, rounding)
    assert (mode.number, mode.residual, mode.dtype, mode.is_random) == (*want[:3], want[4])
    assert set(mode.params) == set(want[3])
    assert mode_of({"master": master, "rounding": rounding}) == mode
    if master is None and rounding == "nearest":
        assert weights_mode() == mode_of({}) == mode


@pytest.mark.parametrize(
    "options, words",
    [
        ({"master": "f64"}, "master must be one of .*, got 'f64'"),
        ({"rounding": "up"}, "rounding must be one of .*, got 'up'"),
        ({"master": "f32", "rounding": "kahan"}, "master='f32' does not go with rounding='kahan'"),
        ({"seed": -1}, r"seed must be from 0 to 2\^32 - 1, got -1"),
        ({"seed": 2**32}, r"got 4294967296"),
        ({"seed": 1.0}, "got 1.0"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        check_weight_options(options)


def test_remainders_are_of_bfloat16():
    half, bf16 = (torch.ones(1, dtype=dtype) for dtype in (F16, BF16))
    for master, seed in (("remainder16", 0), ("remainder8", 2**32 - 1)):
        options = {"master": master, "seed": seed}
        for params in (bf16, [bf16, half.float()], [("a", bf16)], iter([half])):
            check_weight_options(options | {"params": params})
        for params in (half, [bf16, half], [("a", half)]):
            with pytest.raises(
                ValueError, match=f"master='{master}' needs bfloat16 weights.*16; use"
            ):
                check_weight_options(options | {"params": params})
    check_weight_options({"master": "f32", "params": half})


def test_seeds_are_those_of_places():
    """The seed in the upper 32 bits and the place in the lower ones, as a signed number."""
    for seed in (0, 7, 2**31, 2**32 - 1):
        places = [0, 1, 5, 2**32 - 1, 2**32 + 3]
        for got, place in zip(weight_seeds(seed, places), places):
            unsigned = int(torch.tensor(got).view(torch.uint64).item())
            assert (unsigned >> 32, unsigned & (2**32 - 1)) == (seed, place % 2**32)

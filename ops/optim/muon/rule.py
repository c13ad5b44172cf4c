"""The numbers of Muon's rule: coefficients of Newton-Schulz, factors of the learning rate, and the
checks of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from ..._core.checks import check_choice, check_count, check_number
from ...functional.newton_schulz import VARIANTS

Triple = tuple[float, float, float]
AdjustLr = Literal["original", "match_rms_adamw", "spectral_unclamped"]
Variant = Literal["standard", "gram"]
Precision = Literal["bfloat16", "float16", "float32"]
DTYPES = {name: getattr(torch, name) for name in get_args(Precision)}

JORDAN: Triple = (3.4445, -4.7750, 2.0315)
SAFETY = 1.05  # by which Polar Express scales its argument, for the rounding of 16 bits

# By name: polynomials a x + b x^3 + c x^5 of the iterations. Keller Jordan's is that of
# kellerjordan.github.io/posts/muon, and You Jiacheng's are those of github.com/KellerJordan/Muon;
# Polar Express is arXiv:2505.16932. Its last one takes 1 to 1 and has no safety factor, so that
# singular values stay at 1 where it is repeated.
COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "jordan": (JORDAN,),
    "you_jiacheng": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        *(
            (a / SAFETY, b / SAFETY**3, c / SAFETY**5)
            for a, b, c in (
                (8.287212018, -23.595886519, 17.300387313),
                (4.107059112, -2.947849917, 0.544843108),
                (3.948690853, -2.908902116, 0.551819139),
                (3.318419657, -2.488488024, 0.510048940),
                (2.300652020, -1.668903985, 0.418807312),
                (1.891301408, -1.267995827, 0.376804089),
                (1.875001481, -1.250001645, 0.375000165),
            )
        ),
        (1.875, -1.25, 0.375),
    ),
}


def iterations(coefficients: str | Sequence[Any], steps: int) -> tuple[Triple, ...]:
    """Returns the polynomials of ``steps`` iterations. The last one that is given is repeated.

    Raises:
        ValueError: the name is unknown, or the coefficients are not triples of finite numbers.
    """
    if isinstance(coefficients, str):
        check_choice("ns_coefficients", coefficients, COEFFICIENTS)
        triples: Sequence[Any] = COEFFICIENTS[coefficients]
    else:
        several = len(coefficients) > 0 and isinstance(coefficients[0], Sequence)
        triples = coefficients if several else (coefficients,)
    for triple in triples:
        if not isinstance(triple, Sequence) or len(triple) != 3:
            raise ValueError(
                "ns_coefficients must be a name, three numbers, or three for each iteration, got "
                f"{coefficients!r}"
            )
        for number in triple:
            check_number("ns_coefficients", number, "numbers")
            if not math.isfinite(number):
                raise ValueError(f"ns_coefficients must be finite, got {coefficients!r}")
    return tuple(tuple(map(float, triples[min(k, len(triples) - 1)])) for k in range(steps))


def lr_scale(adjust: str | None, rows: int, cols: int) -> float:
    """Returns the factor of the learning rate for a matrix of ``rows`` outputs and ``cols`` inputs,
    as torch's ``_adjust_lr`` does."""
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    ratio = rows / max(cols, 1)
    return math.sqrt(ratio if adjust == "spectral_unclamped" else max(1.0, ratio))


def dtype_of(options: dict[str, Any]) -> torch.dtype:
    """Returns the dtype of the products of a group. In bfloat16 the Gram variant is too coarse."""
    default = "float16" if options["variant"] == "gram" else "bfloat16"
    return DTYPES[options["ns_dtype"] or default]


def check_rule(options: dict[str, Any]) -> None:
    """Refuses options of a group of matrices that are out of range."""
    check_number("momentum", options["momentum"])
    if not 0.0 <= options["momentum"] < math.inf:
        raise ValueError(f"momentum should be >= 0 but is: {options['momentum']}")
    check_count("ns_steps", options["ns_steps"], 1)
    if options["ns_steps"] >= 100:
        raise ValueError(
            "Number of steps must be less than 100 for computational efficiency, got "
            f"{options['ns_steps']}"
        )
    iterations(options["ns_coefficients"], options["ns_steps"])
    if options["adjust_lr_fn"] is not None:
        choices = ("original", "match_rms_adamw", "spectral_unclamped")
        check_choice("adjust_lr_fn", options["adjust_lr_fn"], choices)
    check_choice("variant", options["variant"], VARIANTS)
    if options["ns_dtype"] is not None:
        check_choice("ns_dtype", options["ns_dtype"], DTYPES)
    if options["ns_dtype"] == "bfloat16" and options["variant"] == "gram":
        raise ValueError(
            "variant='gram' squares the condition of a matrix, for which bfloat16 has too few "
            "bits: use ns_dtype='float16' or 'float32'"
        )
    if options["normuon"] is not None:
        check_number("normuon", options["normuon"], "a number or None")
        if not 0.0 <= options["normuon"] < 1.0:
            raise ValueError(f"normuon must be in [0, 1), got {options['normuon']}")

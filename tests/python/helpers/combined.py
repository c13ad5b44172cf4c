"""Combinations of features, and what their trainings are compared with: the same training without
the feature, in float64.

A family names axes and their values. Of the values of any two axes every pair occurs in a case of
the default run (of any three, with ``strength=3``); the full run has more cases, drawn from all
combinations. Both are seeded.
"""

import copy
import itertools
import random

import pytest
import torch


def combinations(axes, *, full=60, seed=26, strength=2, possible=lambda **case: True):
    """Returns a decorator that gives a test its cases, as a dict ``case``."""
    rng = random.Random(seed)
    every = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]
    every = [case for case in every if possible(**case)]
    rng.shuffle(every)

    tuples = [set(itertools.combinations(case.items(), strength)) for case in every]
    left = set().union(*tuples)
    chosen = []
    while left:
        best = max(range(len(every)), key=lambda k: len(tuples[k] & left))
        left -= tuples.pop(best)
        chosen.append(every.pop(best))
    cases = [pytest.param(case, id=_name(case)) for case in chosen]
    # Marked for the full run alone: each is quick, all of them are not.
    cases += [pytest.param(case, id=_name(case), marks=pytest.mark.slow) for case in every[:full]]
    return pytest.mark.parametrize("case", cases)


def _name(case):
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


def in_float64(model):
    return copy.deepcopy(model).double()


def gradients(model):
    """The gradients of a model's parameters as one vector in float64; 0 where there is none."""
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).detach().double().flatten()
            for p in model.parameters()
        ]
    )


def distance(got, wanted):
    """The norm of the difference over that of what is wanted; infinite where that is 0."""
    difference = (got.double() - wanted.double()).norm()
    if not difference.isfinite():
        return float("inf")
    return float(difference / wanted.double().norm()) if difference else 0.0

"""Arguments that torch's optimizers refuse, and the errors that they raise."""

import pytest
import torch

from helpers.parameters import parameter

BAD_OPTIONS = {
    "lr -1": {"lr": -1.0},
    "lr nan": {"lr": float("nan")},
    "lr of 2 elements": {"lr": torch.tensor([1e-3, 1e-3])},
    "lr negative tensor": {"lr": torch.tensor(-1.0)},
    "beta1 1": {"betas": (1.0, 0.999)},
    "beta1 -0.1": {"betas": (-0.1, 0.999)},
    "beta2 nan": {"betas": (0.9, float("nan"))},
    "beta2 2": {"betas": (0.9, 2.0)},
    "beta number and tensor": {"betas": (0.9, torch.tensor(0.99))},
    "beta tensor and number": {"betas": (torch.tensor(0.9), 0.99)},
    "eps -1": {"eps": -1.0},
    "eps nan": {"eps": float("nan")},
    "weight_decay -1": {"weight_decay": -1},
    "weight_decay nan": {"weight_decay": float("nan")},
}
shared = torch.nn.Parameter(torch.ones(2))
BAD_PARAMS = {
    "a tensor": lambda: shared,
    "none": lambda: [],
    "an exhausted generator": lambda: (p for p in ()),
    "numbers": lambda: [1.0],
    "None": lambda: [None],
    "a non-leaf": lambda: [shared * 2],
    "the same in two groups": lambda: [{"params": [shared]}, {"params": shared}],
    "a group without params": lambda: [{"lr": 1.0}],
    "a group that is a list": lambda: [{"params": [shared]}, [shared]],
    "a set in a group": lambda: [{"params": {shared}}],
    "names on some": lambda: [("weight", shared), parameter(2)],
    "names on some groups": lambda: [{"params": [("a", shared)]}, {"params": [parameter(2)]}],
}


def raised(function, *args, **kwargs):
    with pytest.raises((ValueError, TypeError, RuntimeError, KeyError)) as caught:
        function(*args, **kwargs)
    return type(caught.value), str(caught.value)

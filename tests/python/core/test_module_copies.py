"""Deep copies of models whose modules hold more than tensors."""

import math

import torch
from headroom._core.module_copies import copied_modules
from torch import nn


def test_modules_of_python_are_shared():
    model = nn.Linear(2, 2)
    model.math, model.own = math, {"math": math, "numbers": [1]}
    copied = copied_modules(model, torch.zeros_like)
    assert copied.math is math and copied.own["math"] is math
    assert copied.own["numbers"] == [1] and copied.own["numbers"] is not model.own["numbers"]

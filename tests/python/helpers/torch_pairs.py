"""Our optimizers beside torch's of the same name."""

from functools import partial

import headroom
import pytest
import torch

from helpers.twins import NAMES as TWINS

NAMES = ["Adam", "AdamW"]
OURS = pytest.mark.parametrize(
    "make",
    [headroom.optim.AdamW, partial(headroom.optim.AdamW8bit, min_8bit_size=0)],
    ids=TWINS,
)


def pair(name):
    return getattr(headroom.optim, name), getattr(torch.optim, name)

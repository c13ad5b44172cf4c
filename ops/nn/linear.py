"""An ``nn.Linear`` that is fast in 16 bits on every CPU."""

from __future__ import annotations

from torch import nn

from ..functional.linear import linear_forward


class Linear(nn.Linear):
    """``torch.nn.Linear``, whose product is :func:`headroom.functional.linear`: torch's own, but on
    the CPU in a dtype that torch has no fast product for."""

    forward = linear_forward

"""The callbacks that Lightning asks an installed Headroom for: none, unless the environment has a
budget. Lightning loads this file in every program that makes a Trainer, so it imports little."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["callbacks"]

BUDGET, HOST_BUDGET = "HEADROOM_BUDGET", "HEADROOM_HOST_BUDGET"


def callbacks() -> list[Any]:
    """Returns a :class:`headroom.integrations.lightning.FitCallback` with the budgets of the
    environment, or nothing."""
    budget = os.environ.get(BUDGET)
    if not budget:
        return []
    from .lightning import FitCallback

    return [FitCallback(budget, host_budget=os.environ.get(HOST_BUDGET) or None)]

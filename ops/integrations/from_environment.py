"""Callbacks that Lightning finds by an entry point of this package, and that are none unless an
environment variable asks for one: ``HEADROOM_BUDGET="6 GiB"`` fits every training of a process into
a budget of memory, as :class:`headroom.integrations.lightning.FitCallback` does."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["lightning_callbacks"]

BUDGET, HOST_BUDGET, ALLOW = "HEADROOM_BUDGET", "HEADROOM_HOST_BUDGET", "HEADROOM_ALLOW"


def lightning_callbacks() -> list[Any]:
    """Returns the callbacks that a Trainer of Lightning gets when it is made.

    ``HEADROOM_BUDGET`` asks for an EnvironmentFit; ``HEADROOM_HOST_BUDGET`` and ``HEADROOM_ALLOW``,
    names with commas, are its other arguments. Imports nothing and returns none without the first.
    """
    budget = os.environ.get(BUDGET)
    if not budget:
        return []
    from .lightning import EnvironmentFit

    allow = [name for name in os.environ.get(ALLOW, "").split(",") if name]
    return [EnvironmentFit(budget, allow, host_budget=os.environ.get(HOST_BUDGET) or None)]

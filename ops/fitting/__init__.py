"""Finds the fastest way to train a model within a budget of memory: :func:`headroom.fit`.

A step has costs, from which candidates follow; the search finds the fastest of them, which is
planned and applied. ``headroom.fit`` is a function, hence the name of this package.
"""

from .api import fit
from .apply.fitted import Fitted
from .choice import Choice, FrontierPoint
from .ladder import Ladder, Rung
from .report import Change
from .search.refusal import DoesNotFit

__all__ = ["Change", "Choice", "DoesNotFit", "Fitted", "FrontierPoint", "Ladder", "Rung", "fit"]

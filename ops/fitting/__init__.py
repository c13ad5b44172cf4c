"""Finds the fastest way to train a model within a budget of memory: :func:`headroom.fit`.

``headroom.fit`` is a function, hence the name of this package.
"""

from .api import fit
from .choice import Choice
from .errors import DoesNotFit
from .fitted import Change, Fitted
from .ladder import Ladder, Rung
from .search import FrontierPoint

__all__ = [
    "Change",
    "Choice",
    "DoesNotFit",
    "Fitted",
    "FrontierPoint",
    "Ladder",
    "Rung",
    "fit",
]

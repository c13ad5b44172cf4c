"""Optimizer states from one library to another: what a checkpoint needs to resume elsewhere.

A reader for each library takes the state of one parameter to a neutral form, a writer takes it from
there. What the target cannot keep is measured by reading back what was written.
"""

from .conversion import Converted, convert_state
from .libraries import LIBRARIES
from .report import Loss, Report

__all__ = ["LIBRARIES", "Converted", "Loss", "Report", "convert_state"]

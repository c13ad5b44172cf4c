"""Converts optimizer states between libraries, so that a checkpoint of one resumes in another.

Each library has a reader, from the state of one parameter to a neutral form, and a writer. Reading
back what was written measures what the target cannot keep.
"""

from .conversion import Converted, convert_state
from .libraries import LIBRARIES
from .neutral import RULES
from .report import Loss, Report

__all__ = ["LIBRARIES", "RULES", "Converted", "Loss", "Report", "convert_state"]

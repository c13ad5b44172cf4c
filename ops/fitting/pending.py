"""What a backward pass that has failed leaves in the queue of its thread."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Pending"]


class Pending:
    """Frees what a backward pass that fails leaves behind. Make it before the graph of that pass.

    Nodes that were ready to run when another one, or a hook on a parameter, raised stay in the
    queue of the thread, with their gradients and all of the graph behind them, until a later
    backward pass of the thread comes to them. The youngest nodes run first, so a pass that begins
    anew comes to them when it has ended. (Devices have threads of their own, which never rest.)
    """

    def __init__(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self._oldest: Tensor = torch.zeros((), device="cpu", requires_grad=True) * 1

    def free(self) -> None:
        """Runs the backward pass of a node that is older than those that were left, so that all of
        them are taken out of the queue before it; they are not run."""
        self._oldest.backward()

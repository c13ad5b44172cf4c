"""Steps on the host when all gradients are known, which wait there until then."""

from __future__ import annotations

import torch
from torch import Tensor

from ..param_states.paging import Hosting
from .stepping import Stepping


class Waiting(Stepping):
    """Clips by the norm of all gradients, and skips steps as a whole, exactly.

    Each gradient goes to the host beside the backward pass, and waits there. When all are known,
    the host steps with them.
    """

    _needs_norms = True

    @property
    def _hosting(self) -> Hosting:
        paging = self.optimizer._paging
        if not isinstance(paging, Hosting):
            raise RuntimeError(
                "the optimizer is not stepped on the host any more, which clips and skips exactly: "
                "release its gradients anew"
            )
        return paging

    def check(self) -> None:
        """Refuses an optimizer that is not stepped on the host any more."""
        assert self._hosting

    def restart(self) -> None:
        super().restart()
        if isinstance(self.optimizer._paging, Hosting):
            self.optimizer._paging.discard()

    def end(self) -> None:
        super().end()
        if isinstance(self.optimizer._paging, Hosting):
            self.optimizer._paging.drop_gradients()

    def _step_finite(self, params: list[Tensor], scale: Tensor | None) -> None:
        norms = self._norms.measure(params, scale)
        if self._flag is not None:
            found = (~norms.isfinite()).any().float()
            self._flag.copy_(torch.maximum(self._flag, found.to(self._flag.device)))
        hosting = self._hosting
        hosting.waits = True
        try:
            self._apply(params, scale)
        finally:
            hosting.waits = False
        self.has_stepped = False  # the gradients wait

    def _conclude(self) -> None:
        if self._verdict is None and self._norms:
            self._verdict = measured = self._norms.total(self.max_norm)
            self.optimizer.grad_norm = measured.norm
            self.has_stepped = True
            coef = None if self.max_norm is None else measured.clip_coef
            self._hosting.step_waiting(measured.found_inf, coef)
        super()._conclude()

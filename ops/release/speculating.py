"""Steps on the host inside backward, in second places, until all gradients are known."""

from __future__ import annotations

import torch
from torch import Tensor

from ..param_states.paging import Hosting
from .stepping import Stepping


class Speculating(Stepping):
    """Clips by the norm of all gradients, and skips steps as a whole, exactly.

    Each bucket is stepped on the host beside the backward pass as if nothing were clipped, and the
    old states are kept. When all gradients are known, the new states take their place; or those are
    made again from the old ones, with gradients that are clipped; or they are forgotten.
    """

    _needs_norms = True

    @property
    def _hosting(self) -> Hosting:
        paging = self.optimizer.paging
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
        if isinstance(self.optimizer.paging, Hosting):
            self.optimizer.paging.discard()

    def end(self) -> None:
        super().end()
        if isinstance(self.optimizer.paging, Hosting):
            self.optimizer.paging.drop_seconds(self.optimizer)

    def _step_finite(self, params: list[Tensor], scale: Tensor | None) -> None:
        norms = self._norms.measure(params, scale)
        if self._flag is not None:
            found = (~norms.isfinite()).any().float()
            self._flag.copy_(torch.maximum(self._flag, found.to(self._flag.device)))
        hosting = self._hosting
        hosting.speculates = True
        try:
            self._apply(params, scale)
        finally:
            hosting.speculates = False
        self.has_stepped = False  # it can be taken back

    def _conclude(self) -> None:
        if self._verdict is None and self._norms:
            self._decide()
        super()._conclude()

    def _decide(self) -> None:
        """Lets the steps count, or makes them again, or forgets them. Waits for the device."""
        self._verdict = measured = self._norms.total(self.max_norm)
        optimizer, hosting = self.optimizer, self._hosting
        optimizer.grad_norm = measured.norm
        self.has_stepped = not measured.found_inf  # if it fails, a part has been
        if measured.found_inf:
            optimizer._restart_stalled()
            hosting.discard()
        elif self.max_norm is not None and measured.clip_coef != 1:
            optimizer._restart_stalled()
            optimizer._run(hosting.made_again(measured.clip_coef))
            hosting.finish()
        else:
            hosting.commit()

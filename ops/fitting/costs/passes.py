"""Keeps the times of passes of a model, and estimates those of passes that were not timed."""

from __future__ import annotations

from dataclasses import dataclass

from ...step.pass_seconds import PassSeconds

FASTER = 0.95  # of the time of a whole batch: parts that take more are not taken to be faster


@dataclass
class PassTimes:
    """The times of passes at the leanest levels: of the batch, of parts of it, and with either
    loss. Those that were not timed are estimated: a part of some size takes as much longer than
    its share with one loss as with the other, and smaller parts take no less than larger ones.

    Args:
        whole: of the batch.
        fused_loss: whether that was with the fused loss.
    """

    whole: PassSeconds
    fused_loss: bool

    def __post_init__(self) -> None:
        self._timed = {(1, self.fused_loss): self.whole}

    def add(self, count: int, fused_loss: bool, seconds: PassSeconds) -> None:
        """Notes the times of one of ``count`` parts."""
        self._timed[count, fused_loss] = seconds

    def is_known(self, count: int, fused_loss: bool) -> bool:
        """Returns whether parts of this size have been timed, and this loss."""
        return any(count == n for n, _ in self._timed) and any(
            fused_loss == fused for _, fused in self._timed
        )

    def factor(self, count: int) -> float:
        """Returns by which factor the blocks take longer in ``count`` parts than in the batch."""
        found = {n: self._factor(n) for n, _ in self._timed}
        return found.get(count) or max(factor for n, factor in found.items() if n < count)

    def _factor(self, count: int) -> float:
        if self.whole.blocks > 0:
            blocks = min(seconds.blocks for (n, _), seconds in self._timed.items() if n == count)
            factor = count * blocks / self.whole.blocks
        elif (count, self.fused_loss) in self._timed and self.whole.outside > 0:  # without blocks
            factor = count * self._timed[count, self.fused_loss].outside / self.whole.outside
        else:
            factor = 1.0
        return 1.0 if FASTER < factor < 1.0 else factor

    def outside(self, count: int, fused_loss: bool) -> float:
        """Returns the seconds of all but the blocks, of all ``count`` parts together."""
        timed = self._timed.get((count, fused_loss))
        if timed is not None:
            return count * timed.outside
        return self.whole.outside * self.factor(count) * self._share(fused_loss)

    def _share(self, fused_loss: bool) -> float:
        """Returns the seconds of all but the blocks with a loss, as a share of those of ``whole``.
        One that was not timed is taken to be as fast."""
        if fused_loss == self.fused_loss or self.whole.outside <= 0:
            return 1.0
        return min(
            (
                n * seconds.outside / (self.whole.outside * self.factor(n))
                for (n, fused), seconds in self._timed.items()
                if fused == fused_loss
            ),
            default=1.0,
        )

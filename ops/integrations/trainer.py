"""Steps of the Trainer of transformers, for what must know where they end."""

from __future__ import annotations

from typing import Any, Protocol

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("headroom.integrations.trainer needs the package transformers") from error

__all__ = ["StepCallback"]


class _Steps(Protocol):
    def step(self) -> None: ...


class StepCallback(TrainerCallback):
    """Calls ``prof.step()`` whenever the Trainer has ended a step, micro-batches included.

    Make the Trainer, then ``with headroom.profile("runs/profile", model=model) as prof:`` add
    ``StepCallback(prof)`` to it and train. ``docs/integrations.md`` has the whole of it.

    The Trainer moves the model to its device when it is made, so make it before the profile.

    Args:
        prof: what :func:`headroom.profile` returns, or anything else with such a method.
    """

    def __init__(self, prof: _Steps) -> None:
        self._prof = prof

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Tells the profile that a step has ended."""
        self._prof.step()

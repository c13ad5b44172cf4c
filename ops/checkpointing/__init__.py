"""Keeps fewer activations for the backward pass and computes them again: checkpointing.

``headroom.checkpoint`` is a function, like torch's. Importing a package of that name would replace
it: hence the name of this one.
"""

from .every import CheckpointedBlocks, checkpoint_every
from .regions import checkpoint, checkpoint_sequential
from .verify import RecomputeError

__all__ = [
    "CheckpointedBlocks",
    "RecomputeError",
    "checkpoint",
    "checkpoint_every",
    "checkpoint_sequential",
]

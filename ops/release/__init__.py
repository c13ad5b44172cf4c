"""Gradient release: parameters are stepped inside backward, and their gradients freed at once.

The engine (engine.py) collects gradients as they become ready and hands them over in buckets. A
strategy says what becomes of them:

- stepping.py steps their parameters, and clips by the norm of all gradients, of the step before or
  of a first backward;
- accumulation.py adds them to the sums of a GradAccumulator;
- adama.py adds them to the moments of Adam.

The user's loop sees the handle (handle.py).
"""

from .handle import ReleaseHandle, bucket_of, release_gradients

__all__ = ["ReleaseHandle", "bucket_of", "release_gradients"]

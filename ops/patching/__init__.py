"""Changes models that exist, in place: their norms and blocks become Headroom's.

``headroom.patch`` is a function, hence the name of this package. :mod:`.patch` is the frame,
:mod:`.families` knows architectures of transformers, and :mod:`.generic` norms of any model.
"""

from .patch import patch, unpatch
from .report import PatchReport

__all__ = ["PatchReport", "patch", "unpatch"]

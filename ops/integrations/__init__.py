"""Adapts Headroom to the training loops of other libraries. Each module is imported when it is
first used, and names the package that it needs if that is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy

if TYPE_CHECKING:
    from . import accelerate, lightning, transformers
else:
    __getattr__, __dir__ = lazy(__name__, {}, ("accelerate", "lightning", "transformers"))

__all__ = ["accelerate", "lightning", "transformers"]

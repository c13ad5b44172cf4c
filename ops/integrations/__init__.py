"""Adapts Headroom to the training loops of other libraries. Each module is imported when it is
first used, and names the package that it needs if that is missing. Those that a configuration of
these libraries names, such as ``headroom.integrations.axolotl``, are not listed here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy

if TYPE_CHECKING:
    from . import accelerate, lightning, transformers, trl
else:
    __getattr__, __dir__ = lazy(__name__, {}, ("accelerate", "lightning", "transformers", "trl"))

__all__ = ["accelerate", "lightning", "transformers", "trl"]

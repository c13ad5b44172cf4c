"""Adapts Headroom to the training loops of other libraries. Each module is imported when it is
first used, and names the package that it needs if that is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy

if TYPE_CHECKING:
    from . import accelerate, axolotl, lightning, torchtitan, transformers, trl
else:
    modules = ("accelerate", "axolotl", "lightning", "torchtitan", "transformers", "trl")
    __getattr__, __dir__ = lazy(__name__, {}, modules)

__all__ = ["accelerate", "axolotl", "lightning", "torchtitan", "transformers", "trl"]

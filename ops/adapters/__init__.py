"""Low-rank adapters of models, in place: which layers get them, which are active, their files, and
merging."""

from __future__ import annotations

from .files import load_adapter, save_adapter
from .lora import lora
from .merge import MergeReport, merge, unmerge
from .report import LoRAReport
from .switching import adapters_disabled, delete_adapter, use_adapters

__all__ = [
    "LoRAReport",
    "MergeReport",
    "adapters_disabled",
    "delete_adapter",
    "load_adapter",
    "lora",
    "merge",
    "save_adapter",
    "unmerge",
    "use_adapters",
]

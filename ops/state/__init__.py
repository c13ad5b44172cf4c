"""States of a run: files with checksums, conversion between libraries, and resharding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy
from .compare import check_same_state
from .convert import Converted, Loss, Report, convert_state
from .file import StateFileError
from .load import load_state
from .newest import latest
from .save import save_state

if TYPE_CHECKING:
    from .reshard import ReshardReport, load_sharded
else:  # which load torch.distributed.fsdp and torch.distributed.checkpoint
    __getattr__, __dir__ = lazy(__name__, {".reshard": ("ReshardReport", "load_sharded")})

__all__ = [
    "Converted",
    "Loss",
    "Report",
    "ReshardReport",
    "StateFileError",
    "check_same_state",
    "convert_state",
    "latest",
    "load_sharded",
    "load_state",
    "save_state",
]

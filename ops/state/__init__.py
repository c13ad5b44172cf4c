"""States of a run: files with checksums, conversion between libraries, and resharding.

Each function is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy

if TYPE_CHECKING:
    from .compare import check_same_state
    from .convert import Converted, Loss, Report, convert_state
    from .file import StateFileError
    from .load import load_state
    from .newest import latest
    from .reshard import ReshardReport, load_sharded
    from .save import save_state
else:
    __getattr__ = lazy(
        __name__,
        {
            "Converted": ".convert",
            "Loss": ".convert",
            "Report": ".convert",
            "ReshardReport": ".reshard",
            "StateFileError": ".file",
            "check_same_state": ".compare",
            "convert_state": ".convert",
            "latest": ".newest",
            "load_sharded": ".reshard",
            "load_state": ".load",
            "save_state": ".save",
        },
    )

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


def __dir__() -> list[str]:
    return list(__all__)

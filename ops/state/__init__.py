"""States of a run: files that survive, conversion from and to other libraries, other ranks.

What a function needs is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy

if TYPE_CHECKING:
    from .compare import check_same_state
    from .convert import Converted, Loss, Report, convert_state
    from .file import StateFileError
    from .reshard import ReshardReport, load_sharded
    from .save import latest, load_state, save_state
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
            "latest": ".save",
            "load_sharded": ".reshard",
            "load_state": ".save",
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

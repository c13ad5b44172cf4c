"""Progress bars of long work."""

from __future__ import annotations

from tqdm import tqdm


def progress_bar(total: int | None, description: str | None, *, unit: str, shown: bool) -> tqdm:
    """Returns a bar, to be used in a ``with`` block. Bytes (``unit="B"``) are shown with prefixes,
    and their bar only if the work takes longer than a second.

    Args:
        total: how many units there are; None: not known.
        description: what stands before the bar.
        unit: the name of one.
        shown: False for a bar that stays invisible.
    """
    is_bytes = unit == "B"
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=is_bytes,
        delay=1 if is_bytes else 0,
        disable=not shown,
    )

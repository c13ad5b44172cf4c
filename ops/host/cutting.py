"""Divides tensors into the parts that pass through slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .ring import aligned

# Elements, at multiples of which tensors are cut: whole blocks of scales, and whole cache lines.
CUT = 4096

Held = list[tuple[int, slice | None]]  # positions of tensors, and which elements; None: all


def divided(
    sizes: Sequence[int], slot_bytes: int, cuts: Callable[[int], Iterable[slice | None]]
) -> list[Held]:
    """Returns what fills each slot, of tensors of these bytes in their order.

    Args:
        cuts: is called with the position of a tensor that is larger than a slot, and returns the
            elements that each of its parts has.
    """
    found: list[Held] = []
    filled = slot_bytes + 1  # no part
    for at, size in enumerate(sizes):
        if size > slot_bytes:
            found += [[(at, elements)] for elements in cuts(at)]
            filled = slot_bytes + 1
            continue
        if filled + size > slot_bytes:
            found.append([])
            filled = 0
        found[-1].append((at, None))
        filled = aligned(filled + size)
    return found


def equal_cuts(count: int, most: int) -> list[slice]:
    """Returns the elements of equal parts, of no more than ``most`` unless that is below ``CUT``: a
    small part would leave the link idle while its slot waits for a large one's."""
    most = max(CUT, most // CUT * CUT)
    length = aligned(-(-count // -(-count // most)), CUT)
    return [slice(i, min(i + length, count)) for i in range(0, count, length)]

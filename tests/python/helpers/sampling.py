"""Chooses which cases of a test with several parameters to run when not all of them are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

__all__ = ["sample"]


def sample(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the items to run and the others. Of each test the first cases are kept in which every
    value of every parameter occurs once; only combinations are left out.
    """
    kept, left_out = [], []
    seen: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for item in items:
        case = getattr(item, "callspec", None)
        # By identity: values need not be hashable, and each is one object in all of its cases.
        values = {(name, id(value)) for name, value in case.params.items()} if case else set()
        known = seen[item.nodeid.partition("[")[0]]
        (left_out if case and values <= known else kept).append(item)
        known |= values
    return kept, left_out

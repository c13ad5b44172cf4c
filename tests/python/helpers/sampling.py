"""Chooses which cases of a test with several parameters to run when not all of them are."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import combinations
from pathlib import Path

import pytest

__all__ = ["ALONE", "sample", "sample_slow"]

# Cases that alone reach a line or a branch; tests/python/mutation/cases.py measures them.
DATA = Path(__file__).with_name("kept_cases.json")
ALONE = frozenset(case for cases in json.loads(DATA.read_text()).values() for case in cases)


def sample(
    items: Iterable[pytest.Item], ways: int = 1, kept_too: Collection[str] = ALONE
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the items to run and the others. Of each test the first cases are kept in which every
    combination of the values of ``ways`` parameters occurs once, and those of ``kept_too``: with 1
    every value of every parameter, with 2 every pair of them.
    """
    kept, left_out = [], []
    seen: dict[str, set[frozenset[tuple[str, int]]]] = defaultdict(set)
    for item in items:
        case = getattr(item, "callspec", None)
        # By identity: values need not be hashable, and each is one object in all of its cases.
        values = [(name, id(value)) for name, value in case.params.items()] if case else []
        combined = {frozenset(few) for few in combinations(values, min(ways, len(values)))}
        known = seen[item.nodeid.partition("[")[0]]
        leave = case and combined <= known and item.nodeid not in kept_too
        (left_out if leave else kept).append(item)
        known |= combined
    return kept, left_out


def sample_slow(
    items: Iterable[pytest.Item], most: int, kept_too: Collection[str] = ALONE
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the items to run and the others. Of the cases of a test that are marked slow ``most``
    are kept, from the first to the last at equal distances, and those of ``kept_too``.
    """
    items = list(items)
    slow: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is not None:
            slow[item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for cases in slow.values():
        last = len(cases) - 1
        chosen = {round(k * last / max(most - 1, 1)) for k in range(min(most, len(cases)))}
        if len(cases) > most:
            left_out |= {
                case.nodeid
                for k, case in enumerate(cases)
                if k not in chosen and case.nodeid not in kept_too
            }
    kept = [item for item in items if item.nodeid not in left_out]
    return kept, [item for item in items if item.nodeid in left_out]

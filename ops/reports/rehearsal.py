"""The report of ``headroom rehearse`` as a part of a page: whether it fits, what the device holds
at the peak, the lines that own it, and what ran out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._core.text import quoted
from ..memory.events import KINDS
from .kinds import UNKNOWN
from .limits import SUM, checked, number, text
from .text import Texts

__all__ = ["VERDICTS", "described"]

ROWS = 200  # of requests that were refused, and of reads
OWNERS = 3000  # rows of the table
VERDICTS = {True: "it fits", False: "it does not fit", None: "unknown whether it fits"}


def described(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a report shows of a rehearsal. ``owners``, ``kinds``, ``strings`` and ``stacks``
    are those of what was live at the peak, as in :func:`headroom.reports.recording.described`.

    Raises:
        ValueError: a number or text is missing, or of another type.
    """
    if value["fits"] not in VERDICTS:
        raise ValueError(f"fits is {repr(value['fits'])[:60]}")
    device = checked(value["device"], Mapping, "the device")
    summary = {
        "fits": value["fits"],
        "device": quoted(text(device["name"], "the name of the device"), 60),
        "device_bytes": number(device["memory"], "the memory of the device"),
        "context_bytes": number(device["context"], "the context"),
        "capability": number(device["capability"], "the capability"),
        "program": " ".join(
            quoted(text(word, "a word of the program"), 120) for word in value["program"]
        ),
        "peak_bytes": number(value["peak_allocated"], "the peak"),
        "peak_reserved_bytes": number(value["peak_reserved"], "what was reserved"),
        "host_peak_bytes": number(value["host"]["peak"], "the host's peak"),
        "steps": number(value["steps"], "steps"),
        "after_step": {
            quoted(kind, 40): number(size, "bytes") for kind, size in value["after_step"].items()
        },
    }
    texts, kinds = Texts(), [*KINDS, UNKNOWN]
    owners: list[list[Any]] = []
    for row in checked(value["at_peak"], list, "at_peak"):
        kind = UNKNOWN if row["kind"] is None else row["kind"]
        if kind not in kinds:
            raise ValueError(f"a kind is {repr(kind)[:60]}, wanted one of {', '.join(kinds)}")
        stack = texts.stack([text(line, "a line of a stack") for line in row["stack"]])
        size = number(row["bytes"], "bytes")
        op = None if row["stack"] else texts.number("a backward pass")  # whose thread has no line
        owners.append([kinds.index(kind), None, op, stack, size, number(row["count"], "a count")])
    owners.sort(key=lambda owner: -owner[4])
    by_kind = dict.fromkeys(kinds, 0)
    rest = [[0, 0] for _ in kinds]
    for place, (kind, *_, size, count) in enumerate(owners):
        by_kind[kinds[kind]] += size
        if place >= OWNERS:
            rest[kind][0] += size
            rest[kind][1] += count
    if sum(by_kind.values()) > SUM:
        raise ValueError("at_peak has more than 2**62 bytes")
    summary["peak_by_kind"] = {kind: size for kind, size in by_kind.items() if size}
    return {
        "summary": summary,
        "kinds": kinds,
        "owners": owners[:OWNERS],
        "rest": rest,
        "strings": texts.strings,
        "stacks": texts.stacks,
        "refused": [
            {
                "line": quoted(text(one["line"], "a line"), 300),
                "asked": number(one["asked"], "what was asked for"),
                "allocated": number(one["allocated"], "what was allocated"),
            }
            for one in value["refused"][:ROWS]
        ],
        "reads": [
            [quoted(place, 300), number(count, "a count")]
            for place, count in [*value["unknown_reads"].items()][:ROWS]
        ],
        "versions": {
            quoted(name, 60): quoted(text(version, "a version"), 60)
            for name, version in [*value["versions"].items()][:ROWS]
        },
    }

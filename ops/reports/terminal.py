"""A report as text for a terminal: with rich where it is installed, plain where it is not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from .._core.sizes import format_bytes
from .._core.text import shortened
from .files import Part
from .kinds import PHASES, color_of, name_of

__all__ = ["show", "text_of"]

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 72  # columns of the picture over time
HEIGHT = 8  # its rows
BAR = 28


def show(parts: Sequence[Part], file: TextIO | None = None, top: int = 10) -> None:
    """Prints the parts to ``file``, by default standard output: in color where that is a terminal
    and rich is installed."""
    file = sys.stdout if file is None else file
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        file.write(text_of(parts, top) + "\n")
        return
    console = Console(file=file, highlight=False, soft_wrap=True)
    for pieces in _lines(parts, top):
        line = Text()
        for text, kind in pieces:
            line.append(text, style=_style(kind))
        console.print(line)


def text_of(parts: Sequence[Part], top: int = 10) -> str:
    """Returns the parts as plain text."""
    return "\n".join("".join(text for text, _ in pieces).rstrip() for pieces in _lines(parts, top))


Pieces = list[tuple[str, "str | None"]]
"""A line: texts, each with the kind of memory that colors it, "head" or None."""


def _style(kind: str | None) -> str:
    return "" if kind is None else "bold" if kind == "head" else color_of(kind)


def _lines(parts: Sequence[Part], top: int) -> list[Pieces]:
    lines: list[Pieces] = []
    for part in parts:
        lines += [[]] * bool(lines) + [[(part.title, "head")]]
        lines += SHOWN[part.kind](part.content, top)
    return lines


def _bar(share: float, kind: str) -> tuple[str, str]:
    return ("█" * round(BAR * max(0.0, min(1.0, share))), kind)


def _recording(content: dict[str, Any], top: int) -> list[Pieces]:
    facts = content["summary"]
    peak = facts["peak_bytes"]
    lines: list[Pieces] = []
    if "total_bytes" in facts:
        lines.append(
            [(f"{format_bytes(facts['total_bytes'])} on {facts['device']}, predicted", None)]
        )
    lines.append([(f"peak of tensors {format_bytes(peak)}, {_where(facts)}", None)])
    lines += [[], *_area(content), []]
    for kind, size in facts["peak_by_kind"].items():
        numbers = f"{name_of(kind):<18}{format_bytes(size):>11}{size / max(1, peak):>8.1%}  "
        lines.append([(numbers, None), _bar(size / max(1, peak), kind)])
    owners = [owner for owner in content["owners"] if owner[4]][:top]
    if owners:
        lines += [[], [(f"{'owners at the peak':<44}{'bytes':>11}{'count':>8}", "head")]]
    for kind, module, op, stack, size, count in owners:
        strings = content["strings"]
        names = [strings[number] for number in (module, op) if number is not None]
        stacks = content["stacks"][stack]
        if len(names) == 2 and names[1].startswith(f"{names[0]}."):
            del names[0]  # the name of a parameter begins with that of its module
        name = " ".join(filter(None, names)) or (strings[stacks[0]] if stacks else "unknown")
        text = f"{shortened(name, 42):<42}{format_bytes(size):>11}{count:>8}"
        lines.append([("■ ", content["kinds"][kind]), (text, None)])
    if "segments" in facts:
        held = facts["segments"]
        lines += [
            [],
            [
                (
                    f"reserved {format_bytes(held['reserved_bytes'])} in {held['segments']} "
                    f"segments, in use {format_bytes(held['allocated_bytes'])}, largest free "
                    f"block {format_bytes(held['largest_free_block_bytes'])}",
                    None,
                )
            ],
        ]
    return lines + [[(note, None)] for note in content["notes"]]


def _where(facts: dict[str, Any]) -> str:
    if facts["peak_phase"] == "other":
        return f"at event {facts['peak_event']:,} of {facts['events']:,}"
    return f"in the {facts['peak_phase']} phase of step {facts['peak_step']}"


def _area(content: dict[str, Any]) -> list[Pieces]:
    """Returns the live bytes over the events, as columns of blocks, each the most of its
    events."""
    total = 0
    sums = []
    for changes in zip(*content["series"]["kind"].values()):
        total += sum(changes)
        sums.append(total)
    if not sums or not max(sums):
        return []
    width = min(WIDTH, len(sums))
    edges = [place * len(sums) // width for place in range(width + 1)]
    most = max(sums)
    heights = [8 * HEIGHT * max(sums[a:b]) / most for a, b in zip(edges, edges[1:])]
    lines: list[Pieces] = []
    for row in reversed(range(HEIGHT)):
        cells = "".join(BLOCKS[round(max(0, min(8, height - 8 * row)))] for height in heights)
        label = format_bytes(most) if row == HEIGHT - 1 else "0 B" if row == 0 else ""
        lines.append([(f"{label:>9} ", None), (cells, "parameters")])
    return lines


def _ladder(content: dict[str, Any], top: int) -> list[Pieces]:
    rungs = content["summary"]["rungs"]
    most = max(max(rung["peak_bytes"], sum(rung["bytes"].values())) for rung in rungs) or 1
    lines: list[Pieces] = []
    for rung in rungs:
        share = rung["peak_bytes"] / max(1, rung["first_peak_bytes"])
        line: Pieces = [
            (f"{rung['title'][:36]:<37}{format_bytes(rung['peak_bytes']):>10}{share:>7.0%}  ", None)
        ]
        line += [_bar(size / most, kind) for kind, size in rung["bytes"].items()]
        lines.append(line)
    lines.append([])
    lines.append(
        [piece for kind in content["colors"] for piece in (("■ ", kind), (f"{kind}  ", None))]
    )
    return lines


def _profile(content: dict[str, Any], top: int) -> list[Pieces]:
    facts = content["summary"]
    steps, wall = max(1, facts["steps"]), facts.get("wall_us", 0)
    lines: list[Pieces] = [
        [(f"{wall / steps / 1e3:,.2f} ms a step, of {facts['steps']} on {facts['device']}", None)]
    ]
    if "mfu" in facts:
        lines.append([(f"{facts['mfu']:.1%} model-FLOPs utilization", None)])
    lines.append([])
    for phase, spent in facts["phases_us"].items():
        share = spent / wall if wall else 0
        numbers = f"{phase:<18}{spent / steps / 1e3:>11,.2f} ms{share:>8.1%}  "
        lines.append([(numbers, None), _bar(share, PHASES.get(phase, "temporaries"))])
    heads = f"{'operations':<44}{'own ms a step':>16}{'calls':>10}"
    lines += [[], [(heads, "head")]]
    for op in sorted(content["ops"], key=lambda op: -op.get("self_us", 0))[:top]:
        name = shortened(op["name"], 42)
        spent = op.get("self_us", 0) / steps / 1e3
        lines.append([(f"{name:<44}{spent:>16,.3f}{op.get('calls', 0):>10,}", None)])
    return lines + [[(note, None)] for note in content["notes"]]


SHOWN = {"recording": _recording, "ladder": _ladder, "profile": _profile}

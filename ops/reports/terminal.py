"""Shows a report as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from .._core.sizes import format_bytes
from .._core.text import shortened
from .files import Part
from .rehearsal import VERDICTS

__all__ = ["text_of"]

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 72  # columns of the picture over time
HEIGHT = 8  # its rows
BAR = 28


def text_of(parts: Sequence[Part], top: int = 10) -> str:
    """Returns the parts as text, with the ``top`` largest owners and operations."""
    lines: list[str] = []
    for part in parts:
        lines += [""] * bool(lines) + [part.title, *SHOWN[part.kind](part.content, top)]
    return "\n".join(line.rstrip() for line in lines)


def _bar(share: float) -> str:
    return "█" * round(BAR * max(0.0, min(1.0, share)))


def _recording(content: dict[str, Any], top: int) -> list[str]:
    facts = content["summary"]
    peak = facts["peak_bytes"]
    lines: list[str] = []
    if "total_bytes" in facts:
        lines.append(f"{format_bytes(facts['total_bytes'])} on {facts['device']}, predicted")
    lines += [f"peak of tensors {format_bytes(peak)}, {_where(facts)}", "", *_area(content), ""]
    lines += [*_kinds(facts), *_owners(content, top)]
    if "segments" in facts:
        held = facts["segments"]
        lines += [
            "",
            f"reserved {format_bytes(held['reserved_bytes'])} in {held['segments']} segments, "
            f"in use {format_bytes(held['allocated_bytes'])}, largest free block "
            f"{format_bytes(held['largest_free_block_bytes'])}",
        ]
    return lines + content["notes"]


def _kinds(facts: dict[str, Any]) -> list[str]:
    lines = []
    for kind, size in facts["peak_by_kind"].items():
        share, name = size / max(1, facts["peak_bytes"]), kind.replace("_", " ")
        lines.append(f"{name:<18}{format_bytes(size):>11}{share:>8.1%}  {_bar(share)}")
    return lines


def _owners(content: dict[str, Any], top: int) -> list[str]:
    lines: list[str] = []
    owners = [owner for owner in content["owners"] if owner[4]][:top]
    if owners:
        lines += ["", f"{'owners at the peak':<44}{'bytes':>11}{'count':>8}"]
    strings = content["strings"]
    for _, module, op, stack, size, count in owners:
        names = [strings[number] for number in (module, op) if number is not None]
        stacks = content["stacks"][stack]
        if len(names) == 2 and names[1].startswith(f"{names[0]}."):
            del names[0]  # the name of a parameter begins with that of its module
        name = " ".join(filter(None, names)) or (strings[stacks[0]] if stacks else "unknown")
        lines.append(f"{shortened(name, 42):<44}{format_bytes(size):>11}{count:>8}")
    return lines


def _rehearsal(content: dict[str, Any], top: int) -> list[str]:
    facts = content["summary"]
    device = f"{facts['device']} of {format_bytes(facts['device_bytes'])}"
    lines = [
        f"{facts['program']}: {VERDICTS[facts['fits']]} on {device}",
        f"peak of tensors {format_bytes(facts['peak_bytes'])}, reserved "
        f"{format_bytes(facts['peak_reserved_bytes'])}, and about "
        f"{format_bytes(facts['context_bytes'])} of context",
        "",
        *_kinds(facts),
        *_owners(content, top),
    ]
    for one in content["refused"][:top]:
        sizes = f"{format_bytes(one['asked'])} beside {format_bytes(one['allocated'])}"
        lines += ["", f"ran out: {sizes} of tensors, at {one['line']}"]
    return lines


def _where(facts: dict[str, Any]) -> str:
    if facts["peak_phase"] == "other":
        return f"at event {facts['peak_event']:,} of {facts['events']:,}"
    return f"in the {facts['peak_phase']} phase of step {facts['peak_step']}"


def _area(content: dict[str, Any]) -> list[str]:
    """Returns the live bytes over the events, as columns of blocks, each the most of its
    events."""
    sums = list(accumulate(map(sum, zip(*content["series"]["kind"].values()))))
    if not sums or not max(sums):
        return []
    width = min(WIDTH, len(sums))
    edges = [place * len(sums) // width for place in range(width + 1)]
    most = max(sums)
    heights = [8 * HEIGHT * max(sums[a:b]) / most for a, b in zip(edges, edges[1:])]
    lines = []
    for row in reversed(range(HEIGHT)):
        cells = "".join(BLOCKS[round(max(0, min(8, height - 8 * row)))] for height in heights)
        label = format_bytes(most) if row == HEIGHT - 1 else "0 B" if row == 0 else ""
        lines.append(f"{label:>9} {cells}")
    return lines


def _ladder(content: dict[str, Any], top: int) -> list[str]:
    rungs = content["summary"]["rungs"]
    most = max(rung["peak_bytes"] for rung in rungs) or 1
    lines = []
    for rung in rungs:
        peak = rung["peak_bytes"]
        share = peak / max(1, rung["first_peak_bytes"])
        bar = _bar(peak / most)
        lines.append(f"{rung['title'][:36]:<37}{format_bytes(peak):>10}{share:>7.0%}  {bar}")
    return lines


def _profile(content: dict[str, Any], top: int) -> list[str]:
    facts = content["summary"]
    steps, wall = max(1, facts["steps"]), facts.get("wall_us", 0)
    lines = [f"{wall / steps / 1e3:,.2f} ms a step, of {facts['steps']} on {facts['device']}"]
    if "mfu" in facts:
        lines.append(f"{facts['mfu']:.1%} model-FLOPs utilization")
    lines.append("")
    for phase, spent in facts["phases_us"].items():
        share = spent / wall if wall else 0
        lines.append(f"{phase:<18}{spent / steps / 1e3:>11,.2f} ms{share:>8.1%}  {_bar(share)}")
    lines += ["", f"{'operations':<44}{'own ms a step':>16}{'calls':>10}"]
    for op in sorted(content["ops"], key=lambda op: -op.get("self_us", 0))[:top]:
        spent = op.get("self_us", 0) / steps / 1e3
        lines.append(f"{shortened(op['name'], 42):<44}{spent:>16,.3f}{op.get('calls', 0):>10,}")
    return lines + content["notes"]


SHOWN = {
    "recording": _recording,
    "ladder": _ladder,
    "profile": _profile,
    "rehearsal": _rehearsal,
}

"""Shows a profile as text: the step by phases, rates, modules and operations."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable

from .._core.sizes import format_bytes
from .._core.text import shortened
from .result import Figures, ModuleRow, ProfileResult

__all__ = ["table"]

_BAR = 30  # characters
_COLUMN = 10


def table(result: ProfileResult, *, rows: int, width: int | None, merge: bool) -> str:
    """Returns the text; see :meth:`headroom.profiling.Profile.table`."""
    if width is None:
        width = min(120, max(80, shutil.get_terminal_size((100, 24)).columns))
    count = max(1, len(result.steps))
    lines = [*_summary(result, count), ""]
    lines += _modules(result, rows, width, merge, count) + [""]
    lines += _ops(result, rows, width, count)
    lines += [""] * bool(result.notes) + [f"Note: {note}" for note in result.notes]
    return "\n".join(line.rstrip() for line in lines)


def _summary(result: ProfileResult, count: int) -> Iterable[str]:
    totals = result.totals
    wall = totals["wall_us"] or 1.0
    steps = f"{count} step{'s' * (count > 1)}"
    yield f"{steps} on {result.device['type']} ({result.device['name']}), {_ms(wall / count)} each"
    for phase, us in totals["phases_us"].items():
        bar = "█" * round(_BAR * us / wall)
        yield f"  {phase:<10}{_ms(us / count):>10}{us / wall:>7.1%}  {bar}"
    parts = [f"computed again {_ms(totals['recompute_us'] / count)}"]
    if totals["loader_us"]:
        parts.append(f"in the DataLoader {_ms(totals['loader_us'] / count)}")
    if totals["device_us"] is not None:
        parts.append(f"kernels {_ms(totals['device_us'] / count)}")
    yield "  of which " + ", ".join(parts)
    model, again = totals["model_flops"], totals["recomputed_flops"]
    line = f"{_number(model / count)}FLOP per step"
    line += f" and {_number(again / count)}FLOP computed again" if again else ""
    line += f": {_number(model / (wall * 1e-6))}FLOP/s"
    if totals["mfu"] is not None:
        line += f", {totals['mfu']:.1%} of the {result.peak_rate.source} peak"
        line += f" ({totals['hfu']:.1%} with what is computed again)" if again else ""
    yield line
    for device, curve in result.memory.items():
        yield f"{format_bytes(curve['peak_bytes'])} more at the peak on {device} than at the start"


def _modules(result: ProfileResult, rows: int, width: int, merge: bool, count: int) -> list[str]:
    found = [*_merged(result.modules)] if merge else result.modules
    found = [row for row in found if row.total.host_us]
    shown = _largest(found, rows)
    cells: list[list[str]] = []
    for row in shown:
        depth = row.name.count(".") + bool(row.name)
        total, held = row.total, row.parameter_bytes + row.optimizer_bytes
        name = "  " * min(depth, 4) + (row.name or f"({row.type})")
        calls = f"{row.calls / count:.4g}"
        cells.append([name, calls, *_figures(total, count), _size(row.peak_bytes)])
        cells[-1] += [_size(total.kept_bytes, count), _size(held)]
    outside = result.outside
    cells.append(["(outside modules)", "", *_figures(outside, count), ""])
    cells[-1] += [_size(outside.kept_bytes, count), ""]
    head = ["module, per step", "calls", "forward", "backward", "again", "FLOP", "peak"]
    lines = _grid([*head, "kept", "holds"], cells, width)
    if left := len(found) - len(shown):
        lines.append(f"... and {left} smaller; table(rows=...) shows more")
    return lines


def _figures(figures: Figures, count: int) -> list[str]:
    times = (figures.forward_us, figures.backward_us, figures.recompute_us)
    flops = figures.model_flops / count
    return [*(_ms(us / count) if us else "-" for us in times), _number(flops) if flops else "-"]


def _ops(result: ProfileResult, rows: int, width: int, count: int) -> list[str]:
    cells: list[list[str]] = []
    for row in result.ops[:rows]:
        on_device = row.device_us is not None
        flops = row.model_flops + row.recomputed_flops
        took = row.device_us if on_device else row.total_us
        about = "~" if row.bytes_are == "estimate" else ""
        cells.append(
            [
                row.name,
                f"{row.calls / count:.4g}",
                _ms((row.device_us or 0.0) / count if on_device else row.self_us / count),
                _number(flops / (took * 1e-6)) if flops and took else "-",
                about + _size(row.bytes, count),
                "-" if row.bytes_per_s is None else about + _number(row.bytes_per_s) + "B",
            ]
        )
    head = ["operation, per step", "calls", "time", "FLOP/s", "bytes", "bytes/s"]
    lines = _grid(head, cells, width)
    if any(row.bytes_are == "estimate" for row in result.ops[:rows]):
        lines.append("~ an estimate: the least that the operation could move")
    return lines


def _grid(head: list[str], cells: list[list[str]], width: int) -> list[str]:
    """Returns the lines of a name and columns, of which the last are left out where names get no
    room."""
    columns = len(head) - 1
    while columns > 4 and width - columns * _COLUMN < 20:
        columns -= 1
    room = width - columns * _COLUMN
    return [
        f"{shortened(name, room - 1):<{room}}"
        + "".join(f"{v:>{_COLUMN}}" for v in values[:columns])
        for name, *values in [head, *cells]
    ]


def _merged(rows: Iterable[ModuleRow]) -> Iterable[ModuleRow]:
    """Adds up rows whose names differ in numbers alone."""
    found: dict[tuple[str, str], ModuleRow] = {}
    for row in rows:
        name = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", row.name)
        one = found.setdefault((name, row.type), ModuleRow(name, row.type))
        one.calls += row.calls
        one.recomputed_calls += row.recomputed_calls
        one.self.add(row.self)
        one.total.add(row.total)
        one.parameter_bytes += row.parameter_bytes
        one.optimizer_bytes += row.optimizer_bytes
        if row.peak_bytes is not None:
            one.peak_bytes = max(one.peak_bytes or 0, row.peak_bytes)
    return found.values()


def _largest(rows: list[ModuleRow], count: int) -> list[ModuleRow]:
    """Returns those that take the longest, in the order of the model."""
    kept = sorted(rows, key=lambda row: -row.total.host_us)[:count]
    chosen = {id(row) for row in kept}
    return [row for row in rows if id(row) in chosen]


def _ms(us: float) -> str:
    if us >= 1e6:
        return f"{us / 1e6:.3g} s"
    return f"{us / 1e3:.3g} ms" if us >= 100 else f"{us:.3g} us"


def _size(size: int | None, count: int = 1) -> str:
    return "-" if size is None else format_bytes(int(size / count))


def _number(value: float) -> str:
    for unit in ("", "K", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} P"

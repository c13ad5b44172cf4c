"""The one model of memory over time that measuring, planning and reporting share: allocations with
a beginning, an end and an owner, and the timeline that they add up to. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from os import PathLike
from typing import Any, NamedTuple

from .._core.atomic import write_json
from .._core.sizes import format_bytes
from .._core.text import shortened

__all__ = ["KINDS", "PHASES", "SMALLEST_BLOCK", "Allocation", "Owner", "Span", "Timeline"]

SMALLEST_BLOCK = 512  # bytes, of which torch's allocator for CUDA gives multiples

KINDS: dict[str, str] = {
    "parameters": "parameters of the model, in the dtype that the forward pass reads",
    "master_weights": "float32 copies or residuals of 16-bit parameters, which optimizers keep",
    "optimizer_state": "what optimizers keep from step to step: moments, codes, scales, counters",
    "gradients": "gradients of parameters, from their arrival until they are set to None",
    "buffers": "buffers of the model, such as running means and tables of positions",
    "batch": "inputs and targets of the step",
    "activations": "what autograd keeps from the forward pass for the backward pass, no parameters",
    "communication": "buckets of DDP, gathered parameters and reduced gradients of FSDP",
    "workspaces": "scratch memory that libraries keep between calls, such as that of cuBLAS",
    "temporaries": "everything else: what lives for moments, in an op or between two",
}
"""What memory is for, with what each kind means, in the order in which tables list them.

An allocation has one kind for its whole life, which is the first in this list that it ever was:
what becomes the gradient of a parameter is "gradients" from the moment it is allocated, and
copies of weights that autocast makes are "activations", because the backward pass keeps them.
"""

PHASES = ("forward", "backward", "optimizer", "other")
"""When it was allocated. The loss belongs to the forward pass, recomputation to the backward pass,
and whatever is between the optimizer's step and the next forward pass is "other"."""


@dataclass(slots=True)
class Allocation:
    """A piece of memory: ``bytes`` that are live at the events from ``start`` until before ``end``.

    Events are numbered from 0. What exists before the first event starts at 0, and what is never
    freed has the end None.
    """

    id: int
    bytes: int
    start: int = 0
    end: int | None = None
    kind: str = "temporaries"
    module: str | None = None
    """Name of the innermost module that it was allocated in or for; "" is the model itself."""
    op: str | None = None
    """The operation that allocated it, such as ``aten::mm``, or the name of a parameter."""
    phase: str = "other"
    step: int = 0
    stack: tuple[str, ...] = ()
    """Lines of Python, innermost first, such as ``"model.py:12 forward"``."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}, wanted one of {', '.join(KINDS)}")
        if self.phase not in PHASES:
            raise ValueError(f"phase is {self.phase!r}, wanted one of {', '.join(PHASES)}")

    def is_live(self, index: int) -> bool:
        return self.start <= index and (self.end is None or index < self.end)


class Span(NamedTuple):
    """A phase of a step: the events from ``start`` until the next span."""

    start: int
    step: int
    phase: str


class Owner(NamedTuple):
    """The allocations of one kind, module, op and line at a moment."""

    kind: str
    module: str | None
    op: str | None
    stack: tuple[str, ...]
    bytes: int
    count: int

    @property
    def name(self) -> str:
        """Returns the owner in a few words."""
        parts = [
            self.module or ("(model)" if self.module == "" else ""),
            (self.op or "").removeprefix("aten::"),
        ]
        moves = self.kind in ("activations", "workspaces", "temporaries")
        line = f" at {self.stack[0].rpartition('/')[2]}" if self.stack and moves else ""
        return " ".join(part for part in parts if part) + line or "?"


@dataclass
class Timeline:
    """Live bytes over the events of some steps, and who owns them.

    Args:
        allocations: in any order.
        spans: phases in the order of events. Without them, phases are known only at the events
            that allocate.
        device: that the memory is of.
        notes: sentences that :meth:`table` ends with.
        host: what the host arena held meanwhile; None: nothing.
        link_bytes: bytes that the last step copied between the device and the arena.
        workspaces: of a plan for CUDA, the scratch memory of cuBLAS, which is no tensor and no part
            of the live bytes; it is not saved.
        past: of a plan for CUDA, what was freed before the steps, and has left gaps between what
            has stayed; it is not saved either.
        began: the event at which the steps began.
    """

    allocations: list[Allocation]
    spans: list[Span] = field(default_factory=list)
    device: str = "cpu"
    notes: list[str] = field(default_factory=list)
    host: Timeline | None = None
    link_bytes: int = 0
    workspaces: list[Allocation] = field(default_factory=list, repr=False, compare=False)
    past: list[Allocation] = field(default_factory=list, repr=False, compare=False)
    began: int = field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        ends = (a.start if a.end is None else a.end for a in self.allocations)
        last = max((*ends, *(span.start for span in self.spans)), default=0)
        self.events = last + 1
        """How many events there are: :meth:`live` is defined from 0 to before this."""
        self._total = self._sums(self.allocations)
        self.peak_bytes = max(self._total)
        """The most bytes that are live at once."""
        self.peak_index = self._total.index(self.peak_bytes)
        """The first event at which that is so."""
        if not self.spans:
            at = {a.start: Span(a.start, a.step, a.phase) for a in self.allocations if a.start}
            self.spans = [at[start] for start in sorted(at)]

    def _sums(self, allocations: Iterable[Allocation]) -> list[int]:
        change = [0] * self.events
        for a in allocations:
            change[a.start] += a.bytes
            if a.end is not None:
                change[a.end] -= a.bytes
        return list(accumulate(change))

    def live(self, index: int | None = None) -> list[Allocation]:
        """Returns what is live at an event, the largest first; at the peak by default."""
        at = self.peak_index if index is None else index
        return sorted((a for a in self.allocations if a.is_live(at)), key=lambda a: -a.bytes)

    def bytes_over_events(self) -> list[int]:
        """Returns the live bytes at each event."""
        return list(self._total)

    def by_kind_over_events(self) -> dict[str, list[int]]:
        """Returns the live bytes of each kind at each event. Kinds that never occur are left
        out."""
        groups: dict[str, list[Allocation]] = {kind: [] for kind in KINDS}
        for a in self.allocations:
            groups[a.kind].append(a)
        return {kind: self._sums(group) for kind, group in groups.items() if group}

    def by_kind(self, index: int | None = None) -> dict[str, int]:
        """Returns the live bytes of every kind at an event; at the peak by default."""
        found = dict.fromkeys(KINDS, 0)
        for a in self.live(index):
            found[a.kind] += a.bytes
        return found

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """Returns the bytes of every kind at the peak; they add up to :attr:`peak_bytes`."""
        return self.by_kind()

    @property
    def most_by_kind(self) -> dict[str, int]:
        """Returns the most bytes of every kind, each at its own moment."""
        series = self.by_kind_over_events()
        return {kind: max(series.get(kind, (0,))) for kind in KINDS}

    def by_module(self, index: int | None = None) -> dict[str, dict[str, int]]:
        """Returns the live bytes of each module by kind at an event, the largest module first; at
        the peak by default. What belongs to no module is under ``"-"``."""
        found: dict[str, dict[str, int]] = {}
        for a in self.live(index):
            kinds = found.setdefault("-" if a.module is None else a.module, {})
            kinds[a.kind] = kinds.get(a.kind, 0) + a.bytes
        return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))

    def span(self, index: int) -> Span:
        """Returns the phase that an event is in."""
        found = Span(0, 0, "other")
        for span in self.spans:
            if span.start > index:
                break
            found = span
        return found

    def peaks(self) -> dict[tuple[int, str], int]:
        """Returns the most live bytes within each phase of each step: ``{(step, phase): bytes}``,
        in the order of the steps."""
        found: dict[tuple[int, str], int] = {}
        ends = [span.start for span in self.spans[1:]] + [self.events]
        for span, end in zip(self.spans, ends):
            key = (span.step, span.phase)
            here = max(self._total[span.start : end], default=0)
            found[key] = max(found.get(key, 0), here)
        return found

    def peaks_by_phase(self) -> dict[str, int]:
        """Returns the most live bytes within each phase, over all steps."""
        peaks = self.peaks()
        return {
            phase: max(found)
            for phase in PHASES
            if (found := [b for (_, of), b in peaks.items() if of == phase])
        }

    def peaks_by_step(self) -> dict[int, int]:
        """Returns the most live bytes within each step."""
        found: dict[int, int] = {}
        for (step, _), here in self.peaks().items():
            found[step] = max(found.get(step, 0), here)
        return found

    def owners(self, index: int | None = None, top: int | None = None) -> list[Owner]:
        """Returns who owns the live bytes at an event, the largest first; at the peak by default,
        and all of them unless ``top`` is given."""
        groups: dict[tuple, list[int]] = {}
        for a in self.live(index):
            key = (a.kind, a.module, a.op, a.stack)  # a stack tells two calls of a module apart
            group = groups.setdefault(key, [0, 0])
            group[0] += a.bytes
            group[1] += 1
        owners = [Owner(*key, *group) for key, group in groups.items()]
        return sorted(owners, key=lambda owner: -owner.bytes)[:top]

    def table(self, top: int = 10) -> str:
        """Returns the peak as text of at most 80 columns: kinds, phases and the largest owners."""
        span = self.span(self.peak_index)
        lines = [
            f"Peak {format_bytes(self.peak_bytes)} on {self.device}, in step {span.step}, "
            f"{span.phase}; event {self.peak_index} of {self.events}",
            "",
            f"{'kind':<18}{'at the peak':>14}{'share':>8}{'own peak':>14}",
        ]
        most = self.most_by_kind
        for kind, size in self.peak_by_kind.items():
            if most[kind]:
                share = f"{100 * size / max(1, self.peak_bytes):.1f} %"
                sizes = f"{format_bytes(size):>14}{share:>8}{format_bytes(most[kind]):>14}"
                lines.append(f"{kind:<18}{sizes}")
        if self.host is not None:
            for kind, size in self.host.most_by_kind.items():
                if size:
                    lines.append(f"{'on the host':<18}{format_bytes(size):>14}{'':>8}  {kind}")
        peaks = self.peaks_by_phase()
        if peaks:
            lines += ["", f"{'phase':<18}{'peak':>14}"]
            lines += [f"{phase:<18}{format_bytes(size):>14}" for phase, size in peaks.items()]
        owners = self.owners()
        if owners and top:
            lines += ["", f"{'owners at the peak':<18}{'bytes':>14}{'count':>7}  who"]
            for owner in owners[:top]:
                sizes = f"{format_bytes(owner.bytes):>14}{owner.count:>7}"
                lines.append(f"{owner.kind:<18}{sizes}  {shortened(owner.name, 39)}")
            if rest := owners[top:]:
                size = sum(owner.bytes for owner in rest)
                count = sum(owner.count for owner in rest)
                name = f"{len(rest)} more"
                lines.append(f"{'':<18}{format_bytes(size):>14}{count:>7}  {name}")
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])

    __str__ = table

    def to_json(self) -> dict[str, Any]:
        """Returns the timeline in what :mod:`json` writes. Stacks are stored once."""
        stacks: dict[tuple[str, ...], int] = {}
        rows = []
        for a in self.allocations:
            row = asdict(a)
            row["stack"] = stacks.setdefault(a.stack, len(stacks))
            rows.append(list(row.values()))
        return {
            "format": "headroom.memory.timeline/1",
            "device": self.device,
            "fields": list(Allocation.__dataclass_fields__),
            "allocations": rows,
            "stacks": [list(stack) for stack in stacks],
            "spans": [list(span) for span in self.spans],
            "notes": self.notes,
            "host": self.host and self.host.to_json(),
            "link_bytes": self.link_bytes,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Timeline:
        """Returns the timeline that :meth:`to_json` described."""
        known = "headroom.memory.timeline/1"
        if not isinstance(value, dict) or value.get("format") != known:
            got = value.get("format") if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"not a timeline: its format is {got!r}, wanted {known!r}")
        stacks = [tuple(stack) for stack in value["stacks"]]
        allocations = []
        for row in value["allocations"]:
            named = dict(zip(value["fields"], row))
            named["stack"] = stacks[named["stack"]]
            allocations.append(Allocation(**named))
        spans = [Span(*span) for span in value["spans"]]
        host = value.get("host") and cls.from_json(value["host"])
        notes, link_bytes = list(value["notes"]), value.get("link_bytes", 0)
        return cls(allocations, spans, value["device"], notes, host, link_bytes)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the timeline as JSON; the file changes only once all of it is written."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Timeline:
        """Reads what :meth:`save` wrote."""
        with open(path, encoding="utf-8") as file:
            return cls.from_json(json.load(file))

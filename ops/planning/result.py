"""The result of a plan: bytes of a step by kind, who owns them, and what the device adds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from .._core.atomic import write_json
from .._core.sizes import format_bytes, parse_bytes
from .._core.text import shortened
from ..memory.events import KINDS, Owner, Timeline

__all__ = ["DeviceShare", "Plan"]

_FORMAT = "headroom.plan/1"


@dataclass(frozen=True)
class DeviceShare:
    """The bytes that a CUDA device holds besides the tensors.

    Attributes:
        rounding: blocks of the caching allocator are larger than the tensors in them.
        fragmentation: memory that the allocator holds, and no tensor uses, when it holds the most.
        workspaces: what those of cuBLAS add to the peak.
        context: of the process on the GPU; an estimate.
        source: where the estimate of the context is from.
    """

    rounding: int = 0
    fragmentation: int = 0
    workspaces: int = 0
    context: int = 0
    source: str = ""

    @property
    def bytes(self) -> int:
        return self.rounding + self.fragmentation + self.workspaces + self.context


@dataclass
class Plan:
    """The memory that training steps will need.

    Attributes:
        timeline: live bytes over the events of all steps that were traced.
        device_share: what a GPU holds besides; of zeros on the CPU.
        model: a few words on what was planned.
        options: what the plan was made with, as text.
    """

    timeline: Timeline
    device_share: DeviceShare = field(default_factory=DeviceShare)
    model: str = ""
    options: dict[str, str] = field(default_factory=dict)
    _again: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """Returns the most bytes of tensors that are live at once: what ``headroom.memory.track``
        and, up to rounding, ``torch.cuda.max_memory_allocated`` will show."""
        return self.timeline.peak_bytes

    @property
    def total_bytes(self) -> int:
        """Returns what the process takes on the device: the peak and the share of the device."""
        return self.peak_bytes + self.device_share.bytes

    @property
    def host_peak_bytes(self) -> int:
        """Returns the most bytes that the host arena, what torch saves on the CPU, and states of
        weights that are on the host hold at once."""
        return 0 if self.timeline.host is None else self.timeline.host.peak_bytes

    @property
    def link_bytes(self) -> int:
        """Returns the bytes that a step copies to the host arena and back."""
        return self.timeline.link_bytes

    @property
    def reserved_bytes(self) -> int:
        """Returns what ``torch.cuda.max_memory_reserved`` will show; the peak on the CPU."""
        return self.total_bytes - self.device_share.context

    @property
    def allocated_bytes(self) -> int:
        """Returns what ``torch.cuda.max_memory_allocated`` will show; the peak on the CPU."""
        return self.peak_bytes + self.device_share.rounding + self.device_share.workspaces

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """Returns the bytes of every kind at the peak; they add up to :attr:`peak_bytes`."""
        return self.timeline.peak_by_kind

    @property
    def peak_owners(self) -> list[Owner]:
        """Returns who owns the bytes at the peak, the largest first."""
        return self.timeline.owners()

    @property
    def first_step(self) -> int:
        """Returns the peak of the first step, before which an optimizer may have no state."""
        return self.timeline.peaks_by_step().get(0, 0)

    @property
    def steady(self) -> int:
        """Returns the peak of the steps after it."""
        return max(self.timeline.peaks_by_step().items())[1]

    def fits(self, budget: int | str) -> bool:
        """Returns whether all that the process takes on the device is at most ``budget``, such as
        "16 GiB"."""
        return self.total_bytes <= parse_bytes(budget, "budget")

    def advice(self, top: int | None = None) -> Any:
        """Plans again with one change at a time, and returns what would help, the most first.

        Raises:
            ValueError: the plan was loaded from a file, and cannot be made again.
        """
        if self._again is None:
            raise ValueError("this plan was loaded from a file: make it again to get advice")
        return self._again(self, top)

    # ---- as text and as JSON --------------------------------------------------------------------

    def table(self, top: int = 8) -> str:
        """Returns the plan as text of at most 80 columns."""
        timeline, share = self.timeline, self.device_share
        span = timeline.span(timeline.peak_index)
        name = shortened(self.model, 50)
        size = f"{format_bytes(self.total_bytes)} on {timeline.device}"
        which = "first step" if span.step == 0 else "steady state"
        lines = [
            f"{name}: {size}".strip(": "),
            f"peak of tensors {format_bytes(self.peak_bytes)}, in the {span.phase} phase, {which}",
        ]
        if self.options:
            lines.append(shortened(", ".join(f"{k} {v}" for k, v in self.options.items()), 80))
        lines += ["", f"{'kind':<20}{'at the peak':>12}{'share':>8}  {'':<24}{'own peak':>12}"]
        most, at = timeline.most_by_kind, self.peak_by_kind
        for kind in KINDS:
            if most[kind]:
                lines.append(self._row(kind.replace("_", " "), at[kind], format_bytes(most[kind])))
        if share.bytes:
            lines += [
                self._row("rounding", share.rounding),
                self._row("fragmentation", share.fragmentation),
                self._row("cuBLAS workspace", share.workspaces),
                self._row("CUDA context", share.context, "estimate"),
            ]
        lines.append(self._row("total", self.total_bytes))
        if self.timeline.host is not None:
            for kind, size in self.timeline.host.most_by_kind.items():
                if size:
                    words = kind.replace("_", " ")
                    lines.append(f"{'on the host':<20}{format_bytes(size):>12}  {words}")
            lines.append(f"{'copied per step':<20}{format_bytes(self.link_bytes):>12}")
        lines += ["", f"{'phase':<20}{'first step':>12}{'steady':>12}"]
        peaks = timeline.peaks()
        last = max(step for step, _ in peaks)
        for phase in ("forward", "backward", "optimizer"):
            first, steady = peaks.get((0, phase)), peaks.get((last, phase))
            if first or steady:
                lines.append(
                    f"{phase:<20}{format_bytes(first or 0):>12}{format_bytes(steady or 0):>12}"
                )
        lines += ["", f"{'largest owners at the peak':<32}{'kind':<18}{'bytes':>12}{'count':>7}"]
        for owner in self.owners_by_module()[:top]:
            name = shortened(owner.name, 31)
            kind = owner.kind.replace("_", " ")
            lines.append(f"{name:<32}{kind:<18}{format_bytes(owner.bytes):>12}{owner.count:>7}")
        return "\n".join([*lines, *([""] if timeline.notes else []), *timeline.notes])

    def _row(self, name: str, size: int, last: str = "") -> str:
        part = size / max(1, self.total_bytes)
        bar = "#" * round(24 * part)
        return (
            f"{name:<20}{format_bytes(size):>12}{100 * part:>6.1f} %  {bar:<24}{last:>12}".rstrip()
        )

    def owners_by_module(self) -> list[Owner]:
        """Returns the owners at the peak with the numbers of blocks left out, so that the same part
        of all blocks is one owner."""
        groups: dict[tuple[str, str], list[int]] = {}
        for owner in self.peak_owners:
            module = owner.module if owner.module else owner.op or ""
            parts = ["*" if part.isdigit() else part for part in module.split(".")]
            found = groups.setdefault((owner.kind, ".".join(parts)), [0, 0])
            found[0] += owner.bytes
            found[1] += owner.count
        owners = [Owner(kind, name, None, (), *sizes) for (kind, name), sizes in groups.items()]
        return sorted(owners, key=lambda owner: -owner.bytes)

    __str__ = table

    def to_json(self) -> dict[str, Any]:
        """Returns the plan in what :mod:`json` writes."""
        return {
            "format": _FORMAT,
            "model": self.model,
            "options": self.options,
            "peak_bytes": self.peak_bytes,
            "peak_by_kind": self.peak_by_kind,
            "total_bytes": self.total_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "link_bytes": self.link_bytes,
            "device_share": vars(self.device_share),
            "timeline": self.timeline.to_json(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        """Returns the plan that :meth:`to_json` described."""
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            got = value.get("format") if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"not a plan: its format is {got!r}, wanted {_FORMAT!r}")
        timeline = Timeline.from_json(value["timeline"])
        return cls(timeline, DeviceShare(**value["device_share"]), value["model"], value["options"])

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON; the file changes only once all of it is written."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Reads what :meth:`save` wrote."""
        with open(path, encoding="utf-8") as file:
            return cls.from_json(json.load(file))

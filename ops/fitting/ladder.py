"""``headroom.ladder``: the whole frontier of a model, its peak memory against its time."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._core.atomic import write_json
from .._core.sizes import format_bytes
from .._core.text import shortened
from ..step.description import Step
from ..step.errors import PlanError
from ..step.pytree import tensors_in
from .arguments import allowed_of, checked, host_room
from .choice import SAME, Choice, FrontierPoint
from .frontier_chart import Series, draw_frontier, telling
from .search.candidates import Candidates
from .search.changes import peak_as_given, peak_by_kind, plain_choice
from .search.search import Search
from .search.techniques import techniques_of

ROWS = 14  # of the table, besides the first
SAVED = 200  # rungs of the file, besides the first
LABELS = 6  # of the picture
FORMAT = "headroom.ladder/1"


@dataclass(frozen=True)
class Rung:
    """A way to train the model.

    Attributes:
        title: what is changed.
        peak: predicted bytes at the peak of a step.
        seconds: predicted seconds of a step.
        choice: what :func:`headroom.fit` would apply; None for the model as it was given.
        bytes: at the peak by kind, which add up to it; estimates.
        host: bytes on the host.
    """

    title: str
    peak: int
    seconds: float
    choice: Choice | None = None
    bytes: Mapping[str, int] = field(default_factory=dict, hash=False)
    host: int = 0


class Ladder:
    """The trades of memory against time that a model has.

    Attributes:
        model: its class.
        device: where steps were measured.
        first: the model as it was given.
        points: the frontier: rungs by ascending peaks and descending seconds. No other choice has a
            smaller peak and is as fast.
    """

    def __init__(
        self,
        model: str,
        device: str,
        first: Rung,
        points: Sequence[Rung],
        search: Search | None = None,
    ) -> None:
        self.model, self.device = model, device
        self.first, self.points = first, tuple(points)
        self._search = search

    def _search_for(self, asked: Search) -> Search:
        """Returns the search that the ladder was made by for :func:`headroom.fit`, with the
        optimizers of that call. The ladder's own stays as it is.

        Args:
            asked: one that has measured nothing yet, for the same model, batch and so on.

        Raises:
            ValueError: it is for something else; says for what.
        """
        if self._search is None:
            raise ValueError("ladder was not made by headroom.ladder: leave it out")
        was, now = _asked(self._search), _asked(asked)
        if wrong := [name for name in was if was[name] != now[name]]:
            raise ValueError(
                f"ladder was made with another {', another '.join(wrong)}: give headroom.fit what "
                "headroom.ladder was given, or leave ladder= out"
            )
        return self._search.with_techniques(asked.candidates.techniques, asked.given)

    def rungs(self, most: int = ROWS) -> list[Rung]:
        """Returns the model as it was given, and then up to ``most`` points of the frontier from
        the fastest to the leanest: those between which the frontier is the most nearly straight."""
        return [self.first, *reversed(telling(self.points, most))]

    def __str__(self) -> str:
        first, rungs = self.first, self.rungs()
        head = f"{shortened(self.model, 24)} on {self.device}: {len(self.points)} choices"
        head += f", {len(rungs) - 1} shown" if len(self.points) >= len(rungs) else ""
        shared = self._shared()
        head += f", all with {', '.join(shared)}" if shared else ""
        levels = "L0 keeps the most, L5 the least" if self._has_levels() else ""
        lines = [
            shortened(head, 80, "beginning"),
            f"{levels:<47}{'peak':>10}{'':>6}{'ms a step':>11}",
        ]
        for rung in rungs:
            shares = [_share(rung.peak, first.peak), _share(rung.seconds, first.seconds)]
            title = shortened(_without(rung.title, shared), 46, keep="beginning")
            lines.append(
                f"{title:<47}{format_bytes(rung.peak):>10}{shares[0]:>6}"
                f"{1e3 * rung.seconds:>11,.1f}{shares[1]:>6}"
            )
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__  # notebooks show it

    def _shared(self) -> list[str]:
        """Returns what is changed in every point, and so distinguishes none."""
        titles = [point.title.split(", ") for point in self.points]
        if len(titles) < 2:
            return []
        return [part for part in titles[0] if all(part in other for other in titles)]

    def _has_levels(self) -> bool:
        return any(point.choice is not None and point.choice.levels for point in self.points)

    def to_json(self) -> dict[str, Any]:
        """Returns the rungs in what :mod:`json` writes and ``headroom report`` opens."""
        return {
            "format": FORMAT,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "model": self.model,
            "device": self.device,
            "peaks": "predicted",
            "rungs": [
                {
                    "title": rung.title,
                    "peak_bytes": rung.peak,
                    "step_seconds": rung.seconds,
                    "host_bytes": rung.host,
                    "bytes": dict(rung.bytes),
                }
                for rung in self.rungs(SAVED)
            ],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the rungs as JSON.

        Raises:
            OSError: the file cannot be written; what was there before stays.
        """
        write_json(path, self.to_json(), indent=1)

    def png(self, path: str | os.PathLike[str], *others: Series) -> None:
        """Draws the frontier, beside other points where there are some.

        Raises:
            ImportError: matplotlib is missing.
            OSError: the file cannot be written.
        """
        labeled, shared = {id(rung) for rung in telling(self.points, LABELS)}, self._shared()
        points = [
            (rung.peak, rung.seconds, _without(rung.title, shared) if id(rung) in labeled else "")
            for rung in self.points
        ]
        name = ", ".join(["headroom.fit", *shared])
        given = [(self.first.peak, self.first.seconds, self.first.title)]
        draw_frontier(
            path,
            f"{self.model} on {self.device}: peak against time, predicted",
            [Series(name, points, is_frontier=True), Series("now", given), *others],
        )


def ladder(
    model: nn.Module,
    sample_batch: Any,
    *,
    optimizer: Any = None,
    loss: Callable[..., Tensor] | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    amp: torch.dtype | None = None,
    scaler: Any = None,
    max_grad_norm: float | None = None,
    prefetch: bool = False,
    allow: Collection[str] | str = (),
    host_budget: int | str | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Ladder:
    """Returns all trades of memory against time that :func:`headroom.fit` can choose from for a
    model: print it for a table. Nothing is changed.

    Every kind of block is measured once at each level, a whole pass once for each size of
    micro-batches, and the rest is planned. Peaks are estimates from these plans, while what
    :func:`headroom.fit` chooses is planned itself.

    Args:
        path: a PNG to draw the frontier to.

    All other arguments are those of :func:`headroom.fit`.

    Raises:
        PlanError: the step cannot be planned; see :func:`headroom.plan`.
        ImportError: ``path`` is given and matplotlib is missing.
        OSError: ``path`` cannot be written.
        TypeError, ValueError: an argument does not fit; says which one, and what was wanted.
    """
    where = None if device is None else torch.device(device)
    step = Step(
        model, optimizer, sample_batch, loss, forward, where, amp, scaler,
        max_grad_norm=max_grad_norm, prefetch=prefetch,
    )  # fmt: skip
    room = host_room(host_budget)
    techniques = techniques_of(checked(step), allowed_of(allow), on_host=room is not None)
    search = Search(Candidates(techniques, room))
    search.time_all()
    points = distinct(search.frontier())
    if not points:
        raise PlanError("; ".join(search.candidates.notes) or "nothing can be planned")
    made = Ladder(
        type(model).__name__,
        str(search.candidates.step.device),
        _as_given(search),
        [_rung(search, str(p.choice), p.peak, p.seconds, p.choice) for p in points],
        search,
    )
    if path is not None:
        made.png(path)
    return made


def _asked(search: Search) -> dict[str, Any]:
    """Returns what a search is for, in what can be compared."""
    techniques = search.candidates.techniques
    step = techniques.step
    groups = step.optimizer.param_groups
    options = [{**group, "params": list(map(id, group["params"]))} for group in groups]
    return {
        "model": id(step.model),
        "sample_batch": list(map(id, tensors_in(step.batch))),
        "loss or forward": (step.loss, step.forward),
        "device": step.device,
        "amp": step.amp,
        "scaler": bool(step.scaler),
        "optimizer": repr((type(step.optimizer), options)),
        "max_grad_norm": step.max_grad_norm is not None,
        "prefetch": step.prefetch,
        "host_budget": techniques.on_host,
        "allow, or before its optimizer had begun to train": (
            list(techniques.optimizers),
            techniques.formats,
            list(dict.fromkeys(choice.others for choice in techniques.choices)),
            techniques.in_8_bits,
        ),
        "only": techniques.only,
    }


def distinct(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Returns the points without those that are hardly faster than one that takes less, and of
    those that take about the same, only the fastest."""
    found: list[FrontierPoint] = []
    least = 0  # bytes of the first of those that take about the same
    for point in points:
        if found and point.peak <= (1 + SAME) * least:
            found[-1] = point
        elif not found or point.seconds < (1 - SAME) * found[-1].seconds:
            found.append(point)
            least = point.peak
    return found


def _as_given(search: Search) -> Rung:
    """Returns the model as it was given. Its time is that of blocks which keep all they can."""
    choice = plain_choice(search.candidates, search.known)
    estimate = search.known[choice.but(levels=())].at(choice.levels)
    peak = peak_as_given(search.candidates)
    size = estimate.peak if peak is None else peak
    rung = _rung(search, "as it is", size, estimate.seconds, choice)
    return replace(rung, choice=None)


def _rung(search: Search, title: str, peak: int, seconds: float, choice: Choice) -> Rung:
    candidate = search.known[choice.but(levels=())]
    kinds = peak_by_kind(search.candidates, candidate, choice.levels, peak)
    return Rung(title, peak, seconds, choice, kinds, candidate.host_at(choice.levels))


def _without(title: str, shared: Sequence[str]) -> str:
    """Returns a title without some of its parts, or all of it if nothing would be left."""
    return ", ".join(part for part in title.split(", ") if part not in shared) or title


def _share(value: float, first: float) -> str:
    return f"{100 * value / first:.0f}%" if first else ""

"""The state of the optimizer on the host, or its step, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from .._core.sizes import format_bytes
from ..host import HostMemoryError
from ..host.engines import engine_of
from ..optim import offload
from ..param_states.paging import planned_paging
from ..step.description import Step
from ..step.optimizers import can_offload
from .optimizer import is_ours
from .technique import Change, Request, Running, Target, Technique

SHARES = (0.25, 0.5, 0.75)
"""Of a state on the host, which may stay on the device."""

PLACES = ("", "state", "step")


class Offload(Technique):
    """Keeps the state on the host, from where it is copied for each step, or steps it there."""

    field, default = "offload", ""
    told, row = 5, 4
    in_row = "{}", "on the device", "on the host"

    def refusal_of_type(self, value: Any) -> str | None:
        return None if value in PLACES else f"one of {PLACES}"

    def values(self, request: Request, choice: Any) -> Sequence[str]:
        return list(dict.fromkeys(("", *(place for place, _ in places(request, choice)))))

    def rank(self, value: Any) -> int:
        return int(bool(value))

    def on_step(self, step: Step, choice: Any, blocks: Sequence[str]) -> Step:
        return step.but(offload=choice.offload or None, state_budget=choice.state_budget)

    def apply(self, target: Target, choice: Any) -> Callable[[], None] | None:
        budget = choice.state_budget or None
        return offload(target.optimizer, choice.offload, budget=budget).remove

    def words(self, choice: Any) -> list[str]:
        stays = f" but {format_bytes(choice.state_budget)}" if choice.state_budget else ""
        return [f"{choice.offload} on the host{stays}"]

    def advice(self, step: Step) -> Iterator[Change]:
        is_away = step.offload is not None or getattr(step.optimizer, "_paging", None) is not None
        if not has_host(step) or not is_ours(step.optimizer) or is_away:
            return
        for what, name in (("state", "optimizer state"), ("step", "the optimizer's step")):
            yield (
                f"{name} on the host",
                step.but(offload=what),
                "the same bits",
                SOURCE,
                f'headroom.optim.offload(optimizer, "{what}")',
            )


class StateBudget(Technique):
    """Keeps a part of a state on the device that lies on the host."""

    field, default = "state_budget", 0
    row = 5
    counts, least = False, 0

    def values(self, request: Request, choice: Any) -> Sequence[int]:
        if not choice.offload:
            return (0,)
        return [size for place, size in places(request, choice) if place == choice.offload]

    def reduce_memory(self, running: Running) -> str | None:
        """Moves half of the state that an optimizer has on the device to the host, or all, if the
        host has room for it."""
        for one in running.optimizers:
            if (handle := getattr(one, "offload_handle", None)) is None:
                continue
            before = format_bytes(handle.budget)
            with suppress(HostMemoryError):
                if handle.reduce_memory():
                    left = format_bytes(handle.budget) if handle.budget else "only the ring"
                    kind = type(one).__name__
                    return f"state of {kind}: {before} on the device before, {left} now"
        return None

    def words(self, choice: Any) -> list[str]:
        return []  # which those of the state have

    def change(self, before: Any, after: Any, step: Step) -> tuple[str, str, str]:
        return "of it", "none stays", f"{format_bytes(after.state_budget)} stay"


SOURCE = "copies beside the backward pass, and which of them wins when: docs/offloading.md"


def has_host(step: Step) -> bool:
    """Returns whether anything is gained by what is on the host: not where host and device are
    one."""
    return step.device is not None and step.device.type == "cuda" and step.sharding is None


def places(request: Request, choice: Any) -> list[tuple[str, int]]:
    """Returns how a state can lie on the host: what happens there, and how many bytes of it may
    stay on the device, with those of the ring."""
    optimizer = request.optimizers[choice.optimizer, choice.weights]
    return request.once(("places", id(optimizer)), lambda: _places(request, optimizer))


def _places(request: Request, optimizer: Any) -> list[tuple[str, int]]:
    given, found = request.given, []
    if given is not None and given.offload:
        found.append((given.offload, given.state_budget))
    if not (request.on_host or found) or not can_offload(optimizer):
        return []
    if request.on_host:
        memory = planned_paging(optimizer, 0)
        shares = (memory.ring + round(share * memory.host) for share in SHARES)
        budgets = [0, *(size for size in shares if planned_paging(optimizer, size).host)]
        found += [("state", budget) for budget in budgets]
        if engine_of(request.device).is_asynchronous:
            found.append(("step", 0))  # elsewhere the host is the device
    return list(dict.fromkeys(found))

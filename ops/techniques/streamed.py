"""Weights of blocks on the host, fetched for each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..host.arena import default_arena
from ..host.engines import engine_of
from ..patching import unpatch
from ..patching.levels import Blocks
from ..patching.streaming import streamed_blocks
from ..step.description import Step
from .offload import SHARES, SOURCE, has_host
from .technique import Change, Request, Target, Technique


class StreamedWeights(Technique):
    """Keeps the weights of the first blocks on the host. Setting the levels of blocks sets it."""

    field, default = "weights_host", 0
    told, row = 6, 6
    in_words = "weights of {} blocks on the host"
    in_row = "weights", "on the device", "{} blocks on the host"
    least = 0

    def values(self, request: Request, choice: Any) -> Sequence[int]:
        if choice.state_budget:
            return (0,)  # whose room weights would take
        return request.once(self, lambda: self._values(request))

    def _values(self, request: Request) -> Sequence[int]:
        """Returns of how many blocks the weights can lie on the host. On a CPU, where host and
        device are one, that is worth it if the arena is in a file."""
        found = [0, 0 if request.given is None else request.given.weights_host]
        is_beside = engine_of(request.device).is_asynchronous
        if request.on_host and (is_beside or default_arena().file is not None):
            blocks = len(Blocks(request.step.model).names)
            found += [round(share * blocks) for share in (*SHARES, 1)]
        return [count for count in dict.fromkeys(found) if count >= 0]

    def rank(self, value: Any) -> int:
        return int(bool(value))

    def on_step(self, step: Step, choice: Any, blocks: Sequence[str]) -> Step:
        return step.but(weights=dict.fromkeys(blocks[: choice.weights_host], "host") or None)

    def apply(self, target: Target, choice: Any) -> Callable[[], None] | None:
        return partial(unpatch, target.model)  # they come back before their states do

    def advice(self, step: Step) -> Iterator[Change]:
        if has_host(step) and step.weights is None and not streamed_blocks(step.model):
            yield (
                "weights of blocks on the host",
                step.but(weights="host"),
                "the same bits",
                SOURCE,
                'headroom.patch(model, weights="host")',
            )

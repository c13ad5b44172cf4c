"""A batch in parts, whose gradients add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..step.description import Step
from ..step.micro_batches import can_cut, counts, mixes_samples, resized, samples_of
from .technique import Change, Option, Request, Running, Technique


class MicroBatches(Technique):
    """Trains the parts of a batch one after the other, which the loop does: there is nothing to
    apply."""

    field, default = "micro_batches", 1
    told, row = 1, 8
    in_words, in_row = "{} micro-batches", ("micro-batches", "{}", "{}")
    options = {"accumulation": Option(1, least=1, help="micro-batches")}

    def values(self, request: Request, choice: Any) -> Sequence[int]:
        return request.once(self, lambda: self._values(request))

    def _values(self, request: Request) -> Sequence[int]:
        batch = request.step.batch
        asked = sorted(n for n in {*request.only.get(self.field, ())} if can_cut(batch, n))
        numbers = asked or [1, *counts(batch)]
        if mixes_samples(request.step.model):
            request.note(
                "micro-batches: not with a BatchNorm in training, whose statistics are over the "
                "whole batch"
            )
            numbers = numbers[:1] if request.parts_add_up else [1]  # a loop makes so many anyway
        return numbers

    def on_step(self, step: Step, choice: Any, blocks: Sequence[str]) -> Step:
        return step.but(
            batch=step.part(choice.micro_batches),
            whole=step.batch,
            accumulation=min(2, choice.micro_batches),  # the second is like all that follow
        )

    def reduce_memory(self, running: Running) -> str | None:
        if 2 * running.parts > running.most_parts:
            return None
        running.parts *= 2
        return f"micro-batches: {running.parts // 2} before, {running.parts} now"

    def advice(self, step: Step) -> Iterator[Change]:
        size = samples_of(step.batch)
        if step.accumulation == 1 and size is not None and size % 2 == 0:
            yield (
                "two micro-batches of half the size",
                step.but(batch=resized(step.batch, size // 2), accumulation=2),
                "about as fast while a half still fills the device",
                "the same products, in two halves",
                "for part in halves(batch):  # then one optimizer.step()\n"
                "    (loss_of(model, part) / 2).backward()",
            )

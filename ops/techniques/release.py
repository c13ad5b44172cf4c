"""Gradients that are used and freed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..release import bucket_of, release_gradients
from ..step.description import Step
from ..step.optimizers import is_headroom
from .optimizer import is_ours
from .technique import Change, Option, Request, Target, Technique


class Release(Technique):
    """Steps each parameter as soon as its gradient is there."""

    field, default = "release", False
    told, row = 8, 7
    in_words, in_row = "release", ("release", "gradients stay", "released")
    options = {"release": Option(False, help="release gradients in the backward")}
    hint = (
        ": gradients can be released only where nothing clips or scales them, by an optimizer of "
        "Headroom's that has all parameters that are trained, in one micro-batch"
    )

    def values(self, request: Request, choice: Any) -> Sequence[bool]:
        optimizer = request.optimizers[choice.optimizer, choice.weights]
        key = self, id(optimizer)
        is_possible = choice.micro_batches == 1 and request.once(
            key, lambda: _can_release(request.step, optimizer)
        )
        return (False, True) if is_possible else (False,)

    def on_step(self, step: Step, choice: Any, blocks: Sequence[str]) -> Step:
        return step.but(release=choice.release and bucket_of(step.model, choice.dtype))

    def apply(self, target: Target, choice: Any) -> Callable[[], None] | None:
        bucket = bucket_of(target.model, choice.dtype)
        return release_gradients(target.model, target.optimizer, bucket_bytes=bucket).remove

    def advice(self, step: Step) -> Iterator[Change]:
        is_alone = step.sharding is None and is_ours(step.optimizer)
        if is_alone and not step.release and step.max_grad_norm is None:
            yield (
                "release gradients",
                step.but(release=True),
                "no slower",
                "the same updates, in the backward pass",
                "handle = headroom.release_gradients(model, optimizer)",
            )


def _can_release(step: Step, optimizer: Any) -> bool:
    """Returns whether gradients can be released: a step that is made within the backward pass can
    neither clip nor wait for other micro-batches, nor be skipped as a whole."""
    limits = [group.get("max_grad_norm") for group in optimizer.param_groups]
    clips = any(limit is not None for limit in (step.max_grad_norm, *limits))
    if not is_headroom(optimizer) or clips or step.scaler:
        return False
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return all(id(p) in own for p in step.model.parameters() if p.requires_grad)

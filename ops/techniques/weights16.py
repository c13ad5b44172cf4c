"""Weights in bfloat16, with 16 more bits of each that the optimizer keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..amp.cast_model import cast_model
from ..optim import load_master_weights, master_weights
from ..step.description import Step
from ..step.optimizers import obstacle
from .optimizer import counterparts_of, is_of_8_bits, maker, options_of, shown_options, source_of
from .technique import Change, Request, Target, Technique


class Weights16(Technique):
    """Casts the model, and gives the optimizer the bits that its weights lose."""

    field, default = "weights", "given"
    told, row = 3, 2
    in_words, in_row = "{} weights", ("weights", "float32", "bfloat16 + 16 bits")
    allowed = {"bf16": 2}
    changes = {"bf16": "weights are bfloat16, with 16 more bits that the optimizer keeps"}

    def values(self, request: Request, choice: Any) -> Sequence[str]:
        given = request.step.optimizer
        if "bf16" not in request.allowed or obstacle(given) is not None:
            return (self.default,)
        step, params = request.step, {p for group in given.param_groups for p in group["params"]}
        if any(p.dtype != torch.float32 for p in params):
            request.note("bf16: not all parameters of the optimizer are float32")
            return (self.default,)
        if step.scaler or step.amp == torch.float16:
            request.note("bf16: not with float16 or a scaler of losses")
            return (self.default,)
        others = (p for p in step.model.parameters() if p not in params)
        if any(p.is_floating_point() and p.itemsize > 2 for p in others):
            request.note(
                "bf16: the weights that the optimizer lacks are rounded as well, but for norms, "
                "and undo() does not give back the bits that they lose"
            )
        return self.default, "bf16"

    def on_step(self, step: Step, choice: Any, blocks: Sequence[str]) -> Step:
        return step.but(dtype=choice.dtype)

    def on_measured_copy(self, target: Target, choice: Any) -> None:
        cast_model(target.model, torch.bfloat16)

    def apply(self, target: Target, choice: Any) -> Callable[[], None] | None:
        model, optimizer = target.model, target.optimizer
        params = [p for group in optimizer.param_groups for p in group["params"]]
        tensors = {*model.parameters(), *model.buffers()}
        before = {x: x.data for x in tensors if x.is_floating_point()}
        others = {x: x.dtype for x in before if x.dtype != torch.float32}
        try:
            cast_model(model, torch.bfloat16)
            load_master_weights(optimizer, {p: before[p] for p in params})
        except BaseException:
            cast_model(model, torch.float32)
            for x, data in before.items():
                x.data = data
            raise

        def cast_back() -> None:
            weights = master_weights(optimizer)
            cast_model(model, torch.float32)
            for param, value in weights.items():
                param.data = value
            for x, dtype in others.items():
                grad, x.grad = x.grad, None  # which has to be of the same dtype
                x.data = x.data.to(dtype)
                x.grad = None if grad is None else grad.to(dtype)

        return cast_back

    def advice(self, step: Step) -> Iterator[Change]:
        classes = counterparts_of(step.optimizer)
        dtypes = {p.dtype for p in step.model.parameters() if p.requires_grad}
        if not classes or dtypes != {torch.float32} or step.scaler:
            return
        options = options_of(step.optimizer)
        kind = classes["8bit" if is_of_8_bits(step.optimizer) else "headroom"]
        params = source_of(step.optimizer)
        keep = {key: value for key, value in options.items() if key != "master"}
        yield (
            "parameters in bfloat16 with a 16-bit remainder",
            step.but(
                dtype=torch.bfloat16,
                amp=None,
                optimizer=maker(kind, keep | {"master": "remainder16"}, params),
            ),
            "faster: 16-bit products",
            "the remainder keeps the bits of float32 weights; docs/weights-16bit.md",
            "headroom.cast_model(model, torch.bfloat16)\n"
            f"optimizer = headroom.optim.{kind.__name__}({params}, "
            'master="remainder16"' + shown_options(options) + ")",
        )

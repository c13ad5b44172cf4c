"""What each part of a batch counts for, so that the losses of parts add up to that of all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from .._core.surroundings import Random
from ..nn import Transformer
from ..step.randomness import generators_kept
from .blocks import private_copy
from .micro_batches import parts, samples_of
from .out_of_memory import is_out_of_memory
from .setting import Setting

__all__ = ["NO_RULE", "SAMPLES", "SUM", "rule_of", "rules_of", "shares"]

SAMPLES = "samples"  # the loss is a mean over samples
TOKENS = "tokens"  # over the labels that are not -100
NEXT_TOKENS = "next tokens"  # over these but the first of each sequence, which nothing predicts
SUM = "sum"  # the loss of the batch is the sum of those of its parts

NO_RULE = (
    "the losses of parts of a batch do not add up to the loss of the batch, or the model keeps "
    "something of each call, such as a moving average"
)

MOST_PARTS = 8  # whose losses are compared

IGNORED = -100  # the label of what counts for nothing, in losses of torch and of transformers


def shares(each: Sequence[Any], rule: str = SAMPLES) -> list[Fraction]:
    """Returns what the loss of each part of a batch is multiplied by.

    Parts without a token that counts get 0 and need not be computed: a mean over none is nan. If no
    part has any, all get the same.

    Args:
        each: the parts.
        rule: what the loss is a mean over.
    """
    if rule == SUM:
        return [Fraction(1) for _ in each]
    if rule == SAMPLES or len(each) == 1:
        counts = [samples_of(part) or 1 for part in each]
    else:
        # One transfer for all of them, before anything is computed that it would wait for.
        counts = torch.stack([_counted(part, rule == NEXT_TOKENS) for part in each]).tolist()
        counts = counts if any(counts) else [1] * len(each)
    return [Fraction(count, sum(counts)) for count in counts]


def rules_of(setting: Setting) -> tuple[str, ...]:
    """Returns the rules that may hold for a loss, the likeliest first."""
    if _labels(setting.batch) is None:
        return (SAMPLES,)
    own = setting.loss is None and setting.forward is None
    if own and any(_predicts_next(module) for module in setting.model.modules()):
        return (NEXT_TOKENS, TOKENS, SAMPLES)
    return (TOKENS, SAMPLES, NEXT_TOKENS)


def rule_of(setting: Setting, count: int, rules: Sequence[str]) -> str | None:
    """Returns the rule by which the losses of ``count`` parts of the batch add up to that of all of
    it; the first of several. None if there is none, such as for a loss that compares samples with
    one another; if the model cannot be called with the parts; or if it keeps something of each
    call, such as a moving average in a buffer, which would be moved several times in a step.

    Losses are compared in evaluation mode, and where training computes another loss without drawing
    random numbers, in training mode too. They are of ``count`` parts, or of more: the smaller parts
    are, the more do their losses differ where they do not add up.
    """
    if _compares_tokens(setting):
        return None
    each = parts(setting.batch, max(count, min(MOST_PARTS, samples_of(setting.batch) or 1)))
    with ExitStack() as stack:
        stack.enter_context(generators_kept(setting.device))
        stack.enter_context(torch.no_grad())
        whole: list[Tensor] = []
        try:
            whole, _ = _run(setting, (setting.batch,), trains=False)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
        if not whole:  # of a loss that has a gradient in it
            stack.enter_context(torch.enable_grad())
            whole, _ = _run(setting, (setting.batch,), trains=False)
        try:
            losses, _ = _run(setting, each, trains=False)
            rule = _fitting_rule(setting, whole[0], each, losses, rules)
            if rule is None:
                return None
            if _trains_alike(setting, each[0], losses[0]):
                return rule
            drawn = Random([whole[0]])
            trained, buffers = _run(setting, (setting.batch,), trains=True)
            has_drawn = drawn.moved()
            losses, others = _run(setting, each, trains=True)
            if not _is_equal(buffers, others, _tolerance(setting, whole[0])):
                return None
            return rule if has_drawn else _fitting_rule(setting, trained[0], each, losses, (rule,))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None  # the batch as a whole was no problem


def _trains_alike(setting: Setting, part: Any, loss: Tensor) -> bool:
    """Whether a part has the same loss in training mode, but for random numbers, and leaves the
    buffers as they are."""
    drawn = Random([loss])
    trained, buffers = _run(setting, (part,), trains=True)
    is_same = _is_equal(buffers, dict(setting.model.named_buffers()))
    return is_same and (drawn.moved() or torch.equal(trained[0], loss))


def _run(
    setting: Setting, batches: Sequence[Any], *, trains: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the losses of batches, one after the other, and the buffers after them."""
    model = private_copy(setting.model)
    if not trains:
        model.eval()
    losses = [setting.run(model, batch, trains=False).detach() for batch in batches]
    return losses, dict(model.named_buffers())


def _fitting_rule(
    setting: Setting, whole: Tensor, each: Sequence[Any], losses: Sequence[Tensor], rules: Any
) -> str | None:
    """Returns the first rule by which losses of parts add up to that of the whole batch."""
    expected, found = float(whole), [float(loss) for loss in losses]
    errors = {}
    for rule in rules:
        counted = [loss * share for loss, share in zip(found, shares(each, rule)) if share]
        errors[rule] = abs(sum(counted) - expected)
    least = min(errors.values())
    if not least <= _tolerance(setting, whole) * abs(expected) + 1e-6:
        return None
    # Rules that are equal in this batch have equal errors, whatever the noise.
    return next(rule for rule in rules if errors[rule] <= 2 * least + 1e-6 * abs(expected))


def _tolerance(setting: Setting, loss: Tensor) -> float:
    """Returns the share of a loss by which it depends on how products are rounded: those of parts
    may be computed by other kernels."""
    dtypes = {x.dtype for x in (loss, *setting.model.parameters()) if x.is_floating_point()}
    if setting.amp is not None or any(dtype.itemsize < 4 for dtype in dtypes):
        return 1e-2
    is_rounded = setting.device.type == "cuda" or torch.get_float32_matmul_precision() != "highest"
    return 1e-3 if is_rounded else 2e-6


def _compares_tokens(setting: Setting) -> bool:
    """Whether a model of transformers adds a loss of its router, which depends on how the tokens of
    a batch are spread over experts, by so little that the sum of the losses does not show it."""
    asked = isinstance(setting.batch, Mapping) and setting.batch.get("output_router_logits")
    configs = [getattr(module, "config", None) for module in setting.model.modules()]
    return any(
        (asked or getattr(config, "output_router_logits", False))
        and getattr(config, "router_aux_loss_coef", 0)
        for config in configs
    )


def _is_equal(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0) -> bool:
    """Whether buffers are equal, floating-point ones up to a share of their largest element."""

    def is_near(x: Tensor, y: Tensor) -> bool:
        if x.shape != y.shape:
            return False
        if tolerance == 0.0 or not x.is_floating_point():
            return torch.equal(x, y)
        x, y = x.double(), y.double()
        return x.numel() == 0 or bool((x - y).abs().max() <= tolerance * y.abs().max())

    return a.keys() == b.keys() and all(is_near(a[name], b[name]) for name in a)


def _predicts_next(module: nn.Module) -> bool:
    """Whether a model that is given labels has each token predict the one after it."""
    if isinstance(module, Transformer):
        return module.config.causal
    cls = type(module)
    return cls.__module__.startswith("transformers.") and cls.__name__.endswith(
        ("ForCausalLM", "LMHeadModel")
    )


def _counted(part: Any, shifted: bool) -> Tensor:
    """The number of tokens that count."""
    labels = _labels(part)
    assert labels is not None
    if shifted and labels.dim() > 1 and not (isinstance(part, Mapping) and "shift_labels" in part):
        labels = labels[..., 1:]
    return labels.ne(IGNORED).sum()


def _labels(batch: Any) -> Tensor | None:
    """The labels of a batch that are whole numbers: of a dict by their name, else the last ones."""
    found = None
    if isinstance(batch, Mapping):
        found = batch.get("shift_labels", batch.get("labels"))
    elif isinstance(batch, (tuple, list)) and batch:
        found = batch[-1]
    if not isinstance(found, Tensor) or not found.dim():
        return None
    return None if found.is_floating_point() or found.is_complex() else found

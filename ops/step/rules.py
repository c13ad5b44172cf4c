"""Compares the gradients of parts of a batch with that of all of it, to find out what the loss is a
mean over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from .._core.dtensor import local_part
from .._core.randomness import generators_kept
from ..nn import Transformer
from ..patching.levels import Blocks
from .constant_rng import ConstantRandom
from .description import Step
from .micro_batches import (
    NEXT_TOKENS,
    SAMPLES,
    TOKENS,
    check_told,
    labels_of,
    picked,
    samples_of,
    shares,
    some_samples,
)
from .out_of_memory import is_out_of_memory
from .watch import hearing_gradients

__all__ = ["NO_RULE", "rule_of", "rules_of"]

NO_RULE = (
    "the gradients of parts of a batch do not add up to the gradient of the batch or cannot be "
    "compared with it, or the model keeps something of each call, such as a moving average"
)

# The samples whose gradients are compared, by parts. A loss that compares neighbors may add up over
# parts of even numbers of samples, and a micro-batch may have any number.
UNEVEN = ((0,), (1, 2), (3, 4), (5, 6, 7))
MOST_SAMPLES = 8
ELEMENTS = 1024  # of each gradient, about
ROUNDING = 1e-3  # of the largest gradient: what is less is compared at this scale
CANCELED = 2e-7  # of the largest gradient: what float32 leaves of sums that are zero
SCALE = 1024.0  # of a loss whose gradients might vanish in float16


def rules_of(step: Step) -> tuple[str, ...]:
    """Returns the rules that may hold for a loss, the likeliest first."""
    if labels_of(step.batch) is None:
        return (SAMPLES,)
    own = step.loss is None and step.forward is None
    if own and any(_predicts_next(module) for module in step.model.modules()):
        return (NEXT_TOKENS, TOKENS, SAMPLES)
    return (TOKENS, SAMPLES, NEXT_TOKENS)


def rule_of(step: Step, rules: Sequence[str], *, has_levels: bool = True) -> str | None:
    """Returns the rule by which the gradients of parts of the batch add up to that of all of it;
    the first of several. None if there is none, such as for a loss that compares samples with one
    another; if the model cannot be called with the parts; if it keeps something of each call, such
    as a moving average in a buffer, which would be moved several times in a step; or if it cannot
    be found out, as where random numbers do not come from torch, or depend on values.

    What is compared are elements of the gradients of all parameters, in training mode, of 8 samples
    in uneven parts, or of each sample where there are fewer. Blocks keep as little as they can, or
    without ``has_levels`` what they keep already.
    """
    if _compares_tokens(step):
        return None
    try:
        return _compared(step, rules, has_levels)
    except Exception as error:
        if is_out_of_memory(error):
            raise
    # Blocks may be what cannot be run again.
    return rule_of(step, rules, has_levels=False) if has_levels else None


def _compared(step: Step, rules: Sequence[str], has_levels: bool) -> str | None:
    assert step.device is not None
    batch = some_samples(step.batch, MOST_SAMPLES)
    samples = samples_of(batch) or 1
    numbers = UNEVEN if samples == MOST_SAMPLES else [(k,) for k in range(samples)]
    check_told(batch)
    each = [picked(batch, some) for some in numbers]
    with generators_kept(step.device), ConstantRandom():
        model = Blocks.of_copy(step.model, has_levels=has_levels).model
        whole = _gradients(step, model, batch)
        buffers = dict(model.named_buffers())
        model = Blocks.of_copy(step.model, has_levels=has_levels).model
        found = [_gradients(step, model, part) for part in each]
    tolerance = _tolerance(step)
    if not _is_equal(buffers, dict(model.named_buffers()), tolerance):
        return None
    errors = {rule: _error(whole, found, shares(each, rule, batch)) for rule in rules}
    least = min(errors.values())
    if not least <= tolerance:
        return None
    # Rules that are equal in this batch have equal errors, whatever the noise.
    return next(rule for rule in rules if errors[rule] <= 2 * least + 1e-3 * tolerance)


def _gradients(step: Step, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Returns some elements of the gradient of each parameter, which is dropped as it arrives."""
    found: dict[str, Tensor] = {}

    def take(name: str, param: Tensor) -> None:
        assert param.grad is not None
        grad, param.grad = local_part(param.grad), None
        flat = (grad if grad.layout == torch.strided else grad.to_dense()).reshape(-1)
        some = flat[:: max(1, flat.numel() // ELEMENTS) | 1].double()
        found[name] = found[name] + some if name in found else some  # may arrive several times

    with hearing_gradients(model, take):
        (step.loss_of(model, batch) * (SCALE if step.scaler else 1)).backward()
    return found


def _error(
    whole: Mapping[str, Tensor], found: Sequence[Mapping[str, Tensor]], each: Sequence[Fraction]
) -> float:
    """Returns by how much gradients of parts, times their shares, differ from that of the batch, as
    a share of it: the most of any parameter. NaN if they cannot be compared.

    Differences that are next to nothing beside the gradients of other parameters, as that of a bias
    before a norm, are rounding.
    """
    norms = {name: float(grad.norm()) for name, grad in whole.items()}
    largest = max(norms.values(), default=0.0)
    errors = [0.0 if 0 < largest < math.inf else math.nan]
    for name in {name for one in (whole, *found) for name in one}:
        got = [float(share) * one[name] for one, share in zip(found, each) if share and name in one]
        wanted = whole.get(name)
        difference = sum(got) - (0.0 if wanted is None else wanted)
        error = float(torch.as_tensor(difference).norm())
        if not error <= CANCELED * largest:
            errors.append(error / (norms.get(name, 0.0) + ROUNDING * largest))
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _tolerance(step: Step) -> float:
    """Returns the share of a gradient by which it depends on how products are rounded: those of
    parts may be computed by other kernels."""
    dtypes = {x.dtype for x in step.model.parameters() if x.is_floating_point()}
    if step.amp is not None or any(dtype.itemsize < 4 for dtype in dtypes):
        return 5e-2
    assert step.device is not None
    is_rounded = step.device.type == "cuda" or torch.get_float32_matmul_precision() != "highest"
    return 1e-2 if is_rounded else 2e-5


def _compares_tokens(step: Step) -> bool:
    """Returns whether a model of transformers adds a loss of its router, which depends on how the
    tokens of a batch are spread over experts, by so little that the sum of the losses does not show
    it."""
    asked = isinstance(step.batch, Mapping) and step.batch.get("output_router_logits")
    configs = [getattr(module, "config", None) for module in step.model.modules()]
    return any(
        (asked or getattr(config, "output_router_logits", False))
        and getattr(config, "router_aux_loss_coef", 0)
        for config in configs
    )


def _is_equal(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> bool:
    """Returns whether buffers are equal, floating-point ones up to a share of their largest
    element."""

    def is_near(x: Tensor, y: Tensor) -> bool:
        if x.shape != y.shape:
            return False
        if not x.is_floating_point():
            return torch.equal(x, y)
        x, y = x.double(), y.double()
        return x.numel() == 0 or bool((x - y).abs().max() <= tolerance * y.abs().max())

    return a.keys() == b.keys() and all(is_near(a[name], b[name]) for name in a)


def _predicts_next(module: nn.Module) -> bool:
    """Returns whether a model that is given labels has each token predict the one after it."""
    if isinstance(module, Transformer):
        return module.config.causal
    cls = type(module)
    return cls.__module__.startswith("transformers.") and cls.__name__.endswith(
        ("ForCausalLM", "LMHeadModel")
    )

"""What each part of a batch counts for, so that the losses of parts add up to that of all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._core.dtensor import local_part
from ..nn import Transformer
from ..step.out_of_memory import is_out_of_memory
from ..step.randomness import generators_kept
from .blocks import Blocks, private_copy
from .micro_batches import parts, samples_of, some_samples
from .replay import Replay
from .setting import Setting

__all__ = ["NO_RULE", "SAMPLES", "SUM", "rule_of", "rules_of", "shares"]

SAMPLES = "samples"  # the loss is a mean over samples
TOKENS = "tokens"  # over the labels that are not -100
NEXT_TOKENS = "next tokens"  # over these but the first of each sequence, which nothing predicts
SUM = "sum"  # the loss of the batch is the sum of those of its parts

NO_RULE = (
    "the gradients of parts of a batch do not add up to the gradient of the batch or cannot be "
    "compared with it, or the model keeps something of each call, such as a moving average"
)

MOST_PARTS = 8  # whose gradients are compared
ELEMENTS = 1024  # of each gradient, about
ROUNDING = 1e-3  # of the largest gradient: what is less is compared at this scale
SCALE = 1024.0  # of a loss whose gradients might vanish in float16

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


def rule_of(setting: Setting, rules: Sequence[str]) -> str | None:
    """Returns the rule by which the gradients of parts of the batch add up to that of all of it;
    the first of several. None if there is none, such as for a loss that compares samples with one
    another; if the model cannot be called with the parts; if it keeps something of each call, such
    as a moving average in a buffer, which would be moved several times in a step; or if it cannot
    be found out, as where random numbers of the batch cannot be drawn again for its parts.

    What is compared are elements of the gradients of all parameters, in training mode, of at most
    16 samples in 8 parts. Blocks keep as little as they can.
    """
    if _compares_tokens(setting):
        return None
    try:
        return _compared(setting, rules)
    except Exception as error:
        if is_out_of_memory(error):
            raise
    # Blocks may be what cannot be run again.
    return rule_of(setting.but(has_levels=False), rules) if setting.has_levels else None


def _compared(setting: Setting, rules: Sequence[str]) -> str | None:
    batch = some_samples(setting.batch, 2 * MOST_PARTS)
    samples = samples_of(batch) or 1
    each = parts(batch, min(MOST_PARTS, samples))
    with generators_kept(setting.device):
        replay = Replay(samples, setting.device)
        model = _copy(setting)
        with replay.of_batch():
            whole = _gradients(setting, model, batch)
        buffers = dict(model.named_buffers())
        model, found, start = _copy(setting), [], 0
        for part in each:
            count = samples_of(part) or 1
            with replay.of_part(start, count):
                found.append(_gradients(setting, model, part))
            start += count
    tolerance = _tolerance(setting)
    if not replay.is_exact or not _is_equal(buffers, dict(model.named_buffers()), tolerance):
        return None
    errors = {rule: _error(whole, found, shares(each, rule)) for rule in rules}
    least = min(errors.values())
    if not least <= tolerance:
        return None
    # Rules that are equal in this batch have equal errors, whatever the noise.
    return next(rule for rule in rules if errors[rule] <= 2 * least + 1e-3 * tolerance)


def _copy(setting: Setting) -> nn.Module:
    model = private_copy(setting.model)
    blocks = Blocks(model, fused_loss=setting.fused_loss, has_levels=setting.has_levels)
    blocks.set(blocks.leanest)
    return model


def _gradients(setting: Setting, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Returns some elements of the gradient of each parameter, which is dropped as it arrives."""
    found: dict[str, Tensor] = {}

    def take(name: str, param: Tensor) -> None:
        assert param.grad is not None
        grad, param.grad = local_part(param.grad), None
        flat = (grad if grad.layout == torch.strided else grad.to_dense()).reshape(-1)
        some = flat[:: max(1, flat.numel() // ELEMENTS) | 1].double()
        found[name] = found[name] + some if name in found else some  # may arrive several times

    with ExitStack() as hooks:
        for name, param in model.named_parameters():
            if param.requires_grad:
                hook = param.register_post_accumulate_grad_hook(partial(take, name))
                hooks.callback(hook.remove)
        (setting.run(model, batch) * (SCALE if setting.scaler else 1)).backward()
    return found


def _error(
    whole: Mapping[str, Tensor], found: Sequence[Mapping[str, Tensor]], each: Sequence[Fraction]
) -> float:
    """Returns by how much gradients of parts, times their shares, differ from that of the batch, as
    a share of it: the most of any parameter. NaN if they cannot be compared.

    Gradients that are next to nothing beside those of other parameters, as that of a bias before a
    norm, are rounding.
    """
    norms = {name: float(grad.norm()) for name, grad in whole.items()}
    largest = max(norms.values(), default=0.0)
    errors = [0.0 if 0 < largest < math.inf else math.nan]
    for name in {name for one in (whole, *found) for name in one}:
        got = [float(share) * one[name] for one, share in zip(found, each) if share and name in one]
        wanted = whole.get(name)
        difference = sum(got) - (0.0 if wanted is None else wanted)
        error = float(torch.as_tensor(difference).norm())
        errors.append(error / (norms.get(name, 0.0) + ROUNDING * largest))
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _tolerance(setting: Setting) -> float:
    """Returns the share of a gradient by which it depends on how products are rounded: those of
    parts may be computed by other kernels."""
    dtypes = {x.dtype for x in setting.model.parameters() if x.is_floating_point()}
    if setting.amp is not None or any(dtype.itemsize < 4 for dtype in dtypes):
        return 5e-2
    is_rounded = setting.device.type == "cuda" or torch.get_float32_matmul_precision() != "highest"
    return 1e-2 if is_rounded else 2e-5


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

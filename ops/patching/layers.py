"""The forward of a layer of transformers with the dial: its modules in the steps of a Block."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .._core.surroundings import again, takes_ops
from ..checkpointing.caches import is_filled, warn_of_cache
from ..nn.fused import is_untouched
from ..nn.steps import SaveLevel, run_steps
from .attention import collects_attentions
from .parts import Call, Dial, Family

UNKNOWN = ("encoder_hidden_states", "encoder_attention_mask", "output_attentions")
NOT_FOR_ATTENTION = {
    *("attention_mask", "position_embeddings", "encoder_hidden_states", "encoder_attention_mask"),
    "output_attentions",
}
CAPTURE = "install_output_capuring_hook"  # so spelled in transformers


def layer_forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Takes the place of a layer's ``forward``. What it does not know it leaves to that."""
    dial: Dial = self._headroom_dial
    family = dial.family
    given = dict(zip(dial.arguments, args)) | kwargs
    if not dial.has_own_halves or not _is_known(self, family, given):
        return type(self).forward(self, *args, **kwargs)
    x = given.pop("hidden_states")
    # Transformers 5.24 renamed it, and takes the old name in keywords.
    cache = given.pop("past_key_values", None)
    if cache is None and "cache" in dial.arguments:
        cache = given.pop("cache", None)
    if getattr(self, "gradient_checkpointing", False) and self.training:
        # As GradientCheckpointingLayer does, whose wrapper is on the forward of the class.
        if cache is not None or given.get("use_cache"):
            warn_of_cache(self, "gradient checkpointing")
            given["use_cache"] = False
        run = functools.partial(_run, self, SaveLevel(0), None, given)
        return self._gradient_checkpointing_func(again(run), x)
    level = dial.level
    if cache is not None and level.number > 0 and torch.is_grad_enabled():
        if self.training and not is_filled(cache, self):
            warn_of_cache(self, "save levels")
            given["use_cache"], cache = False, None
        else:
            # What a cache takes is changed by it, and cannot be computed again.
            level = SaveLevel(0)
    return _run(self, level, cache, given, x)


def _is_known(layer: Any, family: Family, given: dict[str, Any]) -> bool:
    """Returns whether the steps of the family compute what the layer's own forward does."""
    for name in UNKNOWN:
        if given.get(name) is not None and given[name] is not False:
            return False
    if not takes_ops(given.get("hidden_states"), (3,)):
        return False
    if family.rotates and given.get("position_embeddings") is None:
        return False
    for half in map(layer.get_submodule, family.halves):
        if type(half).__module__ != family.module or "forward" in vars(half):
            return False
        if not is_untouched(half) and not _only_captures(half):
            return False
    return family.supports(layer)


def _only_captures(half: nn.Module) -> bool:
    """Returns whether a module has no hooks but those by which transformers collects attentions,
    and now collects none."""
    hooks = [*half._forward_pre_hooks.values(), *half._backward_hooks.values()]
    hooks += [*half._backward_pre_hooks.values(), *half._forward_hooks.values()]
    captures = all(getattr(hook, "__qualname__", "").startswith(CAPTURE) for hook in hooks)
    return captures and not collects_attentions()


def _run(layer: Any, level: SaveLevel, cache: Any, given: dict[str, Any], x: Tensor) -> Tensor:
    dial: Dial = layer._headroom_dial
    tables = given["position_embeddings"] if dial.family.rotates else ()
    options = {name: value for name, value in given.items() if name not in NOT_FOR_ATTENTION}
    call = Call(dial, x, given.get("attention_mask"), cache, options)
    steps = functools.partial(dial.family.steps, layer, call)
    return run_steps(steps, level, x, *tables)

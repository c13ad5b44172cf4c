"""Headroom's optimizers in torchtitan, by its command line::

    --override.imports headroom.integrations.torchtitan.adamw8bit
    --override.imports 'headroom.integrations.torchtitan.adamw={"master": "remainder16"}'

The parameter groups of the configuration stay, and their learning rates, betas and weight decay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .. import optim

try:
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.override import derive, override
except ImportError as error:
    raise ImportError(
        "headroom.integrations.torchtitan needs the package torchtitan, of 0.3 or newer"
    ) from error

__all__ = ["HeadroomOptimizers", "adamw", "adamw8bit"]

REPLACED = ("Adam", "AdamW")
PREFIX = "headroom."  # of the names in parameter groups


class HeadroomOptimizers(OptimizersContainer):
    """Makes Headroom's optimizers where a parameter group names one, such as
    ``headroom.AdamW8bit``, and torchtitan's elsewhere."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name.startswith(PREFIX):
            return getattr(optim, name.removeprefix(PREFIX))
        return OptimizersContainer._resolve_optimizer_factory(name)


@override(target=OptimizersContainer.Config, description="Adam and AdamW by Headroom's AdamW")
def adamw(cfg: Any, **options: Any) -> Any:
    """Returns a configuration whose groups of Adam and AdamW are of :class:`headroom.optim.AdamW`,
    which gets the options."""
    return _with("AdamW", cfg, options)


@override(target=OptimizersContainer.Config, description="Adam and AdamW by Headroom's AdamW8bit")
def adamw8bit(cfg: Any, **options: Any) -> Any:
    """Returns a configuration whose groups of Adam and AdamW are of
    :class:`headroom.optim.AdamW8bit`, which gets the options."""
    return _with("AdamW8bit", cfg, options)


def _with(name: str, cfg: Any, options: dict[str, Any]) -> Any:
    if cfg.implementation == "fused_opt_states_bf16":
        raise ValueError(
            f"{__name__}: the implementation is {cfg.implementation!r}, which makes states in "
            "bfloat16; wanted 'fused', or no override"
        )
    ours = {
        old: PREFIX + (name if old == "AdamW" else name.replace("AdamW", "Adam"))
        for old in REPLACED
    }
    groups = []
    for group in cfg.param_groups:
        name = ours.get(group.optimizer_name, group.optimizer_name)
        groups.append(dataclasses.replace(group, optimizer_name=name))
    given = {ours.get(old, old): own for old, own in cfg.optimizer_factory_kwargs_by_name.items()}
    for each in ours.values():
        given[each] = {**given.get(each, {}), **options}
    return derive(
        cfg,
        HeadroomOptimizers.Config,
        param_groups=groups,
        optimizer_factory_kwargs_by_name=given,
    )

"""Models as :func:`headroom.patch` would change them, for advice."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .._core.module_copies import copied_modules
from ..nn.block import Block
from ..patching import patch
from ..patching.changes import is_patched
from ..patching.families import find_layers

__all__ = ["patched_models"]


def patched_models(model: nn.Module) -> Iterator[tuple[str | None, nn.Module]]:
    """Yields copies that were patched, each with its level. None of a model in
    which nothing is recognized, that is patched already, or that is of :mod:`headroom.nn`.

    The copies have the parameters and buffers of the model, not copies of those: modules alone are
    new, so that the model stays as it is.
    """
    if any(is_patched(module) or isinstance(module, Block) for module in model.modules()):
        return
    # Other blocks than those of known architectures can only be checkpointed, which is advice too.
    levels = (None, "L2", "L3", "L4", "L5") if find_layers(model) is not None else (None,)
    for level in levels:
        try:
            made = copied_modules(model, lambda x: x)
            report = patch(made, save=level)
        except Exception:  # it cannot be copied or patched, and then it is not advised
            return
        if report.changed:
            yield level, made

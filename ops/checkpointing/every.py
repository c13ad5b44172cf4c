"""Checkpoints the repeated blocks of a model in place."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .caches import without_caches
from .regions import checkpointed


def repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields names and blocks: the members of the outermost lists of two or more modules of one
    class that have parameters."""
    members = list(model.named_children())
    if (
        isinstance(model, (nn.ModuleList, nn.Sequential))
        and len(members) > 1
        and len({type(block) for _, block in members}) == 1
        and all(next(block.parameters(), None) is not None for _, block in members)
    ):
        yield from members
        return
    for name, child in members:
        yield from ((f"{name}.{inner}", block) for inner, block in repeated_blocks(child))


class CheckpointedBlocks:
    """The blocks that :func:`checkpoint_every` changed.

    Attributes:
        names: of the blocks that are checkpointed, in the order of the model.
        kept: names of those that keep their activations.
    """

    def __init__(self, blocks: list[tuple[str, nn.Module]], kept: list[str]) -> None:
        self.names = [name for name, _ in blocks]
        self.kept = kept
        self._blocks = [block for _, block in blocks]

    def remove(self) -> None:
        """Gives the blocks their own ``forward`` back. A second call does nothing."""
        for block in self._blocks:
            del block.forward, block._checkpoint_options
        self._blocks = []

    def __repr__(self) -> str:
        state = f"{len(self.names)} of {len(self.names) + len(self.kept)} blocks"
        return f"CheckpointedBlocks({state}: {', '.join(self.names)})"


def checkpoint_every(model: nn.Module, n: int = 1, **options: Any) -> CheckpointedBlocks:
    """Checkpoints one in ``n`` of the repeated blocks of a model, from the first on, in place.

    With n = 1 the model keeps one input per block; with n = 2 half of the blocks keep all that
    they save, for half the time of recomputation. Only training is changed: in ``eval()`` and
    under ``torch.no_grad()`` a block runs as before. Names of parameters and the ``state_dict``
    stay. An empty cache of keys and values, which transformers hands to its layers in training too,
    is dropped; a layer that is given a filled one runs as before.

    Args:
        model: has its blocks in a ModuleList or Sequential of two or more modules of one class.
        n: 1 or more.
        **options: of :func:`checkpoint`, ``verify`` among them.

    Returns:
        A handle whose ``remove()`` undoes it.

    Raises:
        ValueError: ``n`` is less than 1, the model has no repeated blocks, or one of them has a
            ``forward`` of its own already, as after an earlier call.
    """
    if n < 1:
        raise ValueError(f"n is {n}, wanted 1 or more")
    blocks = list(repeated_blocks(model))
    if not blocks:
        raise ValueError(
            f"checkpoint_every: {type(model).__name__} has no repeated blocks: no ModuleList or "
            "Sequential of two or more modules of one class; call headroom.checkpoint in its "
            "forward instead"
        )
    taken = [name for name, block in blocks if "forward" in vars(block)]
    if taken:
        raise ValueError(
            f"checkpoint_every: {taken[0]} has a forward of its own, set on the module and not by "
            "its class; call remove() of whatever set it first"
        )
    chosen = [pair for k, pair in enumerate(blocks) if k % n == 0]
    for name, block in chosen:
        # What the last block keeps is wanted back as soon as it would have left.
        moved = {"host", "in_8_bits"} & options.keys() if name == blocks[-1][0] else ()
        block._checkpoint_options = options | dict.fromkeys(moved, False)  # type: ignore[assignment]
        # Of the block, so that a copy has its own, and a function that pickle finds by its name.
        block.forward = functools.partial(_forward, block)
    return CheckpointedBlocks(chosen, [name for k, (name, _) in enumerate(blocks) if k % n != 0])


def _forward(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    own = functools.partial(type(block).forward, block)  # torch.compile traces no making of methods
    if not block.training or not torch.is_grad_enabled():
        return own(*args, **kwargs)
    given = without_caches(block, "checkpoint_every", args, kwargs)
    if given is None:
        return own(*args, **kwargs)  # what a cache takes cannot be computed again
    args, kwargs = given
    return checkpointed(own, block._checkpoint_options, *args, **kwargs)

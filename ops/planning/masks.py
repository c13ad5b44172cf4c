"""Lets models of transformers choose on fakes the attention that they choose on tensors.

They look into masks and positions: where nothing is masked they need no mask, which would be one of
the largest activations. On fakes they cannot look, and make one; so the batch is looked at here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from ..patching import attention

__all__ = ["hidden_by", "masks_of"]


def masks_of(batch: Any) -> AbstractContextManager[None]:
    """Tells masks from those of a batch, which is a dict of named arguments and looked at now.

    Without "position_ids" in it, positions are those that the model counts, and no row holds
    several sequences; nor does one whose positions rise by one. An "attention_mask" of ones masks
    nothing.
    """
    return _masks(*hidden_by(batch))


@contextmanager
def _masks(is_full: bool, begins_anew: bool) -> Iterator[None]:
    module = sys.modules.get("transformers.masking_utils")
    if module is None:
        yield
        return
    with ExitStack() as stack:

        def replace(name: str, made: Callable[[Any], Any]) -> None:
            if (function := getattr(module, name, None)) is not None:
                stack.enter_context(mock.patch.object(module, name, made(function)))

        if not begins_anew:
            replace("find_packed_sequence_indices", _none)
            stack.enter_context(mock.patch.object(attention, "sequences_of", lambda *given: None))
        if is_full:
            replace("_ignore_causal_mask_sdpa", _without_mask)
            replace("_ignore_bidirectional_mask_sdpa", _without_mask)
            stack.enter_context(mock.patch.object(attention, "is_full", lambda mask: True))
        yield


def hidden_by(batch: Any) -> tuple[bool, bool]:
    """Returns whether a batch has a mask that hides nothing, and whether its positions begin anew
    within a row: what of its values an attention depends on."""
    given = batch if isinstance(batch, Mapping) else {}
    mask = given.get("attention_mask")
    is_full = isinstance(mask, Tensor) and not mask.is_meta and bool(mask.all())
    return is_full, _begin_anew(given.get("position_ids"), mask)


def _begin_anew(positions: Any, mask: Any) -> bool:
    """Returns whether positions tell that rows hold several sequences."""
    if not isinstance(positions, Tensor) or positions.is_meta:
        return positions is not None
    if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_meta:
        if positions.shape in (mask.shape, (1, mask.shape[1])):
            return attention.sequences_of(positions.expand_as(mask), mask) is not None
    return bool((positions.diff(dim=-1) != 1).any())


def _none(function: Callable[..., Any]) -> Callable[..., None]:
    def one_sequence(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)  # for what it allocates

    return one_sequence


def _without_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    def nothing_masked(*args: Any, **kwargs: Any) -> Any:
        return function(None, *args[1:], **kwargs)

    return nothing_masked

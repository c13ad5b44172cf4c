"""Which tokens see which: sequences that are packed into a row, windows and masks."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.rows import autocast_dtype


class Pattern(NamedTuple):
    """Says which tokens see which, for :meth:`Attention.attend`.

    Attributes:
        mask: what is added to the scores, as
            :func:`torch.nn.functional.scaled_dot_product_attention` takes it, or None.
        causal: a token sees itself and those before it.
        window: as in :func:`attention_pattern`, or None.
        cu_seqlens: int32 ``[sequences + 1]``, 0 and where each sequence ends in a batch whose rows
            lie end to end; or None if each row is a sequence.
        longest: no sequence has more tokens; None if that is not known.

    With a mask the last three are None: it says all.
    """

    mask: Tensor | None
    causal: bool
    window: int | None = None
    cu_seqlens: Tensor | None = None
    longest: int | None = None


def _known_ends(cu_seqlens: Tensor) -> list[int] | None:
    """Returns where sequences end, from 0 on, or None where looking would wait for a device, or
    break a trace.

    Raises:
        ValueError: they do not begin with 0, or fall.
    """
    if (
        cu_seqlens.device.type != "cpu"
        or type(cu_seqlens) is not Tensor
        or torch.compiler.is_compiling()
    ):
        return None
    ends = cu_seqlens.tolist()
    if not ends or ends[0] != 0 or any(end < start for start, end in pairwise(ends)):
        raise ValueError(
            f"cu_seqlens is {ends[:20]}, wanted 0 and then where each sequence ends, in rising "
            "order; take the cumulative sum of the lengths"
        )
    return ends


def packed_positions(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns the number of the sequence of each token, and its position in it.

    ``cu_seqlens`` is ``[sequences + 1]``: 0, and where each sequence ends. What lies behind the
    last end is one more sequence.

    Raises:
        ValueError: ``cu_seqlens`` on the CPU, where looking waits for no device, does not begin
            with 0 or falls.
    """
    _known_ends(cu_seqlens)
    index = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)
    return sequence, index - cu_seqlens[sequence]


def attention_pattern(
    x: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Pattern:
    """Returns which tokens of ``x``, ``[batch, tokens, hidden]``, see which.

    Args:
        causal: a token sees itself and those before it.
        window: a token sees that many tokens, itself among them, or, if not ``causal``, those less
            than that far away.
        mask: bool, or integer and not 0, where a token is seen; or floating-point, added to the
            scores. ``[batch or 1, tokens]`` says which tokens are seen by all; with 3 or 4
            dimensions it broadcasts to ``[batch, heads, tokens, tokens]``.
        cu_seqlens: int ``[sequences + 1]``: 0, and the end of each of the sequences that are packed
            into one row, which do not see each other. On the CPU, also for ``x`` on a GPU, the
            longest of them is known without waiting for the device.

    A ``mask`` takes tokens ** 2 elements of the dtype of ``x`` with all that hides tokens from
    others. Blocks can share it, where a mask of bools would be converted and kept by each. Without
    one no such mask is made.
    """
    batch, tokens = x.shape[:2]
    if window is not None and window >= tokens:
        window = None
    longest = None
    if cu_seqlens is not None:
        cu_seqlens, longest = end_to_end(cu_seqlens, batch, tokens, x.device)
    pattern = Pattern(None, causal, window, cu_seqlens, longest)
    if mask is None:
        return pattern
    if mask.dim() == 2:
        if mask.shape[0] not in (1, batch) or mask.shape[1] != tokens:
            raise ValueError(
                f"mask is {list(mask.shape)}, wanted [batch, tokens], which is "
                f"{[batch, tokens]}; a mask of pairs of tokens has 3 or 4 dimensions"
            )
        mask = mask[:, None, None, :]
    return masked(pattern, x, mask)


def masked(pattern: Pattern, x: Tensor, mask: Tensor | None = None) -> Pattern:
    """Returns a pattern for ``x``, ``[batch, tokens, ...]``, as one mask, which hides what another
    mask hides too."""
    batch, tokens = x.shape[:2]
    dtype = autocast_dtype(x.device.type) or x.dtype
    index = torch.arange(tokens, device=x.device)
    distance = index[:, None] - index  # from the token that is seen
    parts = []
    if pattern.window is not None:
        parts.append(distance < pattern.window)
        if not pattern.causal:
            parts.append(distance > -pattern.window)
    if pattern.cu_seqlens is not None:
        ends = pattern.cu_seqlens[1:].contiguous()
        every = torch.arange(batch * tokens, device=x.device)
        sequence = torch.searchsorted(ends, every, right=True).view(batch, 1, tokens)
        parts.append(sequence[..., None] == sequence[..., None, :])
    if pattern.causal and (parts or mask is not None):
        parts.append(distance >= 0)
    if mask is not None and not mask.is_floating_point():
        parts.append(mask.bool())
        mask = None
    if not parts and mask is None:
        return pattern
    added = torch.zeros((), dtype=dtype, device=x.device) if mask is None else mask.to(dtype)
    for seen in parts:
        added = torch.where(seen, added, float("-inf"))
    return Pattern(added, False)


def end_to_end(
    cu_seqlens: Tensor, batch: int, tokens: int, device: torch.device
) -> tuple[Tensor, int]:
    """Returns where the sequences of all rows end, if each has those of ``cu_seqlens``, and how
    many tokens a sequence has at most."""
    known = _known_ends(cu_seqlens)
    if known is not None:
        ends = {min(end, tokens) for end in known} | {tokens}
        every = sorted({row * tokens + end for row in range(batch) for end in ends} | {0})
        longest = max((end - start for start, end in pairwise(every)), default=0)
        return torch.tensor(every, dtype=torch.int32, device=device), longest
    ends = cu_seqlens[1:].to(device, torch.int32).clamp(max=tokens)
    starts = torch.arange(batch, dtype=torch.int32, device=device) * tokens
    rows = torch.cat((starts[:, None], starts[:, None] + ends), 1)
    return torch.cat((rows.flatten(), rows.new_full((1,), batch * tokens))), tokens

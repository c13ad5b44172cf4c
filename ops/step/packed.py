"""Cuts batches whose sequences are packed into one row, at the ends of sequences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..patching.attention import is_full, sequences_of
from .layout import ENDS, LONGEST, layout_of
from .pytree import map_tensors

__all__ = ["chosen", "ends_of", "resized_row", "spread"]


def ends_of(batch: Any) -> list[int] | None:
    """Returns 0 and the tokens at which the sequences end that a batch of named tensors, or the
    first of a tuple, holds in its one row, ``[1, tokens, ...]``; None for any other batch, and of
    fakes.

    Ends are told by ``cu_seqlens`` or ``cu_seq_lens_q``, or by ``position_ids`` that begin anew. A
    mask that hides tokens from each other, or hides padding, says otherwise; one of ones says
    nothing, as for flash attention and for ours.
    """
    named = _named(batch)
    if named is None or (tokens := layout_of(named).tokens) is None:
        return None
    for name in ENDS:
        if isinstance(ends := named.get(name), Tensor):
            return None if _is_unknown(ends) or ends.dim() != 1 else _within(ends.tolist(), tokens)
    positions, mask = named.get("position_ids"), named.get("attention_mask")
    if not isinstance(positions, Tensor) or _is_unknown(positions):
        return None
    if positions.dim() == 3 and len(positions) == 4:  # those of the text before those of the axes
        positions = positions[0]
    if positions.shape != (1, tokens):
        return None
    if mask is None:
        begins = positions[0].diff() != 1
    elif not isinstance(mask, Tensor) or mask.shape != (1, tokens) or not is_full(mask):
        return None
    elif (sequences := sequences_of(positions)) is None:
        return None
    else:
        begins = sequences[0].diff() != 0
    begin = begins.nonzero().flatten() + 1
    return [0, *begin.tolist(), tokens] if begin.numel() else None


def _named(batch: Any) -> Mapping[str, Any] | None:
    """Returns the named tensors of a batch, which may be the first of a tuple."""
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    return batch if isinstance(batch, Mapping) else None


def _within(ends: list[int], tokens: int) -> list[int] | None:
    """Returns the ends of the sequences that have tokens, as ``headroom.nn`` reads them: what lies
    behind the last one is one more sequence. None if they do not rise from 0."""
    if not ends or ends[0] != 0 or any(end < start for start, end in pairwise(ends)):
        return None
    return sorted({min(end, tokens) for end in ends} | {tokens}) if tokens else None


def _is_unknown(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


def _dims_of_tokens(x: Tensor, tokens: int) -> tuple[int, ...]:
    """Returns the dimensions of a tensor that have an element for each token of a row: of ``[1,
    tokens, ...]``, ``[tokens, ...]``, positions ``[axes, 1, tokens]`` and masks ``[1, 1, 1 or
    tokens, tokens]``."""
    if x.dim() == 4 and x.shape[:2] == (1, 1) and x.shape[3] == tokens != 1:
        return (2, 3) if x.shape[2] == tokens else (3,)
    for dim in (1, 0):
        if x.shape[: dim + 1] == (*[1] * dim, tokens):
            return (dim,)
    return (2,) if x.dim() == 3 and x.shape[1:] == (1, tokens) else ()


def spread(ends: Sequence[int], count: int) -> list[range]:
    """Returns the numbers of the sequences in each of ``count`` parts of about as many tokens."""
    sequences, tokens = len(ends) - 1, ends[-1]
    cuts = [0]
    for k in range(1, count):
        wanted = tokens * k / count
        at = bisect_left(ends, wanted)
        if at and wanted - ends[at - 1] < ends[at] - wanted:
            at -= 1
        cuts.append(min(max(at, cuts[-1] + 1), sequences - (count - k)))
    return [range(*cut) for cut in zip(cuts, [*cuts[1:], sequences])]


def chosen(batch: Any, ends: Sequence[int], numbers: Sequence[int]) -> Any:
    """Returns a batch of some of the sequences, in the order of their numbers: a view of the row
    where these follow one another, else a copy."""
    spans = [
        (ends[run[0]], ends[run[-1] + 1])
        for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
        if (run := [number for _, number in group])
    ]

    def change(x: Tensor) -> Tensor:
        for dim in _dims_of_tokens(x, ends[-1]):
            cut = [x.narrow(dim, start, end - start) for start, end in spans]
            x = cut[0] if len(cut) == 1 else torch.cat(cut, dim=dim)
        return x

    made = map_tensors(batch, change)
    named: Any = _named(made)
    lengths = [ends[number + 1] - ends[number] for number in numbers]
    for name, given in [*named.items()]:
        if name in ENDS and isinstance(given, Tensor):
            named[name] = given.new_tensor([0, *lengths]).cumsum(0, dtype=given.dtype)
        elif name in LONGEST and given is not None:
            most = max(lengths)
            named[name] = torch.full_like(given, most) if isinstance(given, Tensor) else most
        elif name == "seq_idx" and isinstance(given, Tensor):
            index = torch.arange(len(numbers)).repeat_interleave(torch.tensor(lengths))
            named[name] = index.to(given)[None]
    return made


def resized_row(batch: Any, ends: Sequence[int], sequences: int) -> Any:
    """Returns a batch of as many sequences of the mean length, on the meta device."""
    tokens = -(-ends[-1] * sequences // (len(ends) - 1))

    def resize(x: Tensor) -> Tensor:
        shape = list(x.shape)
        for dim in _dims_of_tokens(x, ends[-1]):
            shape[dim] = tokens
        return torch.empty(shape, dtype=x.dtype, device="meta")

    made = map_tensors(batch, resize)
    named: Any = _named(made)
    for name in ENDS:
        if isinstance(given := named.get(name), Tensor):
            named[name] = torch.empty(sequences + 1, dtype=given.dtype, device="meta")
    return made

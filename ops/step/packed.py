"""Cuts batches whose sequences are packed into one row, at the ends of sequences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .trees import mapped, tensors_in

__all__ = ["chosen", "ends_of", "resized_row", "spread"]

# Where batches say at which tokens sequences end, and how long the longest is: in headroom.nn, and
# in transformers and TRL.
ENDS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_length_q", "max_length_k")


def ends_of(batch: Any) -> list[int] | None:
    """Returns 0 and the tokens at which the sequences end that a batch of named tensors, or the
    first of a tuple, holds in its one row, ``[1, tokens, ...]``; None for any other batch, and of
    fakes.

    Ends are told by ``cu_seqlens`` or ``cu_seq_lens_q``, or by ``position_ids`` that begin anew.
    """
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Mapping):
        return ends_of(batch[0])
    if not isinstance(batch, Mapping) or (tokens := _tokens(batch)) is None:
        return None
    for name in ENDS:
        ends = batch.get(name)
        if isinstance(ends, Tensor):
            return None if _is_unknown(ends) or ends.dim() != 1 else ends.tolist()
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or _is_unknown(positions):
        return None
    if positions.shape != (1, tokens):
        return None
    begin = (positions[0].diff() != 1).nonzero().flatten() + 1
    return [0, *begin.tolist(), tokens] if begin.numel() else None


def _tokens(batch: Any) -> int | None:
    """Returns the tokens in the row of a batch that has one row."""
    row = next((x for x in tensors_in(batch) if x.dim() > 1), None)
    return row.shape[1] if row is not None and row.shape[0] == 1 else None


def _is_unknown(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


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
    if not isinstance(batch, Mapping):
        return type(batch)((chosen(batch[0], ends, numbers), *batch[1:]))
    spans = [
        (ends[run[0]], ends[run[-1] + 1])
        for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
        if (run := [number for _, number in group])
    ]
    tokens = ends[-1]

    def change(x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[:2] != (1, tokens):
            return x
        cut = [x[:, start:end] for start, end in spans]
        return cut[0] if len(cut) == 1 else torch.cat(cut, dim=1)

    made = mapped(batch, change)
    lengths = [ends[number + 1] - ends[number] for number in numbers]
    for name in ENDS:
        if isinstance(given := batch.get(name), Tensor):
            made[name] = given.new_tensor([0, *lengths]).cumsum(0, dtype=given.dtype)
    for name in LONGEST:
        if batch.get(name) is not None:
            made[name] = type(batch[name])(max(lengths))
    if isinstance(numbered := batch.get("seq_idx"), Tensor):
        index = torch.arange(len(numbers)).repeat_interleave(torch.tensor(lengths))
        made["seq_idx"] = index.to(numbered)[None]
    return made


def resized_row(batch: Any, ends: Sequence[int], sequences: int) -> Any:
    """Returns a batch of as many sequences of the mean length, on the meta device."""
    if not isinstance(batch, Mapping):
        return type(batch)((resized_row(batch[0], ends, sequences), *batch[1:]))
    tokens = -(-ends[-1] * sequences // (len(ends) - 1))

    def resize(x: Tensor) -> Tensor:
        is_row = x.dim() > 1 and x.shape[:2] == (1, ends[-1])
        shape = (1, tokens, *x.shape[2:]) if is_row else x.shape
        return torch.empty(shape, dtype=x.dtype, device="meta")

    made = mapped(batch, resize)
    for name in ENDS:
        if isinstance(given := batch.get(name), Tensor):
            made[name] = torch.empty(sequences + 1, dtype=given.dtype, device="meta")
    return made

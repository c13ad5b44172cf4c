"""Cuts batches whose sequences are packed into one row, at the ends of sequences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .trees import mapped, tensors_in

__all__ = ["chosen", "ends_of", "resized_row", "spread", "tokens_of"]

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
    named = _named(batch)
    if named is None or (tokens := tokens_of(named)) is None:
        return None
    for name in ENDS:
        if isinstance(ends := named.get(name), Tensor):
            return None if _is_unknown(ends) or ends.dim() != 1 else _within(ends.tolist(), tokens)
    positions = named.get("position_ids")
    # With a mask, transformers does not look at where positions begin.
    if not isinstance(positions, Tensor) or isinstance(named.get("attention_mask"), Tensor):
        return None
    if _is_unknown(positions) or positions.shape != (1, tokens):
        return None
    begin = (positions[0].diff() != 1).nonzero().flatten() + 1
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


def tokens_of(batch: Any) -> int | None:
    """Returns the tokens in the row of a batch that has one row."""
    row = next((x for x in tensors_in(batch) if x.dim() > 1), None)
    return row.shape[1] if row is not None and row.shape[0] == 1 else None


def _is_unknown(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


def _dim_of_tokens(x: Tensor, tokens: int) -> int | None:
    """Returns the dimension of a tensor that has an element for each token of a row, ``[1, tokens,
    ...]`` or ``[tokens, ...]``; None if there is none."""
    return next((dim for dim in (1, 0) if x.shape[: dim + 1] == (*[1] * dim, tokens)), None)


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
        dim = _dim_of_tokens(x, ends[-1])
        if dim is None:
            return x
        cut = [x.narrow(dim, start, end - start) for start, end in spans]
        return cut[0] if len(cut) == 1 else torch.cat(cut, dim=dim)

    made = mapped(batch, change)
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
        if (dim := _dim_of_tokens(x, ends[-1])) is not None:
            shape[dim] = tokens
        return torch.empty(shape, dtype=x.dtype, device="meta")

    made = mapped(batch, resize)
    named: Any = _named(made)
    for name in ENDS:
        if isinstance(given := named.get(name), Tensor):
            named[name] = torch.empty(sequences + 1, dtype=given.dtype, device="meta")
    return made

"""The op ``headroom::attention_segments``: self-attention of sequences that lie end to end.

Modules call it, through :func:`headroom.nn.flash.attend`. It runs torch's FlashAttention of the CPU
on each sequence, so it makes no mask of tokens x tokens and keeps what FlashAttention keeps. As an
op it can be traced, and planned, where nobody knows where sequences end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.registration import (
    FLOATS,
    differentiable,
    refuse_derivative,
    register_flops,
    require,
)
from .linear import SLOW_ON_CPU

_INPUTS = "Tensor q, Tensor k, Tensor v"
_OPTIONS = "Tensor cu_seqlens, bool causal, int window, float? scale"
_library = torch.library.Library("headroom", "FRAGMENT")
# Heads are [tokens, heads, head_dim], and a window of 0 is none. `sums` are the logarithms of the
# sums of exponentials of scores, [tokens, heads].
_library.define(f"attention_segments({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor sums)")
_library.define(
    f"attention_segments_backward(Tensor dout, {_INPUTS}, Tensor out, Tensor sums, {_OPTIONS}) -> "
    "(Tensor dq, Tensor dk, Tensor dv)"
)
Find = Callable[[Tensor, int], Sequence[int]]


class Kernel(NamedTuple):
    """Has functions with the arguments and results of torch's FlashAttention of the CPU."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


ON_CPU = Kernel(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


class Group(NamedTuple):
    """Says where sequences of the same length follow one another: attention takes them at once."""

    start: int
    count: int
    length: int

    def heads(self, x: Tensor) -> Tensor:
        """Returns their part of ``[tokens, ...]`` as ``[count, heads, length, ...]``."""
        rows = x[self.start : self.start + self.count * self.length]
        return rows.unflatten(0, (self.count, self.length)).transpose(1, 2)


class Piece(NamedTuple):
    """Says which keys of a sequence some of its queries see: all or, if ``causal``, those up to
    their own; or with a mask those in a window."""

    queries: slice
    keys: slice
    causal: bool
    mask: Tensor | None


def ends_of(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Returns the numbers of ``cu_seqlens``, which are 0 and where each sequence ends.

    Raises:
        RuntimeError: they do not begin with 0, fall, or end elsewhere than at ``tokens``.
    """
    ends = cu_seqlens.tolist()
    if (
        not ends
        or ends[0] != 0
        or ends[-1] != tokens
        or any(end < start for start, end in pairwise(ends))
    ):
        raise RuntimeError(
            f"cu_seqlens is {ends[:20]}, wanted 0 and then where each sequence ends, in rising "
            f"order up to {tokens}, the number of tokens"
        )
    return ends


def groups_of(ends: Sequence[int]) -> list[Group]:
    """Returns the sequences that are not empty, with those of the same length in one group."""
    groups: list[Group] = []
    for start, end in pairwise(ends):
        if groups and groups[-1].length == end - start:
            groups[-1] = groups[-1]._replace(count=groups[-1].count + 1)
        elif end > start:
            groups.append(Group(start, 1, end - start))
    return groups


def pieces_of(length: int, causal: bool, window: int, like: Tensor) -> list[Piece]:
    """Returns the pieces of attention in a sequence: one, or in a window so many that no mask has
    more than tokens x window elements. Masks are for queries ``like`` these."""
    if not window or window >= length:
        return [Piece(slice(0, length), slice(0, length), causal, None)]
    pieces = []
    start = 0
    if causal:  # the first tokens see all that is before them
        start = window
        pieces.append(Piece(slice(0, start), slice(0, start), True, None))
    masks: dict[tuple[int, int, int], Tensor] = {}  # most pieces have the same
    while start < length:
        stop = min(start + _rows(window), length)
        first, last = max(0, start - window + 1), min(length, stop if causal else stop + window - 1)
        key = stop - start, last - first, start - first
        if key not in masks:
            masks[key] = _band(*key, causal, window, like)
        pieces.append(Piece(slice(start, stop), slice(first, last), False, masks[key]))
        start = stop
    return pieces


def _rows(window: int) -> int:
    """Returns how many queries are taken at once: enough for the kernel, and not so many that they
    see much more than a window."""
    return max(64, min(window, 512))


def _band(rows: int, cols: int, offset: int, causal: bool, window: int, like: Tensor) -> Tensor:
    """Returns what is added to the scores of queries and keys, the first of which are ``offset``
    apart."""
    queries = torch.arange(offset, offset + rows, device=like.device)
    distance = queries[:, None] - torch.arange(cols, device=like.device)
    hidden = (distance >= window) | (distance < 0 if causal else distance <= -window)
    mask = torch.zeros(rows, cols, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, float("-inf"))


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int) -> None:
    require(q.dtype in FLOATS, f"q has dtype {q.dtype}, wanted one of {FLOATS}")
    for name, x in {"k": k, "v": v}.items():
        require(x.dtype == q.dtype, f"{name} has dtype {x.dtype}, but q has {q.dtype}")
    require(
        q.dim() == 3 and k.shape == v.shape and k.dim() == 3 and k.shape[::2] == q.shape[::2],
        f"q is {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]}, wanted [tokens, heads, head_dim] "
        "with the same tokens and head_dim",
    )
    require(
        q.shape[1] % max(k.shape[1], 1) == 0,
        f"q has {q.shape[1]} heads, wanted a multiple of the {k.shape[1]} of k",
    )
    require(
        cu_seqlens.dim() == 1 and cu_seqlens.dtype in (torch.int32, torch.int64),
        f"cu_seqlens is {cu_seqlens.dtype} {[*cu_seqlens.shape]}, wanted integers [sequences + 1]",
    )
    require(window >= 0, f"window is {window}, wanted 0 or more")


def _check_gradient(dout: Tensor, q: Tensor, out: Tensor, sums: Tensor) -> None:
    for name, x in {"dout": dout, "out": out}.items():
        require(
            x.shape == q.shape and x.dtype == q.dtype,
            f"{name} is {x.dtype} {[*x.shape]}, wanted {q.dtype} {[*q.shape]}",
        )
    require(
        sums.shape == q.shape[:-1] and sums.dtype == torch.float32,
        f"sums is {sums.dtype} {[*sums.shape]}, wanted float32 {[*q.shape[:-1]]}",
    )


def forward_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    window: int,
    scale: float | None,
    find: Find = ends_of,
) -> tuple[Tensor, Tensor]:
    """Computes ``headroom::attention_segments``. ``find`` is for plans, which do not know the
    values of ``cu_seqlens``."""
    _check(q, k, v, cu_seqlens, window)
    groups = groups_of(find(cu_seqlens, q.shape[0]))
    return attend_groups(q, k, v, groups, causal, window, scale)


def attend_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Sequence[Group],
    causal: bool,
    window: int,
    scale: float | None,
    kernel: Kernel = ON_CPU,
) -> tuple[Tensor, Tensor]:
    """Returns the results of ``headroom::attention_segments``, one group after the other."""
    out = sums = None
    for group in groups:
        query, key, value = (group.heads(x) for x in (q, k, v))
        pieces = pieces_of(group.length, causal, window, q)
        for piece in pieces:
            results = kernel.forward(
                query[:, :, piece.queries],
                key[:, :, piece.keys],
                value[:, :, piece.keys],
                is_causal=piece.causal,
                attn_mask=piece.mask,
                scale=scale,
            )
            if len(groups) == len(pieces) == 1:  # all there is, which need not be copied
                return tuple(x.transpose(1, 2).flatten(0, 1) for x in results)
            if out is None:
                out, sums = _results(q)
            for x, result in zip((out, sums), results):
                group.heads(x)[:, :, piece.queries] = result
    return _results(q) if out is None else (out, sums)


def backward_of(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    window: int,
    scale: float | None,
    find: Find = ends_of,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes ``headroom::attention_segments_backward``; ``find`` is as in :func:`forward_of`."""
    _check(q, k, v, cu_seqlens, window)
    _check_gradient(dout, q, out, sums)
    groups = groups_of(find(cu_seqlens, q.shape[0]))
    return group_gradients(dout, q, k, v, out, sums, groups, causal, window, scale)


def group_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    groups: Sequence[Group],
    causal: bool,
    window: int,
    scale: float | None,
    kernel: Kernel = ON_CPU,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of :func:`attend_groups`.

    In a dtype that torch has no fast product for, they are computed in float32. So are those of
    keys and values that several pieces see, until they have been added.
    """
    dtype = torch.float32 if q.device.type == "cpu" and q.dtype in SLOW_ON_CPU else q.dtype
    grads = None
    for group in groups:
        rows = [group.heads(x).to(dtype) for x in (dout, q, out)]
        key, value = (group.heads(x).to(dtype) for x in (k, v))
        logs = group.heads(sums)
        pieces = pieces_of(group.length, causal, window, rows[0])
        added = None
        if len(pieces) > 1:
            added = [torch.zeros_like(x, dtype=sums.dtype) for x in (key, value)]
        for piece in pieces:
            grad, query, result = (x[:, :, piece.queries] for x in rows)
            found = kernel.backward(
                *(grad, query, key[:, :, piece.keys], value[:, :, piece.keys], result),
                *(logs[:, :, piece.queries], 0.0, piece.causal),
                attn_mask=piece.mask,
                scale=scale,
            )
            if len(groups) == len(pieces) == 1:
                return tuple(x.transpose(1, 2).flatten(0, 1).to(q.dtype) for x in found)
            if grads is None:
                grads = _gradients(q, k, v)
            group.heads(grads[0])[:, :, piece.queries] = found[0]
            for x, more in zip(added or (), found[1:]):
                x[:, :, piece.keys] += more
        for x, total in zip(grads[1:], added or found[1:]):
            group.heads(x).copy_(total)
    return _gradients(q, k, v) if grads is None else grads


_library.impl("attention_segments", forward_of, "CPU")
_library.impl("attention_segments_backward", backward_of, "CPU")


def sums_dtype(q: Tensor) -> torch.dtype:
    """Returns the dtype of the logarithms of sums."""
    return torch.promote_types(q.dtype, torch.float32)


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=sums_dtype(q))


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, given, results):
    tensors = (given["q"], given["k"], given["v"], results["out"], results["sums"])
    ctx.save_for_backward(*tensors, given["cu_seqlens"])
    ctx.options = given["causal"], given["window"], given["scale"]
    ctx.set_materialize_grads(False)


def _backward(ctx, grads, needs):
    if grads["out"] is None:
        return {}
    dout = grads["out"].contiguous()
    dq, dk, dv = torch.ops.headroom.attention_segments_backward(
        dout, *ctx.saved_tensors, *ctx.options
    )
    return {"q": dq, "k": dk, "v": dv}


def _product(q, cu_seqlens, causal, window, **_) -> int:
    """Returns the work of a product of queries and keys as if all sequences were equally long,
    which is the least it can be: shapes do not say more. What comes later than a query and is not
    seen counts too, as in torch's counts."""
    tokens, heads, size = q
    seen = tokens // max(cu_seqlens[0] - 1, 1)
    if window:
        seen = min(seen, window if causal else 2 * window - 1)
    return 2 * tokens * heads * size * seen


def _fake(q, k, v, cu_seqlens, window, **_):
    _check(q, k, v, cu_seqlens, window)
    return _results(q)


def _fake_backward(dout, q, k, v, out, sums, cu_seqlens, window, **_):
    _check(q, k, v, cu_seqlens, window)
    _check_gradient(dout, q, out, sums)
    return _gradients(q, k, v)


differentiable(
    "attention_segments",
    fake=_fake,
    save=_save,
    backward=_backward,
    flops=lambda **given: 2 * _product(**given),
)
refuse_derivative("attention_segments_backward", fake=_fake_backward)
register_flops("attention_segments_backward", lambda **given: 5 * _product(**given), again=_product)

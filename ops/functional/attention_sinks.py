"""The op ``headroom::attention_sinks``: attention in which a learned number of each head takes part
of the softmax.

Torch's fused kernels know no sinks, but what they return and take is enough. The forward pass gives
the logarithm of the sum of exponentials of each row; with the sink in that sum, results get smaller
by a factor. The backward pass computes probabilities anew from that logarithm, and subtracts the
products of results and their gradients: with those of attention with sinks it gives the gradients
of that. So nothing else is kept than by attention without sinks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.checks import check_count, check_flags
from .._core.registration import (
    FLOATS,
    differentiable,
    refuse_derivative,
    register_flops,
    require,
)
from .._core.rows import autocast_dtype, cast, check_tensors
from .._core.surroundings import constant_in_graphs
from .attention_segments import (
    ON_CPU,
    Find,
    Group,
    Kernel,
    attend_groups,
    ends_of,
    group_gradients,
    groups_of,
    sums_dtype,
)

_HEADS = "Tensor q, Tensor k, Tensor v, Tensor sinks"
_OPTIONS = "Tensor? cu_seqlens, int longest, bool causal, int window, float? scale"
_library = torch.library.Library("headroom", "FRAGMENT")
# Heads are [tokens, heads, head_dim], and a window of 0 is none. `sums` are the logarithms of the
# sums of exponentials of scores and the sink, [heads, tokens].
_library.define(f"attention_sinks({_HEADS}, {_OPTIONS}) -> (Tensor out, Tensor sums)")
_library.define(
    f"attention_sinks_backward(Tensor dout, {_HEADS}, Tensor out, Tensor sums, {_OPTIONS}, "
    "bool want_dsinks) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)
_aten = torch.ops.aten


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    longest: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Returns attention in which each head has a sink: a score that no token has, by which the
    probabilities of tokens sum to less than one (gpt-oss).

    Row i of a head is the sum over j of ``p[i, j] * v[j]`` with ``p[i, j] = exp(s[i, j]) / (sum_k
    exp(s[i, k]) + exp(sink))`` and ``s = q @ k.T * scale``. No probabilities are kept, and none of
    tokens x tokens are made: kept are q, k, v, the result, and 4 bytes for each row of a head.

    Args:
        q: float32, bfloat16 or float16, and on the CPU float64, ``[batch, heads, tokens,
            head_dim]``.
        k, v: the same, of as many heads or of a divisor of them.
        sinks: ``[heads]``, of any of these dtypes. Its gradient is summed in float32, or in float64
            if q is.
        causal: a token sees itself and those before it.
        window: a token sees that many tokens, itself among them, or, if not ``causal``, those less
            than that far away.
        cu_seqlens: int ``[sequences + 1]``, 0 and where each sequence ends in a batch whose rows
            lie end to end; or None if each row is a sequence. Sequences do not see each other.
        longest: no sequence has more tokens; by default as many as the batch.
        scale: of the scores; by default ``head_dim ** -0.5``.

    Under autocast q, k and v are cast to its dtype.

    Returns:
        A tensor like ``q``, whose memory is that of ``[batch, tokens, heads, head_dim]``. A second
        derivative raises.

    Raises:
        TypeError: an argument that must be a tensor, a bool or an integer is none.
        ValueError: ``window`` or ``longest`` is less than 1.
        RuntimeError: shapes, dtypes or devices do not fit; ``cu_seqlens`` does not begin with 0,
            falls, or ends elsewhere than at the number of tokens, where somebody looks; or torch
            has no kernel for such heads on this GPU.

    Torch's kernels compute it. On the CPU they are FlashAttention; on a GPU FlashAttention in 16
    bits, for heads of up to 256, on compute capability 8.0 or newer unless
    :func:`torch.nn.attention.sdpa_kernel` rules it out, and nobody looks at ``cu_seqlens``;
    otherwise the memory-efficient kernel, sequence by sequence, which reads ``cu_seqlens``.
    """
    check_tensors(q=q, k=k, v=v, sinks=sinks)
    check_flags(causal=causal)
    for name, count in {"window": window, "longest": longest}.items():
        if count is not None:
            check_count(name, count, 1)
    if (dtype := autocast_dtype(q.device.type)) is not None:
        q, k, v = cast(dtype, q, k, v)
    for name, x in {"q": q, "k": k, "v": v}.items():
        require(x.dim() == 4, f"{name} is {[*x.shape]}, wanted [batch, heads, tokens, head_dim]")
    batch, tokens = q.shape[0], q.shape[2]
    require(
        k.shape[0] == v.shape[0] == batch and k.shape[2] == v.shape[2] == tokens,
        f"q is {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]}, wanted the same batch and tokens",
    )
    if cu_seqlens is None:
        longest = tokens
    else:
        cu_seqlens = cu_seqlens.to(q.device)
        longest = min(longest or batch * tokens, batch * tokens)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    given = q, k, v, sinks, cu_seqlens, longest, causal, window or 0, scale
    out = torch.ops.headroom.attention_sinks(*given)[0]
    return out.unflatten(0, (batch, tokens)).transpose(1, 2)


# ---- Kernels ---------------------------------------------------------------------------------


@constant_in_graphs
def allows_flash(device: torch.device) -> bool:
    """Returns whether a device has FlashAttention, and :func:`torch.nn.attention.sdpa_kernel` does
    not rule it out."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def is_flash(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Returns whether FlashAttention of a GPU computes heads of this size there."""
    small = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and small and size % 8 == 0 < size <= 256 and allows_flash(device)


def is_fused(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Returns whether torch has a kernel of any kind for heads of this size."""
    if device.type != "cuda" or is_flash(device, dtype, size):
        return True
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return size % (4 if dtype == torch.float32 else 8) == 0


def _is_flash(q: Tensor) -> bool:
    return is_flash(q.device, q.dtype, q.shape[-1])


def _for_heads(query: Tensor, *rows: Tensor) -> list[Tensor]:
    """Returns keys or values once for each head of the query."""
    heads = query.shape[1]
    return [x.repeat_interleave(heads // x.shape[1], 1) for x in rows]


def _aligned(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Returns a mask ``[rows, cols]`` for each head, in rows that begin at multiples of 16."""
    if mask is None:
        return None
    cols = mask.shape[-1]
    return F.pad(mask, (0, -cols % 16))[:, :cols].expand(*query.shape[:2], -1, -1)


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    key, value = _for_heads(query, key, value)
    mask = _aligned(attn_mask, query)
    out, sums, *_ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, 0.0, is_causal, scale=scale
    )
    return out, sums[..., : query.shape[2]]


def _efficient_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    dropout: float,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, ...]:
    heads = key.shape[1]
    key, value = _for_heads(query, key, value)
    sums = F.pad(sums, (0, -sums.shape[-1] % 32), value=float("inf"))  # as the kernel has them
    unused = torch.zeros((), dtype=torch.int64, device=query.device)  # of dropout
    dq, *shared, _ = _aten._scaled_dot_product_efficient_attention_backward(
        *(dout, query, key, value, _aligned(attn_mask, query), out, sums, unused, unused),
        *(dropout, [True, True, True, False], is_causal),
        scale=scale,
    )
    if heads != query.shape[1]:
        shared = [x.unflatten(1, (heads, -1)).sum(2) for x in shared]
    return dq, *shared


_EFFICIENT = Kernel(_efficient, _efficient_backward)


def _sequences(
    q: Tensor, cu_seqlens: Tensor | None, longest: int, find: Find
) -> tuple[list[Group], Kernel]:
    tokens = q.shape[0]
    if cu_seqlens is None:
        groups = [Group(0, tokens // longest, longest)] if tokens else []
    else:
        groups = groups_of(find(cu_seqlens, tokens))
    return groups, _EFFICIENT if q.device.type == "cuda" else ON_CPU


def _flash_options(
    q: Tensor, cu_seqlens: Tensor | None, longest: int, causal: bool, window: int
) -> tuple[list[Any], dict[str, Any]]:
    """Returns arguments of FlashAttention of a GPU: ends, the longest, dropout and whether it is
    causal; and the window."""
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, q.shape[0] + 1, longest, device=q.device)
    ends = cu_seqlens.to(torch.int32)
    sides: dict[str, Any] = {}
    if window and window < longest:
        sides = {"window_size_left": window - 1, "window_size_right": 0 if causal else window - 1}
    return [ends, ends, longest, longest, 0.0, causal and not sides], sides


# ---- The op ----------------------------------------------------------------------------------


def forward_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    cu_seqlens: Tensor | None,
    longest: int,
    causal: bool,
    window: int,
    scale: float | None,
    find: Find = ends_of,
) -> tuple[Tensor, Tensor]:
    """Computes ``headroom::attention_sinks``. ``find`` is for plans, which do not know the values
    of ``cu_seqlens``."""
    _check(q, k, v, sinks, cu_seqlens, longest, window)
    if not q.numel():
        return _results(q)
    if _is_flash(q):
        given, sides = _flash_options(q, cu_seqlens, longest, causal, window)
        out, sums, *_ = _aten._flash_attention_forward(q, k, v, *given, False, scale=scale, **sides)
    else:
        groups, kernel = _sequences(q, cu_seqlens, longest, find)
        out, sums = attend_groups(q, k, v, groups, causal, window, scale, kernel)
        sums = sums.t().contiguous()
    sink = sinks.to(sums.dtype)[:, None]
    factor = torch.sigmoid(sums - sink).t()[..., None]
    if q.dtype == sums.dtype or q.device.type == "cuda":
        out.mul_(factor)
    else:  # where torch would convert in place, a plan shall see it
        out.copy_(out.to(sums.dtype).mul_(factor))
    return out, torch.logaddexp(sums, sink)


def backward_of(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor | None,
    longest: int,
    causal: bool,
    window: int,
    scale: float | None,
    want_dsinks: bool,
    find: Find = ends_of,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes ``headroom::attention_sinks_backward``; ``find`` is as in :func:`forward_of`."""
    _check(q, k, v, sinks, cu_seqlens, longest, window)
    _check_gradient(dout, q, out, sums)
    dsinks = sinks.new_zeros(sinks.shape if want_dsinks else 0)
    if not q.numel():
        return *(torch.empty_like(x) for x in (q, k, v)), dsinks
    if want_dsinks:
        products = dout.to(sums.dtype, copy=True).mul_(out.to(sums.dtype)).sum(-1)
        taken = torch.exp(sinks.to(sums.dtype)[:, None] - sums)  # the probability of the sink
        dsinks = taken.mul_(products.t()).sum(-1).neg_().to(sinks.dtype)
    if _is_flash(q):
        given, sides = _flash_options(q, cu_seqlens, longest, causal, window)
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout
        found = _aten._flash_attention_backward(
            *(dout, q, k, v, out, sums, *given, unused, unused.new_empty(0)), scale=scale, **sides
        )
    else:
        groups, kernel = _sequences(q, cu_seqlens, longest, find)
        rows = sums.t()
        found = group_gradients(dout, q, k, v, out, rows, groups, causal, window, scale, kernel)
    return *found, dsinks


for _device in ("CPU", "CUDA"):
    _library.impl("attention_sinks", forward_of, _device)
    _library.impl("attention_sinks_backward", backward_of, _device)


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads = q.shape[:2]
    return q.new_empty(q.shape), q.new_empty((heads, tokens), dtype=sums_dtype(q))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    cu_seqlens: Tensor | None,
    longest: int,
    window: int,
) -> None:
    floats = FLOATS if q.device.type == "cuda" else (*FLOATS, torch.float64)
    require(q.dtype in floats, f"q has dtype {q.dtype}, wanted one of {floats}")
    for name, x in {"k": k, "v": v}.items():
        require(x.dtype == q.dtype, f"{name} has dtype {x.dtype}, but q has {q.dtype}")
    require(
        q.dim() == 3 and k.shape == v.shape and k.dim() == 3 and k.shape[::2] == q.shape[::2],
        f"q is {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]}, wanted [tokens, heads, head_dim] "
        "with the same tokens and head_dim",
    )
    tokens, heads, size = q.shape
    require(
        heads % max(k.shape[1], 1) == 0,
        f"q has {heads} heads, wanted a multiple of the {k.shape[1]} of k",
    )
    require(
        sinks.shape == (heads,) and sinks.dtype in (*FLOATS, torch.float64),
        f"sinks is {sinks.dtype} {[*sinks.shape]}, wanted floating-point numbers [{heads}], one "
        "for each head of q",
    )
    if cu_seqlens is None:
        require(
            tokens % max(longest, 1) == 0 and (longest > 0 or tokens == 0),
            f"longest is {longest}, wanted a divisor of {tokens}, the tokens of all rows",
        )
    else:
        require(
            cu_seqlens.dim() == 1 and cu_seqlens.dtype in (torch.int32, torch.int64),
            f"cu_seqlens is {cu_seqlens.dtype} {[*cu_seqlens.shape]}, wanted integers "
            "[sequences + 1]",
        )
    require(window >= 0, f"window is {window}, wanted 0 or more")
    require(
        is_fused(q.device, q.dtype, size),
        f"q has heads of {size} in {q.dtype}, for which torch has no fused kernel on this GPU: "
        "wanted a multiple of 4 in float32, of 8 in 16 bits, and bfloat16 from compute capability "
        "8.0 on",
    )


def _check_gradient(dout: Tensor, q: Tensor, out: Tensor, sums: Tensor) -> None:
    for name, x in {"dout": dout, "out": out}.items():
        require(
            x.shape == q.shape and x.dtype == q.dtype,
            f"{name} is {x.dtype} {[*x.shape]}, wanted {q.dtype} {[*q.shape]}",
        )
    wanted = [q.shape[1], q.shape[0]]
    require(
        [*sums.shape] == wanted and sums.dtype == sums_dtype(q),
        f"sums is {sums.dtype} {[*sums.shape]}, wanted {sums_dtype(q)} {wanted}",
    )


def _save(ctx, given, results):
    names = ("q", "k", "v", "sinks")
    saved = (*(given[name] for name in names), results["out"], results["sums"])
    ctx.save_for_backward(*saved, given["cu_seqlens"])
    ctx.options = tuple(given[name] for name in ("longest", "causal", "window", "scale"))
    ctx.set_materialize_grads(False)


def _backward(ctx, grads, needs):
    if grads["out"] is None:
        return {}
    found = torch.ops.headroom.attention_sinks_backward(
        grads["out"].contiguous(), *ctx.saved_tensors, *ctx.options, needs["sinks"]
    )
    return dict(zip(("q", "k", "v", "sinks"), found))


def _product(q, longest, causal, window, **_) -> int:
    """Returns the work of a product of queries and keys, as if all sequences were as long as the
    longest. What comes later than a query and is not seen counts too, as in torch's counts."""
    tokens, heads, size = q
    seen = longest
    if window:
        seen = min(seen, window if causal else 2 * window - 1)
    return 2 * tokens * heads * size * seen


def _fake(q, k, v, sinks, cu_seqlens, longest, window, **_):
    _check(q, k, v, sinks, cu_seqlens, longest, window)
    return _results(q)


def _fake_backward(dout, q, k, v, sinks, out, sums, cu_seqlens, longest, window, want_dsinks, **_):
    _check(q, k, v, sinks, cu_seqlens, longest, window)
    _check_gradient(dout, q, out, sums)
    dsinks = sinks.new_empty(sinks.shape if want_dsinks else 0)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsinks


differentiable(
    "attention_sinks",
    fake=_fake,
    save=_save,
    backward=_backward,
    flops=lambda **given: 2 * _product(**given),
)
refuse_derivative("attention_sinks_backward", fake=_fake_backward)
register_flops("attention_sinks_backward", lambda **given: 5 * _product(**given), again=_product)

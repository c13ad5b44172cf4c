"""Attention on the CPU with the arguments and results of torch's three fused kernels for CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _draws

_INF = float("inf")


def _scores(q: Tensor, k: Tensor, bias, causal, scale, window) -> tuple[Tensor, float]:
    """Returns the scores [B, H, L, S] in f32, masked, and the factor of the queries.

    ``causal`` is None, "top" (query i sees keys up to i) or "bottom" (the last query sees all).
    """
    factor = q.size(-1) ** -0.5 if scale is None else scale
    s = torch.matmul(q.float() * factor, k.float().transpose(-1, -2))
    if bias is not None:
        s = s + bias.float()
    rows, columns = s.shape[-2:]
    shift = columns - rows if causal == "bottom" or window is not None else 0
    distance = torch.arange(columns) - torch.arange(rows)[:, None] - shift
    if causal is not None:
        s = s.masked_fill(distance > 0, -_INF)
    if window is not None:
        left, right = window
        outside = (distance < -left if left >= 0 else False) | (
            distance > right if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
        )
        s = s.masked_fill(outside, -_INF)
    return s, factor


def _kept(a: Tensor, p: float, state) -> Tensor | None:
    """Returns what dropout multiplies the weights by, or None."""
    if not p:
        return None
    return torch.empty_like(a).bernoulli_(1 - p, generator=_draws.generator(state)).div_(1 - p)


def _repeated(t: Tensor, heads: int) -> Tensor:
    return t if t.size(1) == heads else t.repeat_interleave(heads // t.size(1), 1)


def _summed(t: Tensor, like: Tensor) -> Tensor:
    """Returns the sums over the query heads that share one of the keys and values."""
    return t if t.size(1) == like.size(1) else t.unflatten(1, (like.size(1), -1)).sum(2)


def _forward(q, k, v, p=0.0, bias=None, causal=None, scale=None, window=None, state=None):
    """Returns the output and the logarithms of the sums of [B, H, L, D]."""
    s, _ = _scores(q, _repeated(k, q.size(1)), bias, causal, scale, window)
    a = torch.softmax(s, -1).nan_to_num(0.0)  # 0 where nothing is seen
    kept = _kept(a, p, state)
    sums = torch.logsumexp(s, -1)
    out = torch.matmul(a if kept is None else a * kept, _repeated(v, q.size(1)).float())
    return out, sums.masked_fill(sums == -_INF, _INF)


def _backward(
    grad, q, k, v, out, sums, p=0.0, bias=None, causal=None, scale=None, window=None, state=None
):
    """Returns the gradients of queries, keys, values and scores. Like the kernels it takes what is
    left of the scores from the sums, and what all gradients of a row's weights have in common from
    the output: these may be those of another attention, with the same scores."""
    heads = q.size(1)
    s, factor = _scores(q, _repeated(k, heads), bias, causal, scale, window)
    a = torch.exp(s - sums.float().unsqueeze(-1))
    kept = _kept(a, p, state)
    g = grad.float()
    common = (g * out.float()).sum(-1, keepdim=True)
    dv = torch.matmul((a if kept is None else a * kept).transpose(-1, -2), g)
    da = torch.matmul(g, _repeated(v, heads).float().transpose(-1, -2))
    if kept is not None:
        da = da * kept
    ds = a * (da - common)
    dq = torch.matmul(ds, _repeated(k, heads).float()) * factor
    dk = torch.matmul(ds.transpose(-1, -2), q.float()) * factor
    return dq, _summed(dk, k), _summed(dv, v), ds


def _by_sequence(q, k, v, cu_q, cu_k):
    """Yields each packed sequence as [1, H, L, D], and where its queries and keys lie."""
    for i in range(len(cu_q) - 1):
        of_q = slice(int(cu_q[i]), int(cu_q[i + 1]))
        of_k = slice(int(cu_k[i]), int(cu_k[i + 1]))
        yield tuple(t.transpose(0, 1)[None] for t in (q[of_q], k[of_k], v[of_k])), of_q, of_k


def _tensors_of(state, packed: bool) -> tuple:
    """Returns a generator's state as the tensors that the backward pass is given."""
    if state is None:
        return None, None
    numbers = [n - (1 << 64) if n >> 63 else n for n in state]
    seed, offset = torch.tensor(numbers[0]), torch.tensor(numbers[1])
    return (torch.stack([seed, offset]), None) if packed else (seed, offset)


def _state_from(seed: Tensor, offset: Tensor, p: float):
    """Returns what :func:`_tensors_of` was given."""
    if not p:
        return None
    numbers = seed.tolist() if seed.numel() == 2 else [seed.item(), offset.item()]
    return tuple(n & ((1 << 64) - 1) for n in numbers)


# ---- torch's operations: flash ------------------------------------------------------------------


def sdp_flash(query, key, value, dropout_p=0.0, is_causal=False, debug=False, *, scale=None, state):
    """Computes _scaled_dot_product_flash_attention."""
    causal = "bottom" if is_causal else None
    out, sums = _forward(query, key, value, dropout_p, None, causal, scale, None, state)
    return out, sums, None, None, None, None, *_tensors_of(state, True), None


def sdp_flash_backward(
    grad, q, k, v, out, sums, cu_q, cu_k, max_q, max_k, p, causal, seed, offset, *, scale=None
):
    """Computes _scaled_dot_product_flash_attention_backward."""
    state = _state_from(seed, offset, p)
    causal = "bottom" if causal else None
    return _backward(grad, q, k, v, out, sums, p, None, causal, scale, None, state)[:3]


def _window(left: int | None, right: int | None):
    left, right = -1 if left is None else left, -1 if right is None else right
    return None if left < 0 and right < 0 else (left, right)


def flash(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, debug,
    *, scale=None, window_size_left=None, window_size_right=None, state=None, **others,
):  # fmt: skip
    """Computes _flash_attention_forward: of [B, L, H, D], or of packed sequences [T, H, D]."""
    for name in ("seqused_k", "alibi_slopes", "block_table"):
        if others.get(name) is not None:
            raise NotImplementedError(f"{name} is not supported")
    rules = (None, "bottom" if is_causal else None, scale)
    rules += (_window(window_size_left, window_size_right), state)
    if cum_seq_q is None:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out, sums = _forward(q, k, v, dropout_p, *rules)
        return out.transpose(1, 2), sums, *_tensors_of(state, True), None
    out = torch.zeros(*query.shape[:-1], value.size(-1))
    sums = torch.full((query.size(1), query.size(0)), _INF)
    for (q, k, v), of_q, _ in _by_sequence(query, key, value, cum_seq_q, cum_seq_k):
        o, s = _forward(q, k, v, dropout_p, *rules)
        out[of_q], sums[:, of_q] = o[0].transpose(0, 1), s[0]
    return out, sums, *_tensors_of(state, True), None


def flash_inplace(out, *args, **kwargs):
    """Computes _flash_attention_forward_no_dropout_inplace."""
    result, sums, *_ = flash(*args, **kwargs)
    out.copy_(result)
    return sums


def flash_backward(
    grad, query, key, value, out, sums, cum_seq_q, cum_seq_k, max_q, max_k, p, causal, seed, offset,
    *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """Computes _flash_attention_backward."""
    rules = (None, "bottom" if causal else None, scale)
    rules += (_window(window_size_left, window_size_right), _state_from(seed, offset, p))
    if cum_seq_q is None:
        turned = (t.transpose(1, 2) for t in (grad, query, key, value, out))
        return tuple(t.transpose(1, 2) for t in _backward(*turned, sums, p, *rules)[:3])
    found = tuple(torch.zeros(t.shape) for t in (query, key, value))
    for qkv, of_q, of_k in _by_sequence(query, key, value, cum_seq_q, cum_seq_k):
        g, o = (t[of_q].transpose(0, 1)[None] for t in (grad, out))
        parts = _backward(g, *qkv, o, sums[None, :, of_q], p, *rules)[:3]
        for to, at, part in zip(found, (of_q, of_k, of_k), parts, strict=True):
            to[at] = part[0].transpose(0, 1)
    return found


# ---- Memory-efficient ---------------------------------------------------------------------------


def _padded(sums: Tensor, wanted: bool) -> Tensor:
    """Returns the sums [B, H, L] as the kernel stores them: rows are multiples of 32."""
    if not wanted:
        return sums.new_empty(*sums.shape[:2], 0)
    return torch.nn.functional.pad(sums, (0, -sums.size(2) % 32), value=_INF)


def sdp_efficient(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
    *, scale=None, state,
):  # fmt: skip
    """Computes _scaled_dot_product_efficient_attention."""
    causal = "top" if is_causal else None
    out, sums = _forward(query, key, value, dropout_p, attn_bias, causal, scale, None, state)
    return out, _padded(sums, compute_log_sumexp), *_tensors_of(state, False)


def sdp_efficient_backward(
    grad, q, k, v, bias, out, sums, seed, offset, p, mask, is_causal=False, *, scale=None
):
    """Computes _scaled_dot_product_efficient_attention_backward."""
    state = _state_from(seed, offset, p)
    causal = "top" if is_causal else None
    sums = sums[..., : q.size(2)]
    dq, dk, dv, ds = _backward(grad, q, k, v, out, sums, p, bias, causal, scale, None, state)
    return dq, dk, dv, ds.sum_to_size(bias.shape) if mask[3] and bias is not None else None


_MASKS = (None, "top", "bottom")


def efficient(
    query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    custom_mask_type, compute_log_sumexp=False,
    *, scale=None, seqlen_k=None, window_size=None, state,
):  # fmt: skip
    """Computes _efficient_attention_forward: [B, L, H, D], or packed [1, T, H, D]."""
    if seqlen_k is not None or window_size is not None:
        raise NotImplementedError("seqlen_k and window_size are not supported")
    rules = (bias, _MASKS[custom_mask_type], scale, None, state)
    if cu_seqlens_q is None:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out, sums = _forward(q, k, v, dropout_p, *rules)
        out = out.transpose(1, 2)
    else:
        out = torch.zeros(*query.shape[:-1], value.size(-1))
        sums = torch.full((len(cu_seqlens_q) - 1, query.size(2), max_seqlen_q), _INF)
        sequences = _by_sequence(query[0], key[0], value[0], cu_seqlens_q, cu_seqlens_k)
        for i, ((q, k, v), of_q, _) in enumerate(sequences):
            o, s = _forward(q, k, v, dropout_p, *rules)
            out[0, of_q], sums[i, :, : s.size(2)] = o[0].transpose(0, 1), s[0]
    sums = _padded(sums, compute_log_sumexp)
    return out, sums, *_tensors_of(state, False), None, None


def efficient_backward(
    grad, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_q, max_k, sums, p, seed,
    offset, mask_type, bias_requires_grad, *, scale=None, window_size=None, **_,
):  # fmt: skip
    """Computes _efficient_attention_backward."""
    if window_size is not None:
        raise NotImplementedError("window_size is not supported")
    rules = (bias, _MASKS[mask_type], scale, None, _state_from(seed, offset, p))
    if cu_seqlens_q is None:
        turned = (t.transpose(1, 2) for t in (grad, query, key, value, out))
        *found, ds = _backward(*turned, sums[..., : query.size(1)], p, *rules)
        found = [t.transpose(1, 2) for t in found]
        return *found, ds.sum_to_size(bias.shape) if bias_requires_grad else None
    found = [torch.zeros(t.shape) for t in (query, key, value)]
    sequences = _by_sequence(query[0], key[0], value[0], cu_seqlens_q, cu_seqlens_k)
    for i, (qkv, of_q, of_k) in enumerate(sequences):
        g, o = (t[0, of_q].transpose(0, 1)[None] for t in (grad, out))
        parts = _backward(g, *qkv, o, sums[i : i + 1, :, : g.size(2)], p, *rules)[:3]
        for to, at, part in zip(found, (of_q, of_k, of_k), parts, strict=True):
            to[0, at] = part[0].transpose(0, 1)
    return *found, None


# ---- cuDNN, which is not there: these results are not made by its CUDA code ---------------------


def _like(values: Tensor, t: Tensor) -> Tensor:
    """Returns the values with the dtype and the order of dimensions of ``t``."""
    order = sorted(range(t.dim()), key=lambda d: -t.stride(d))
    made = torch.empty([values.size(d) for d in order], dtype=t.dtype)
    return made.permute([order.index(d) for d in range(t.dim())]).copy_(values)


def sdp_cudnn(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, debug=False,
    *, scale=None, state,
):  # fmt: skip
    """Computes _scaled_dot_product_cudnn_attention."""
    causal = "top" if is_causal else None
    out, sums = _forward(query, key, value, dropout_p, attn_bias, causal, scale, None, state)
    seed, offset = _tensors_of(state or (0, 0), False)
    sums = sums.unsqueeze(-1) if compute_log_sumexp else None
    sizes = query.size(2), key.size(2)
    return _like(out, query), sums, None, None, *sizes, seed, offset, None


def sdp_cudnn_backward(
    grad, q, k, v, out, sums, seed, offset, bias, cu_q, cu_k, max_q, max_k, p, causal, *, scale=None
):
    """Computes _scaled_dot_product_cudnn_attention_backward."""
    state = _state_from(seed, offset, p)
    causal = "top" if causal else None
    sums = sums.squeeze(-1)
    found = _backward(grad, q, k, v, out, sums, p, bias, causal, scale, None, state)
    return tuple(_like(g, t) for g, t in zip(found, (q, k, v), strict=False))


def cudnn(
    query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp,
    dropout_p=0.0, is_causal=False, debug=False,
    *, scale=None, state, **others,
):  # fmt: skip
    """Computes _cudnn_attention_forward, of as many keys as queries where it is causal."""
    if attn_bias is not None:
        raise NotImplementedError("attn_bias is not supported")
    packed = (query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    rules = (dropout_p, is_causal, debug)
    out, sums, *_ = flash(*packed, *rules, scale=scale, state=state, **others)
    seed, offset = _tensors_of(state or (0, 0), False)
    return _like(out, query), sums, None, None, max_q, max_k, seed, offset, None


def cudnn_backward(
    grad, q, k, v, out, sums, seed, offset, bias, cu_q, cu_k, max_q, max_k, p, causal, *, scale=None
):
    """Computes _cudnn_attention_backward."""
    rules = (cu_q, cu_k, max_q, max_k, p, causal, seed, offset)
    found = flash_backward(grad, q, k, v, out, sums, *rules, scale=scale)
    return tuple(_like(g, t) for g, t in zip(found, (q, k, v), strict=True))


def _workspace(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest) -> int:
    """Returns the bytes that cuDNN takes for gradients: that of the queries and a sum of each row
    in f32 (cudnn-frontend, scaled_dot_product_flash_attention.h), and those of keys and values for
    each head of the queries. What its engines take besides is not known."""
    shared = [t for t in (k, v) if t.size(1) != q.size(1)]
    heads = sum(t.numel() // t.size(1) * q.size(1) * t.itemsize for t in shared)
    return 4 * (q.numel() + q.numel() // q.size(-1)) + heads


for _kernel in (sdp_cudnn, sdp_cudnn_backward, cudnn, cudnn_backward):
    _kernel.absent_library = True
sdp_cudnn_backward.workspace = _workspace

ATTENTION = {
    "_scaled_dot_product_flash_attention": sdp_flash,
    "_scaled_dot_product_flash_attention_backward": sdp_flash_backward,
    "_scaled_dot_product_efficient_attention": sdp_efficient,
    "_scaled_dot_product_efficient_attention_backward": sdp_efficient_backward,
    "_scaled_dot_product_cudnn_attention": sdp_cudnn,
    "_scaled_dot_product_cudnn_attention_backward": sdp_cudnn_backward,
    "_cudnn_attention_forward": cudnn,
    "_cudnn_attention_backward": cudnn_backward,
    "_flash_attention_forward": flash,
    "_flash_attention_forward_no_dropout_inplace": flash_inplace,
    "_flash_attention_backward": flash_backward,
    "_efficient_attention_forward": efficient,
    "_efficient_attention_backward": efficient_backward,
}

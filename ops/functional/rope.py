"""Rotary embeddings with gradients, ``headroom::rope``, and the tables of their angles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_count, check_flags
from .._core.registration import FLOATS, differentiable, require
from .._core.rows import check_tensors, promoted


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    offset: int = 0,
    rotary_dim: int | None = None,
    token_major: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns queries and keys rotated by the angles of their positions, in one pass over memory.

    Computes in float32 and rounds once, whatever the dtype. Gives gradients of q and k, of any
    order, and keeps nothing but the tables and position_ids for them.

    Args:
        q: float32, bfloat16 or float16 ``[batch, heads, tokens, head_dim]``, or without a batch.
            Strides are free: transposed views and slices of a packed product are read in place.
        k: like ``q``, with its own number of heads; or None.
        cos, sin: in any of these dtypes, ``[positions, rotary_dim / 2]`` as :func:`rope_tables`
            gives them, or ``[batch or 1, tokens, rotary_dim]`` as the models of transformers hand
            them to their layers. Of tables with ``rotary_dim`` columns, whose halves are alike, the
            first half is read; where each column comes twice in a row instead, pass
            ``cos[..., ::2]``.
        interleaved: whether pairs are neighbors, as in GPT-J, and not halves, as in Llama.
        position_ids: int64 ``[batch, tokens]``, ``[1, tokens]`` or ``[tokens]``: rows of tables.
        offset: the position of the first token, if there are no ``position_ids``.
        rotary_dim: how many elements of a head are rotated; the rest is passed on. By default, all
            columns of tables per token, and of tables per position twice the columns, if a head has
            as many elements, or else the columns.
        token_major: whether ``q`` and ``k`` are ``[batch, tokens, heads, head_dim]``.

    Returns:
        Tensors like ``q`` and ``k`` in the same memory order; a single one if ``k`` is None.

    Raises:
        RuntimeError: an argument does not fit; on the CPU also if a position has no row. On CUDA
            the rotated elements of such a token are NaN.

    The formula and its source are documented at ``hr_rope`` in ``headroom.h``.
    """
    check_tensors(q=q, cos=cos, sin=sin)
    check_flags(interleaved=interleaved, token_major=token_major)
    check_count("offset", offset)
    if rotary_dim is None:
        columns = cos.shape[-1] if cos.dim() > 0 else 0
        per_position = cos.dim() == 2 and 2 * columns <= q.shape[-1]
        rotary_dim = 2 * columns if per_position else columns
    if k is not None:
        q, k = promoted(q, k)
    q_out, k_out = torch.ops.headroom.rope(
        q, k, cos, sin, position_ids, offset, rotary_dim, interleaved, token_major, False
    )
    return q_out if k is None else (q_out, k_out)


def _check(q, k, cos, sin, position_ids, offset, rotary_dim, token_major) -> None:
    order = (
        "[batch, tokens, heads, head_dim]" if token_major else "[batch, heads, tokens, head_dim]"
    )
    tokens_dim = -3 if token_major else -2
    for name, x in {"q": q, "k": k}.items():
        if x is None:
            continue
        require(
            x.dim() in (3, 4),
            f"{name} has shape {list(x.shape)}, wanted {order}, or the same without a batch",
        )
        require(x.dtype in FLOATS, f"{name} has dtype {x.dtype}, wanted one of {FLOATS}")
    batch, tokens = q.shape[0] if q.dim() == 4 else 1, q.shape[tokens_dim]
    if k is not None:
        require(k.dtype == q.dtype, f"k has dtype {k.dtype}, but q has {q.dtype}")
        heads = k.dim() - 5 - tokens_dim
        like = list(k.shape)
        if k.dim() == q.dim():
            like[heads] = q.shape[heads]
        require(
            like == list(q.shape),
            f"k has shape {list(k.shape)}, which differs from that of q, {list(q.shape)}, in more "
            "than the heads",
        )
    require(cos.dtype in FLOATS, f"cos has dtype {cos.dtype}, wanted one of {FLOATS}")
    require(
        sin.shape == cos.shape and sin.dtype == cos.dtype,
        "sin has another shape or dtype than cos",
    )
    require(
        cos.dim() == 2
        or (cos.dim() == 3 and cos.shape[0] in (1, batch) and cos.shape[1] == tokens),
        f"cos has shape {list(cos.shape)}, wanted [positions, columns], or [batch or 1, tokens, "
        f"columns] with {batch} batches of {tokens} tokens",
    )
    rotated = rotary_dim or q.shape[-1]
    require(
        cos.shape[-1] == rotated or 2 * cos.shape[-1] == rotated,
        f"cos has {cos.shape[-1]} columns, wanted rotary_dim ({rotated}) or half of it",
    )
    if position_ids is not None:
        require(
            position_ids.dtype == torch.int64
            and position_ids.dim() in (1, 2)
            and position_ids.shape[-1] == tokens
            and (position_ids.dim() == 1 or position_ids.shape[0] in (1, batch)),
            f"position_ids is {position_ids.dtype} {list(position_ids.shape)}, wanted int64 "
            f"[tokens], [1, tokens] or [batch, tokens] with {batch} batches of {tokens} tokens",
        )


def _empty(x: Tensor) -> Tensor:
    """Returns a tensor in the memory order of ``x``, as far as elements of a head are neighbors."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return x.new_empty(x.shape)
    like = torch.empty_like(x)
    return like if x.shape[-1] <= 1 or like.stride(-1) == 1 else x.new_empty(x.shape)


def _fake(q, k, cos, sin, position_ids, offset, rotary_dim, token_major, **_):
    _check(q, k, cos, sin, position_ids, offset, rotary_dim, token_major)
    return _empty(q), q.new_empty(0) if k is None else _empty(k)


_NUMBERS = ("offset", "rotary_dim", "interleaved", "token_major")


def _save(ctx: Any, given: dict[str, Any], results: dict[str, Tensor]) -> None:
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        raise RuntimeError(
            "headroom::rope has no derivative with respect to cos and sin, but one of them "
            "requires grad; detach it"
        )
    ctx.save_for_backward(given["cos"], given["sin"], given["position_ids"])
    ctx.numbers = {name: given[name] for name in _NUMBERS} | {"inverse": not given["inverse"]}
    ctx.set_materialize_grads(False)
    if given["k"] is None:
        ctx.mark_non_differentiable(results["k_out"])


def _backward(
    ctx: Any, grads: dict[str, Tensor | None], needs: dict[str, bool]
) -> dict[str, Tensor | None]:
    tables = ctx.saved_tensors
    wanted = {n: g for n, g in zip("qk", grads.values()) if g is not None and needs[n]}
    if not wanted:
        return {}
    first, second = (*wanted.values(), None)[:2]
    return dict(zip(wanted, torch.ops.headroom.rope(first, second, *tables, **ctx.numbers)))


differentiable("rope", fake=_fake, save=_save, backward=_backward)


# ---- Tables ------------------------------------------------------------------------------------

# What a scaling dict must and may have, by its rope_type.
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL = {
    "dynamic": ("original_max_position_embeddings",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
    ),
    "llama3": ("original_max_position_embeddings",),
}
_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rope_tables(
    head_dim: int,
    positions: int,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    *,
    rotary_dim: int | None = None,
    max_position_embeddings: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of positions 0, 1, ... for :func:`rope`, each
    ``[positions, rotary_dim / 2]``.

    The angle of pair i at position p is ``p * f[i]`` with ``f[i] = base ** (-2 * i / rotary_dim)``
    (Su et al., arXiv:2104.09864), changed by ``scaling``. Everything is computed in float64 and
    rounded once, so that far positions are as exact as near ones.

    Args:
        head_dim: elements of a head.
        positions: rows of the tables.
        base: of the frequencies, ``rope_theta`` in models.
        scaling: None, or a dict with the keys of transformers' ``rope_scaling`` or
            ``rope_parameters``, whose ``rope_theta`` and ``partial_rotary_factor`` take the place
            of ``base`` and ``rotary_dim``. ``rope_type`` (or ``type``) is one of

            - "default": no scaling;
            - "linear": positions are divided by ``factor``;
            - "dynamic": the base grows where ``positions`` is more than the model was trained with
              (NTK-aware scaling, arXiv:2309.00071 section 3.1 and appendix A);
            - "yarn": low frequencies are divided by ``factor``, high ones stay, and the tables are
              multiplied by ``attention_factor``, which follows from ``factor``, or from ``mscale``
              and ``mscale_all_dim``, where it is not given (arXiv:2309.00071);
            - "llama3": the same with the bounds of Llama 3.1, ``low_freq_factor`` and
              ``high_freq_factor`` (arXiv:2407.21783, and Meta's reference code).
        rotary_dim: elements that are rotated, even; by default ``head_dim``.
        max_position_embeddings: positions that the model was trained with, where ``scaling`` does
            not say ``original_max_position_embeddings``.
        dtype: of the tables.
        device: where they go. They are computed on the CPU.

    Raises:
        ValueError: an argument is out of range, or ``scaling`` has a key that its type does not
            know, or lacks one.
    """
    scaling = dict(scaling or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    _check_scaling(kind, scaling)
    base = float(scaling.get("rope_theta", base))
    if rotary_dim is None or "partial_rotary_factor" in scaling:
        rotary_dim = int(head_dim * scaling.get("partial_rotary_factor", 1.0))
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(
            f"rotary_dim is {rotary_dim}, wanted an even number from 2 to head_dim ({head_dim})"
        )
    if positions < 0:
        raise ValueError(f"positions is {positions}, wanted 0 or more")
    if not 1 < base < math.inf:
        raise ValueError(f"base is {base}, wanted a finite number above 1")
    trained = scaling.get("original_max_position_embeddings") or max_position_embeddings
    if kind in _OPTIONAL and not trained:
        raise ValueError(
            f"scaling of type {kind!r} needs original_max_position_embeddings, or the argument "
            "max_position_embeddings"
        )
    factor = scaling.get("factor")
    if factor is None and kind == "yarn":
        factor = (max_position_embeddings or trained) / trained
    if factor is not None and not factor >= 1:
        raise ValueError(f"scaling has factor {factor!r}, wanted a number of 1 or more")
    if kind == "dynamic" and positions > trained and rotary_dim > 2:
        stretch = factor * positions / trained - (factor - 1)
        base *= stretch ** (rotary_dim / (rotary_dim - 2))
    frequencies = base ** (
        -torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim
    )
    size = 1.0
    if kind == "linear":
        frequencies /= factor
    elif kind == "yarn":
        frequencies = _yarn(frequencies, base, factor, trained, scaling)
        size = _attention_factor(factor, scaling)
    elif kind == "llama3":
        frequencies = _llama3(frequencies, factor, trained, scaling)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64, device="cpu"), frequencies)
    return tuple((f(angles) * size).to(dtype=dtype).to(device) for f in (torch.cos, torch.sin))


def _check_scaling(kind: str, scaling: Mapping[str, Any]) -> None:
    if kind not in _REQUIRED:
        raise ValueError(f"scaling has type {kind!r}, wanted one of {', '.join(_REQUIRED)}")
    missing = [key for key in _REQUIRED[kind] if scaling.get(key) is None]
    if missing:
        raise ValueError(f"scaling of type {kind!r} lacks {', '.join(missing)}")
    known = {*_ALWAYS, *_REQUIRED[kind], *_OPTIONAL.get(kind, ())}
    if unknown := sorted(set(scaling) - known):
        raise ValueError(f"scaling of type {kind!r} has no key {', '.join(unknown)}")


def _yarn(
    frequencies: Tensor, base: float, factor: float, trained: int, scaling: Mapping[str, Any]
) -> Tensor:
    """Returns slower frequencies: pairs that turn more than ``beta_fast`` times within the trained
    length keep theirs, those that turn less than ``beta_slow`` times are slowed down, and between
    them, counted in pairs, one passes evenly into the other."""
    pairs = frequencies.numel()

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(trained / (2 * math.pi * times)) / math.log(base)

    first = pair_that_turns(scaling.get("beta_fast") or 32)
    last = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first if last != first else 1e-3
    slowed = ((torch.arange(pairs, dtype=torch.float64, device="cpu") - first) / width).clamp(0, 1)
    return frequencies * (1 - slowed) + frequencies / factor * slowed


def _attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    growth = 0.1 * math.log(factor)
    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:
        return (numerator * growth + 1) / (denominator * growth + 1)
    return growth + 1


def _llama3(frequencies: Tensor, factor: float, trained: int, scaling: Mapping[str, Any]) -> Tensor:
    """Slows frequencies as YaRN does, but evenly in the turns within the trained length."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if not high > low:
        raise ValueError(
            f"scaling has high_freq_factor {high}, wanted more than {low}, its low one"
        )
    turns = trained * frequencies / (2 * math.pi)
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * unscaled + frequencies / factor * (1 - unscaled)

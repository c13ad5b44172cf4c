"""Halves of layers of transformers as steps of a block."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._core.recompute import inside_checkpoint
from ..functional.glu import glu
from ..functional.rope import rope
from ..nn.flash import attend, repeat_heads, takes_groups
from ..nn.functional import mlp_block
from ..nn.fused import can_fuse, is_untouched, weights_of
from ..nn.steps import AttentionSteps, BlockSteps, MLPSteps, Run, SaveLevel
from .attention import pattern_of, varlen_attention
from .norms import NormRule, norm_forward

ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu_squared",
}


def _any(layer: Any) -> bool:
    return True


class Family(NamedTuple):
    """Describes an architecture.

    Attributes:
        module: where its classes are defined.
        layer: the name of the class of a layer.
        steps: returns the steps of a layer, given it and the call.
        halves: the names of the modules in a layer whose ``forward`` is not called.
        rotates: whether the layer is given the tables of a rotation.
        supports: whether a layer has nothing that ``steps`` does not know.
    """

    module: str
    layer: str
    steps: Callable[[Any, Call], BlockSteps]
    halves: tuple[str, ...]
    rotates: bool = True
    supports: Callable[[Any], bool] = _any


class Dial(NamedTuple):
    """Holds what patch() sets on a layer.

    Attributes:
        family: its architecture.
        arguments: the names of those of its class's ``forward``, in their order, which releases of
            transformers change.
        level: what is kept, and where.
        glu, rope: whether activations and rotations are ops of Headroom.
        has_own_halves: whether nobody had set another ``forward`` on the classes of the halves.
    """

    family: Family
    arguments: tuple[str, ...]
    level: SaveLevel
    glu: bool = True
    rope: bool = True
    has_own_halves: bool = True


class Call(NamedTuple):
    """Holds what a model gives to a layer in one call.

    Attributes:
        dial: of the layer.
        x: its input.
        mask: for the attention function.
        cache: of keys and values, or None.
        options: what else the attention function is given.
    """

    dial: Dial
    x: Tensor
    mask: Any
    cache: Any
    options: dict[str, Any]


def _activation(module: nn.Module) -> str | None:
    """Returns what :func:`headroom.functional.glu` calls the activation, or None."""
    name = ACTIVATIONS.get(type(module).__name__)
    return name if is_untouched(module) else None


def _heads(
    attention: Any, dim: int, widths: list[int] | None, rotate: Callable[..., Any], *rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, ``[batch, heads, tokens, dim]``, given the results of the Linears, of
    which ``widths`` is what a packed one holds, and the tables of the rotation."""
    if widths is None:
        q, k, v, *tables = rows
    else:
        packed, *tables = rows
        q, k, v = packed.split(widths, dim=-1)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in (q, k, v))
    if (norm := getattr(attention, "q_norm", None)) is not None:
        q, k = norm(q), attention.k_norm(k)
    if tables:
        q, k = rotate(q, k, *tables)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


_rope = functools.partial(rope, token_major=True)


def _rotation(dial: Dial) -> Callable[..., Any]:
    if dial.rope or not dial.family.rotates:
        return _rope
    rotate = sys.modules[dial.family.module].apply_rotary_pos_emb
    return functools.partial(rotate, unsqueeze_dim=2)


class _Repeated:
    """Takes the place of an attention module whose keys and values were repeated already."""

    num_key_value_groups = 1

    def __init__(self, is_causal: bool) -> None:
        self.is_causal = is_causal


def _added(dtype: torch.dtype, seen: Tensor) -> Tensor:
    """Returns a mask as scaled_dot_product_attention makes it for itself, and keeps it."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _attend(
    attention: Any,
    call: Call,
    dropout: float,
    options: dict[str, Any],
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    from transformers.integrations import sdpa_attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mask = call.mask
    if call.cache is not None:
        k, v = call.cache.update(k, v, attention.layer_idx)
    eager = sys.modules[call.dial.family.module].eager_attention_forward
    function = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager)
    module = attention
    dropout = dropout if attention.training else 0.0
    options = options | call.options
    if function is varlen_attention:
        pattern = pattern_of(attention, q, mask, options)
        if pattern is not None:
            scale = attention.scaling
            rows = attend(q, k, v, pattern, dropout=dropout, scale=scale, run=run)
            return rows.transpose(1, 2).flatten(-2)
        function = sdpa_attention.sdpa_attention_forward
    cached = call.cache is not None or call.options.get("cache") is not None
    if function is sdpa_attention.sdpa_attention_forward and not cached:
        # What it would compute from k, v and the mask, and keep, is dropped.
        groups = getattr(attention, "num_key_value_groups", 1)
        fits = sdpa_attention.use_gqa_in_sdpa(mask, k, v) and takes_groups(q, mask)
        if groups > 1 and not fits:
            k, v = run(functools.partial(repeat_heads, groups), k, v)
            module = _Repeated(attention.is_causal)
        if mask is not None and mask.dtype == torch.bool:
            mask = run(functools.partial(_added, q.dtype), mask)
    rows, _ = function(
        module,
        *(q, k, v, mask),
        dropout=dropout,
        scaling=attention.scaling,
        **options,
    )
    return rows.reshape(*rows.shape[:-2], -1).contiguous()


def attention_steps(
    attention: Any,
    call: Call,
    linears: tuple[nn.Module, ...],
    out: nn.Module,
    *,
    dim: int,
    dropout: float,
    widths: list[int] | None = None,
    **options: Any,
) -> AttentionSteps:
    """Returns the steps of an attention module of transformers.

    Args:
        attention: the module, which the attention function is given.
        call: what the model gives to the layer.
        linears: of q, k and v, or one of all three.
        out: the Linear behind attention.
        dim: the size of a head.
        dropout: of the probabilities.
        widths: of q, k and v, if they are the result of one Linear.
        **options: what the module gives to the attention function beside that.
    """
    return AttentionSteps(
        linears,
        functools.partial(_heads, attention, dim, widths, _rotation(call.dial)),
        (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)),
        functools.partial(_attend, attention, call, dropout, options),
        None,
        out,
        draws=attention.training and dropout > 0,
    )


def mlp_steps(
    mlp: Any,
    norm: Any,
    call: Call,
    linears: tuple[nn.Module, ...],
    act: nn.Module,
    down: nn.Module,
    *,
    packed: bool = False,
) -> MLPSteps:
    """Returns the steps of an MLP of transformers.

    Args:
        mlp: the module, or None if it is none of its own.
        norm: in front of it, where ``x + mlp(norm(x))`` may be one op; or None.
        call: what the model gives to the layer.
        linears: gate and up, or what is one Linear of both, or the one in front of the activation.
        act: the activation.
        down: the Linear behind it.
        packed: whether the Linear is gate and up in one.
    """
    name = _activation(act) if call.dial.glu else None
    if name is None:
        activate = functools.partial(_activated, act, packed)
        return MLPSteps(linears, activate, down, random=not is_untouched(act))
    if packed:
        activate = functools.partial(glu, activation=name, packed=True)
    else:
        activate = functools.partial(_glu, name)
    fused = None
    rule = None if norm is None or _in_checkpoint() else _rule(norm)
    if rule is not None and can_fuse(call.x, (*linears, down), (norm, mlp)):
        fused = functools.partial(_fused, norm, rule, linears, down, name)
    return MLPSteps(linears, activate, down, fused=fused)


def _glu(name: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    return glu(gate, up, name)


def _activated(act: nn.Module, packed: bool, gate: Tensor, up: Tensor | None = None) -> Tensor:
    if packed:
        gate, up = gate.chunk(2, dim=-1)
    return act(gate) if up is None else act(gate) * up


def _in_checkpoint() -> bool:
    """Returns whether a checkpoint will run the layer again, up to the last tensor that is saved:
    before the last product, unless that is within the op that saves it."""
    return not torch.compiler.is_compiling() and inside_checkpoint()


def _rule(norm: nn.Module) -> NormRule | None:
    """Returns what a norm computes, if it was swapped and its weights are like the input."""
    forward: Any = vars(norm).get("forward")
    return forward.args[1] if getattr(forward, "func", None) is norm_forward else None


def _fused(
    norm: Any,
    rule: NormRule,
    linears: tuple[Any, ...],
    down: Any,
    name: str,
    x: Tensor,
    save: str,
) -> Tensor:
    matrices, options = weights_of(x, *linears, down)
    return mlp_block(
        x,
        norm.weight,
        *matrices,
        **options,
        norm_bias=None if rule.kind == "RMSNorm" else norm.bias,
        norm="rms" if rule.kind == "RMSNorm" else "layer",
        eps=getattr(norm, rule.eps) if isinstance(rule.eps, str) else rule.eps,
        offset=rule.offset,
        casting=rule.casting,
        activation=name,
        save=save,
    )

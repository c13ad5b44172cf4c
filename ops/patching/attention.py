"""An attention for models of transformers that makes no mask of tokens x tokens for sequences that
are packed into rows, and none for windows.

Transformers asks one function for the mask of all layers, and another for the attention of each.
Where nothing but the ends of sequences and a window hides tokens, the first returns a
:class:`headroom.nn.Pattern`, which models hand on to the second. In all other cases both are those
of ``sdpa``, and for attention with sinks, which ``sdpa`` does not know, those of ``eager``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.rows import autocast_dtype
from .._core.surroundings import takes_ops
from ..functional.attention_sinks import is_fused, sink_attention
from ..nn.flash import attend
from ..nn.pattern import Pattern, end_to_end, masked

NAME = "headroom_varlen"
_MASKS = "transformers.masking_utils"


def register_attention() -> str:
    """Registers the attention with transformers, and returns its name, ``"headroom_varlen"``.

        model.set_attn_implementation(register_attention())

    It is transformers' ``sdpa`` for batches in which each row is one sequence, with or without
    padding. Sequences that are packed into rows, by position_ids that begin anew as those of
    ``DataCollatorWithFlattening`` and of TRL's packing do, or by ``cu_seq_lens_q``, do not see each
    other, and take no mask; with padding besides they take one. :func:`headroom.patch` gives it to
    those models that it knows.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, varlen_mask)
    return NAME


# ---- The mask --------------------------------------------------------------------------------


def varlen_mask(**given: Any) -> Pattern | Tensor | None:
    """Returns the mask of a batch; the arguments are those of transformers' ``sdpa_mask``."""
    from transformers.masking_utils import sdpa_mask
    from transformers.utils.import_utils import is_tracing

    if is_tracing():
        return sdpa_mask(**given)
    given |= _by_positions(_asked(), **given)
    pattern = _pattern(**given)
    return sdpa_mask(**given) if pattern is None else pattern


def _asked() -> dict[str, Any]:
    """Returns the variables of the function of transformers that asks for a mask: it has the
    positions, and hands them on only where it looks at them itself."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _MASKS:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _by_positions(
    asked: dict[str, Any],
    mask_function: Callable[..., Any],
    q_length: int,
    kv_length: int,
    batch_size: int,
    q_offset: Any = 0,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> dict[str, Any]:
    """Returns arguments of ``sdpa_mask`` by which the sequences of a row do not see each other, if
    positions begin anew where transformers does not look at them: beside a mask of tokens, most
    often of ones, or beside a cache, which is empty."""
    from transformers.masking_utils import (
        and_masks,
        packed_sequence_mask_function,
        remap_positions_for_packed_sequence,
    )

    positions = asked.get("position_ids")
    cache = asked.get("cache", asked.get("past_key_values"))
    if not isinstance(positions, Tensor) or (attention_mask is None and cache is None):
        return {}
    rows = (batch_size, q_length)
    if q_length != kv_length or not isinstance(q_offset, int) or q_offset:
        return {}
    if positions.shape not in ((1, q_length), rows):
        return {}
    if attention_mask is not None and attention_mask.shape != rows:
        return {}
    positions = positions.expand(batch_size, -1)
    sequences = sequences_of(positions, attention_mask)
    if sequences is None:
        return {}
    if not use_vmap and asked.get("block_sequence_ids") is None:  # these go by places in the row
        mask_function = remap_positions_for_packed_sequence(mask_function, positions)
    told = packed_sequence_mask_function(sequences)
    return {"mask_function": and_masks(mask_function, told), "allow_is_causal_skip": False}


def sequences_of(positions: Tensor, attention_mask: Tensor | None = None) -> Tensor | None:
    """Returns the number of the sequence of each token, or None if no row holds several. A sequence
    begins where the position is the least of its row, as for transformers' flash attention.

    Args:
        positions: ``[rows, tokens]``.
        attention_mask: not 0 where a token is no padding, whose position says nothing.
    """
    if positions.is_meta or not positions.numel():
        return None
    if type(positions) is not Tensor:  # a plan knows whether there are several
        return torch.zeros_like(positions)
    seen = torch.ones_like(positions) if attention_mask is None else attention_mask
    seen = seen.to(positions.device, torch.bool)
    least = positions.where(seen, positions.amax()).amin(-1, keepdim=True)
    begins = (positions == least) & seen & (seen.cumsum(-1) > 1)
    return begins.cumsum(-1) if begins.any() else None


def _pattern(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **_: Any,
) -> Pattern | None:
    """Returns which tokens see which, or None if ``sdpa_mask`` shall say it."""
    if use_vmap or q_length != kv_length:
        return None
    if not all(isinstance(offset, int) and offset == 0 for offset in (q_offset, kv_offset)):
        return None
    if attention_mask is not None and not is_full(attention_mask):
        return None
    rule = _rule(mask_function)
    if rule is None or (rule.before is not None and not rule.causal):
        return None
    widths = [width for width in (rule.before, rule.around) if width is not None]
    window = min(widths, default=q_length)
    if rule.sequences is None:
        may_skip = allow_is_causal_skip if rule.causal else allow_is_bidirectional_skip
        return Pattern(None, rule.causal, window) if may_skip and window < q_length else None
    cu_seqlens, longest = _ends(rule.sequences.expand(batch_size, -1))
    return Pattern(None, rule.causal, window if window < longest else None, cu_seqlens, longest)


def is_full(attention_mask: Tensor) -> bool:
    """Returns whether a mask of tokens hides none. A plan, whose fakes have no values, says so."""
    return (
        type(attention_mask) is Tensor and not attention_mask.is_meta and bool(attention_mask.all())
    )


def _ends(sequences: Tensor) -> tuple[Tensor, int]:
    """Returns where sequences end in rows that lie end to end, and how long the longest is, given
    the number of the sequence of each token."""
    tokens = sequences.numel()
    if type(sequences) is not Tensor:  # nobody knows: at worst it is one
        return torch.tensor([0, tokens], dtype=torch.int32, device=sequences.device), tokens
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat((starts, starts.new_full((1,), tokens)))
    return ends.int(), int(ends.diff().max())


class _Rule(NamedTuple):
    """Says what a mask function of transformers hides.

    Attributes:
        causal: tokens that come later.
        before: tokens that many places before, and further.
        around: tokens that many places away, and further.
        sequences: ``[rows, tokens]``, tokens with another number.
    """

    causal: bool = False
    before: int | None = None
    around: int | None = None
    sequences: Tensor | None = None


def _rule(function: Callable[..., Any]) -> _Rule | None:
    """Returns what a mask function hides, or None for one that it does not know: the function that
    made it has a name, and what that was given is in the cells of the closure."""
    if getattr(function, "__module__", None) != _MASKS:
        return None
    cells = getattr(function, "__closure__", None) or ()
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells)))
    maker = function.__qualname__.partition(".")[0]
    try:
        return _MAKERS[maker](held)
    except KeyError:
        return None


def _all(held: dict[str, Any]) -> _Rule | None:
    found = _Rule()
    for rule in map(_rule, held["mask_functions"]):
        if rule is None:
            return None
        for name, value in rule._asdict().items():
            if value is None or value is False:
                continue
            if getattr(found, name) not in (None, False):
                return None  # two of a kind
            found = found._replace(**{name: value})
    return found


# Positions in a sequence are as far apart as the places, so a rule holds of both.
_MAKERS: dict[str, Callable[[dict[str, Any]], _Rule | None]] = {
    "and_masks": _all,
    "causal_mask_function": lambda held: _Rule(causal=True),
    "bidirectional_mask_function": lambda held: _Rule(),
    "sliding_window_overlay": lambda held: _Rule(before=held["sliding_window"]),
    "sliding_window_bidirectional_overlay": lambda held: _Rule(around=held["sliding_window"] + 1),
    "packed_sequence_mask_function": lambda held: _Rule(sequences=held["packed_sequence_mask"]),
    "remap_positions_for_packed_sequence": lambda held: _rule(held["mask_function"]),
}


# ---- The attention ---------------------------------------------------------------------------


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Pattern | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns attention ``[batch, tokens, heads, head_dim]``, and, where transformers' own code
    computes it with sinks, the probabilities; the arguments are those of transformers' attention
    functions."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if options.get("s_aux") is not None and hasattr(module, "sinks"):
        return _with_sinks(module, query, key, value, attention_mask, dropout, scaling, options)
    pattern = pattern_of(module, query, attention_mask, options)
    if pattern is not None and options.get("position_bias") is None:
        out = attend(query, key, value, pattern, dropout=dropout, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    mask = attention_mask
    if pattern is not None:
        mask = masked(pattern, query.transpose(1, 2)).mask
    return sdpa_attention_forward(
        *(module, query, key, value, mask), dropout=dropout, scaling=scaling, **options
    )


def pattern_of(module: Any, query: Tensor, mask: Any, options: dict[str, Any]) -> Pattern | None:
    """Returns which tokens see which, or None if a mask says it or all rows are one sequence.

    Args:
        module: of the attention.
        query: ``[batch, heads, tokens, head_dim]``.
        mask: what :func:`varlen_mask` returned.
        options: what else the attention function is given.

    Raises:
        ValueError: an option changes scores, as neither ``sdpa`` nor this attention can.
    """
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(
                f"attention {NAME!r} has no {name}, which {type(module).__name__} uses; take "
                "attn_implementation='eager'"
            )
    given = options.get("cu_seq_lens_q")
    pattern = mask if isinstance(mask, Pattern) else None
    if (
        given is None
        or isinstance(mask, Tensor)
        or getattr(pattern, "cu_seqlens", None) is not None
    ):
        return pattern
    if pattern is None:
        pattern = Pattern(None, _is_causal(module, options))
    tokens = query.shape[0] * query.shape[-2]
    cu_seqlens, longest = end_to_end(given, 1, tokens, query.device)
    longest = min(longest, options.get("max_length_q") or longest)
    return pattern._replace(cu_seqlens=cu_seqlens, longest=longest)


# ---- With sinks ------------------------------------------------------------------------------


def _with_sinks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Pattern | Tensor | None,
    dropout: float,
    scaling: float | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Returns attention with the sinks of a module: by :func:`headroom.functional.sink_attention`,
    or by the function that is beside the class in transformers, where there is a mask, a cache that
    holds tokens, dropout, or somebody who collects attentions."""
    if isinstance(mask, Tensor) and options.get("cu_seq_lens_q") is not None:
        raise ValueError(
            f"{type(module).__name__} has sinks, and was given cu_seq_lens_q and an attention_mask "
            "with padding; wanted one of them: a row of packed sequences has no padding"
        )
    pattern = pattern_of(module, query, mask, options | {"s_aux": None})
    if pattern is None and mask is None and query.shape[-2] == key.shape[-2]:
        pattern = Pattern(None, _is_causal(module, options))
    if pattern is not None and not dropout and _takes_sinks(query, key, value):
        out = sink_attention(
            *(query, key, value, options["s_aux"]),
            **{name: x for name, x in pattern._asdict().items() if name != "mask"},
            scale=scaling,
        )
        return out.transpose(1, 2), None
    if pattern is not None:
        if pattern.causal and pattern.window is None:  # which alone would make no mask
            pattern = pattern._replace(window=query.shape[-2])
        mask = masked(pattern, query.transpose(1, 2)).mask
    elif isinstance(mask, Tensor) and mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min  # as in transformers' mask of "eager"
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, hidden)
    beside = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    own = next(filter(None, (getattr(each, "eager_attention_forward", None) for each in beside)))
    return own(module, query, key, value, mask, dropout=dropout, scaling=scaling, **options)


def _is_causal(module: Any, options: dict[str, Any]) -> bool:
    given = options.get("is_causal")
    return getattr(module, "is_causal", True) if given is None else given


def _takes_sinks(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Returns whether :func:`headroom.functional.sink_attention` takes heads, and nobody asks for
    their probabilities."""
    lowered = autocast_dtype(query.device.type)
    return (
        all(takes_ops(x, (4,)) for x in (query, key, value))
        and (lowered is not None or query.dtype == key.dtype == value.dtype)
        and query.shape[-2:] == key.shape[-2:] == value.shape[-2:]
        and is_fused(query.device, lowered or query.dtype, query.shape[-1])
        and not collects_attentions()
    )


def collects_attentions() -> bool:
    """Returns whether transformers collects the probabilities of a call of a model."""
    from transformers.utils import output_capturing

    collected = output_capturing._active_collector.get()
    return any(key.endswith("attentions") for key in collected or ())


if _MASKS in sys.modules:  # a model that was patched in another process is loaded
    register_attention()

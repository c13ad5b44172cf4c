"""A transformer block that decides how much of it is kept for the backward pass."""

from __future__ import annotations

import functools

from torch import Tensor, nn

from .._core.checks import check_choice
from .attention import Attention, Rotation
from .config import check_probabilities
from .fused import fused_mlp, is_fusible
from .mlp import MLP
from .pattern import Pattern
from .steps import AttentionSteps, BlockSteps, MLPSteps, Run, run_steps, save_level

LAYOUTS = ("pre", "post", "sandwich", "parallel")


def norm_names(layout: str) -> list[str]:
    """Returns the names of the norms that a block of a layout has."""
    names = ["attention_norm"]
    names += [] if layout == "parallel" else ["mlp_norm"]
    return names + (["attention_post_norm", "mlp_post_norm"] if layout == "sandwich" else [])


class Block(nn.Module):
    """A transformer block with a dial: how much of it is kept for the backward pass.

    Gradients have the same bits at every exact level, which all of these are: what was dropped is
    computed again by the same operations. A Block calls the modules in its halves, and not the
    halves, whose own hooks do not run. Per token, with h = hidden size, a = heads * head_dim, k =
    kv_heads * head_dim, f = features, g = 2 with a gate and 1 without, in elements, and for layout
    "pre":

    ======  =================================================================================
    level   kept
    ======  =================================================================================
    "L0"    everything that torch's autograd keeps
    "L1"    2 h + 2 a + 2 k + g f: the inputs of both halves; q, k and v in front of the rotation;
            the result of attention; gate and up. No product is computed again.
    "L2"    2 h + 2 a + 2 k: gate and up are computed again
    "L3"    2 h + a: q, k and v too
    "L4"    h + a: the input of the MLP too, by the product behind attention
    "L5"    h: attention too, so that only the input of the block is kept
    ======  =================================================================================

    With "@host" behind it, as in "L2@host", what the level keeps is held in the host arena
    (:class:`headroom.HostArena`) between the forward and the backward pass: tensors of 64 KiB and
    more, each once, and no parameters or inputs that the model shares. torch.compile traces no
    such level but "L5@host", which is then "L5".

    "L5:8bit" keeps the input as codes of 8 bits with a scale per 64 elements, 17/16 h bytes, so
    that gradients are those of the rounded input: see :func:`headroom.checkpoint`. torch.compile
    does not trace it, and it has no second derivatives. "L5:8bit@host" copies the codes.

    All but L0 and L5 also keep what attention keeps beside q, k, v and its result: 4 bytes per head
    with FlashAttention. With layout "post" or "sandwich", L1 to L4 keep the inputs of the two norms
    behind the halves (h each), which are computed again from L4 and from L5 on. With "parallel",
    L4 is L3. Dropout keeps nothing from L1 on.

    Within a checkpoint, which drops everything anyway, and where torch does not allow hooks on
    saved tensors, a block runs as at L0. While torch.compile traces it, which decides by itself
    what is kept, L5 is :func:`torch.utils.checkpoint.checkpoint`, and the other levels hold in the
    MLP alone.

    The MLP of layout "pre" is :func:`headroom.nn.functional.mlp_block`, unless it has dropout, its
    modules have been replaced or have hooks, or autocast is on; LoRA adapters are taken with them.
    It also keeps 4 bytes per token, or 8 with a LayerNorm.

    Args:
        attention, mlp: the halves.
        norms: ``attention_norm`` and ``mlp_norm`` are in front of the halves, or behind the sums of
            layout "post"; ``attention_post_norm`` and ``mlp_post_norm`` are behind the halves, in
            front of the sums, with layout "sandwich". Layout "parallel" has no ``mlp_norm``.
        layout: "pre": ``x = x + half(norm(x))`` twice; "post": ``x = norm(x + half(x))``;
            "sandwich": ``x = x + post_norm(half(norm(x)))``; "parallel": ``x + attention(norm(x)) +
            mlp(norm(x))``.
        dropout: behind each half.
        save: the level; it may be changed at any time by assigning to ``save``.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: MLP,
        norms: dict[str, nn.Module],
        *,
        layout: str = "pre",
        dropout: float = 0.0,
        save: str = "L0",
    ) -> None:
        super().__init__()
        check_choice("layout", layout, LAYOUTS)
        wanted = norm_names(layout)
        if sorted(norms) != sorted(wanted):
            raise ValueError(
                f"Block: norms are {', '.join(norms)}, wanted {', '.join(wanted)} for layout "
                f"{layout!r}"
            )
        check_probabilities("Block", dropout=dropout)
        self.layout, self.dropout = layout, dropout
        self.attention, self.mlp = attention, mlp
        for name, norm in norms.items():
            self.add_module(name, norm)
        self.save = save

    @property
    def save(self) -> str:
        return str(self._level)

    @save.setter
    def save(self, name: str) -> None:
        self._level = save_level(name)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        mask: Tensor | Pattern | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Returns the next ``x``; the arguments are those of :class:`Attention`."""
        pattern = self.attention.pattern(x, mask, cu_seqlens)
        tables = (*(rotation or ()), None, None, None)[:3]
        return run_steps(functools.partial(self._steps, pattern, x), self._level, x, *tables)

    def _steps(self, pattern: Pattern, x: Tensor) -> BlockSteps:
        attention, mlp = self.attention, self.mlp
        drops = self.dropout if self.training else 0.0
        fusible = self.layout == "pre" and is_fusible(self.mlp_norm, mlp, x)
        return BlockSteps(
            self.layout,
            AttentionSteps(
                (attention.qkv,),
                attention.split,
                (attention.q_norm, attention.k_norm),
                functools.partial(_attend, attention, pattern),
                attention.merge,
                attention.out,
                random=type(attention) is not Attention,
                draws=attention.training and attention.dropout > 0,
            ),
            MLPSteps(
                (mlp.first,),
                mlp.activate,
                mlp.down,
                random=type(mlp) is not MLP,
                fused=functools.partial(fused_mlp, self.mlp_norm, mlp) if fusible else None,
            ),
            self.attention_norm,
            getattr(self, "mlp_norm", None),
            getattr(self, "attention_post_norm", None),
            getattr(self, "mlp_post_norm", None),
            drops,
            drops,
        )

    def extra_repr(self) -> str:
        return f"layout={self.layout}, dropout={self.dropout}, save={self.save}"


def _attend(
    attention: Attention, pattern: Pattern, run: Run, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    if type(attention).attend is not Attention.attend:  # which knows nothing of regions
        return attention.attend(q, k, v, pattern)
    return attention.attend(q, k, v, pattern, run=run)

"""Knows what a layer of each architecture of transformers is made of."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..nn.fused import known
from ..nn.steps import LEVELS, BlockSteps, save_level
from .attention import register_attention
from .blocks import LEANEST_FREE, Options, PatchedLayer
from .changes import Changes
from .classes import entry_of, runs_forward_of
from .layers import layer_forward
from .norms import norm_forward
from .parts import Call, Dial, Family, attention_steps, mlp_steps
from .report import PatchReport


def _decoder(layer: Any, call: Call) -> BlockSteps:
    attention, mlp = layer.self_attn, layer.mlp
    window = _WINDOWS.get(call.dial.family.layer)
    options = {} if window is None else {"sliding_window": window(attention)}
    if call.dial.family.layer == "Gemma2DecoderLayer":
        options["softcap"] = attention.attn_logit_softcapping
    steps = attention_steps(
        attention,
        call,
        (attention.q_proj, attention.k_proj, attention.v_proj),
        attention.o_proj,
        dim=attention.head_dim,
        dropout=attention.attention_dropout,
        **options,
    )
    linears = mlp.gate_proj, mlp.up_proj
    if hasattr(layer, "pre_feedforward_layernorm"):
        return BlockSteps(
            "sandwich",
            steps,
            mlp_steps(mlp, None, call, linears, mlp.act_fn, mlp.down_proj),
            layer.input_layernorm,
            layer.pre_feedforward_layernorm,
            layer.post_attention_layernorm,
            layer.post_feedforward_layernorm,
        )
    norm = layer.post_attention_layernorm
    mlp = mlp_steps(mlp, norm, call, linears, mlp.act_fn, mlp.down_proj)
    return BlockSteps("pre", steps, mlp, layer.input_layernorm, norm)


# What the attention modules themselves give to the attention function as sliding_window.
_WINDOWS: dict[str, Callable[[Any], Any]] = {
    "MistralDecoderLayer": lambda attention: getattr(attention.config, "sliding_window", None),
    "Phi3DecoderLayer": lambda attention: getattr(attention.config, "sliding_window", None),
} | dict.fromkeys(
    ("Qwen2DecoderLayer", "Qwen3DecoderLayer", "Gemma2DecoderLayer", "Gemma3DecoderLayer"),
    lambda attention: attention.sliding_window,
)


def _dropout(module: nn.Dropout) -> float:
    return module.p if module.training else 0.0


def _phi3(layer: Any, call: Call) -> BlockSteps:
    attention, mlp = layer.self_attn, layer.mlp
    dim, heads = attention.head_dim, attention.config.num_attention_heads
    steps = attention_steps(
        attention,
        call,
        (attention.qkv_proj,),
        attention.o_proj,
        dim=dim,
        dropout=attention.attention_dropout,
        widths=[heads * dim] + [attention.num_key_value_heads * dim] * 2,
        sliding_window=_WINDOWS[call.dial.family.layer](attention),
    )
    norm = layer.post_attention_layernorm
    linears = (mlp.gate_up_proj,)
    return BlockSteps(
        "pre",
        steps,
        mlp_steps(mlp, norm, call, linears, mlp.activation_fn, mlp.down_proj, packed=True),
        layer.input_layernorm,
        norm,
        attention_dropout=_dropout(layer.resid_attn_dropout),
        mlp_dropout=_dropout(layer.resid_mlp_dropout),
    )


def _gpt2(layer: Any, call: Call) -> BlockSteps:
    attention, mlp = layer.attn, layer.mlp
    steps = attention_steps(
        attention,
        call,
        (attention.c_attn,),
        attention.c_proj,
        dim=attention.head_dim,
        dropout=attention.attn_dropout.p,
        widths=[attention.split_size] * 3,
    )
    return BlockSteps(
        "pre",
        steps,
        mlp_steps(mlp, layer.ln_2, call, (mlp.c_fc,), mlp.act, mlp.c_proj),
        layer.ln_1,
        layer.ln_2,
        attention_dropout=_dropout(attention.resid_dropout),
        mlp_dropout=_dropout(mlp.dropout),
    )


def _bert(layer: Any, call: Call) -> BlockSteps:
    attention, behind = layer.attention.self, layer.attention.output
    steps = attention_steps(
        attention,
        call,
        (attention.query, attention.key, attention.value),
        behind.dense,
        dim=attention.attention_head_size,
        dropout=attention.dropout.p,
    )
    first, act = layer.intermediate.dense, layer.intermediate.intermediate_act_fn
    return BlockSteps(
        "post",
        steps,
        mlp_steps(None, None, call, (first,), act, layer.output.dense),
        behind.LayerNorm,
        layer.output.LayerNorm,
        attention_dropout=_dropout(behind.dropout),
        mlp_dropout=_dropout(layer.output.dropout),
    )


def _plain_gpt2(layer: Any) -> bool:
    upcast = layer.attn.reorder_and_upcast_attn
    return not upcast or layer.attn.config._attn_implementation != "eager"


def _whole_bert(layer: Any) -> bool:
    return layer.chunk_size_feed_forward == 0


# Decoders of one pattern: the name of a module, and how its classes begin.
DECODERS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "phi3": "Phi3",
}


def _families() -> dict[str, Family]:
    found = {}
    for model, prefix in DECODERS.items():
        module = f"transformers.models.{model}.modeling_{model}"
        steps = _phi3 if model == "phi3" else _decoder
        layer = f"{prefix}DecoderLayer"
        found[layer] = Family(module, layer, steps, ("self_attn", "mlp"))
    gpt2 = "transformers.models.gpt2.modeling_gpt2"
    found["GPT2Block"] = Family(
        gpt2, "GPT2Block", _gpt2, ("attn", "mlp"), rotates=False, supports=_plain_gpt2
    )
    bert = "transformers.models.bert.modeling_bert"
    halves = ("attention", "attention.self", "attention.output", "intermediate", "output")
    found["BertLayer"] = Family(
        bert, "BertLayer", _bert, halves, rotates=False, supports=_whole_bert
    )
    return found


FAMILIES = _families()


class TransformersLayer:
    """A layer of a model of transformers."""

    levels: Sequence[str] = LEVELS
    swaps = True

    def __init__(self, name: str, module: nn.Module, family: Family) -> None:
        self.name, self.module, self.family = name, module, family

    def patch(
        self, level: str | None, options: Options, changes: Changes, report: PatchReport
    ) -> None:
        from transformers.pytorch_utils import Conv1D

        known.update((Conv1D, norm_forward))
        layer = self.module
        if "forward" in vars(layer):
            reason = "it has a forward of its own, set on the module and not by its class"
            report._leave(self.name, layer, reason)
            return
        level = LEANEST_FREE if level is None else level
        arguments = tuple(inspect.signature(layer.forward).parameters)
        own = _has_own_halves(layer, self.family)
        dial = Dial(self.family, arguments, save_level(level), options.glu, options.rope, own)
        changes.set(layer, "_headroom_dial", dial)
        changes.set(layer, "forward", functools.partial(layer_forward, layer))
        self._pack(changes)
        report._set_level(self.name, layer, level)
        # The steps swap what is in the MLP. Norms are left to what takes any of them.
        report._claim(*map(layer.get_submodule, self.family.halves))

    def _pack(self, changes: Changes) -> None:
        """Lets the model tell sequences that are packed into rows apart without a mask."""
        halves = map(self.module.get_submodule, self.family.halves)
        config = next(half.config for half in halves if hasattr(half, "config"))
        if config._attn_implementation == "sdpa":
            name = register_attention()
            changes.set_shared(self.module, config, "_attn_implementation_internal", name)


def _has_own_halves(layer: nn.Module, family: Family) -> bool:
    """Returns whether nobody has set another ``forward`` on the classes of a layer's halves."""
    kinds = (type(layer.get_submodule(name)) for name in family.halves)
    return all(runs_forward_of(kind, kind) for kind in kinds if kind.__module__ == family.module)


def find_layers(model: nn.Module) -> tuple[str, list[PatchedLayer]] | None:
    """Returns the name of an architecture of transformers and its layers, or None for others."""
    if "transformers" not in sys.modules:
        return None
    layers: list[PatchedLayer] = []
    names = []
    for name, module in model.named_modules():
        family = entry_of(module, FAMILIES)
        if family is not None:
            layers.append(TransformersLayer(name, module, family))
            names.append(family.layer)
    return (", ".join(dict.fromkeys(names)), layers) if layers else None

"""Shapes and names of transformers' models, as those of :class:`~headroom.nn.Transformer`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.checks import check_choice
from .config import TransformerConfig
from .transformer import Transformer

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}


# ---- Shapes ------------------------------------------------------------------------------------


def config_from_hf(config: Any) -> TransformerConfig:
    """Returns the shape of a model of transformers, given its configuration.

    Raises:
        ValueError: the model is none of those known here, or has something that a
            :class:`~headroom.nn.Transformer` does not have.
    """
    kind = _kind(config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            raise ValueError(f"config_from_hf: {kind} has {name}, which headroom.nn does not have")
    return TransformerConfig(**_SHAPES.get(kind, _llama)(config))


def _kind(config: Any) -> str:
    check_choice("model_type", config.model_type, sorted(_NAMES))
    return config.model_type


def _refuse(config: Any, **wanted: Any) -> None:
    for name, value in wanted.items():
        if getattr(config, name, value) != value:
            raise ValueError(
                f"config_from_hf: {config.model_type} has {name}={getattr(config, name)!r}, of "
                f"which headroom.nn has only {value!r}"
            )


def _activation(name: str) -> str:
    check_choice("the activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
    }


def _llama(config: Any) -> dict[str, Any]:
    """Returns the shape of Llama, Mistral, Qwen2, Qwen3 and Phi-3, and what others have of it."""
    kind = config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary = dict(config.rope_parameters)
    by_layer = rotary.get("full_attention")
    rotary = dict(rotary if by_layer is None else by_layer)
    partial = rotary.pop("partial_rotary_factor", 1.0) or 1.0
    bias = bool(getattr(config, "attention_bias", False))
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    return {
        **_sizes(config),
        "features": config.intermediate_size,
        "kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "activation": _activation(
            getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        ),
        "qkv_bias": bias or kind == "qwen2",
        "out_bias": bias,
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "qk_norm": kind in ("qwen3", "gemma3_text"),
        "window": window,
        "window_layers": None
        if kinds is None or window is None
        else tuple(k == "sliding_attention" for k in kinds),
        "max_positions": config.max_position_embeddings,
        "rope_base": rotary.get("rope_theta", 10000.0),
        "rope_scaling": rotary,
        "rotary_dim": int(head_dim * partial),
        "tied": bool(config.tie_word_embeddings),
        "dropout": getattr(config, "resid_pdrop", 0.0),
        "embedding_dropout": getattr(config, "embd_pdrop", 0.0) if kind == "phi" else 0.0,
        "attention_dropout": config.attention_dropout or 0.0,
    }


def _gemma(config: Any) -> dict[str, Any]:
    return _llama(config) | {
        "norm_offset": 1.0,
        "norm_casting": "once",
        "embedding_scale": config.hidden_size**0.5,
    }


def _gemma3(config: Any) -> dict[str, Any]:
    _refuse(config, use_bidirectional_attention=False)
    return _gemma(config) | {
        "layout": "sandwich",
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "window_rope_base": config.rope_parameters["sliding_attention"]["rope_theta"],
    }


def _phi(config: Any) -> dict[str, Any]:
    return _llama(config) | {
        "layout": "parallel",
        "norm": "layer",
        "norm_eps": config.layer_norm_eps,
        "gated": False,
        **_BIASES,
        "head_bias": True,
        "qk_norm": config.qk_layernorm,
    }


def _gpt2(config: Any) -> dict[str, Any]:
    _refuse(
        config,
        add_cross_attention=False,
        scale_attn_by_inverse_layer_idx=False,
        scale_attn_weights=True,
    )
    return {
        **_sizes(config),
        "features": config.n_inner or 4 * config.hidden_size,
        "norm": "layer",
        "norm_eps": config.layer_norm_epsilon,
        "activation": _activation(config.activation_function),
        "gated": False,
        **_BIASES,
        "positions": "learned",
        "max_positions": config.max_position_embeddings,
        "tied": bool(config.tie_word_embeddings),
        "dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
        "embedding_dropout": config.embd_pdrop,
    }


def _bert(config: Any) -> dict[str, Any]:
    _refuse(config, is_decoder=False, add_cross_attention=False)
    return {
        **_sizes(config),
        "features": config.intermediate_size,
        "layout": "post",
        "norm": "layer",
        "norm_eps": config.layer_norm_eps,
        "activation": _activation(config.hidden_act),
        "gated": False,
        **_BIASES,
        "causal": False,
        "positions": "learned",
        "max_positions": config.max_position_embeddings,
        "token_types": config.type_vocab_size,
        "embedding_norm": True,
        "final_norm": False,
        "head": False,
        "dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "embedding_dropout": config.hidden_dropout_prob,
    }


_SHAPES = {"gemma": _gemma, "gemma3_text": _gemma3, "phi": _phi, "gpt2": _gpt2, "bert": _bert}


# ---- Names -------------------------------------------------------------------------------------


class _Names(NamedTuple):
    """Maps our names of modules to those of a model of transformers, without the prefix."""

    prefix: str  # of all but the head
    modules: dict[str, str]  # several of theirs, one above the other, are one of ours
    transposed: tuple[str, ...] = ()  # modules whose weights are
    others: str = "$^"  # a pattern of names that a Transformer does not have


_LLAMA = {
    "embedding.tokens": "embed_tokens",
    "blocks.#.attention_norm": "layers.#.input_layernorm",
    "blocks.#.attention.qkv": "layers.#.self_attn.q_proj "
    "layers.#.self_attn.k_proj layers.#.self_attn.v_proj",
    "blocks.#.attention.q_norm": "layers.#.self_attn.q_norm",
    "blocks.#.attention.k_norm": "layers.#.self_attn.k_norm",
    "blocks.#.attention.out": "layers.#.self_attn.o_proj",
    "blocks.#.mlp_norm": "layers.#.post_attention_layernorm",
    "blocks.#.mlp.gate_up": "layers.#.mlp.gate_proj layers.#.mlp.up_proj",
    "blocks.#.mlp.down": "layers.#.mlp.down_proj",
    "norm": "norm",
    "head": "lm_head",
}
_GEMMA3 = {
    "blocks.#.attention_post_norm": "layers.#.post_attention_layernorm",
    "blocks.#.mlp_norm": "layers.#.pre_feedforward_layernorm",
    "blocks.#.mlp_post_norm": "layers.#.post_feedforward_layernorm",
}
_PHI3 = {
    "blocks.#.attention.qkv": "layers.#.self_attn.qkv_proj",
    "blocks.#.mlp.gate_up": "layers.#.mlp.gate_up_proj",
}
_PHI = {
    "blocks.#.attention.q_norm": "layers.#.self_attn.q_layernorm",
    "blocks.#.attention.k_norm": "layers.#.self_attn.k_layernorm",
    "blocks.#.attention.out": "layers.#.self_attn.dense",
    "blocks.#.mlp.up": "layers.#.mlp.fc1",
    "blocks.#.mlp.down": "layers.#.mlp.fc2",
    "norm": "final_layernorm",
}
_GPT2 = {
    "embedding.tokens": "wte",
    "embedding.positions": "wpe",
    "blocks.#.attention_norm": "h.#.ln_1",
    "blocks.#.attention.qkv": "h.#.attn.c_attn",
    "blocks.#.attention.out": "h.#.attn.c_proj",
    "blocks.#.mlp_norm": "h.#.ln_2",
    "blocks.#.mlp.up": "h.#.mlp.c_fc",
    "blocks.#.mlp.down": "h.#.mlp.c_proj",
    "norm": "ln_f",
    "head": "lm_head",
}
_BERT = {
    "embedding.tokens": "embeddings.word_embeddings",
    "embedding.positions": "embeddings.position_embeddings",
    "embedding.types": "embeddings.token_type_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
    "blocks.#.attention.qkv": "encoder.layer.#.attention.self.query "
    "encoder.layer.#.attention.self.key encoder.layer.#.attention.self.value",
    "blocks.#.attention.out": "encoder.layer.#.attention.output.dense",
    "blocks.#.attention_norm": "encoder.layer.#.attention.output.LayerNorm",
    "blocks.#.mlp.up": "encoder.layer.#.intermediate.dense",
    "blocks.#.mlp.down": "encoder.layer.#.output.dense",
    "blocks.#.mlp_norm": "encoder.layer.#.output.LayerNorm",
}
_FREQUENCIES = r".*rotary_emb\.inv_freq"
_NAMES = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma"), _Names("model.", _LLAMA, (), _FREQUENCIES)
    ),
    "gemma3_text": _Names("model.", _LLAMA | _GEMMA3, (), _FREQUENCIES),
    "phi3": _Names("model.", _LLAMA | _PHI3, (), _FREQUENCIES),
    "phi": _Names("model.", _LLAMA | _PHI, (), _FREQUENCIES),
    "gpt2": _Names(
        "transformer.",
        _GPT2,
        ("attention.qkv", "attention.out", "mlp.up", "mlp.down"),
        r".*\.attn\.(masked_)?bias",
    ),
    "bert": _Names("bert.", _BERT, (), r"(pooler|cls)\..*|embeddings\.position_ids"),
}


def _parts(config: TransformerConfig, ours: str) -> list[int] | None:
    """Returns how many rows of one of our tensors each of their tensors has."""
    if ours.endswith("attention.qkv"):
        assert config.head_dim is not None and config.kv_heads is not None
        keys = config.kv_heads * config.head_dim
        return [config.heads * config.head_dim, keys, keys]
    if ours.endswith("mlp.gate_up"):
        return [config.features] * 2
    return None


def _tensors(names: _Names, layers: int) -> Iterator[tuple[str, list[str], bool]]:
    """Yields the name of each of our modules, the names of theirs, and whether those of weights
    are transposed."""
    for ours, theirs in names.modules.items():
        for layer in range(layers if "#" in ours else 1):
            module = ours.replace("#", str(layer))
            transposed = ours.endswith(names.transposed) if names.transposed else False
            yield module, [name.replace("#", str(layer)) for name in theirs.split()], transposed


def state_from_hf(state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Returns the ``state_dict`` of a :class:`~headroom.nn.Transformer`, given that of a model of
    transformers, with or without its head, and the configuration of that model.

    Tensors are shared where theirs are the same as ours, and concatenated where ours are packed.

    Raises:
        ValueError: a name is not one of such a model, or a tensor is missing.
    """
    names = _NAMES[_kind(config)]
    shape = config_from_hf(config)
    given = {name.removeprefix(names.prefix): tensor for name, tensor in state.items()}
    found: dict[str, Tensor] = {}
    for ours, theirs, transposed in _tensors(names, shape.layers):
        for suffix in (".weight", ".bias"):
            parts = [given.pop(name + suffix) for name in theirs if name + suffix in given]
            if not parts or (ours == "head" and not shape.head):
                continue
            if len(parts) != len(theirs):
                wanted = ", ".join(name + suffix for name in theirs)
                raise ValueError(f"state_from_hf: only {len(parts)} are there of {wanted}")
            whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
            found[ours + suffix] = whole.t() if transposed and suffix == ".weight" else whole
    if shape.head and shape.tied and "embedding.tokens.weight" in found:
        found.setdefault("head.weight", found["embedding.tokens.weight"])
    if unknown := [name for name in given if not re.fullmatch(names.others, name)]:
        raise ValueError(
            f"state_from_hf: {', '.join(unknown[:5])} is no tensor of a {config.model_type}"
        )
    return found


def state_to_hf(
    state: Mapping[str, Tensor], config: Any, prefix: str | None = None
) -> dict[str, Tensor]:
    """Returns the ``state_dict`` of a model of transformers, given that of a
    :class:`~headroom.nn.Transformer` and the configuration of that model.

    ``prefix`` is that of all names but the head's; by default "model." or the like where there is a
    head, and nothing where there is none.

    Raises:
        ValueError: a name is not one of a :class:`~headroom.nn.Transformer` of this shape.
    """
    names = _NAMES[_kind(config)]
    shape = config_from_hf(config)
    if prefix is None:
        prefix = names.prefix if shape.head else ""
    given = dict(state)
    found: dict[str, Tensor] = {}
    for ours, theirs, transposed in _tensors(names, shape.layers):
        for suffix in (".weight", ".bias"):
            if ours + suffix not in given:
                continue
            whole = given.pop(ours + suffix)
            rows = _parts(shape, ours) if len(theirs) > 1 else None
            if transposed and suffix == ".weight":
                whole = whole.t().contiguous()
            for name, part in zip(theirs, [whole] if rows is None else whole.split(rows)):
                found[("" if ours == "head" else prefix) + name + suffix] = part
    if given:
        raise ValueError(
            f"state_to_hf: {', '.join(list(given)[:5])} is no tensor of a {config.model_type}"
        )
    return found


def transformer_from_hf(model: Any, **options: Any) -> Transformer:
    """Returns a :class:`~headroom.nn.Transformer` with copies of the weights of a model of
    transformers.

    ``options`` are those of the Transformer; by default the dtype and device of the model. A model
    with a head that is not that of a language model gives hidden states.
    """
    first = next(model.parameters())
    options = {"dtype": first.dtype, "device": first.device} | options
    config = config_from_hf(model.config)
    config.head = config.head and model.get_output_embeddings() is not None
    transformer = Transformer(config, **options)
    given = dict(model.base_model.state_dict())  # without heads of other kinds
    if config.head:
        head = model.get_output_embeddings().state_dict()
        given |= {f"lm_head.{name}": tensor for name, tensor in head.items()}
    state = state_from_hf(given, model.config)
    if not config.head:
        state.pop("head.weight", None)
    transformer.load_state_dict(state)
    return transformer.train(model.training)

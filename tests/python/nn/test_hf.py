"""Transformers of each shape, beside transformers' own: results, gradients and names."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from headroom.nn import (  # noqa: E402
    Transformer,
    TransformerConfig,
    config_from_hf,
    state_from_hf,
    state_to_hf,
    transformer_from_hf,
)

from helpers.bits import assert_same_bits  # noqa: E402
from helpers.kept import kept_bytes  # noqa: E402

SIZES = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
WIDE = SIZES | dict(intermediate_size=40, num_key_value_heads=2, max_position_embeddings=64)
TIGHT = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
MODELS = {
    "Llama": WIDE | dict(rope_parameters=LLAMA3, tie_word_embeddings=False),
    "Mistral": WIDE | dict(sliding_window=5, head_dim=12),
    "Qwen2": WIDE | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "Qwen3": WIDE | dict(head_dim=16),
    "Gemma": WIDE | dict(head_dim=16),
    "Gemma3": WIDE
    | dict(head_dim=16, sliding_window=4, sliding_window_pattern=2)
    | dict(query_pre_attn_scalar=20),
    "Phi": WIDE | dict(num_key_value_heads=4),
    "Phi3": WIDE,
    "GPT2": SIZES | dict(n_positions=64, activation_function="gelu_new"),
    "Bert": SIZES | dict(intermediate_size=40, max_position_embeddings=64),
}
CLASSES = {"Bert": "BertModel", "GPT2": "GPT2LMHeadModel", "Gemma3": "Gemma3ForCausalLM"}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def model_of(name):
    torch.manual_seed(5)
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**MODELS[name], **TIGHT)
    config._attn_implementation = "eager"
    options = {"add_pooling_layer": False} if name == "Bert" else {}
    model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config, **options)
    for parameter in model.parameters():  # zeros and ones hide what is left out
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def result(model, ids, mask):
    if isinstance(model, Transformer):
        return model(ids, mask=mask)
    out = model(ids, attention_mask=mask)
    return out.logits if "logits" in out else out.last_hidden_state


def results(model, ids, mask, weights):
    """The result, and the gradients of parameters, by the names of transformers."""
    model.zero_grad()
    out = result(model, ids, mask)
    out = out * mask[..., None]  # what padding sees is not defined
    (out * weights).sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


def error(left, right):
    return ((left.double() - right).norm() / right.norm().clamp_min(1e-12)).item()


@pytest.mark.parametrize("name", MODELS)
def test_results_gradients_and_names(name):
    model = model_of(name)
    ours = transformer_from_hf(model, save="L3")
    assert config_from_hf(model.config).layers == len(ours.blocks)
    exact = copy.deepcopy(model).double()
    ids = torch.randint(3, 61, (2, 11))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 8:] = 0
    out_exact = result(exact, ids, mask)
    weights = torch.randn(out_exact.shape)

    exact_out, exact_grads = results(exact, ids, mask, weights)
    their_out, their_grads = results(model, ids, mask, weights)
    our_out, our_grads = results(ours, ids, mask, weights)
    our_grads = state_to_hf(our_grads, model.config)
    assert error(our_out, exact_out) <= 2 * max(error(their_out, exact_out), 2**-24)
    assert sorted(our_grads) == sorted(their_grads)
    # A bias of keys alone has a gradient of zero.
    keys = [key for key, grad in exact_grads.items() if grad.norm() >= 1e-9 * exact_out.norm()]
    # Which tensor is off the most is chance, and differs with the instructions of the processor.
    most = max(2**-22, *(error(their_grads[key], exact_grads[key]) for key in keys))
    for key in keys:
        assert error(our_grads[key], exact_grads[key]) <= 2 * most, key
    exact_all, theirs_all, ours_all = (
        torch.cat([grads[key].flatten() for key in keys])
        for grads in (exact_grads, their_grads, our_grads)
    )
    assert error(ours_all, exact_all) <= 2 * max(error(theirs_all, exact_all), 2**-24)


ROPE = dict(rope_theta=10000.0, rope_type="default")
LINEAR = dict(rope_type="linear", factor=2.0, rope_theta=77.0)
SHAPE = dict(vocab_size=61, hidden_size=32, layers=2, heads=4, features=40, max_positions=64)
GROUPED = SHAPE | dict(kv_heads=2, head_dim=8, rope_scaling=ROPE, rotary_dim=8)
GEMMA = GROUPED | dict(
    head_dim=16, rotary_dim=16, norm_offset=1.0, norm_casting="once", activation="gelu_tanh",
    embedding_scale=32**0.5, tied=True,
)  # fmt: skip
BIASES = dict(qkv_bias=True, out_bias=True, mlp_bias=True)
VECTORS = SHAPE | BIASES | dict(kv_heads=4, head_dim=8, norm="layer", norm_eps=1e-4, gated=False)
# What transformers has, and what of the shape is not a default then.
SHAPES = {
    "Llama": (
        WIDE
        | dict(attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3, hidden_act="gelu")
        | dict(attention_dropout=0.1, tie_word_embeddings=True, rope_parameters=LINEAR),
        GROUPED
        | BIASES
        | dict(norm_eps=1e-3, activation="gelu", rope_base=77.0, rope_scaling=LINEAR)
        | dict(tied=True, attention_dropout=0.1),
    ),
    "Qwen2": (
        WIDE
        | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)
        | dict(attention_dropout=0.2),
        GROUPED | dict(qkv_bias=True, window=4, window_layers=(False, True), attention_dropout=0.2),
    ),
    "Qwen3": (
        WIDE | dict(head_dim=10, attention_bias=True),
        GROUPED | dict(head_dim=10, rotary_dim=10, qkv_bias=True, out_bias=True, qk_norm=True),
    ),
    "Mistral": (
        WIDE | dict(sliding_window=5, head_dim=12),
        GROUPED | dict(head_dim=12, rotary_dim=12, window=5),
    ),
    "Gemma": (WIDE | dict(head_dim=16), GEMMA),
    "Gemma3Text": (
        WIDE
        | dict(head_dim=16, sliding_window=4, query_pre_attn_scalar=25, attention_dropout=0.3)
        | dict(layer_types=["sliding_attention", "full_attention"]),
        GEMMA
        | dict(layout="sandwich", qk_norm=True, window=4, window_layers=(True, False))
        | dict(attention_scale=0.2, rope_base=1e6, window_rope_base=1e4, attention_dropout=0.3)
        | dict(rope_scaling=ROPE | dict(rope_theta=1e6)),
    ),
    "Phi": (
        WIDE
        | dict(num_key_value_heads=4, layer_norm_eps=1e-4, qk_layernorm=True, resid_pdrop=0.1)
        | dict(embd_pdrop=0.2, attention_dropout=0.3, partial_rotary_factor=0.25),
        VECTORS
        | dict(layout="parallel", activation="gelu_tanh", head_bias=True, qk_norm=True)
        | dict(rope_scaling=ROPE, rotary_dim=2)
        | dict(dropout=0.1, attention_dropout=0.3, embedding_dropout=0.2),
    ),
    "Phi3": (
        WIDE | dict(resid_pdrop=0.1, embd_pdrop=0.2, attention_dropout=0.3, sliding_window=7),
        GROUPED | dict(norm_eps=1e-5, window=7, dropout=0.1, attention_dropout=0.3),
    ),
    "GPT2": (
        SIZES
        | dict(n_positions=64, n_inner=50, resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3)
        | dict(layer_norm_epsilon=1e-4, activation_function="relu", tie_word_embeddings=False),
        VECTORS
        | dict(features=50, activation="relu", positions="learned")
        | dict(dropout=0.1, attention_dropout=0.3, embedding_dropout=0.2),
    ),
    "Bert": (
        SIZES
        | dict(intermediate_size=40, max_position_embeddings=64, type_vocab_size=3)
        | dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2, layer_norm_eps=1e-4)
        | dict(hidden_act="gelu_new"),
        VECTORS
        | dict(layout="post", activation="gelu_tanh", causal=False, positions="learned")
        | dict(token_types=3, embedding_norm=True, final_norm=False, head=False)
        | dict(dropout=0.1, attention_dropout=0.2, embedding_dropout=0.1),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    options, shape = SHAPES[name]
    config = getattr(transformers, f"{name}Config")(**options, **TIGHT)
    assert config_from_hf(config) == TransformerConfig(**shape)


def test_activations():
    names = dict(gelu="gelu", gelu_new="gelu_tanh", gelu_pytorch_tanh="gelu_tanh", relu="relu")
    names |= dict(relu2="relu_squared", silu="silu", swish="silu")
    for theirs, ours in names.items():
        config = transformers.GPT2Config(activation_function=theirs)
        assert config_from_hf(config).activation == ours
    assert config_from_hf(config).features == 4 * config.hidden_size


@pytest.mark.parametrize(
    "name, option, value",
    [
        ("GPT2", "add_cross_attention", True),
        ("GPT2", "scale_attn_by_inverse_layer_idx", True),
        ("GPT2", "scale_attn_weights", False),
        ("Bert", "is_decoder", True),
        ("Bert", "add_cross_attention", True),
        ("Gemma3Text", "use_bidirectional_attention", True),
    ],
)
def test_what_headroom_has_in_one_way_only(name, option, value):
    config = getattr(transformers, f"{name}Config")(**{option: value})
    with pytest.raises(ValueError, match=f"has {option}={value}, of which headroom.nn has only"):
        config_from_hf(config)


@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_the_model_that_is_made(name):
    model = model_of(name).to(torch.bfloat16)
    assert not transformer_from_hf(model).training
    made = transformer_from_hf(model.train(), save="L2")
    assert made.training and made.save == ["L2", "L2"]
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    assert next(transformer_from_hf(model, dtype=torch.float32).parameters()).dtype == torch.float32
    if name == "Llama":
        state = state_to_hf(made.state_dict(), model.config, "language_model.")
        assert {name.partition(".")[0] for name in state} == {"language_model", "lm_head"}


@pytest.mark.parametrize("name", MODELS)
def test_names_there_and_back(name):
    model = model_of(name)
    state = {k: v for k, v in model.state_dict().items()}
    back = state_to_hf(state_from_hf(state, model.config), model.config)
    assert sorted(back) == sorted(state)
    assert_same_bits([back[k] for k in state], list(state.values()))


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_model_without_a_head_gives_hidden_states(name):
    model = model_of(name).base_model
    ours = transformer_from_hf(model)
    ids = torch.randint(3, 61, (2, 5))
    torch.testing.assert_close(ours(ids), model(ids).last_hidden_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["LlamaForSequenceClassification", "GPT2ForTokenClassification", "GPT2DoubleHeadsModel"]
    + ["BertForSequenceClassification", "BertForMaskedLM"],
)
def test_a_model_with_another_head_gives_hidden_states(name):
    kind = name.split("For")[0].split("Double")[0]
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind], **TIGHT)
    model = getattr(transformers, name)(config).eval()
    ours = transformer_from_hf(model)
    ids = torch.randint(3, 61, (2, 5))
    wanted = model.base_model(ids).last_hidden_state
    if name == "GPT2DoubleHeadsModel":  # has that of a language model too
        wanted = model.lm_head(wanted)
    torch.testing.assert_close(ours(ids), wanted, rtol=1e-4, atol=1e-5)


def test_kept_bytes_beside_those_of_transformers():
    """A Llama of the proportions of Llama-3-8B, an eighth of its size."""
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1792,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_hidden_layers=1,
        vocab_size=8,
        max_position_embeddings=16,
    )
    config._attn_implementation = "sdpa"  # eager keeps more
    theirs = transformers.LlamaModel(config).to(torch.bfloat16)
    ours = transformer_from_hf(theirs)
    x = torch.randn(1, 16, 512, dtype=torch.bfloat16, requires_grad=True)
    tables = theirs.rotary_emb(x, torch.arange(16)[None])
    spared = [*theirs.parameters(), *tables]
    full = kept_bytes(lambda: theirs.layers[0](x, position_embeddings=tables), spared)

    (block,) = ours.blocks
    rotation, pattern = ours._inputs(x, False, 16, None, None, None)
    spared = [*block.parameters(), rotation.cos, rotation.sin]
    for level, most in {"L1": 0.48, "L2": 0.19, "L5": 0.045}.items():
        block.save = level
        assert kept_bytes(lambda: block(x, rotation, pattern), spared) <= most * full, level


def test_what_is_not_known_raises():
    model = model_of("Llama")
    state = model.state_dict()
    with pytest.raises(ValueError, match="extra.weight is no tensor of a llama"):
        state_from_hf(state | {"extra.weight": torch.ones(1)}, model.config)
    with pytest.raises(ValueError, match="only 2 are there of layers.1.self_attn.q_proj.weight"):
        lacking = {k: v for k, v in state.items() if "layers.1.self_attn.k_proj" not in k}
        state_from_hf(lacking, model.config)
    with pytest.raises(ValueError, match="extra.weight is no tensor of a llama"):
        state_to_hf({"extra.weight": torch.ones(1)}, model.config)
    with pytest.raises(ValueError, match="model_type is 't5', wanted one of bert"):
        config_from_hf(transformers.T5Config())
    with pytest.raises(ValueError, match="gemma3_text has final_logit_softcapping"):
        config_from_hf(transformers.Gemma3TextConfig(final_logit_softcapping=30.0))
    with pytest.raises(ValueError, match="the activation is 'mish'"):
        config_from_hf(transformers.LlamaConfig(hidden_act="mish"))

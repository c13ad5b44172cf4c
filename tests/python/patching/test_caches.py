"""Caches of keys and values in blocks at L5 of models of transformers that are not known."""

import copy

import headroom
import pytest
import torch

from helpers.hf_models import TIGHT, WIDE, transformers

HEADS = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4) | TIGHT
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
CONFIGS = {
    "OPT": HEADS | dict(ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64),
    "GPTNeoX": HEADS | dict(intermediate_size=48),  # which calls its cache layer_past
    "Mixtral": WIDE | EXPERTS,
    "Granite": WIDE,
    "Olmo2": WIDE,
    "Glm4": WIDE | dict(head_dim=8),
}
FAST = ("GPTNeoX", "Olmo2")


def model_of(name):
    torch.manual_seed(2)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    for dropout in ("dropout", "attention_dropout", "hidden_dropout"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():  # else all logits are much alike
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return model.train()


def tokens(n=9):
    return torch.randint(3, 61, (2, n), generator=torch.Generator().manual_seed(8))


def patched(model, save="L5"):
    model = copy.deepcopy(model)
    headroom.patch(model, save, norms=False, glu=False)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_in_training_mode(name):
    model = model_of(name)
    other = patched(model)
    for each in (model, other):
        each.generation_config.pad_token_id = 0
    options = dict(max_new_tokens=5, do_sample=False)
    assert torch.equal(other.generate(tokens(), **options), model.generate(tokens(), **options))


@pytest.mark.parametrize("save", ["L5", {0: "L0", 1: "L5"}], ids=str)
@pytest.mark.parametrize("name", FAST)
def test_a_cache_where_gradients_are_taken(name, save):
    model = model_of(name)
    other, ids = patched(model, save), tokens()
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values

    def step(one):  # with a cache that is filled
        held = copy.deepcopy(cache)
        logits = one(ids[:, 5:], past_key_values=held).logits
        logits.square().sum().backward()
        return held.get_seq_length(1), logits, [p.grad for p in one.parameters()]

    (length, logits, grads), wanted = step(other), step(model)
    assert length == wanted[0] == 9 and torch.equal(logits, wanted[1])
    torch.testing.assert_close(grads, wanted[2])

    other.zero_grad(), model.zero_grad()
    outputs = other(ids, use_cache=True)
    outputs.logits.square().sum().backward()
    # One that is empty is dropped by blocks at L5, as where transformers checkpoints.
    assert outputs.past_key_values.get_seq_length(1) == 0
    model(ids).logits.square().sum().backward()
    torch.testing.assert_close(
        [p.grad for p in other.parameters()], [p.grad for p in model.parameters()]
    )


SMALL = dict(vocab_size=61, hidden_size=32, intermediate_size=48, pad_token_id=0)
HEADS_OF_8 = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
SHARED = dict(
    num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=2, vocab_size_per_layer_input=61, hidden_size_per_layer_input=8,
)  # fmt: skip
# Models whose caches have layers that hold nothing, or whose layers keep states in themselves.
WITHOUT_STATES = {
    "Gemma3nText": SMALL | HEADS_OF_8 | SHARED | dict(
        intermediate_size=[48] * 4, activation_sparsity_pattern=[0.0] * 4, laurel_rank=8,
        altup_num_inputs=2,
    ),
    "Gemma4Text": SMALL | HEADS_OF_8 | SHARED | dict(global_head_dim=8),
    "NemotronH": SMALL | HEADS_OF_8 | dict(
        layers_block_type=["mamba", "mlp", "attention", "moe"], ssm_state_size=8, mamba_num_heads=4,
        mamba_head_dim=16, n_groups=1, n_routed_experts=4, num_experts_per_tok=2, chunk_size=8,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=16,
    ),
    "RecurrentGemma": SMALL | HEADS_OF_8 | dict(
        num_hidden_layers=3, lru_width=32, attention_window_size=8, conv1d_width=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", ["L5", "every", "told"])
@pytest.mark.parametrize("name", WITHOUT_STATES)
def test_layers_without_keys_and_values(name, way):
    torch.manual_seed(2)
    config = getattr(transformers, f"{name}Config")(**WITHOUT_STATES[name])
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    other = copy.deepcopy(model)
    if way == "every":
        headroom.checkpoint_every(other, verify=True)
    else:
        headroom.patch(other, "L5", norms=False, glu=False)
    ids = tokens()
    model(ids, labels=ids, use_cache=False).loss.backward()
    other(ids, labels=ids, **({"use_cache": True} if way == "told" else {})).loss.backward()
    torch.testing.assert_close(
        [p.grad for p in other.parameters()], [p.grad for p in model.parameters()]
    )


def test_transformers_may_checkpoint_too():
    model, ids = model_of("Olmo2"), tokens()
    other = patched(model)
    other.activation_checkpointing_enable({"use_reentrant": False})
    calls = []
    other.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    for each in (model, other):
        each(ids).logits.square().sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(
        [p.grad for p in other.parameters()], [p.grad for p in model.parameters()]
    )
    headroom.unpatch(other)
    other.activation_checkpointing_disable()
    assert not any("forward" in vars(layer) for layer in other.model.layers)

"""Blocks at L5 and under ``checkpoint_every`` in families of transformers whose layers keep more
than keys and values, or share them: small models, with the default cache."""

import headroom
import pytest
import torch

from helpers.hf_models import transformers

SIZES = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, d_model=32, decoder_layers=4, encoder_layers=4, decoder_attention_heads=4,
    encoder_attention_heads=4, decoder_ffn_dim=48, encoder_ffn_dim=48, num_experts=4,
    num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1, n_shared_experts=1,
    first_k_dense_replace=1, state_size=8, mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16,
    mamba_d_ssm=64, mamba_n_groups=1, n_groups=1, mamba_chunk_size=8, chunk_size=8,
    time_step_rank=4, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, index_head_dim=8, index_n_heads=2, index_topk=8,
    attention_dropout=0.0, conv_L_cache=3, sliding_window=16, dropout=0.0, activation_dropout=0.0,
    attention_hidden_size=32,
)  # fmt: skip
LINEAR = dict(layer_types=["linear_attention", "full_attention"] * 2)
FAMILIES = {
    "BailingHybrid": LINEAR,
    "Bamba": dict(attn_layer_indices=[1, 3]),
    "Bart": {},
    "BigBirdPegasus": {},
    "DeepseekV32": {},
    "Dory": dict(n_input_layers=1, n_recurrent_layers=2, n_output_layers=1),
    "FalconH1": {},
    "FalconMamba": {},
    "Gemma4UnifiedText": dict(
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        global_head_dim=8,
    ),
    "GraniteMoeHybrid": dict(layer_types=["mamba", "attention"] * 2),
    "KimiLinear": LINEAR,
    "Lfm2Moe": dict(layer_types=["conv", "full_attention"] * 2, num_dense_layers=1),
    "Mamba2": dict(num_heads=8, head_dim=8),
    "MiniMax": LINEAR,
    "Qwen3Next": LINEAR,
    "Qwen3_5MoeText": LINEAR,
    "Rwkv": {},
}  # fmt: skip


def small(name):
    config = getattr(transformers, f"{name}Config")
    known = {field for cls in config.__mro__ for field in getattr(cls, "__annotations__", {})}
    sizes = {field: size for field, size in SIZES.items() if field in known}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config(**(sizes | FAMILIES[name]))).train()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["L5", "every"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_with_the_default_cache(name, way):
    model, other = small(name), small(name)
    if way == "L5":
        headroom.patch(other, "L5", norms=False, glu=False)
    else:
        headroom.checkpoint_every(other)
    ids = torch.randint(3, 61, (2, 8))
    for each in (model, other):
        torch.manual_seed(5)
        each(ids, labels=ids).loss.backward()
    torch.testing.assert_close(
        [p.grad for p in other.parameters()], [p.grad for p in model.parameters()]
    )

"""Small mixtures of experts of transformers, one of each layout, activation and router."""

import copy

import torch
from headroom.functional import mxfp4_matrix
from headroom.nn import QuantizedExperts
from headroom.patching.experts import found_experts

from .hf_models import SIZES as _SIZES
from .hf_models import TIGHT, transformers

TOKENS, EXPERTS, CHOSEN, HIDDEN, FEATURES = 12, 6, 2, 32, 16
SIZES = _SIZES | TIGHT | dict(
    intermediate_size=FEATURES, moe_intermediate_size=FEATURES, num_key_value_heads=2,
    max_position_embeddings=64, head_dim=8, num_experts=EXPERTS, num_local_experts=EXPERTS,
    n_routed_experts=EXPERTS, num_experts_per_tok=CHOSEN, top_k_experts=CHOSEN,
    shared_expert_intermediate_size=24, moe_shared_expert_intermediate_size=24, q_lora_rank=16,
    kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_group=2, topk_group=1,
    n_shared_experts=1, first_k_dense_replace=0, attention_dropout=0.0, enable_moe_block=True,
    global_head_dim=8, decoder_sparse_step=1, output_router_logits=False, n_groups=1,
)  # fmt: skip
FAMILIES = {
    "Mixtral": {},
    "Qwen2Moe": {},
    "Qwen3Moe": dict(norm_topk_prob=True),
    "Qwen3_5MoeText": dict(
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    ),
    "Olmoe": {},
    "DeepseekV2": dict(num_key_value_heads=4, head_dim=None, topk_method="group_limited_greedy"),
    "DeepseekV3": dict(num_key_value_heads=4, head_dim=None, first_k_dense_replace=1),
    "Glm4Moe": {},
    "Phimoe": dict(router_jitter_noise=0.01, input_jitter_noise=0.0),
    "GraniteMoe": {},
    "GptOss": dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8),
    "Gemma4Text": dict(
        layer_types=["sliding_attention", "full_attention"], vocab_size_per_layer_input=61,
        hidden_size_per_layer_input=8, num_kv_shared_layers=0, sliding_window=8,
    ),
    "NemotronH": dict(
        num_hidden_layers=None, layers_block_type=["attention", "moe", "moe"], ssm_state_size=8,
        mamba_num_heads=4, mamba_head_dim=16, chunk_size=8,
    ),
}  # fmt: skip


def moe_of(name, seed=5, **options):
    """Returns a model in training. Its weights are far from those of its initialization, which
    hide what is left out."""
    kind = getattr(transformers, f"{name}Config")
    known = {field for cls in kind.__mro__ for field in getattr(cls, "__annotations__", {})}
    sizes = {field: size for field, size in SIZES.items() if field in known}
    given = {k: v for k, v in (sizes | FAMILIES[name] | options).items() if v is not None}
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(kind(**given))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def tokens_of(count=TOKENS, rows=2):
    ids = torch.randint(3, 61, (rows, count), generator=torch.Generator().manual_seed(3))
    return dict(input_ids=ids, labels=ids)


def experts_of(model):
    """Returns the modules of experts of a model, by name."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "is_transposed")}


def put_in_mxfp4(model):
    """Turns the experts of gpt-oss into such in MXFP4, whose codes are drawn."""
    g = torch.Generator().manual_seed(4)
    for module, rule in found_experts(model).items():
        stacks = []
        for name in rule.stacks:
            count, inputs, rows = getattr(module, name).shape
            shape = (count, rows, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=g, dtype=torch.uint8)
            scales = torch.randint(121, 125, shape, generator=g, dtype=torch.uint8)
            stacks.append(mxfp4_matrix(blocks, scales))
        QuantizedExperts.take(module, rule, stacks)


def in_float64(model):
    """Returns a copy whose experts can be called in float64."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    return exact


def step(model, inputs, seed=7):
    """Returns the loss and the gradients, by name."""
    torch.manual_seed(seed)
    out = model(**inputs)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": out.loss.detach()} | grads

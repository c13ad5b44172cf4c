"""Small models of transformers, one of each architecture that Headroom knows, and batches."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
TIGHT = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
WIDE = SIZES | TIGHT | dict(intermediate_size=48, num_key_value_heads=2, max_position_embeddings=64)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
MODELS = {
    "Llama": ("LlamaForCausalLM", WIDE),
    "Mistral": ("MistralForCausalLM", WIDE | dict(sliding_window=5, head_dim=12)),
    "Qwen2": ("Qwen2ForCausalLM", WIDE),
    "Qwen3": ("Qwen3ForCausalLM", WIDE | dict(head_dim=16)),
    "Gemma": ("GemmaForCausalLM", WIDE | dict(head_dim=16)),
    "Gemma2": ("Gemma2ForCausalLM", WIDE | dict(head_dim=16, sliding_window=5)),
    "Gemma3": ("Gemma3ForCausalLM", WIDE | dict(head_dim=16, sliding_window=5)),
    "Phi3": (
        "Phi3ForCausalLM",
        WIDE
        | dict(
            rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
        ),
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        SIZES | TIGHT | dict(n_positions=64, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0),
    ),
    "Bert": (
        "BertForMaskedLM",
        SIZES | TIGHT | NO_DROPOUT | dict(intermediate_size=48, max_position_embeddings=64),
    ),
}
TOKENS = 12


def config_of(name, **options):
    kind, shape = MODELS[name]
    kind = "Gemma3Text" if name == "Gemma3" else name
    return getattr(transformers, f"{kind}Config")(**(shape | options))


def model_of(name, **options):
    torch.manual_seed(5)
    model = getattr(transformers, MODELS[name][0])(config_of(name, **options))
    for parameter in model.parameters():  # zeros and ones hide what is left out
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def inputs_of(padded=False, tokens=TOKENS):
    ids = torch.randint(3, 61, (2, tokens), generator=torch.Generator().manual_seed(3))
    if not padded:
        return dict(input_ids=ids, labels=ids)
    mask = torch.ones_like(ids)
    mask[1, tokens - 4 :] = 0
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))


def shaken(model):
    """Gives what trains other values, and returns the model in evaluation."""
    torch.manual_seed(8)
    for p in model.parameters():
        if p.requires_grad:
            p.data.normal_(std=0.1)
    return model.eval()


def outputs(model):
    """Returns the logits of a batch, without gradients."""
    with torch.no_grad():
        return model(input_ids=inputs_of()["input_ids"]).logits

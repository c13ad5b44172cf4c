"""Plans of packed sequences and windows, of which fakes hold no values."""

import headroom
import pytest
import torch
from headroom.memory import track
from headroom.nn import Transformer, TransformerConfig
from torch import nn
from torch.nn.attention import varlen


class Packed(nn.Module):
    def __init__(self, window=None):
        super().__init__()
        config = TransformerConfig(64, 32, 2, 4, 48, kv_heads=2, window=window, head=False)
        self.body = Transformer(config, save="L1")

    def forward(self, ids, ends):
        return self.body(ids, cu_seqlens=ends).square().mean()


def peaks(model, batch, call):
    """The planned and the measured peak of a step."""
    plan = headroom.plan(model, None, batch, forward=call)
    with track(model, batch=batch, stacks=False) as tracked:
        for _ in range(2):
            call(model, batch).backward()
            model.zero_grad()
    return plan.peak_bytes, tracked.peak_bytes


@pytest.mark.parametrize("lengths", [[128] * 8, [100, 300, 24, 600], [1024]], ids=str)
@pytest.mark.parametrize("window", [None, 64])
def test_a_plan_is_what_a_step_takes(lengths, window):
    ids = torch.randint(64, (1, 1024))
    batch = ids, torch.tensor([0, *lengths]).cumsum(0)
    planned, measured = peaks(Packed(window), batch, lambda model, batch: model(*batch))
    # The kernel's blocks of scores and of their gradients are planned as of a long sequence.
    blocks = torch.get_num_threads() * 256 * 512 * 4 * 2
    assert measured - 16 <= planned <= measured * 1.001 + blocks
    if len(lengths) == 1 and window is None:
        assert planned == pytest.approx(measured, rel=0.001)


def model_of(name, attention="sdpa", **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        attn_implementation=attention, **options,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


BATCHES = {
    "packed": ("Llama", {}, {"position_ids": torch.arange(256)[None] % 64}),
    "packed, ones": (
        "Llama",
        {},
        {"position_ids": torch.arange(256)[None] % 64, "attention_mask": torch.ones(1, 256)},
    ),
    "packed, padding": (
        "Llama",
        {},
        {
            "position_ids": torch.arange(256)[None] % 64,
            "attention_mask": (torch.arange(256) < 250)[None],
        },
    ),
    "one sequence": ("Llama", {}, {"position_ids": torch.arange(256)[None]}),
    "window, ones": ("Mistral", {"sliding_window": 32}, {"attention_mask": torch.ones(1, 256)}),
}


@pytest.mark.parametrize(
    "case, patched",
    [(case, case != "one sequence") for case in BATCHES],
)
def test_plans_of_models_of_transformers(case, patched):
    name, options, more = BATCHES[case]
    model = model_of(name, **options)
    if patched:
        headroom.patch(model, "L1")
    ids = torch.randint(50, (1, 256))
    batch = {"input_ids": ids, "labels": ids} | {k: v.long() for k, v in more.items()}
    planned, measured = peaks(model, batch, lambda model, batch: model(**batch).loss)
    assert planned == pytest.approx(measured, rel=0.005)


def test_a_plan_for_a_gpu_leaves_torch_to_look_at_the_gpu():
    batch = torch.randint(64, (1, 64)), torch.tensor([0, 20, 64])
    plan = headroom.plan(
        Packed().bfloat16(), None, batch, device="cuda", forward=lambda m, b: m(*b)
    )
    assert any(a.op == "torch_attn::_varlen_attn" for a in plan.timeline.allocations)
    for function in (varlen._should_use_cudnn, varlen._cudnn_version_and_major_capability):
        assert function.cache_info().currsize == 0

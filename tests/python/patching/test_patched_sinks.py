"""Attention with sinks in models of transformers, which `patch` takes from eager attention."""

import copy

import headroom
import pytest
import torch
from headroom.integrations.transformers import register_attention
from headroom.patching import attention

from helpers.bits import assert_same_bits
from helpers.hf_models import transformers

SIZES = dict(
    vocab_size=61, hidden_size=32, intermediate_size=16, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, sliding_window=7,
    layer_types=["sliding_attention", "full_attention"], pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
ALL = dict(num_experts=3, num_local_experts=3, num_experts_per_tok=3)  # none is chosen by rounding
FAMILIES = {
    "GptOss": ("GptOssForCausalLM", ALL),
    "GraniteSWA": ("GraniteSWAForCausalLM", {}),
    "GraniteMoeSWA": ("GraniteMoeSWAForCausalLM", ALL),
    "Flint": ("FlintForCausalLM", ALL | dict(moe_intermediate_size=16)),
    "OpenAIPrivacyFilter": ("OpenAIPrivacyFilterForTokenClassification", ALL),
}
TOKENS = 20
IDS = torch.randint(3, 61, (2, TOKENS), generator=torch.Generator().manual_seed(3))


def model_of(name, **options):
    kind, more = FAMILIES[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers has no {kind}")
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**SIZES | more | options)
    model = getattr(transformers, kind)(config)
    for parameter in model.parameters():  # zeros and ones hide what is left out
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def run(model, **inputs):
    """Logits, and the gradients of a sum over them."""
    logits = model(**inputs).logits.float()
    trained = dict(model.named_parameters())
    grads = torch.autograd.grad(logits.sin().sum(), trained.values(), allow_unused=True)
    found = {name: grad for name, grad in zip(trained, grads) if grad is not None}
    assert any("sinks" in name for name in found)
    return {"logits": logits.detach()} | found


def only_sinks(model):
    """Patches nothing but what would change other roundings, too."""
    return headroom.patch(model, "L0", norms=False, experts=False)


@pytest.fixture
def calls(monkeypatch):
    """What is given to the op."""
    seen = []

    def watched(*heads, **options):
        seen.append(options)
        return headroom.functional.sink_attention(*heads, **options)

    monkeypatch.setattr(attention, "sink_attention", watched)
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_are_those_of_eager_attention(name, calls):
    model = model_of(name)
    wanted = run(model, input_ids=IDS)
    report = only_sinks(model)
    assert f"2 attention ({name}Attention) -> headroom.functional.sink_attention" in str(report)
    got = run(model, input_ids=IDS)
    assert len(calls) == 2
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-4, msg=key)
    headroom.unpatch(model)
    assert model.config._attn_implementation == "eager"
    again = run(model, input_ids=IDS)
    assert_same_bits(list(again.values()), list(wanted.values()))
    assert len(calls) == 2


def test_layers_have_windows_by_turns(calls):
    model = model_of("GptOss")
    headroom.patch(model)
    model(input_ids=IDS)
    assert [given["window"] for given in calls] == [7, None]
    assert all(given["causal"] for given in calls)
    calls.clear()
    model = model_of("OpenAIPrivacyFilter")
    headroom.patch(model)
    model(input_ids=IDS)
    assert [(given["window"], given["causal"]) for given in calls] == [(8, False)] * 2


@pytest.mark.parametrize("name", ["GptOss", "GraniteSWA"])
def test_errors_in_16_bits_are_not_larger(name):
    model = model_of(name).bfloat16()
    exact = copy.deepcopy(model).double()
    if name == "GptOss":
        exact.set_experts_implementation("eager")
    true, theirs = run(exact, input_ids=IDS), run(model, input_ids=IDS)
    only_sinks(model)
    got = run(model, input_ids=IDS)

    def error(found):
        return sum((found[key] - true[key]).norm() / true[key].norm() for key in true) / len(true)

    assert error(got) <= 1.1 * error(theirs)


PADDING = torch.ones_like(IDS)
PADDING[0, :5] = 0  # on the left
PADDING[1, -5:] = 0
OWN = {
    "padding": dict(attention_mask=PADDING),
    "dropout": {},
    "float64": {},
    "attentions": dict(output_attentions=True),
}


@pytest.mark.parametrize("case", OWN)
@pytest.mark.parametrize("name", ["GptOss", "GraniteSWA", "OpenAIPrivacyFilter"])
def test_what_the_op_does_not_take_is_eager_attention(name, case, calls):
    model = model_of(name, attention_dropout=0.3 if case == "dropout" else 0.0)
    if case == "float64":
        model.double()
        model.set_experts_implementation("eager")  # others take no float64
    found = []
    for patch in (lambda model: None, only_sinks):
        patch(model)
        torch.manual_seed(0)
        out = model(input_ids=IDS, **OWN[case])
        seen = out.logits[PADDING.bool()] if case == "padding" else out.logits
        found.append([seen, *(out.attentions or ())])
    assert len(found[1]) == (3 if case == "attentions" else 1)
    for got, wanted in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert not calls


def test_a_mask_of_ones_says_nothing(calls):
    model = model_of("GptOss")
    wanted = run(model, input_ids=IDS)
    only_sinks(model)
    got = run(model, input_ids=IDS, attention_mask=torch.ones_like(IDS))
    assert len(calls) == 2
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", ["GptOss", "GraniteSWA"])
def test_generation(name, calls):
    model = model_of(name).eval()
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    wanted = model.generate(IDS, attention_mask=PADDING.flip(0)[:, :], **options)
    plain = model.generate(IDS, **options)
    headroom.patch(model)
    assert model.generate(IDS, attention_mask=PADDING.flip(0)[:, :], **options).equal(wanted)
    assert not calls
    assert model.generate(IDS, **options).equal(plain)
    assert len(calls) == 2  # of what is given; tokens that follow see a cache


def test_packed_sequences_do_not_see_each_other(calls):
    """By their ends: these models of transformers look at no positions for their masks."""
    model = model_of("GptOss")
    lengths = (8, 3, 9)
    ids = IDS[:1]
    alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    headroom.patch(model)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, 8, 11, 20], dtype=torch.int32)
    more = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=9, max_length_k=9)
    out = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits
    torch.testing.assert_close(out, torch.cat(alone, 1), rtol=1e-4, atol=3e-5)
    assert [given["cu_seqlens"].tolist() for given in calls] == [[0, 8, 11, 20]] * 2
    assert [given["longest"] for given in calls] == [9, 9]
    mask = (torch.arange(20) < 18)[None]
    with pytest.raises(ValueError, match="was given cu_seq_lens_q and an attention_mask with padd"):
        model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, **more)


def test_autocast(calls):
    model = model_of("GptOss")
    with torch.autocast("cpu", torch.bfloat16):
        wanted = run(model, input_ids=IDS)
        only_sinks(model)
        got = run(model, input_ids=IDS)
    assert len(calls) == 2
    for key, value in wanted.items():
        error = (got[key] - value).norm() / value.norm()
        assert error < 0.05, key


def test_by_name_without_patch(calls):
    model = model_of("GptOss")
    wanted = model(input_ids=IDS).logits
    model.set_attn_implementation(register_attention())
    torch.testing.assert_close(model(input_ids=IDS).logits, wanted, rtol=1e-4, atol=3e-5)
    assert len(calls) == 2
    report = headroom.patch(model)
    assert not any(one.kind == "attention" for each in report.swapped.values() for one in each)


def test_what_was_chosen_stays():
    model = model_of("GptOss", attn_implementation="flex_attention")
    report = headroom.patch(model)
    assert model.config._attn_implementation == "flex_attention"
    assert "sink_attention" not in str(report)


def test_checkpointed_layers_and_levels(calls):
    model = model_of("GptOss")
    wanted = run(model, input_ids=IDS)
    for level in ("L0", "L1", "L2", "L5"):
        headroom.patch(model, level)
        got = run(model, input_ids=IDS)
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value, rtol=2e-4, atol=2e-4, msg=f"{level} {key}")
    assert len(calls) == 2 * 5


def test_compiles(fresh_dynamo):
    model = model_of("GraniteSWA")
    headroom.patch(model)
    wanted = model(input_ids=IDS, use_cache=False).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got = compiled(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=3e-5)

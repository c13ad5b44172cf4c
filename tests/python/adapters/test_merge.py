"""Adapters that become part of the weights, what rounding takes of them, and the way back."""

import copy
import functools
import sys

import headroom
import pytest
import safetensors.torch
import torch
from headroom.nn import Linear4bit, Linear8bit, LoRALinear
from torch import nn

from helpers.bits import assert_same_bits
from helpers.few_bits import error, gradients, with_bitsandbytes
from helpers.hf_models import inputs_of, model_of

transformers = pytest.importorskip("transformers")


def adapted(name="Llama", to=None, dtype=torch.float32, std=0.05, **options):
    """Returns a model whose adapters are not zero."""
    model = model_of(name).to(dtype)
    if to is not None:
        headroom.quantize(model, to)
    headroom.lora(model, 3, alpha=5, **options)
    torch.manual_seed(4)
    for key, p in model.named_parameters():
        if "lora_B" in key or "lora_embedding_A" in key:
            nn.init.normal_(p, std=std)
        if "magnitude" in key:
            p.data *= 1 + 0.2 * torch.rand_like(p)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=inputs_of()["input_ids"]).logits


def layers_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def exact_weight(layer):
    base = layer.base_layer
    weight = base.dequantize(torch.float32) if hasattr(base, "dequantize") else base.weight
    weight = weight.t() if type(base).__name__ == "Conv1D" else weight
    total = weight.detach().double()
    for name in layer.active:
        a, b = layer.lora_A[name].weight.double(), layer.lora_B[name].weight.double()
        total = total + layer.adapters[name].scale * (b @ a).detach()
        if layer.adapters[name].dora:
            lengths = layer.magnitude(name).detach().double() / total.norm(dim=1)
            total = total * lengths.unsqueeze(1)
    return total


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("to", [None, "nf4", "int8"])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
@pytest.mark.parametrize("dora", [False, True])
def test_weights_are_the_sum_rounded_once(name, to, dtype, dora):
    model = adapted(name, to, torch.bfloat16 if dtype is None else torch.float32, dora=dora)
    before = {path: exact_weight(layer) for path, layer in layers_of(model).items()}
    state = copy.deepcopy(model.state_dict())
    wanted = logits(model)
    report = headroom.merge(model, dtype)
    assert [one.name for one in report.merged] == [*before] and not layers_of(model)
    for one in report.merged:
        layer, total = model.get_submodule(one.name), before[one.name]
        assert type(layer) is nn.Linear and layer.weight.dtype == (dtype or torch.bfloat16)
        assert not layer.weight.requires_grad
        eps = torch.finfo(layer.weight.dtype).eps
        # One rounding of a sum whose terms float32 holds.
        assert ((layer.weight.double() - total).abs() <= 0.501 * eps * total.abs() + 1e-6).all()
        assert 0 <= one.lost < (1e-5 if dtype == torch.float32 else 0.5)
    if dtype == torch.float32:
        torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
    assert headroom.unmerge(model) is model
    assert [*layers_of(model)] == [*before]
    assert_same_bits(list(model.state_dict().values()), list(state.values()))
    assert_same_bits(logits(model), wanted)


@pytest.mark.parametrize("dora", [False, True])
def test_embeddings_and_copies_of_modules(dora):
    options = dict(targets=["embed_tokens", "up_proj"], modules_to_save=["lm_head", "norm"])
    model = adapted(dora=dora, **options)
    embedding, head = model.model.embed_tokens, model.lm_head
    head.weight.data += 0.1
    state, wanted = copy.deepcopy(model.state_dict()), logits(model)
    a, b = embedding.matrices("default")
    total = (embedding.weight.double() + embedding.adapters["default"].scale * (b @ a).T).detach()
    if dora:
        total = total * (embedding.magnitude("default") / total.norm(dim=0))
    for _ in range(2):
        report = headroom.merge(model)
        assert type(model.model.embed_tokens) is nn.Embedding
        torch.testing.assert_close(model.model.embed_tokens.weight.double(), total)
        assert model.lm_head is head.modules_to_save["default"]
        assert [one.name for one in report.merged][-2:] == ["model.norm", "lm_head"]
        torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
        again = copy.deepcopy(model)
        headroom.unmerge(model)
        assert model.lm_head is head and model.model.embed_tokens is embedding
        assert_same_bits(list(model.state_dict().values()), list(state.values()))
        assert_same_bits(logits(model), wanted)
        assert_same_bits(logits(headroom.unmerge(again)), wanted)


def test_a_merged_embedding_does_not_call_what_it_was_made_of():
    model = adapted(targets=["embed_tokens"])
    base = model.model.embed_tokens.base_layer
    base.forward = functools.partial(type(base).forward, base)  # as accelerate sets it
    wanted = logits(model)
    headroom.merge(model)
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
    headroom.unmerge(model)
    assert_same_bits(logits(model), wanted)


def test_what_is_lost_is_what_rounding_took():
    """In bfloat16, small adapters vanish in part, and the report says how much of them."""
    model = adapted(dtype=torch.bfloat16, std=1e-3)
    layer, path = next(iter(layers_of(model).values())), next(iter(layers_of(model)))
    total, base = exact_weight(layer), layer.base_layer.weight.double()
    report = headroom.merge(model)
    got = model.get_submodule(path).weight.double()
    wanted = ((got - total).norm() / (total - base).norm()).item()
    assert report.merged[0].lost == pytest.approx(wanted, rel=1e-3) and wanted > 0.1
    assert report.lost == max(one.lost for one in report.merged)
    assert f"rounding took at most {report.lost:.2%}" in str(report)
    assert len(str(report).splitlines()) == 6
    assert repr(report) == f"MergeReport(LlamaForCausalLM: 14 merged, lost {report.lost:.2%})"


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("to", [None, "nf4"])
def test_panels_of_a_weight_are_its_rows(to, dora, monkeypatch):
    """However many are added at a time: what is written has the same numbers."""
    model = adapted(to=to, targets=["q_proj", "down_proj", "embed_tokens"], dora=dora)
    other = copy.deepcopy(model)
    whole = headroom.merge(model, torch.float32)
    monkeypatch.setattr(sys.modules["headroom.adapters.merge"], "PANEL", 7 * 32)
    found = headroom.merge(other, torch.float32)
    for one, wanted in zip(found.merged, whole.merged):
        x, y = (each.get_submodule(one.name).weight.data for each in (other, model))
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
        assert one.lost == pytest.approx(wanted.lost, rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_requantizing_keeps_the_dtype(to, dtype):
    model = adapted(to=to, dtype=dtype, targets=["q_proj"])
    headroom.merge(model, requantize=True)
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.weight_dtype == dtype and layer.dequantize().dtype == dtype
    headroom.dequantize(model)
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == dtype


@pytest.mark.parametrize("to", ["nf4", "fp4", "int8"])
def test_requantizing_is_for_those_who_ask(to):
    model = adapted(to=to, targets=["q_proj"])
    state, wanted = copy.deepcopy(model.state_dict()), logits(model)
    base = next(iter(layers_of(model).values())).base_layer
    plain = headroom.merge(copy.deepcopy(model)).lost
    report = headroom.merge(model, requantize=True)
    layer = model.model.layers[0].self_attn.q_proj
    assert type(layer) is (Linear8bit if to == "int8" else Linear4bit)
    assert (layer.format, layer.block_size, layer.nested) == (to, base.block_size, base.nested)
    assert report.lost > 100 * plain
    assert not torch.equal(logits(model), wanted)
    headroom.unmerge(model)
    assert_same_bits(list(model.state_dict().values()), list(state.values()))
    with pytest.raises(ValueError, match="no layer with an adapter is one of headroom.quantize"):
        headroom.merge(adapted(), requantize=True)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_adapters_are_added_to_the_original_weights(name, tmp_path):
    original = model_of(name)
    original.save_pretrained(tmp_path)
    model = model_of(name)
    headroom.quantize(model)
    headroom.lora(model, 3)
    for layer in layers_of(model).values():
        nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    deltas = {path: layer.delta() for path, layer in layers_of(model).items()}
    headroom.merge(model, base=tmp_path)
    for path, delta in deltas.items():
        wanted = original.get_submodule(path).weight.data
        wanted = (wanted.t() if name == "GPT2" else wanted) + delta
        torch.testing.assert_close(model.get_submodule(path).weight.data, wanted)
    headroom.unmerge(model)
    path = next(iter(deltas))
    weights = {f"{one}.weight": original.get_submodule(one).weight.data for one in deltas}
    weights[f"{path}.weight"] = torch.ones(3, 3)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{path}.weight' in base is torch.float32 \[3, 3\]"):
        headroom.merge(model, base=tmp_path)
    del weights[f"{path}.weight"]
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"base has no '{path}.weight'"):
        headroom.merge(model, base=tmp_path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_original_weights_that_are_not_finite(value, tmp_path):
    model = adapted(to="nf4", targets=["q_proj"])
    before, wanted = [*model.state_dict()], logits(model)
    weights = {f"{one}.weight": torch.randn(32, 32) for one in layers_of(model)}
    path = [*weights][-1]
    weights[path][4, 5] = value
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"'{path}' in base has an element that is not finite"):
        headroom.merge(model, base=tmp_path)
    assert [*model.state_dict()] == before
    assert_same_bits(logits(model), wanted)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_layers_of_bitsandbytes(kind):
    pytest.importorskip("bitsandbytes")
    model = with_bitsandbytes(model_of("Llama"), kind).eval()
    headroom.lora(model, 3)
    for layer in layers_of(model).values():
        nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    headroom.patch(model)
    wanted = logits(model)
    headroom.merge(model, torch.float32)
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
    headroom.unmerge(model)
    assert_same_bits(logits(model), wanted)


def test_training_goes_on_after_unmerging_and_several_adapters_are_merged():
    model, inputs = adapted(), inputs_of()
    headroom.lora(model, 2, targets=["q_proj"], name="second")
    for path, layer in layers_of(model).items():
        if "q_proj" in path:
            nn.init.normal_(layer.lora_B["second"].weight, std=0.1)
    headroom.adapters.use_adapters(model, "default", "second")
    wanted, grads = logits(model), gradients(model, **inputs)
    params = [*model.parameters()]
    report = headroom.merge(model)
    assert report.merged[0].adapters == ("default", "second")
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
    again = copy.deepcopy(model)
    for one in (model, again):
        headroom.unmerge(one)
        assert error(gradients(one, **inputs), grads) < 1e-7
    assert all(mine is before for mine, before in zip(model.parameters(), params))


def test_adapters_that_came_after_merging_are_not_lost():
    model = adapted()
    wanted, names = logits(model), [*model.state_dict()]
    headroom.merge(model)
    headroom.lora(model, 2, name="later")
    merged = [*model.state_dict()]
    with pytest.raises(ValueError, match=r"q_proj' has got adapters \['later'\] since"):
        headroom.unmerge(model)
    assert [*model.state_dict()] == merged
    headroom.adapters.delete_adapter(model, "later")
    headroom.unmerge(model)
    assert_same_bits(logits(model), wanted)
    assert [*model.state_dict()] == names


def test_what_is_not_kept_does_not_come_back():
    model = adapted(to="nf4")
    headroom.merge(model, keep=False)
    assert not any("_before_merge" in vars(one) for one in model.modules())
    with pytest.raises(ValueError, match="no layer that headroom.merge has kept"):
        headroom.unmerge(model)


def test_a_merged_model_is_saved_as_any_other(tmp_path):
    model = adapted(to="nf4")
    headroom.merge(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_same_bits(logits(again), logits(model))


def test_what_cannot_be_merged():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no active adapter to merge"):
        headroom.merge(model_of("Llama"))
    model = adapted()
    headroom.adapters.use_adapters(model)
    with pytest.raises(ValueError, match="no active adapter"):
        headroom.merge(model)
    with pytest.raises(ValueError, match="dtype is torch.int8"):
        headroom.merge(adapted(), torch.int8)

"""An embedding and an output head with one weight: one adapter or one copy, its gradients, its
files beside PEFT's, and merging."""

import copy
import json
import pickle

import headroom
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from headroom.adapters import delete_adapter, use_adapters
from headroom.state import load_adapter, save_adapter
from torch import nn

from helpers.bits import assert_same_bits
from helpers.few_bits import error, gradients
from helpers.hf_models import inputs_of, model_of, outputs, shaken

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's about tied weights

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
A, B = (f"{EMBEDDING}.lora_embedding_{one}.default" for one in "AB")


class Tied(nn.Module):
    """A language model of no library."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 20)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids).tanh())


def tied(**options):
    return model_of("Llama", tie_word_embeddings=True, **options)


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head", ".*(embed_tokens|lm_head)"])
def test_one_pair_of_matrices_is_that_of_both(target):
    model = tied()
    before, weight = outputs(model.eval()), model.lm_head.weight
    report = headroom.lora(model, 3, targets=target if "(" in target else [target])
    assert trained(model) == {A, B}
    assert_same_bits(outputs(model), before)
    shaken(model)
    embedding, head = model.model.embed_tokens, model.lm_head
    assert embedding.base_layer.weight is head.base_layer.weight is weight
    assert_same_bits(head.delta(), embedding.delta().t())
    assert head.delta().norm() > 0 and not torch.equal(outputs(model), before)
    assert {(one.name, one.numel, one.tied_to) for one in report.adapted} == {
        (EMBEDDING, 3 * (61 + 32), None),
        (HEAD, 0, EMBEDDING),
    }
    assert report.trained == 3 * (61 + 32)
    assert "  lm_head (Linear) has the adapter of model.embed_tokens, as it has its" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_both_uses_are_added_up(dtype):
    torch.manual_seed(2)
    model = Tied()
    model.to(dtype)
    headroom.lora(model, 3, alpha=6, targets=["head"])
    shaken(model)
    ids, trains = torch.randint(20, (4, 6)), model.embedding.matrices("default")
    ids[0, 0] = 0  # padding, from which A has no gradient
    F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()

    def reference(dtype):
        base, bias = (p.detach().to(dtype) for p in (model.head.weight, model.head.bias))
        a, b = (p.detach().to(dtype).requires_grad_() for p in trains)
        scaled = 2 * torch.where(torch.arange(20) == 0, a.detach(), a)
        x = (base + (b @ scaled).t())[ids].tanh()
        logits = x @ base.t() + 2 * (x @ b) @ a + bias
        wide = torch.promote_types(dtype, torch.float32)
        F.cross_entropy(logits.flatten(0, 1).to(wide), ids.flatten()).backward()
        return {"A": a.grad, "B": b.grad}

    exact = reference(torch.float64)
    got = {name: p.grad for name, p in zip("AB", trains, strict=True)}
    assert {p.dtype for p in trains} == {torch.float32}
    assert error(got, exact) <= 2 * error(reference(dtype), exact)


def test_gradients_are_the_sum_of_those_of_peft(tmp_path):
    """Which has a parameter for each use, in one memory."""
    options = dict(r=3, lora_alpha=6, target_modules=["q_proj", "embed_tokens"])
    theirs = peft.get_peft_model(tied(), peft.LoraConfig(**options, ensure_weight_tying=True))
    shaken(theirs).save_pretrained(tmp_path)
    ours = tied().eval()
    load_adapter(ours, tmp_path)
    got, wanted = (gradients(one, **inputs_of()) for one in (ours, theirs))
    wanted = {key.removeprefix("base_model.model."): value for key, value in wanted.items()}
    wanted[B] = wanted[B] + wanted.pop("lm_head.lora_A.default.weight").t()
    wanted[A] = wanted[A] + wanted.pop("lm_head.lora_B.default.weight").t()
    assert error(got, wanted) < 1e-5


OPTIONS = {
    "embedding": dict(target_modules=["q_proj", "embed_tokens"]),
    "head": dict(target_modules=["q_proj", "lm_head"]),
    "dropout": dict(target_modules=["embed_tokens"], lora_dropout=0.1),
    "copy of the embedding": dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "copy of the head": dict(target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_files_of_peft_load_and_ours_are_the_same(options, tmp_path):
    config = peft.LoraConfig(r=4, lora_alpha=8, ensure_weight_tying=True, **options)
    theirs = peft.get_peft_model(tied(), config)
    shaken(theirs).save_pretrained(tmp_path / "theirs")
    wanted, ours = outputs(theirs), tied().eval()
    assert not torch.allclose(outputs(ours), wanted, atol=1e-2)
    load_adapter(ours, tmp_path / "theirs")
    torch.testing.assert_close(outputs(ours), wanted, rtol=1e-5, atol=1e-5)
    save_adapter(ours, tmp_path / "ours")
    files = [
        safetensors.torch.load_file(tmp_path / one / "adapter_model.safetensors")
        for one in ("ours", "theirs")
    ]
    weights = {key for key in files[1] if key.endswith("base_layer.weight")}
    assert files[0].keys() == files[1].keys() - weights
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["ensure_weight_tying"] is True
    again = peft.PeftModel.from_pretrained(tied(), tmp_path / "ours").eval()
    assert_same_bits(outputs(again), wanted)
    back = tied().eval()
    load_adapter(back, tmp_path / "ours")
    assert_same_bits(outputs(back), outputs(ours))


def test_a_base_that_does_not_tie_takes_the_same_files(tmp_path):
    model = tied()
    headroom.lora(model, 3, targets=["lm_head"])
    save_adapter(shaken(model), tmp_path)
    untied = model_of("Llama").eval()
    untied.load_state_dict(tied().state_dict())
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(untied), tmp_path)
    load_adapter(untied, tmp_path)
    for other in (untied, theirs):
        torch.testing.assert_close(outputs(other.eval()), outputs(model), rtol=1e-5, atol=1e-5)


UNTIED = {
    "an adapter of 'model.embed_tokens' alone": dict(target_modules=["embed_tokens"]),
    "an adapter of 'lm_head' alone": dict(target_modules=["lm_head"]),
    "an adapter of its own for each": dict(target_modules=["embed_tokens", "lm_head"]),
    "a weight of 'lm_head' alone": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "a weight of its own for each": dict(
        target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]
    ),
}


@pytest.mark.parametrize(("message", "options"), UNTIED.items(), ids=UNTIED)
def test_what_peft_has_untied_is_refused(message, options, tmp_path):
    theirs = peft.get_peft_model(tied(), peft.LoraConfig(r=4, **options))
    shaken(theirs).save_pretrained(tmp_path)
    model = tied()
    before = copy.deepcopy(model.state_dict())
    wanted = f"have the same weight in the model, and .*{message}.* would untie them"
    with pytest.raises(ValueError, match=wanted):
        load_adapter(model, tmp_path)
    assert_same_bits([*model.state_dict().values()], [*before.values()])
    assert all(p.requires_grad for p in model.parameters())


def test_scales_that_differ_are_refused(tmp_path):
    model = tied()
    headroom.lora(model, 3, targets=["lm_head"])
    save_adapter(shaken(model), tmp_path)
    place = tmp_path / "adapter_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"alpha_pattern": {"lm_head": 9}}))
    with pytest.raises(ValueError, match="'lm_head' have the same weight, .*different adapters"):
        load_adapter(tied(), tmp_path)


def test_one_copy_is_that_of_both():
    model = tied()
    weight = model.lm_head.weight
    report = headroom.lora(model, 2, targets=["q_proj"], modules_to_save=["lm_head"])
    embedding, head = model.model.embed_tokens, model.lm_head
    assert embedding.current.weight is head.current.weight is not weight
    assert embedding.original_module.weight is head.original_module.weight is weight
    assert sum(one.numel for one in report.copied) == weight.numel()
    assert report.trained == weight.numel() + 2 * 2 * 2 * 32
    headroom.merge(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight is not weight
    headroom.unmerge(model)
    assert model.lm_head is head and model.model.embed_tokens is embedding


def test_the_weight_itself_trains_and_is_saved(tmp_path):
    model = tied()
    headroom.lora(model, 2, targets=["q_proj"])
    model.lm_head.requires_grad_()
    wanted = outputs(shaken(model))
    save_adapter(model, tmp_path)
    again = peft.PeftModel.from_pretrained(tied(), tmp_path).eval()
    torch.testing.assert_close(outputs(again), wanted, rtol=1e-5, atol=1e-5)
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    other = tied().eval()
    load_adapter(other, tmp_path)
    assert_same_bits(outputs(other), wanted)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_merging_keeps_them_tied(dtype):
    model = tied()
    headroom.lora(model, 3, alpha=6, targets=["q_proj", "lm_head"])
    wanted, layers = outputs(shaken(model)), (model.model.embed_tokens, model.lm_head)
    delta = layers[1].delta().double()
    exact = model.lm_head.weight.double() + delta
    report = headroom.merge(model, dtype)
    assert {one.name for one in report.merged} >= {EMBEDDING, HEAD}
    merged = model.lm_head.weight
    assert type(model.lm_head) is nn.Linear and merged is model.model.embed_tokens.weight
    half = torch.finfo(merged.dtype).eps
    assert (merged.double() - exact).abs().max() <= half * exact.abs().max()
    lost = {one.name: one.lost for one in report.merged}
    assert lost[HEAD] == lost[EMBEDDING]
    if dtype is None:
        torch.testing.assert_close(outputs(model), wanted, rtol=1e-4, atol=1e-4)
    headroom.unmerge(model)
    assert (model.model.embed_tokens, model.lm_head) == layers
    assert_same_bits(outputs(model), wanted)
    model.lm_head.enabled = False
    with pytest.raises(ValueError, match="'lm_head' adds the adapters .* merging would untie them"):
        headroom.merge(model)


def test_the_loss_without_logits_is_not_taken_but_right():
    model = tied()
    headroom.lora(model, 3, targets=["q_proj", "lm_head"])
    shaken(model).train()
    wanted = gradients(model, **inputs_of())
    headroom.patch(model, "L1", loss=True)
    assert error(gradients(model, **inputs_of()), wanted) < 1e-5
    assert model(**inputs_of()).logits is not None


def test_several_adapters_copies_and_pickles():
    model = tied()
    headroom.lora(model, 3, targets=["lm_head"])
    headroom.lora(model, 2, targets=["embed_tokens"], name="second")
    assert trained(model) == {one.replace("default", "second") for one in (A, B)}
    use_adapters(model, "default", "second")
    wanted = outputs(shaken(model))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.lm_head.tied_to is other.model.embed_tokens
        assert_same_bits(outputs(other), wanted)
    use_adapters(model, "second")
    wanted = outputs(model)
    delete_adapter(model)
    assert model.lm_head.names == model.model.embed_tokens.names == ["second"]
    assert_same_bits(outputs(model), wanted)
    headroom.quantize(model)
    assert model.lm_head.base_layer.weight is model.model.embed_tokens.base_layer.weight


def test_what_would_untie_them_is_refused():
    model = tied()
    with pytest.raises(ValueError, match="'lm_head' have the same weight, and DoRA would train"):
        headroom.lora(model, targets=["lm_head"], dora=True)
    with pytest.raises(ValueError, match="is to train as a whole, and .* has an adapter"):
        headroom.lora(model, targets=["embed_tokens"], modules_to_save=["lm_head"])
    assert not any("lora" in name for name in model.state_dict())
    other = Tied()
    report = headroom.lora(nn.Sequential(other, nn.Linear(20, 20), nn.Linear(20, 2)), 2)
    assert [one.name for one in report.adapted] == ["1"]  # "all-linear" leaves the head
    model = Tied()
    third = nn.Sequential(model, nn.Linear(8, 20, bias=False))
    third[1].weight = model.head.weight
    report = headroom.lora(third, 2, targets=["0.head"])
    assert [one.tied_to for one in report.adapted].count("0.embedding") == 2
    other = nn.Sequential(Tied(), nn.Embedding(20, 8))
    other[1].weight = other[0].head.weight
    with pytest.raises(ValueError, match="'0.head' and '1' have the same weight"):
        headroom.lora(other, 2, targets=["0.head"])


def test_a_plan_counts_them_once():
    model = tied(hidden_size=128, intermediate_size=256)
    report = headroom.lora(model, 4, targets=["q_proj", "lm_head"])
    ids = torch.randint(3, 61, (2, 32))
    batch = dict(input_ids=ids, labels=ids)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    plan = headroom.plan(model, optimizer, batch)
    kinds = plan.peak_by_kind
    assert kinds["parameters"] == report.trained_bytes + report.frozen_bytes
    assert kinds["optimizer_state"] == 2 * report.trained_bytes + 4 * 6
    with headroom.memory.track(model, optimizer) as timeline:
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert abs(plan.total_bytes / timeline.peak_bytes - 1) <= 0.001

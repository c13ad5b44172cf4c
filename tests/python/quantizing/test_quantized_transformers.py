"""Models of transformers: what bitsandbytes quantized comes in, and what we quantize goes out."""

import copy

import headroom
import pytest
import torch
from headroom.nn import Linear4bit, Linear8bit, QuantizedExperts

from helpers.hf_models import inputs_of, model_of, transformers

bnb = pytest.importorskip("bitsandbytes")
KINDS = ["nf4", "fp4", "int8"]
# In rows that are no multiple of the blocks bitsandbytes' own loop reads wrong scales.
ROUND = dict(hidden_size=64, intermediate_size=128)


def config_of_bnb(kind, **options):
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    options = dict(bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32) | options
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, **options)


def loaded_by_transformers(folder, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", **options)
    return model.train()  # in evaluation bitsandbytes packs weights anew, and rounds scales


def on_meta(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def logits(model):
    with torch.no_grad():
        return model(input_ids=inputs_of()["input_ids"]).logits


def assert_same_entries(got, wanted):
    got, wanted = got.state_dict(), wanted.state_dict()
    assert set(got) == set(wanted)
    for key, value in wanted.items():
        assert torch.equal(
            got[key].view(-1),
            value.view(torch.uint8).view(-1) if got[key].dtype != value.dtype else value.view(-1),
        ), key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_what_transformers_saved_with_bitsandbytes(kind, tied, storage, tmp_path):
    model = model_of("Llama", tie_word_embeddings=tied, **ROUND)
    model.save_pretrained(tmp_path / "wide")
    config = config_of_bnb(kind, bnb_4bit_quant_storage=storage)
    theirs = loaded_by_transformers(tmp_path / "wide", quantization_config=config)
    theirs.save_pretrained(tmp_path / "packed")
    ours = on_meta(tmp_path / "packed")
    report = headroom.load_quantized(ours, tmp_path / "packed")
    assert len(report.quantized) == 14
    assert_same_entries(ours, theirs)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-3, atol=1e-3)
    assert ours.config.quantization_config[
        "bnb_4bit_quant_type" if kind != "int8" else "load_in_8bit"
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("double", [True, False])
def test_what_we_saved_loads_in_transformers(kind, tied, double, tmp_path):
    ours = model_of("Llama", tie_word_embeddings=tied, **ROUND)
    ours.save_pretrained(tmp_path / "wide")
    headroom.quantize(ours, kind, double=double, block_size=32, search=kind == "nf4")
    ours.save_pretrained(tmp_path / "packed")
    theirs = loaded_by_transformers(tmp_path / "packed")
    linear = bnb.nn.Linear8bitLt if kind == "int8" else bnb.nn.Linear4bit
    assert sum(isinstance(module, linear) for module in theirs.modules()) == 14
    assert_same_entries(ours, theirs)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-3, atol=1e-3)
    again = on_meta(tmp_path / "wide")
    headroom.load_quantized(
        again, tmp_path / "wide", kind, double=double, block_size=32, search=kind == "nf4"
    )
    assert_same_entries(again, ours)
    assert torch.equal(logits(again.train()), logits(ours.train()))


@pytest.mark.parametrize("name", ["GPT2", "Bert", "Gemma3", "Phi3"])
def test_other_architectures(name, tmp_path):
    model = model_of(name).eval()
    model.save_pretrained(tmp_path)
    kind = type(model)
    report = headroom.quantize(model)
    assert report.quantized and not any("lm_head" in one.name for one in report.quantized)
    wanted = headroom.dequantize(kind.from_pretrained(tmp_path).eval())
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        again = kind(config)
    headroom.load_quantized(again, tmp_path)
    assert_same_entries(again, model)
    inputs = inputs_of()
    close = model(**inputs).logits, wanted(**inputs).logits
    assert (close[0] - close[1]).abs().mean() < 0.3 * close[1].abs().mean() + 0.1
    assert torch.equal(again.eval()(**inputs).logits, close[0])


def test_conv1d_is_transposed(tmp_path):
    model = model_of("GPT2").eval()
    wide = {
        name: one.weight.detach().clone()
        for name, one in model.named_modules()
        if type(one).__name__ == "Conv1D"
    }
    headroom.quantize(model)
    for name, weight in wide.items():
        layer = model.get_submodule(name)
        assert type(layer) is Linear4bit and layer.dequantize().shape == weight.T.shape
        assert (layer.dequantize() - weight.T).abs().max() < 0.2 * weight.abs().max()
    model.save_pretrained(tmp_path)
    theirs = loaded_by_transformers(tmp_path)
    assert_same_entries(model, theirs)


def test_classifiers_and_weights_in_float32_are_left():
    config = dict(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(intermediate_size=48, max_position_embeddings=40, **config)
    )
    report = headroom.quantize(model)
    left = {one.name: one.reason for one in report.left}
    assert left["classifier.dense.weight"] == left["classifier.out_proj.weight"] == "an output head"
    t5 = transformers.T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4
    )
    report = headroom.quantize(transformers.T5ForConditionalGeneration(t5))
    left = {one.name: one.reason for one in report.left}
    assert (
        left["encoder.block.0.layer.1.DenseReluDense.wo.weight"]
        == "transformers keeps it in float32"
    )


SMALL = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
SMALL |= dict(num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=16)
T5 = dict(vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, num_experts=4)
GEMMA = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, hidden_size_per_layer_input=8)
# Models whose experts, routers and gates differ, and the names of routers that are linear layers.
MIXTURES = {
    "Gemma4ForCausalLM": ("Gemma4TextConfig", SMALL | GEMMA, ["router.proj"]),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", SMALL | dict(num_experts=4), ["shared_expert_gate"]),
    "AfmoeForCausalLM": ("AfmoeConfig", SMALL | dict(num_experts=4), ["router.gate"]),
    "JetMoeForCausalLM": ("JetMoeConfig", SMALL | dict(kv_channels=16), ["router.layer"]),
    "SwitchTransformersModel": ("SwitchTransformersConfig", T5, ["router.classifier"]),
    "MixtralForCausalLM": ("MixtralConfig", SMALL | dict(num_local_experts=4), []),
    "DogeForCausalLM": ("DogeConfig", SMALL | dict(is_moe=True, num_experts=16), ["router_gate"]),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_routers_are_left(name):
    kind, options, routers = MIXTURES[name]
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, kind)(**options))
    linears = {
        path for path, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "." in path
    }
    wanted = {path for path in linears if path.endswith(tuple(routers))} if routers else set()
    assert bool(wanted) == bool(routers)
    other = copy.deepcopy(model)
    report = headroom.quantize(model)
    left = {one.name.removesuffix(".weight"): one.reason for one in report.left}
    assert {path for path, why in left.items() if why.startswith("a part of a router")} == wanted
    experts = {path for path, m in model.named_modules() if isinstance(m, QuantizedExperts)}
    assert bool(experts) == name.startswith(("Gemma4", "Qwen2Moe", "Afmoe", "Mixtral"))
    assert {one.name for one in report.quantized} == experts | linears - wanted
    assert all(left[path] == left[next(iter(wanted))] for path in wanted)
    report = headroom.lora(other, 2)
    assert {one.name for one in report.left if "router" in one.reason} == wanted
    assert {one.name for one in report.adapted} == linears - wanted
    if name == "MixtralForCausalLM":
        experts = [one for one in report.left if "experts" in one.reason]
        numel = sum(p.numel() for key, p in other.named_parameters() if "experts" in key)
        whole = sum(p.numel() for p in other.parameters()) - report.trained
        assert len(experts) == 4 and numel == 4 * 3 * 32 * 48 * 2
        line = f"which get no adapter: {numel:,} of {whole:,} parameters"
        assert "left: 4 MixtralExperts (model.layers.0.mlp.experts.gate_up_proj" in str(report)
        assert line in str(report)
    if name == "Gemma4ForCausalLM":  # who names a router gets it
        path = next(iter(wanted))
        assert [one.name for one in headroom.lora(other, 2, targets=[path], name="b").adapted] == [
            path
        ]


class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(8, 4)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(4)])


def test_gates_are_routers_beside_experts_alone():
    dense = torch.nn.ModuleDict({"gate": torch.nn.Linear(8, 8), "up": torch.nn.Linear(8, 8)})
    model = torch.nn.ModuleDict({"a": Mixture(), "b": dense, "head": torch.nn.Linear(8, 2)})
    report = headroom.quantize(model)
    assert [one.name for one in report.quantized] == [
        *(f"a.experts.{k}" for k in range(4)),
        *("b.gate", "b.up"),
    ]


def test_what_transformers_keeps_in_float32_by_longer_names():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    model.mlp = torch.nn.ModuleDict({"scale": torch.nn.Linear(8, 8), "up": torch.nn.Linear(8, 8)})
    model.last = torch.nn.Linear(8, 2)
    model._keep_in_fp32_modules_strict = ["mlp.scale.weight", "1", "up.bias"]
    report = headroom.quantize(model)
    left = {one.name: one.reason for one in report.left}
    assert left["mlp.scale.weight"] == left["1.weight"] == "transformers keeps it in float32"
    assert [one.name for one in report.quantized] == ["0", "2", "mlp.up"]


def test_the_config_follows_the_layers():
    model = model_of("Llama")
    headroom.quantize(model, skip=["mlp", "lm_head"])
    assert model.config.quantization_config["bnb_4bit_quant_type"] == "nf4"
    skipped = model.config.quantization_config["llm_int8_skip_modules"]
    assert "lm_head" in skipped and "model.layers.0.mlp.up_proj" in skipped
    headroom.quantize(model, "int8")  # of two formats, which bitsandbytes' config cannot say
    assert not hasattr(model.config, "quantization_config")
    assert {type(m) for m in model.modules()} >= {Linear4bit, Linear8bit}
    headroom.dequantize(model)
    assert not hasattr(model.config, "quantization_config")


def test_adapters_of_peft_are_left_and_trained():
    peft = pytest.importorskip("peft")
    model = model_of("Llama", **ROUND)
    headroom.quantize(model)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    outputs = model(**inputs_of())
    outputs.loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained and all("lora_" in name for name in trained)
    dense = peft.get_peft_model(model_of("Llama", **ROUND), config)
    report = headroom.quantize(dense)
    assert len(report.quantized) == 14 and all("base_layer" in one.name for one in report.quantized)
    dense(**inputs_of()).loss.backward()

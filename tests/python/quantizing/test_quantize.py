"""Models whose linear layers are put into few bits, in place, and what is said of the rest."""

import copy
import gc
import weakref

import headroom
import pytest
import torch
from headroom.functional import quantize_matrix
from headroom.nn import Linear4bit, Linear8bit, Transformer, TransformerConfig
from torch import nn
from torch.nn.utils import prune

from helpers.bits import assert_same_bits

CLASS = {"nf4": Linear4bit, "fp4": Linear4bit, "int8": Linear8bit}


class Model(nn.Module):
    """Layers, a head, and what is no linear layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.up = nn.Linear(32, 72)
        self.down = headroom.nn.Linear(72, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 20)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(self.norm(x + self.down(self.up(x).relu())))


def names(report):
    return [one.name for one in report.quantized]


def reasons(report):
    return {one.name: one.reason for one in report.left}


@pytest.mark.parametrize("to", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("search", [False, True])
def test_layers_are_quantized(to, dtype, double, search):
    model = Model().to(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = headroom.quantize(model, to, block_size=32, double=double, search=search)
    assert names(report) == ["up", "down"]
    for name in names(report):
        layer = model.get_submodule(name)
        wanted = quantize_matrix(before[f"{name}.weight"], to, 32, double, search)
        assert type(layer) is CLASS[to]
        assert_same_bits(layer.weight.detach(), wanted.codes)
        assert_same_bits(layer.scales.detach(), wanted.scales)
        assert layer.weight_dtype == dtype and not layer.weight.requires_grad
    assert_same_bits(model.up.bias.detach(), before["up.bias"])
    assert model.up.bias.requires_grad and model.embedding.weight.requires_grad
    assert report.before == sum(p.nbytes for p in before.values())
    assert report.after == sum(p.nbytes for p in model.parameters())
    assert reasons(report)["head.weight"] == "an output head"
    assert {one.name for one in report.left} == {
        name for name, p in model.named_parameters() if p.is_floating_point()
    }
    assert model(torch.arange(4)).dtype == dtype
    headroom.dequantize(model)
    assert type(model.up) is nn.Linear and type(model.down) is nn.Linear
    assert {name for name, _ in model.named_parameters()} == before.keys()
    assert model.up.weight.dtype == dtype and model.up.weight.requires_grad
    assert repr(model.up) == repr(nn.Linear(32, 72))
    model(torch.arange(4)).sum().backward()


def test_the_report_can_be_read():
    report = headroom.quantize(Model())
    assert str(report).splitlines() == [
        "headroom.quantize: Model, parameters of 23.6 KiB -> 7.95 KiB",
        "  2 Linear -> nf4: 18.0 KiB -> 2.34 KiB",
        "  left, 2.50 KiB: 1 of Embedding (embedding.weight): not the weight of a linear layer",
        "  left, 2.50 KiB: 1 of Linear (head.weight): an output head",
        "  left, 288 B: 1 of Linear4bit (up.bias): a vector",
        "  left, 256 B: 2 of LayerNorm (norm.weight and others): a vector",
        "  left, 80 B: 1 of Linear (head.bias): a vector",
    ]
    assert repr(report).startswith("QuantizeReport(Model: 2 quantized, 6 left, ")


def test_modules_and_their_hooks_stay():
    model, calls = Model(), []
    up, frozen = model.up, model.eval()
    up.register_forward_hook(lambda *_: calls.append("hook"))
    headroom.quantize(model)
    assert model.up is up and not up.training and frozen is model
    model(torch.arange(4))
    assert calls == ["hook"]


def test_the_weight_that_was_is_freed():
    model = Model()
    weight = weakref.ref(model.up.weight)
    headroom.quantize(model)
    gc.collect()
    assert weight() is None


def test_meta_and_deep_copies():
    """A model without values can be planned; a copy has the bytes."""
    with torch.device("meta"):
        empty = Model()
    report = headroom.quantize(empty)
    assert report.after == headroom.quantize(model := Model()).after
    assert_same_bits(list(copy.deepcopy(model).parameters()), list(model.parameters()))


def test_a_patched_model_and_a_model_of_ours():
    config = TransformerConfig(vocab_size=40, hidden_size=32, layers=2, heads=4, features=48)
    model, other = Transformer(config), None
    other = copy.deepcopy(model)
    headroom.patch(model)
    assert names(headroom.quantize(model)) == names(headroom.quantize(other))
    assert not any("head" in name for name in names(headroom.quantize(Transformer(config))))
    ids = torch.randint(40, (2, 6))
    torch.testing.assert_close(model(ids), other(ids))
    headroom.unpatch(model)
    torch.testing.assert_close(model(ids), other(ids))


# ---- what is left --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skip", "wanted"),
    [
        ((), ["0.up", "0.down", "0.head", "1.up", "1.down", "1.head"]),
        ("head", ["0.up", "0.down", "1.up", "1.down"]),
        (["0"], ["1.up", "1.down", "1.head"]),
        (["1", "0.*p"], ["0.down", "0.head"]),
        (["?.up", "down"], ["0.head", "1.head"]),
    ],
)
def test_names_that_are_skipped(skip, wanted):
    report = headroom.quantize(nn.Sequential(Model(), Model()), skip=skip)
    assert names(report) == wanted
    assert "named in skip" in [*reasons(report).values(), *(["named in skip"] if not skip else [])]


def test_an_end_of_a_name_after_no_dot_is_none():
    with pytest.raises(ValueError, match="skip: the model has no module with the name 'p'"):
        headroom.quantize(Model(), skip=["p"])


def test_trained_layers_beside_frozen_ones_are_left():
    model = Model()
    model.adapter = nn.Linear(32, 32)
    model.last = nn.Linear(32, 32)
    for name in ("up", "down"):
        model.get_submodule(name).weight.requires_grad_(False)
    report = headroom.quantize(model)
    assert names(report) == ["up", "down"]
    assert reasons(report)["adapter.weight"] == "it is trained, and others are frozen"


def test_adapters_that_do_not_train_are_left():
    model = Model()
    for name in ("first", "second"):
        headroom.lora(model, 4, name=name, targets=["up", "down"])
    report = headroom.quantize(model)
    assert names(report) == ["up.base_layer", "down.base_layer"]
    assert reasons(report)["up.lora_A.first.weight"] == "a part of an adapter"
    headroom.adapters.use_adapters(model, "first")
    model(torch.arange(3)).sum().backward()
    assert model.up.lora_B["first"].weight.grad is not None


def test_encoder_layers_of_torch_call_layers_of_few_bits_in_eval():
    """Their fast path would read codes as a weight."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    assert len(headroom.quantize(model).quantized) == 4
    x, padding = torch.randn(2, 5, 32), torch.arange(5) > torch.tensor([[2], [4]])
    for options in ({}, {"src_key_padding_mask": padding}):
        wanted = model.train()(x, **options)
        with torch.no_grad():
            got = model.eval()(x, **options)
        torch.testing.assert_close(got[~padding], wanted[~padding], rtol=1e-4, atol=1e-5)


class Own(nn.Linear):
    pass


def test_layers_that_are_more_than_linear_are_left():
    model = Model()
    model.own, model.attention = Own(32, 32), nn.MultiheadAttention(32, 2)
    model.wide = nn.Linear(32, 32, dtype=torch.float64)
    model.empty, model.replaced = nn.Linear(0, 32), nn.Linear(32, 32)
    model.replaced.forward = lambda x: x
    model.experts = nn.ParameterList([nn.Parameter(torch.randn(2, 8, 8))])
    model.convolution = nn.Conv1d(4, 4, 3)
    model.pruned = prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.5)
    model.last = nn.Linear(32, 32)
    report = headroom.quantize(model)
    assert names(report) == ["up", "down", "head"]
    assert "weight_orig" in model.pruned._parameters
    found = reasons(report)
    assert found["own.weight"].startswith("of a subclass of Linear")
    assert found["attention.out_proj.weight"].startswith("of a subclass of Linear")
    assert found["wide.weight"] == "it is torch.float64"
    assert found["replaced.weight"] == "its forward was replaced"
    assert found["experts.0"].startswith("matrices of experts")
    assert found["convolution.weight"] == "not the weight of a linear layer"
    assert found["last.weight"] == "an output head"


def test_tied_weights_are_left_or_refused():
    model = Model()
    model.head.weight = model.embedding.weight
    model.last = nn.Linear(32, 32)
    model.up.weight = nn.Parameter(torch.randn(72, 32))
    report = headroom.quantize(copy.deepcopy(model))
    assert names(report) == ["up", "down"]
    with pytest.raises(ValueError, match="'head.weight' is also 'embedding.weight': name one"):
        headroom.quantize(model, skip=())
    assert type(model.up) is nn.Linear
    headroom.quantize(model, skip="head")


def test_a_module_in_two_places_is_quantized_once():
    model = Model()
    model.again = model.up
    report = headroom.quantize(model)
    assert names(report) == ["up", "down"] and model.again is model.up


# ---- what is refused -----------------------------------------------------------------------------


def refused(model, error, message, **options):
    before = {name: p for name, p in model.named_parameters()}
    with pytest.raises(error, match=message):
        headroom.quantize(model, **options)
    for name, param in model.named_parameters():
        assert param is before[name]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_named(value, dtype):
    model = Model().to(dtype)
    with torch.no_grad():
        model.down.weight[3, 5] = value
    refused(model, ValueError, "'down.weight' has an element that is not finite")


def test_memory_of_another_parameter_is_refused():
    model, whole = Model(), torch.randn(144, 32)
    model.up.weight = nn.Parameter(whole[:72])
    model.other = nn.Linear(32, 72)
    model.other.weight = nn.Parameter(whole[72:])
    model.last = nn.Linear(32, 32)
    refused(model, ValueError, "'up.weight' and 'other.weight' lie in one storage")


def test_what_is_quantized_already():
    model = Model()
    headroom.quantize(model, skip=["up", "head"])
    assert names(headroom.quantize(model, "int8")) == ["up"]
    refused(model, ValueError, "no layer is left: 2, such as 'up', are quantized already")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "int4"}, "to is 'int4', wanted one of nf4, fp4, int8"),
        ({"block_size": 48}, "block_size is 48, wanted a power of two"),
        ({"block_size": 64.0}, "block_size is 64.0"),
        ({"block_size": 8192}, "block_size is 8192"),
    ],
)
def test_bad_arguments(options, message):
    refused(Model(), ValueError, message, **options)


def test_models_without_layers():
    refused(nn.Embedding(3, 3), ValueError, "Embedding has no linear layer")
    refused(nn.Linear(3, 3), ValueError, "1 are skipped, such as '': an output head")
    for function in (headroom.quantize, headroom.dequantize):
        with pytest.raises(TypeError, match="model is 3, wanted an instance of nn.Module"):
            function(3)


def test_one_layer_can_be_the_model():
    model = nn.Linear(3, 3)
    assert names(headroom.quantize(model, skip=())) == [""]
    assert type(model) is Linear4bit
    assert type(headroom.dequantize(model, torch.bfloat16)) is nn.Linear
    assert model.weight.dtype == torch.bfloat16


def test_training_adapters_on_frozen_weights():
    """The loss falls, and the bytes stay."""
    model = Model()
    headroom.quantize(model)
    before = [model.up.weight.clone(), model.up.scales.clone()]
    optimizer = headroom.optim.AdamW(model.parameters(), lr=1e-2)
    ids, losses = torch.arange(20), []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert_same_bits([model.up.weight, model.up.scales], before)

"""Models that bitsandbytes has built: their weights are read in place, and all is undone."""

import copy
import pickle

import headroom
import pytest
import torch
from headroom.patching.bitsandbytes import CLASSES, Held
from torch import nn

from helpers.bits import assert_same_bits
from helpers.few_bits import bitsandbytes_layer, error, freeze, gradients, with_bitsandbytes
from helpers.hf_models import inputs_of, model_of

bnb = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

LAYERS = [
    ("nf4", dict(nested=True)),
    ("nf4", dict(nested=False, storage=torch.bfloat16)),
    ("fp4", dict(nested=True, storage=torch.float32)),
    ("int8", {}),
]
OUT, IN = 24, 128


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def layer(kind="nf4", dtype=torch.float32, **options):
    torch.manual_seed(1)
    weight, bias = torch.randn(OUT, IN, dtype=dtype), torch.randn(OUT, dtype=dtype)
    return bitsandbytes_layer(kind, weight, bias, **options)


def passes(module, x):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(torch.ones_like(y))
    grads = x.grad, module.bias.grad
    module.bias.grad = None
    return dict(zip(("y", "x", "bias"), (y.detach(), *grads)))


def stored(x):
    """Returns the bytes of a tensor, as numbers some may be NaN."""
    return x.detach().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_a_layer_reads_its_weight_in_place(kind, options, dtype):
    module, x = layer(kind, dtype, **options), torch.randn(5, IN, dtype=dtype)
    wanted = passes(module, x)
    before = {name: stored(t).clone() for name, t in module.state_dict().items()}
    report = headroom.patch(module)
    assert str(report).count(f"1 Linear in {kind}") == 1
    q = Held().matrix(module)
    assert q.format == kind and q.shape == (OUT, IN)
    assert q.codes.untyped_storage().data_ptr() == module.weight.untyped_storage().data_ptr()
    got = passes(module, x)
    rounded = 2e-6 if dtype == torch.float32 else 1e-2
    assert error(got, wanted) < rounded and not isinstance(got["y"], nn.Parameter)
    assert type(got["y"]) is torch.Tensor and type(got["x"]) is torch.Tensor
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same_bits(passes(other, x).values(), got.values())
    after = module.state_dict()
    assert all(torch.equal(before[name], stored(after[name])) for name in before)
    report.undo()
    assert "forward" not in vars(module)
    assert_same_bits(passes(module, x).values(), wanted.values())


def test_the_dtype_that_a_layer_was_told_to_compute_in_holds():
    module, x = layer(compute=torch.bfloat16), torch.randn(5, IN)
    headroom.patch(module)
    y = module(x)
    exact = (
        x.bfloat16()
        @ headroom.functional.dequantize_matrix(Held().matrix(module), torch.bfloat16).t()
        + module.bias.bfloat16()
    )
    assert y.dtype == torch.float32 and torch.equal(y, y.bfloat16().float())
    torch.testing.assert_close(y, exact.float(), rtol=2e-2, atol=2e-1)


def test_a_weight_that_was_replaced_is_read_anew():
    module, x = layer("nf4"), torch.randn(5, IN)
    headroom.patch(module)
    module(x)
    other = layer("nf4", nested=False)
    with torch.no_grad():
        module.weight = bnb.nn.Params4bit(
            2 * torch.randn(OUT, IN), requires_grad=False, quant_type="nf4"
        ).to("cpu")
    wanted = headroom.functional.linear_quantized(x, Held().matrix(module), module.bias)
    assert torch.equal(module(x), wanted) and not torch.equal(module(x), other(x))
    module.weight.data = module.weight.data.flip(0)
    assert not torch.equal(module(x), wanted)


def test_a_copy_has_no_codes_twice():
    module = layer()
    size = len(pickle.dumps(module))
    headroom.patch(module)
    module(torch.randn(2, IN))
    assert len(pickle.dumps(module)) < size + OUT * IN // 4


def test_layers_that_cannot_be_read_are_left_and_named():
    never = bnb.nn.Linear4bit(IN, OUT)
    trained = bnb.nn.Linear8bitLt(IN, OUT, has_fp16_weights=True)
    replaced, packed = layer(), layer()
    replaced.forward = replaced.forward
    packed.weight.quant_state.packing_format_for_cpu = True
    odd = layer(nested=False)
    odd.weight.quant_state.code = odd.weight.quant_state.code * 2
    model = nn.Sequential(never, trained, replaced, packed, odd, layer())
    report = headroom.patch(model)
    reasons = {left.name: left.reason for left in report.left}
    words = ["not quantized yet", "16 bits", "replaced its forward", "packed its weight anew"]
    words.append("is not the map of this format")
    for name, word in enumerate(words):
        assert word in reasons.pop(str(name)), name
    assert not reasons and [*report.swapped] == ["5"]


def test_what_was_packed_after_the_patch_and_float64_go_to_bitsandbytes(monkeypatch):
    module = layer()
    headroom.patch(module)
    called = []
    monkeypatch.setattr(type(module), "forward", lambda self, x: called.append(x) or x)
    module(torch.randn(2, IN))
    assert not called
    module(torch.randn(2, IN, dtype=torch.float64))
    module.weight.quant_state.packing_format_for_cpu = True
    module(torch.randn(2, IN))
    assert len(called) == 2


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_compilation(kind):
    module, x = layer(kind), torch.randn(5, IN)
    headroom.patch(module)
    wanted = passes(module, x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same_bits([compiled(x)], [wanted["y"]])


def test_the_classes_are_those_of_bitsandbytes():
    assert all(issubclass(getattr(bnb.nn, name), nn.Linear) for name in CLASSES)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@pytest.mark.parametrize(("kind", "options"), LAYERS[1:])
def test_models_at_every_level(name, kind, options):
    wide = dict(hidden_size=64) | ({} if name == "GPT2" else dict(intermediate_size=128))
    model = freeze(with_bitsandbytes(model_of(name, **wide), kind, **options))
    inputs = inputs_of(padded=True)
    theirs = gradients(copy.deepcopy(model), **inputs)
    wanted = None
    for level in (*headroom.nn.LEVELS, "L1@host"):
        headroom.patch(model, level)
        got = gradients(model, **inputs)
        wanted = wanted or got
        assert_same_bits(got.values(), wanted.values())
    assert error(wanted, theirs) < 1e-5
    headroom.unpatch(model)
    assert_same_bits(gradients(model, **inputs).values(), theirs.values())


def test_a_model_that_transformers_quantizes_while_it_loads(tmp_path):
    model_of("Llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    kind = transformers.LlamaForCausalLM
    model = kind.from_pretrained(tmp_path, quantization_config=config, device_map="cpu").train()
    freeze(model)
    theirs = gradients(model, **inputs_of())
    report = headroom.patch(model, "L5")
    assert sum(one[0].kind == "Linear in nf4" for one in report.swapped.values()) == 14
    assert error(gradients(model, **inputs_of()), theirs) < 1e-5

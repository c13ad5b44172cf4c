"""Layers with adapters: values and gradients against float64, several adapters, and copies."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from headroom.nn import Linear4bit, Linear8bit, LoRAEmbedding, LoRALinear
from headroom.nn.fused import is_known
from headroom.nn.lora import Adapter
from torch import nn

from helpers.bits import assert_same_bits

BASES = {
    "dense": nn.Linear,
    "nf4": Linear4bit,
    "int8": Linear8bit,
}


def layer_of(base="dense", rank=3, dtype=torch.float32, bias=True, **options):
    """Returns a layer of 24 columns and 40 rows with an adapter that is not zero."""
    torch.manual_seed(1)
    layer = LoRALinear(BASES[base](24, 40, bias=bias).to(dtype).requires_grad_(False))
    add(layer, "default", rank, **options)
    layer.active = ("default",)
    return layer


def add(layer, name, rank, alpha=None, dropout=0.0, **options):
    layer.add_adapter(name, Adapter(rank, alpha or rank, dropout, **options))
    nn.init.normal_(layer.lora_B[name].weight)
    if (lengths := layer.magnitude(name)) is not None:
        lengths.data *= 1 + 0.5 * torch.rand_like(lengths)


def exact(layer, x, names=("default",)):
    """Returns the product in float64, and leaves for its gradients: x, A and B of each name."""
    base, leaf = layer.base_layer, lambda t: t.detach().double().requires_grad_()
    weight = base.dequantize() if hasattr(base, "dequantize") else base.weight
    x64 = leaf(x)
    y = x64 @ weight.double().T
    leaves = {"x": x64}
    for name in names:
        a, b = leaf(layer.lora_A[name].weight), leaf(layer.lora_B[name].weight)
        scale = layer.adapters[name].scale
        y = y + scale * (x64 @ a.T) @ b.T
        leaves |= {f"lora_A.{name}.weight": a, f"lora_B.{name}.weight": b}
        if layer.adapters[name].dora:
            lengths = leaf(layer.magnitude(name))
            y = y * (lengths / (weight.double() + scale * b @ a).norm(dim=1).detach())
            leaves[f"lora_magnitude_vector.{name}.weight"] = lengths
    return y if base.bias is None else y + base.bias.double(), leaves


def assert_close_to(layer, x, names=("default",), tolerance=1e-6):
    x = x.detach().requires_grad_()
    y, (wanted, leaves) = layer(x), exact(layer, x, names)
    dy = torch.randn(y.shape)
    y.backward(dy.to(y.dtype))
    wanted.backward(dy.to(y.dtype).double())
    assert y.dtype == x.dtype
    got = {"x": x.grad} | {k: p.grad for k, p in layer.named_parameters() if p.grad is not None}
    assert got.keys() == leaves.keys()
    error = (y.double() - wanted).norm() / max(wanted.norm(), 1e-9)
    assert error <= tolerance
    for key, leaf in leaves.items():
        grad = got[key].double()
        assert (grad - leaf.grad).norm() <= tolerance * max(leaf.grad.norm(), 1e-9), key
    layer.zero_grad()


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("rank", [1, 3, 16, 64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24), (1, 24), (0, 24), (24,)])
def test_values_and_gradients(base, rank, bias, shape, dora):
    layer = layer_of(base, rank, bias=bias, alpha=2 * rank, dora=dora)
    assert_close_to(layer, torch.randn(shape))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_x_in_16_bits_and_adapters_in_32(base, dtype, dora):
    layer = layer_of(base, 4, dtype, dora=dora)
    assert layer.lora_A["default"].weight.dtype == torch.float32
    assert_close_to(layer, torch.randn(9, 24).to(dtype), tolerance=3 * torch.finfo(dtype).eps)


def ops_of(layer, x):
    """Returns how often a call runs the op of adapters."""
    with torch.profiler.profile() as profile:
        layer(x)
    return [event.name for event in profile.events()].count("headroom::lora_linear")


@pytest.mark.parametrize("base", BASES)
def test_one_op_computes_base_and_adapters(base):
    layer, x = layer_of(base, dropout=0.1), torch.randn(4, 24)
    add(layer, "second", 2, dropout=0.1)
    layer.active = ("default", "second")
    assert ops_of(layer, x) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert ops_of(layer, x) == ops_of(layer, x.bfloat16()) == 1
    layer.adapters["second"] = Adapter(2, 2.0)
    assert ops_of(layer, x) == 1  # and two products of the other, which drops nothing
    layer.enabled = False
    assert ops_of(layer, x) == 0


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("what", ["trained", "hook", "forward", "subclass", "float64"])
def test_a_base_that_does_more_is_called(what, dora):
    layer, x = layer_of(dora=dora), torch.randn(4, 24)
    base = layer.base_layer
    if what == "trained":
        base.requires_grad_()
    if what == "hook":
        base.register_forward_hook(lambda *_: None)
    if what == "forward":
        base.forward = lambda x: nn.Linear.forward(base, x)
    if what == "subclass":
        base.__class__ = type("Other", (nn.Linear,), {})
    if what == "float64":
        layer, x = layer.double(), x.double()
    assert ops_of(layer, x) == 0
    base.requires_grad_(False)
    assert_close_to(layer, x.float() if what != "float64" else x)


def test_a_new_adapter_changes_nothing():
    layer = LoRALinear(nn.Linear(24, 40))
    layer.add_adapter("default", Adapter(8, 8.0))
    layer.active = ("default",)
    x = torch.randn(3, 24)
    assert_same_bits(layer(x), layer.base_layer(x))
    bound = math.sqrt(1 / 24)  # kaiming_uniform(a=sqrt(5))
    largest = layer.lora_A["default"].weight.abs().max()
    assert 0.8 * bound < largest <= bound and not layer.lora_B["default"].weight.any()


@pytest.mark.parametrize("base", BASES)
def test_a_new_adapter_with_dora_changes_one_rounding(base):
    layer = LoRALinear(BASES[base](24, 40))
    layer.add_adapter("default", Adapter(8, 8.0, dora=True))
    layer.active = ("default",)
    x = torch.randn(3, 24)
    torch.testing.assert_close(layer(x), layer.base_layer(x), rtol=1e-6, atol=1e-6)


def test_a_row_of_zeros_stays_one_with_dora():
    layer = LoRALinear(nn.Linear(24, 40).requires_grad_(False))
    layer.base_layer.weight[7] = 0
    layer.add_adapter("default", Adapter(8, 8.0, dora=True))
    layer.active = ("default",)
    y = layer(torch.randn(3, 24))
    y.sum().backward()
    assert bool((y[:, 7] == layer.bias[7]).all())
    assert all(bool(p.grad.isfinite().all()) for p in layer.trained("default"))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("hooked", [False, True])
def test_dropout_of_dora_is_that_of_peft(base, hooked):
    """Both parts that the adapter adds are those of the dropped x."""
    layer, x = layer_of(base, 3, dropout=0.4, dora=True), torch.randn(9, 24)
    if hooked:
        layer.base_layer.register_forward_hook(lambda *_: None)
    torch.manual_seed(3)
    got = layer(x)
    torch.manual_seed(3)
    dropped = F.dropout(x, 0.4).double()
    layer.adapters["default"] = Adapter(3, 3.0, dora=True)
    with_dropped = exact(layer, dropped)[0]
    layer.active = ()
    plain, of_dropped = exact(layer, x, ())[0], exact(layer, dropped, ())[0]
    torch.testing.assert_close(got.double(), plain + with_dropped - of_dropped, rtol=0, atol=1e-5)


def test_several_adapters_with_dora_are_refused():
    layer = layer_of(dora=True)
    add(layer, "second", 2)
    for names in (("default", "second"), ["second", "default"]):
        with pytest.raises(ValueError, match="cannot be added up, because one has DoRA"):
            layer.active = names
    assert layer.active == ("default",)
    layer.active = ("second",)
    assert_close_to(layer, torch.randn(4, 24), ("second",))
    layer.delete_adapter("default")
    assert not [name for name, _ in layer.named_parameters() if "magnitude" in name]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [None, 3])
def test_embeddings(dtype, padding, dora):
    torch.manual_seed(2)
    base = nn.Embedding(12, 6, padding_idx=padding).to(dtype).requires_grad_(False)
    layer, ids = LoRAEmbedding(base), torch.tensor([[1, 3, 3], [11, 0, 1]])
    layer.add_adapter("default", Adapter(2, 5.0, dora=dora))
    layer.active = ("default",)
    torch.testing.assert_close(layer(ids), base(ids))
    a, b = layer.matrices("default")
    nn.init.normal_(a)
    a.data[:, padding if padding is not None else []] = 0  # as they stay, without a gradient
    layer.add_adapter("second", Adapter(2, 5.0))
    leaves = [p.detach().double().requires_grad_() for p in layer.trained("default")]
    weight = base.weight.double() + 2.5 * (leaves[1] @ leaves[0]).T
    if dora:
        layer.magnitude("default").data *= 1.5
        leaves[2].data *= 1.5
        weight = weight * (leaves[2] / weight.norm(dim=0).detach())
    wanted = F.embedding(ids, weight, padding_idx=padding)
    got = layer(ids)
    dy = torch.randn(got.shape).to(dtype)
    got.backward(dy)
    wanted.backward(dy.double())
    tolerance = 3 * torch.finfo(dtype).eps
    assert got.dtype == dtype and (got - wanted).norm() <= tolerance * wanted.norm()
    for param, leaf in zip(layer.trained("default"), leaves, strict=True):
        assert (param.grad - leaf.grad).norm() <= 2 * tolerance * leaf.grad.norm()
    layer.enabled = False
    assert_same_bits(layer(ids), base(ids))


def test_scales():
    assert Adapter(4, 8.0).scale == 2
    assert Adapter(4, 8.0, rslora=True).scale == 4


def test_several_adapters_are_added_up():
    layer = layer_of(rank=2, alpha=6)
    add(layer, "second", 5, alpha=1)
    add(layer, "third", 4, rslora=True)
    x = torch.randn(6, 24)
    for names in [("second",), ("default", "third"), ("default", "second", "third"), ()]:
        layer.active = names
        assert_close_to(layer, x, names)
    layer.enabled = False
    assert_same_bits(layer(x), layer.base_layer(x))
    layer.enabled = True
    layer.active = ("default", "second")
    layer.delete_adapter("second")
    layer.delete_adapter("second")
    assert layer.active == ("default",) and "second" not in layer.lora_A
    assert_close_to(layer, x)


@pytest.mark.parametrize("dropouts", [(0.5, 0.0), (0.5, 0.5), (0.2, 0.5)])
def test_dropout_zeroes_elements_of_x_in_training(dropouts):
    layer = layer_of(rank=2, dropout=dropouts[0])
    add(layer, "second", 3, dropout=dropouts[1])
    layer.active = ("default", "second")
    assert layer.draws and not is_known(layer)
    x = torch.randn(50, 24)
    torch.manual_seed(5)
    first = layer(x)
    torch.manual_seed(5)
    assert_same_bits(layer(x), first)
    assert not torch.equal(layer(x), first)
    mean = torch.stack([layer(x) for _ in range(3000)]).mean(0)
    layer.eval()
    assert not layer.draws and is_known(layer)
    assert (mean - layer(x)).norm() < 0.05 * layer(x).norm()
    assert_close_to(layer, x, layer.active)


def test_gradients_are_those_of_the_mask_that_was_drawn():
    layer = layer_of(rank=4, dropout=0.5)
    x = torch.randn(6, 24, requires_grad=True)

    def run(x, a, b):
        torch.manual_seed(2)
        parameters = {"lora_A.default.weight": a, "lora_B.default.weight": b}
        return torch.func.functional_call(layer, parameters, (x,))

    a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    for k, leaf in enumerate((x, a, b)):
        given, direction, step = [x, a, b], torch.randn_like(leaf), 1e-2
        run(*given).square().sum().backward()
        slope = (leaf.grad.double() * direction).sum()
        ends = []
        for sign in (1, -1):
            moved = [t.detach() for t in given]
            moved[k] = moved[k] + sign * step * direction
            ends.append(run(*moved).double().square().sum())
        assert abs((ends[0] - ends[1]) / (2 * step) / slope - 1) < 1e-2
        x.grad = a.grad = b.grad = None


@pytest.mark.parametrize("base", BASES)
def test_hooks_and_forwards_of_the_base_run(base):
    layer, seen = layer_of(base), []
    layer.base_layer.register_forward_hook(lambda *_: seen.append(1))
    assert_close_to(layer, torch.randn(3, 24))
    assert seen == [1]
    assert not is_known(layer)


def test_a_layer_answers_for_its_base():
    layer = layer_of(dtype=torch.bfloat16)
    assert (layer.in_features, layer.out_features) == (24, 40)
    assert layer.weight is layer.base_layer.weight and layer.bias is layer.base_layer.bias
    assert "default: rank=3, active=['default']" in repr(layer)
    names = {name for name, _ in layer.named_parameters()}
    assert names == {
        "base_layer.weight",
        "base_layer.bias",
        "lora_A.default.weight",
        "lora_B.default.weight",
    }


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_copies_and_states(base, dora):
    layer, x = layer_of(base, dora=dora), torch.randn(3, 24)
    wanted = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    other = layer_of(base, dora=dora)
    nn.init.zeros_(other.lora_B["default"].weight)
    other.load_state_dict(layer.state_dict())
    for one in (copy.deepcopy(layer), torch.load(file, weights_only=False), other):
        assert_same_bits(one(x), wanted)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_autocast_and_compilation(base, dora):
    layer, x = layer_of(base, dora=dora), torch.randn(5, 24)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
    assert low.dtype == torch.bfloat16
    assert 0 < (low - layer(x)).norm() < 2e-2 * layer(x).norm()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(rank=0), ValueError, "rank is 0, wanted 1 or more"),
        (dict(rank=2.0), TypeError, "rank is 2.0, wanted an integer"),
        (dict(alpha="8"), TypeError, "alpha must be a number, got '8'"),
        (dict(alpha=math.inf), ValueError, "alpha is inf, wanted a finite number"),
        (dict(dropout=1.0), ValueError, r"dropout is 1.0, wanted a number in \[0, 1\)"),
        (dict(dropout=-0.1), ValueError, r"dropout is -0.1, wanted a number in \[0, 1\)"),
        (dict(rslora=1), TypeError, "rslora is 1, wanted True or False"),
        (dict(dora=1), TypeError, "dora is 1, wanted True or False"),
    ],
)
def test_numbers_that_are_none(given, error, message):
    with pytest.raises(error, match=message):
        Adapter(**({"rank": 4, "alpha": 4.0} | given))


def test_only_adapters_that_there_are_can_be_active():
    layer = layer_of()
    for names in ("default", ["default", "second"]):  # a string has letters, not names
        with pytest.raises(ValueError, match=r"there is no adapter '(d|second)'; there are \['def"):
            layer.active = names
    layer.active = ["default", "default"]
    assert layer.active == ("default",)


def test_a_name_that_is_taken():
    with pytest.raises(ValueError, match="there is an adapter 'default' already"):
        layer_of().add_adapter("default", Adapter(4, 4.0))

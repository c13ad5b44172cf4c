"""Linear layers with frozen weights in 4 and 8 bits, and their state_dict beside bitsandbytes'."""

import copy
import io
import json
import pickle

import headroom
import pytest
import torch
from headroom.functional import QuantizedMatrix, dequantize_matrix, quantize_matrix
from headroom.nn import Linear4bit, Linear8bit
from torch import nn

from helpers.bits import assert_same_bits

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
STATE = "weight.quant_state.bitsandbytes__"
OUT, IN = 37, 131  # an odd number of weights, whose last block is short in any size


def layer(kind="nf4", out=OUT, in_=IN, **options):
    if kind == "int8":
        return Linear8bit(in_, out, **options)
    return Linear4bit(in_, out, format=kind, **options)


def theirs(kind, weight, bias=None, nested=True, block_size=64, storage=torch.uint8):
    """Returns a layer of bitsandbytes."""
    bnb = pytest.importorskip("bitsandbytes")
    out, in_ = weight.shape
    if kind == "int8":
        found = bnb.nn.Linear8bitLt(in_, out, bias=bias is not None, has_fp16_weights=False)
        found.weight = bnb.nn.Int8Params(weight, requires_grad=False)
    else:
        found = bnb.nn.Linear4bit(in_, out, bias=bias is not None, quant_storage=storage)
        options = dict(quant_type=kind, compress_statistics=nested, blocksize=block_size)
        options |= dict(quant_storage=storage, module=found)
        found.weight = bnb.nn.Params4bit(weight, requires_grad=False, **options)
    if bias is not None:
        found.bias = nn.Parameter(bias)
    return found.to("cpu")


def assert_same_entries(got, wanted):
    assert list(got) == list(wanted)
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype, key
        assert torch.equal(got[key], value), key


def as_bytes(entries):
    """Returns entries whose codes are bytes, as ours are in any storage."""
    return entries | {"weight": entries["weight"].view(torch.uint8).view(-1, 1)}


# ---- bitsandbytes' state_dict --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("block_size", [32, 64, 256, 4096])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_state_of_4_bits_comes_and_goes(kind, nested, block_size, dtype, storage):
    shape = (OUT, IN) if storage == torch.uint8 else (OUT, 8 * IN)
    weight = torch.randn(shape).to(dtype)
    entries = theirs(kind, weight, weight[:, 0], nested, block_size, storage).state_dict()
    ours = Linear4bit(*shape[::-1], dtype=dtype)  # of another format, other blocks and no nesting
    ours.load_state_dict(entries)
    assert_same_entries(ours.state_dict(), as_bytes(entries))
    assert (ours.format, ours.block_size, ours.nested) == (kind, block_size, nested)
    assert ours.dequantize().dtype == dtype
    # Decoded by the torch fallback of bitsandbytes: its own loop reads wrong scales in odd shapes.
    absmax = entries["weight.absmax"].float()
    if nested:
        text = json.loads(bytes(entries[STATE + kind].tolist()))
        scale = entries["weight.nested_absmax"].repeat_interleave(256)[: len(absmax)]
        absmax = entries["weight.nested_quant_map"][absmax.long()] * scale + text["nested_offset"]
    codes = as_bytes(entries)["weight"].flatten()
    codes = torch.stack([codes >> 4, codes & 15], 1).flatten()[: weight.numel()]
    numbers = entries["weight.quant_map"][codes.long()]
    numbers *= absmax.repeat_interleave(block_size)[: len(numbers)]
    assert_same_bits(ours.dequantize(), numbers.to(dtype).view(shape))


def test_a_state_of_8_bits_comes_and_goes():
    weight = torch.randn(OUT, IN)
    other = theirs("int8", weight, weight[:, 0])
    entries = other.state_dict()
    ours = Linear8bit(IN, OUT)
    ours.load_state_dict(entries)
    assert_same_entries(ours.state_dict(), entries)
    rows = entries["weight"].float() * entries["SCB"][:, None] * 7.874015718698502e-3
    assert_same_bits(ours.dequantize(torch.float32), rows)
    del entries["weight_format"]
    ours.load_state_dict(entries)
    ours.load_state_dict(entries | {"weight_format": "row"})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_what_we_quantize_bitsandbytes_reads(kind, dtype):
    bnb = pytest.importorskip("bitsandbytes")
    ours = layer(kind, 48, 64, dtype=dtype)
    entries = ours.state_dict()
    x = torch.randn(3, 64, dtype=dtype)
    if kind == "int8":
        rows = bnb.functional.int8_vectorwise_dequant(entries["weight"], entries["SCB"])
        assert_same_bits(ours.dequantize(dtype), rows.to(dtype))
        return
    stats = {
        k.removeprefix("weight."): v for k, v in entries.items() if k not in ("weight", "bias")
    }
    param = bnb.nn.Params4bit.from_prequantized(entries["weight"], stats, device="cpu")
    theirs = bnb.functional.dequantize_4bit(param, param.quant_state)
    # Without AVX-512 bitsandbytes gives the second zero of FP4 a sign, which the sums take away.
    assert_same_bits(ours.dequantize() + 0.0, theirs + 0.0)
    other = bnb.nn.Linear4bit(64, 48, quant_type=kind)
    other.weight, other.bias = param, ours.bias
    torch.testing.assert_close(ours(x), other.train()(x))
    assert_same_entries(other.state_dict(), entries)


# ---- what is loaded ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_weight_of_16_bits_is_quantized(kind, assign):
    weight, bias = torch.randn(OUT, IN).bfloat16(), torch.randn(OUT)
    ours = layer(kind)
    ours.load_state_dict({"weight": weight, "bias": bias}, assign=assign)
    wanted = dequantize_matrix(quantize_matrix(weight, kind))
    assert_same_bits(ours.dequantize(), wanted)
    assert_same_bits(ours.bias.detach(), bias)
    assert not ours.weight.requires_grad and not ours.scales.requires_grad


def test_a_layer_on_meta_is_filled():
    entries = layer().state_dict()
    with torch.device("meta"):
        empty = layer(block_size=256)
    assert list(empty.state_dict()) == ["weight", "bias", "scales"]
    empty.load_state_dict(entries, assign=True)
    assert_same_entries(empty.state_dict(), entries)


def test_parameters_of_the_same_size_stay():
    """Graphs, and processes that share their memory, hold them."""
    ours, entries = layer(), layer().state_dict()
    before = ours.weight, ours.scales, ours.scales.data_ptr()
    ours.load_state_dict(entries)
    assert (ours.weight, ours.scales, ours.scales.data_ptr()) == before


def test_parameters_of_the_module_itself_are_loaded():
    """As a model that FSDP2 shards has them."""
    ours, other = layer(), layer()
    ours.load_state_dict(dict(other.named_parameters()))
    assert_same_entries(ours.state_dict(), other.state_dict())


def test_a_state_without_weights_is_not_strict():
    ours = layer()
    entries = ours.state_dict()
    found = ours.load_state_dict({}, strict=False)
    assert found.missing_keys == ["weight", "bias", "scales"]
    assert_same_entries(ours.state_dict(), entries)
    with pytest.raises(RuntimeError, match="Unexpected key.*other"):
        ours.load_state_dict(entries | {"other": torch.ones(1)})


def changed(entries, kind="nf4", **fields):
    text = json.loads(bytes(entries[STATE + kind].tolist())) | fields
    return entries | {STATE + kind: bytes_of(json.dumps(text))}


def bytes_of(text):
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def without(entries, key):
    return {k: v for k, v in entries.items() if k != key}


BAD_4BIT = {
    "codes of another size": (
        lambda e: e | {"weight": e["weight"][:-1]},
        "'weight' is torch.uint8",
    ),
    "more codes": (lambda e: e | {"weight": torch.cat([e["weight"]] * 2)}, "'weight' is"),
    "codes of int64": (lambda e: e | {"weight": e["weight"].long()}, "'weight' is torch.int64"),
    "no codes": (lambda e: without(e, "weight"), "'weight' is missing"),
    "no scales": (lambda e: without(e, "weight.absmax"), "'weight.absmax' is missing"),
    "short scales": (lambda e: e | {"weight.absmax": e["weight.absmax"][1:]}, "'weight.absmax' is"),
    "scales of f32": (
        lambda e: e | {"weight.absmax": e["weight.absmax"].float()},
        "wanted torch.uint8",
    ),
    "short nested": (
        lambda e: e | {"weight.nested_absmax": e["weight.nested_absmax"][1:]},
        "'weight.nested_absmax' is",
    ),
    "no nested": (lambda e: without(e, "weight.nested_absmax"), "must be there together"),
    "another map": (
        lambda e: e | {"weight.quant_map": e["weight.quant_map"].flip(0)},
        "'weight.quant_map' is not the map",
    ),
    "another nested map": (
        lambda e: e | {"weight.nested_quant_map": e["weight.nested_quant_map"] * 2},
        "'weight.nested_quant_map' is not the map",
    ),
    "no state": (lambda e: without(e, f"{STATE}nf4"), "it has no scales"),
    "two states": (lambda e: e | {f"{STATE}fp4": e[f"{STATE}nf4"]}, "wanted"),
    "another format": (
        lambda e: without(e | {f"{STATE}int3": e[f"{STATE}nf4"]}, f"{STATE}nf4"),
        "wanted 'weight.quant_state.bitsandbytes__nf4'",
    ),
    "no JSON": (lambda e: e | {f"{STATE}nf4": bytes_of("{")}, "is not JSON"),
    "no text": (lambda e: e | {f"{STATE}nf4": torch.tensor([300.0])}, "is not JSON"),
    "a list": (lambda e: e | {f"{STATE}nf4": bytes_of("[1]")}, "keys that are not known"),
    "other keys": (lambda e: changed(e, zero_point=3), "keys that are not known"),
    "another type": (lambda e: changed(e, quant_type="fp4"), "quant_type"),
    "another shape": (lambda e: changed(e, shape=[IN, OUT]), "the weight is .*and the layer"),
    "blocks of 48": (lambda e: changed(e, blocksize=48), "'blocksize' is 48"),
    "blocks of text": (lambda e: changed(e, blocksize="64"), "'blocksize' is 64"),
    "float64": (lambda e: changed(e, dtype="float64"), "'dtype' is float64"),
    "no dtype": (lambda e: changed(e, dtype="nn"), "'dtype' is nn"),
    "nested blocks": (lambda e: changed(e, nested_blocksize=128), "in blocks of 128"),
    "nested offset": (lambda e: changed(e, nested_offset="1"), "'nested_offset' is 1"),
    "a list of codes": (lambda e: e | {"weight.absmax": [1]}, "'weight.absmax' is list"),
    "codes of 8 bits": (lambda e: layer("int8").state_dict(), "it is in int8"),
    "codes alone": (lambda e: {k: e[k] for k in ("weight", "bias")}, "it has no scales"),
    "dense, transposed": (lambda e: {"weight": torch.randn(IN, OUT)}, "and the layer"),
    "not finite": (lambda e: {"weight": torch.full((OUT, IN), torch.inf)}, "not finite"),
    "own, of floats": (lambda e: {"weight": e["weight"], "scales": torch.ones(3)}, "'scales' is"),
}


@pytest.mark.parametrize("bad", BAD_4BIT)
@pytest.mark.parametrize("strict", [True, False])
def test_a_bad_state_of_4_bits_is_refused(bad, strict):
    ours = layer(block_size=32)
    before = copy.deepcopy(ours.state_dict())
    change, message = BAD_4BIT[bad]
    with pytest.raises(RuntimeError, match=f"'weight' cannot be loaded: .*{message}"):
        ours.load_state_dict(change(layer(block_size=32).state_dict()), strict=strict)
    assert_same_entries(ours.state_dict(), before)


BAD_8BIT = {
    "columns": (lambda e: e | {"weight_format": torch.tensor(1)}, "'weight_format' is 1"),
    "a vector": (lambda e: e | {"weight_format": torch.zeros(2)}, "'weight_format' is"),
    "few scales": (lambda e: e | {"SCB": e["SCB"][1:]}, "'SCB' is torch.float32"),
    "scales of f16": (lambda e: e | {"SCB": e["SCB"].half()}, "'SCB' is torch.float16"),
    "transposed": (lambda e: e | {"weight": e["weight"].T}, "'weight' is torch.int8"),
    "no codes": (lambda e: without(e, "weight"), "'weight' is missing"),
    "no scales": (lambda e: without(without(e, "SCB"), "weight_format"), "it has no scales"),
    "codes of 4 bits": (lambda e: layer().state_dict(), "it is in nf4"),
}


@pytest.mark.parametrize("bad", BAD_8BIT)
def test_a_bad_state_of_8_bits_is_refused(bad):
    change, message = BAD_8BIT[bad]
    ours = layer("int8")
    with pytest.raises(RuntimeError, match=message):
        ours.load_state_dict(change(layer("int8").state_dict()))


def test_maps_may_be_missing_and_a_shape_unknown():
    ours, entries = layer(), layer().state_dict()
    wanted = dict(entries)
    for key in ("weight.quant_map", "weight.nested_quant_map"):
        del entries[key]
    ours.load_state_dict(changed(entries, shape=None))
    assert_same_entries(ours.state_dict(), wanted)


# ---- the layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients(kind, dtype, bias):
    ours = layer(kind, bias=bias)
    x = torch.randn(2, 3, IN, dtype=dtype, requires_grad=True)
    dense = nn.functional.linear(x, ours.dequantize(dtype), ours.bias.to(dtype) if bias else None)
    y = ours(x)
    torch.testing.assert_close(y, dense)
    assert y.dtype == dtype and y.shape == (2, 3, OUT)
    dy = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(dense, x, dy, retain_graph=True)
    y.backward(dy)
    torch.testing.assert_close(x.grad, wanted)
    if bias:
        torch.testing.assert_close(ours.bias.grad, dy.float().sum((0, 1)), rtol=1e-2, atol=1e-2)


def test_the_product_against_float64():
    ours = layer(in_=256)
    x = torch.randn(5, 256)
    exact = x.double() @ ours.dequantize(torch.float32).double().T + ours.bias.double()
    torch_error = (nn.functional.linear(x, ours.dequantize(torch.float32), ours.bias) - exact).abs()
    assert (ours(x) - exact).abs().max() <= 2 * torch_error.max()


def test_autocast_sets_the_dtype():
    ours, x = layer(), torch.randn(2, IN)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(x)
    assert_same_bits(y, ours(x.bfloat16()))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_casts_and_copies_leave_the_bytes(kind):
    ours = layer(kind)
    entries = without(ours.state_dict(), "bias")
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(ours),
        pickle.loads(pickle.dumps(ours)),
        torch.load(buffer, weights_only=False),
        copy.deepcopy(ours).to(torch.bfloat16),
        copy.deepcopy(ours).half(),
        copy.deepcopy(ours).double().float(),
    ):
        assert_same_entries(without(other.state_dict(), "bias"), entries)
        assert (other.format, other.nested) == (ours.format, ours.nested)
    assert copy.deepcopy(ours).half().bias.dtype == torch.float16


def test_a_state_dict_is_plain_tensors_of_their_own(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    ours, other = layer(), layer()
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same_entries(other.state_dict(), ours.state_dict())
    safetensors.save_file(ours.state_dict(), tmp_path / "state.safetensors")
    assert_same_entries(
        {
            key: safetensors.load_file(tmp_path / "state.safetensors")[key]
            for key in ours.state_dict()
        },
        ours.state_dict(),
    )


def test_headrooms_state_files_carry_the_bytes(tmp_path):
    model, other = nn.Sequential(layer(), layer("int8", IN, OUT)), None
    headroom.save_state(tmp_path / "state-1.safetensors", model=model)
    other = nn.Sequential(layer(block_size=128), layer("int8", IN, OUT))
    headroom.load_state(tmp_path / "state-1.safetensors", model=other)
    assert_same_entries(other.state_dict(), model.state_dict())


def test_a_packed_weight_is_not_trained():
    ours = layer()
    assert [name for name, p in ours.named_parameters() if p.requires_grad] == ["bias"]
    with pytest.raises(RuntimeError, match="a weight in nf4 cannot be trained; train the bias"):
        ours.requires_grad_()
    assert ours.requires_grad_(False) is ours
    assert not ours.bias.requires_grad
    ours.bias.requires_grad_()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("autocast", [False, True])
def test_one_graph(kind, autocast, fresh_dynamo):
    ours = nn.Sequential(layer(kind), nn.ReLU(), layer(kind, 5, OUT))
    x = torch.randn(4, IN, requires_grad=True)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return ours(x).float().square().mean()

    (wanted,) = torch.autograd.grad(step(x), x)
    loss = torch.compile(step, fullgraph=True)(x)
    (got,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(got, wanted)


def test_what_it_shows():
    ours = layer(block_size=128)
    assert repr(ours) == (
        f"Linear4bit(in_features={IN}, out_features={OUT}, bias=True, format=nf4, block_size=128, "
        "double=True)"
    )
    assert repr(layer("int8", bias=False)).endswith("bias=False, format=int8)")
    assert isinstance(ours.matrix, QuantizedMatrix)
    assert ours.matrix.codes is ours.weight


def test_bad_formats_are_refused():
    with pytest.raises(ValueError, match="Linear4bit: format is 'int8', wanted one of nf4, fp4"):
        Linear4bit(4, 4, format="int8")
    with pytest.raises(RuntimeError, match="block_size is 48"):
        Linear4bit(4, 4, block_size=48)

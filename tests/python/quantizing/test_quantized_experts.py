"""Mixtures whose experts are in few bits: what they compute, hold, copy, save and give back."""

import copy
import inspect
import pickle

import headroom
import pytest
import torch
from headroom.functional import dequantize_matrix, quantize_matrix
from headroom.nn import QuantizedExperts
from headroom.quantizing.frozen import FrozenWeights, frozen_layers
from torch import nn

from helpers.bits import assert_same_bits
from helpers.few_bits import error
from helpers.moe_models import experts_of, in_float64, moe_of, step, tokens_of

FAMILIES = ["Mixtral", "Qwen3Moe", "GptOss", "NemotronH", "DeepseekV3"]
FORMATS = ["nf4", "fp4", "int8"]


def alone(name, dtype=torch.float32, **options):
    """Returns a module of experts, in a model of nothing else."""
    module = next(iter(experts_of(moe_of(name, **options).to(dtype)).values()))
    return nn.ModuleDict({"experts": module})


def call(module, dtype=torch.float32, tokens=20):
    """Returns the result of experts, and the gradients of rows, weights and biases."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, 32, generator=g).to(dtype).requires_grad_()
    index = torch.rand(tokens, 6, generator=g).topk(2).indices
    weight = torch.rand(tokens, 2, generator=g).to(dtype).requires_grad_()
    y = module(x, index, weight)
    biases = [p for name, p in module.named_parameters() if name.endswith("_bias")]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, weight, *biases])]


# ---- what they compute ---------------------------------------------------------------------------


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_decoded_stacks(name, to):
    model, inputs = moe_of(name), tokens_of()
    report = headroom.quantize(model, to)
    found = experts_of(model)
    assert {one.name for one in report.quantized} >= found.keys()
    assert all(type(module) is QuantizedExperts for module in found.values())
    got = step(model, inputs)
    decoded = headroom.dequantize(copy.deepcopy(model))
    assert not any(isinstance(module, QuantizedExperts) for module in decoded.modules())
    exact = {key: x for key, x in step(in_float64(decoded), inputs).items() if key in got}
    theirs = {key: x for key, x in step(decoded, inputs).items() if key in got}
    assert got.keys() == exact.keys() and len(got) > 5
    for one in (got, exact, theirs):
        del one["loss"]
    assert error(got, exact) <= 2 * error(theirs, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_rows_of_16_bits_and_autocast(name, dtype):
    model = alone(name)
    headroom.quantize(model)
    exact = call(headroom.dequantize(copy.deepcopy(model))["experts"])
    half = copy.deepcopy(model).to(dtype)
    assert half["experts"].gate_up_proj.dtype == torch.uint8
    with torch.autocast("cpu", dtype):
        cast = call(model["experts"])
    for got in (call(half["experts"], dtype), cast):
        for mine, want in zip(got, exact):
            assert (mine.float() - want).norm() <= 3e-2 * want.norm()
    assert call(half["experts"], dtype)[0].dtype == dtype and cast[0].dtype == torch.float32
    wide = call(half["experts"])  # rows of float32, over what was loaded in 16 bits
    assert wide[0].dtype == torch.float32 and all(
        (a - b).norm() < 3e-2 * b.norm() for a, b in zip(wide, exact)
    )


def test_calls():
    experts = alone("Mixtral")["experts"]
    names = list(inspect.signature(type(experts).forward.__wrapped__).parameters)[1:]
    headroom.quantize(nn.ModuleDict({"experts": experts}))
    rows, index, weight = torch.randn(5, 32), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    want = experts(rows, index, weight)
    assert_same_bits(experts(**dict(zip(names, (rows, index, weight)))), want)
    with pytest.raises(TypeError, match=f"experts take {', '.join(names)}, each once"):
        experts(rows, index)
    with pytest.raises(RuntimeError, match="x has dtype Double"):
        experts(rows.double(), index, weight)


def test_adapters_of_attention_train_over_them():
    model, inputs = moe_of("Qwen3Moe").requires_grad_(False), tokens_of()
    headroom.quantize(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    headroom.lora(model, 2)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=2e-2), []
    for _ in range(12):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    after = model.state_dict()
    for key, value in before.items():
        if ".experts." in key:
            assert torch.equal(after[key], value), key


# ---- what is quantized, and what is left ---------------------------------------------------------


def test_bytes_of_a_mixture():
    sizes = dict(hidden_size=128, intermediate_size=96, num_local_experts=16)
    model = moe_of("Mixtral", **sizes).bfloat16()
    before = sum(p.nbytes for p in model.parameters())
    report = headroom.quantize(model)
    after = sum(p.nbytes for p in model.parameters())
    assert (report.before, report.after) == (before, after)
    assert after <= 0.30 * before
    assert "2 MixtralExperts -> nf4: 2.25 MiB -> " in str(report)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("options", [{}, {"double": False, "block_size": 32}, {"search": True}])
def test_stacks_have_the_codes_of_quantize_matrix(to, options):
    model = alone("GptOss", torch.bfloat16)
    own = model["experts"]
    stacks = {name: getattr(own, name).detach().clone() for name in ("gate_up_proj", "down_proj")}
    headroom.quantize(model, to, **options)
    assert own.rule.stacks == tuple(stacks)
    for (name, stack), q in zip(stacks.items(), own.stacks()):
        want = quantize_matrix(stack.flatten(0, 1), to, **options)
        assert q.shape == tuple(stack.shape) and q.dtype == torch.bfloat16
        assert_same_bits([q.codes.detach(), q.scales.detach()], [want.codes, want.scales])
        assert getattr(own, name) is q.codes and not q.codes.requires_grad
    assert own.gate_up_proj_bias.requires_grad and own.gate_up_proj_bias.dtype == torch.bfloat16


def test_routers_and_their_biases_are_left():
    for name in ("DeepseekV3", "Qwen2Moe", "Glm4Moe"):
        model = moe_of(name)
        wide = {
            key: tensor.clone()
            for key, tensor in model.state_dict().items()
            if "shared_expert_gate" in key or ".gate." in key
        }
        assert wide
        headroom.quantize(model, skip=None)
        after = model.state_dict()
        assert_same_bits([after[key] for key in wide], wide.values())


def test_experts_that_are_not_known_are_left_with_the_reason():
    model = moe_of("Mixtral")
    first, second = experts_of(model).values()
    second.act_fn = nn.GELU()
    report = headroom.quantize(model)
    assert type(first) is QuantizedExperts and type(second).__name__ == "MixtralExperts"
    why = {one.name: one.reason for one in report.left}["model.layers.1.mlp.experts.down_proj"]
    assert why == (
        "matrices of experts in one parameter, which are not quantized: it computes none of the "
        "activations that headroom.functional has"
    )


def test_names_in_skip_and_what_trains_beside_frozen_weights():
    model = moe_of("Mixtral")
    report = headroom.quantize(model, skip=["layers.0", "lm_head"])
    assert {one.name for one in report.quantized if "experts" in one.name} == {
        "model.layers.1.mlp.experts"
    }
    assert "which are not quantized: named in skip" in str(report)
    model = moe_of("Mixtral").requires_grad_(False)
    experts_of(model)["model.layers.0.mlp.experts"].down_proj.requires_grad_()
    report = headroom.quantize(model)
    assert "model.layers.0.mlp.experts" not in {one.name for one in report.quantized}
    assert "it is trained, and others are frozen" in str(report)


def test_what_is_refused():
    model = moe_of("Mixtral")
    first, second = experts_of(model).values()
    second.down_proj.data[3, 2, 1] = torch.nan
    with pytest.raises(ValueError, match="'model.layers.1.mlp.experts.down_proj' has an element"):
        headroom.quantize(model)
    assert type(first).__name__ == "MixtralExperts"
    second.down_proj = first.down_proj
    report = headroom.quantize(copy.deepcopy(model))
    assert "it is also model.layers.1.mlp.experts.down_proj" in str(report)
    with pytest.raises(ValueError, match="is also 'model.layers.1.mlp.experts.down_proj': name"):
        headroom.quantize(model, skip=["lm_head"])
    model = alone("Mixtral")
    headroom.quantize(model)
    with pytest.raises(ValueError, match="no layer is left: 1, such as 'experts', are quantized"):
        headroom.quantize(model)
    with pytest.raises(RuntimeError, match="stacks in few bits cannot be trained"):
        model["experts"].requires_grad_()
    assert model["experts"].requires_grad_(False) is model["experts"]


# ---- copies, files and back ----------------------------------------------------------------------


@pytest.mark.parametrize("to", ["nf4", "int8"])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss", "NemotronH"])
def test_copies_and_what_was_before(name, to):
    model = alone(name, torch.bfloat16)
    was, biases = type(model["experts"]), [n for n, _ in model.named_parameters() if "bias" in n]
    keys = list(model.state_dict())
    headroom.quantize(model, to)
    want = call(model["experts"], torch.bfloat16)
    assert len(want) == 3 + len(biases)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(call(other["experts"], torch.bfloat16), want)
        decoded = [dequantize_matrix(q) for q in other["experts"].stacks()]
        assert headroom.dequantize(other) is other and type(other["experts"]) is was
        assert list(other.state_dict()) == keys
        stacks = [p for p in other["experts"].parameters() if p.dim() == 3]
        assert_same_bits([p.detach() for p in stacks], decoded)
        assert all(p.requires_grad for p in other.parameters())
    assert headroom.dequantize(other, torch.float32)["experts"].down_proj.dtype == torch.bfloat16


@pytest.mark.parametrize("to", FORMATS)
def test_a_state_dict_loads_strictly(to):
    model = alone("GptOss", torch.bfloat16)
    wide = {key: x.clone() for key, x in model.state_dict().items()}
    other = alone("GptOss", torch.bfloat16, seed=6)
    headroom.quantize(model, to)
    headroom.quantize(other, to, block_size=32, double=False)
    state = model.state_dict()
    other.load_state_dict(state)  # with other blocks
    assert_same_bits(call(other["experts"]), call(model["experts"]))
    assert other.state_dict().keys() == state.keys()
    other.load_state_dict(
        {
            key: x.zero_() if x.dtype == torch.bfloat16 else x
            for key, x in copy.deepcopy(state).items()
        },
        assign=True,
    )
    other.load_state_dict(wide)  # stacks of 16 bits
    again = other.state_dict()
    assert_same_bits([again[key] for key in state], state.values())
    state["experts.down_proj.more"] = torch.ones(1)
    with pytest.raises(RuntimeError, match="Unexpected key.*experts.down_proj.more"):
        other.load_state_dict(state)
    del state["experts.down_proj.more"], state["experts.down_proj"]
    with pytest.raises(RuntimeError, match="'experts.down_proj' cannot be loaded: 'down_proj' is"):
        other.load_state_dict(state)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_the_keys_and_bytes_of_bitsandbytes(name, kind, nested):
    """Both ways, strictly."""
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    # Of rows that are no whole blocks bitsandbytes 0.50 decodes other numbers, with AVX-512.
    sizes = dict(hidden_size=64, intermediate_size=64)
    ours, theirs = (alone(name, torch.bfloat16, **sizes) for _ in range(2))
    headroom.quantize(ours, kind, double=nested)
    for stack in ("gate_up_proj", "down_proj"):
        parametrize.replace_parameter_4bit(
            theirs["experts"], stack, compress_statistics=nested, quant_type=kind
        )
    state = theirs.state_dict()
    mine = ours.state_dict()
    assert mine.keys() == state.keys()
    codes = [key for key in state if key.endswith("_proj")]
    assert len(codes) == 2
    if kind == "nf4":  # kernels of bitsandbytes differ in the middle between two codes of FP4
        assert_same_bits([mine[key] for key in codes], [state[key] for key in codes])
    ours.load_state_dict(state)
    after = ours.state_dict()
    for key, value in state.items():
        if "quant_state" not in key:
            torch.testing.assert_close(after[key], value, rtol=1e-6, atol=0, msg=key)
    for stack, q in zip(("gate_up_proj", "down_proj"), ours["experts"].stacks()):
        got, want = dequantize_matrix(q), getattr(theirs["experts"], stack)
        assert (got.float() - want.float()).abs().max() <= 1e-2 * want.float().abs().max()
    back = alone(name, torch.bfloat16, seed=8, **sizes)["experts"]
    for stack in ("gate_up_proj", "down_proj"):
        own = {
            k.removeprefix(f"experts.{stack}."): v
            for k, v in after.items()
            if k.startswith(f"experts.{stack}.")
        }
        setattr(back, stack, nn.Parameter(after[f"experts.{stack}"], requires_grad=False))
        parametrize.replace_parameter_4bit_prequantized(back, stack, own, "cpu")
        assert torch.equal(getattr(back, stack), getattr(theirs["experts"], stack))


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("down_proj.absmax", lambda x: x[:-1], r"'down_proj.absmax' is torch.uint8 \[47\]"),
        ("down_proj.nested_absmax", lambda x: x * torch.nan, "must have finite numbers alone"),
        ("gate_up_proj", lambda x: x[:-1], r"'gate_up_proj' is torch.uint8 \[3071, 1\]"),
    ],
)
def test_entries_that_do_not_fit_are_named(key, change, message):
    model = alone("Mixtral")
    headroom.quantize(model)
    state = model.state_dict()
    state[f"experts.{key}"] = change(state[f"experts.{key}"])
    other = alone("Mixtral", seed=6)
    headroom.quantize(other, block_size=128)  # whose scales have other sizes
    for each in (model, other):
        before = copy.deepcopy(each.state_dict())
        with pytest.raises(RuntimeError, match=message):
            each.load_state_dict(state)
        assert_same_bits(each.state_dict().values(), before.values())


def test_save_pretrained_writes_stacks_as_they_are(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = moe_of("NemotronH")
    headroom.quantize(model)
    model.save_pretrained(tmp_path)
    saved, state = safetensors.load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert saved.keys() == state.keys()
    assert_same_bits([saved[key] for key in state], state.values())
    headroom.dequantize(model)
    model.save_pretrained(tmp_path / "wide")
    names = safetensors.load_file(tmp_path / "wide" / "model.safetensors").keys()
    assert "backbone.layers.1.mixer.experts.0.up_proj.weight" in names


# ---- for what decides by itself ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_frozen_experts_are_quantized_and_given_back(name):
    model = moe_of(name).requires_grad_(False)
    model.model.norm.weight.requires_grad_()
    names, reason = frozen_layers(model, None)
    assert experts_of(model).keys() <= set(names) and reason is None
    params = {key: p for key, p in model.named_parameters() if key.endswith("_proj")}
    held = FrozenWeights(model, names)
    held.quantize("nf4")
    assert params and not any(p.numel() for p in params.values())
    want = [dequantize_matrix(q) for m in experts_of(model).values() for q in m.stacks()]
    held.give_back()
    after = dict(model.named_parameters())
    assert all(after[key] is p for key, p in params.items())
    assert_same_bits([p.detach() for p in params.values()], want)

"""Layers with adapters of PEFT, over dense, quantized and bitsandbytes layers, in one op."""

import copy

import headroom
import pytest
import torch
from headroom.nn import LEVELS
from torch import nn

from helpers.bits import assert_same_bits
from helpers.few_bits import error, gradients, with_bitsandbytes
from helpers.hf_models import inputs_of, model_of

peft = pytest.importorskip("peft")
BASES = ["dense", "nf4", "int8", "bitsandbytes nf4", "bitsandbytes int8"]


def adapted(base="dense", dtype=torch.float32, **options):
    # Rows of whole blocks, of which alone bitsandbytes decodes 4 bits rightly on every CPU.
    model = model_of("Llama", hidden_size=64, intermediate_size=128).to(dtype)
    if base.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
        model = with_bitsandbytes(model, base.split()[1])
    elif base != "dense":
        headroom.quantize(model, base)
    options = dict(r=3, lora_alpha=5, target_modules="all-linear") | options
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    torch.manual_seed(4)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
    return model


def ops_of(model):
    with torch.profiler.profile() as profile:
        model(**inputs_of())
    return [event.name for event in profile.events()].count("headroom::lora_linear")


@pytest.mark.parametrize("base", BASES)
def test_gradients_are_theirs_in_one_op_per_layer(base):
    model, inputs = adapted(base), inputs_of(padded=True)
    theirs = gradients(model, **inputs)
    report = headroom.patch(model)
    swaps = [one for swaps in report.swapped.values() for one in swaps if one.kind == "LoRA"]
    assert len(swaps) == 14 and {one.now for one in swaps} == {"headroom.functional.lora_linear"}
    assert ops_of(model) == 14
    wanted = None
    for level in LEVELS:
        headroom.patch(model, level)
        got = gradients(model, **inputs)
        assert error(got, theirs) < 1e-5
        wanted = wanted or got
        assert_same_bits(got.values(), wanted.values())
    headroom.unpatch(model)
    assert ops_of(model) == 0
    assert_same_bits(gradients(model, **inputs).values(), theirs.values())


@pytest.mark.parametrize("base", ["dense", "nf4"])
def test_16_bits_are_as_near_to_float64_as_theirs(base):
    model, inputs = adapted(base, torch.bfloat16), inputs_of()
    theirs = gradients(model, **inputs)
    exact = headroom.dequantize(copy.deepcopy(model)).double()
    for name, p in exact.named_parameters():
        p.requires_grad_("lora_" in name)
    exact = gradients(exact, **inputs)
    headroom.patch(model)
    assert model.base_model.model.model.layers[0].mlp.up_proj.lora_A["default"].weight.dtype == (
        torch.float32
    )
    assert error(gradients(model, **inputs), exact) <= 2 * error(theirs, exact)


def test_what_the_op_cannot_compute_is_left_to_peft():
    model, inputs = adapted(lora_dropout=0.5), inputs_of()
    plain = copy.deepcopy(model)
    headroom.patch(model, norms=False, glu=False, rope=False)
    assert ops_of(model) == ops_of(copy.deepcopy(model)) == 14
    model.eval(), plain.eval()

    def same(count):
        assert ops_of(model) == count
        got, wanted = model(**inputs).logits, plain(**inputs).logits
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)

    same(14)
    with model.disable_adapter(), plain.disable_adapter():
        same(0)
    for one in (model, plain):
        one.merge_adapter()
    same(0)
    for one in (model, plain):
        one.unmerge_adapter()
        torch.manual_seed(6)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        one.add_adapter("second", config)
        one.base_model.set_adapter(["default", "second"])
    same(14)  # adapters that drop as much are one
    model.train()  # where the first drops, and the second does not
    assert ops_of(model) == 12
    model.eval()
    layer = model.base_model.model.model.layers[0].self_attn
    layer.k_proj.lora_A["default"].register_forward_hook(lambda *_: None)
    layer.v_proj.base_layer.register_forward_hook(lambda *_: None)
    layer.o_proj.base_layer.weight.requires_grad_()
    same(11)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_peft_does_not_overwrite_codes(base, options):
    """By safe_merge it would without an error, with DoRA or in int8."""
    model = adapted(base, **options)
    headroom.patch(model)
    wanted = {name: p.clone() for name, p in model.named_parameters()}
    for safe in (False, True):
        with pytest.raises(RuntimeError, match=r"headroom\.merge"):
            copy.deepcopy(model).merge_adapter(safe_merge=safe)
        with pytest.raises(RuntimeError, match=r"headroom\.merge"):
            model.merge_adapter(safe_merge=safe)
    assert_same_bits([*dict(model.named_parameters()).values()], [*wanted.values()])
    assert ops_of(model) == 14
    headroom.unpatch(model)
    assert not any("merge" in vars(module) for module in model.modules())


def test_dropout_is_that_of_a_seed_and_levels_repeat_it():
    model, inputs = adapted("nf4", lora_dropout=0.3), inputs_of()
    wanted = None
    for level in LEVELS:
        headroom.patch(model, level)
        got = gradients(model, **inputs)
        wanted = wanted or got
        assert_same_bits(got.values(), wanted.values())
    torch.manual_seed(1)
    assert not torch.equal(model(**inputs).loss, model(**inputs).loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", BASES)
def test_dora(base, dtype):
    model, inputs = adapted(base, dtype, use_dora=True), inputs_of()
    for name, p in model.named_parameters():
        if "magnitude" in name:
            p.data *= 1 + 0.3 * torch.rand_like(p)
    theirs = gradients(model, **inputs)
    exact = theirs
    if dtype == torch.bfloat16:
        if base.startswith("bitsandbytes"):
            pytest.skip("its weights have no float64")
        exact = headroom.dequantize(copy.deepcopy(model)).double()
        for name, p in exact.named_parameters():
            p.requires_grad_("lora_" in name)
        exact = gradients(exact, **inputs)
    assert len(theirs) == 1 + 3 * 14
    wanted = None
    for level in LEVELS:
        headroom.patch(model, level)
        assert ops_of(model) == 14
        got = gradients(model, **inputs)
        wanted = wanted or got
        assert_same_bits(got.values(), wanted.values())
    limit = 1e-5 if dtype == torch.float32 else 2 * error(theirs, exact)
    assert error(wanted, exact) <= limit


def test_dora_drops_what_peft_drops():
    """With the same mask, which torch draws in both, results are the same."""
    model = adapted(use_dora=True, target_modules=["q_proj"], lora_dropout=0.4)
    plain, inputs = copy.deepcopy(model), inputs_of()
    headroom.patch(model, norms=False, glu=False, rope=False)
    got, wanted = gradients(model, **inputs), gradients(plain, **inputs)
    assert ops_of(model) == 2 and error(got, wanted) < 1e-5


def test_variants_and_replaced_forwards_are_left():
    model = adapted(alora_invocation_tokens=[1], target_modules=["q_proj"])
    report = headroom.patch(model)
    assert [one.reason for one in report.left] == [
        "its adapter is a variant of LoRA other than DoRA"
    ] * 2
    model = adapted(target_modules=["q_proj"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.forward = lambda x: type(layer).forward(layer, x)
    left = headroom.patch(model).left
    assert [one.reason for one in left] == ["something else has replaced its forward"]


@pytest.mark.slow
def test_autocast_and_compilation():
    model, inputs = adapted("nf4"), inputs_of()
    headroom.patch(model, "L1")
    wanted = gradients(model, **inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = gradients(compiled, **inputs)
    assert error({k.removeprefix("_orig_mod."): x for k, x in got.items()}, wanted) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert ops_of(model) == 14
        assert 1e-4 < error(gradients(model, **inputs), wanted) < 5e-2

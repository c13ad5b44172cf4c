"""Mixtures whose experts are in few bits, at every level: the same bits in fewer bytes."""

import copy

import headroom
import pytest
import torch
from headroom.nn import QuantizedExperts

from helpers.bits import assert_same_bits
from helpers.few_bits import error
from helpers.kept import kept_bytes
from helpers.moe_models import (
    CHOSEN,
    FEATURES,
    HIDDEN,
    TOKENS,
    experts_of,
    in_float64,
    moe_of,
    step,
    tokens_of,
)

LEVELS = ("L0", "L1", "L2", "L5")
OURS = "headroom.functional.experts"


def quantized(name, to="nf4", **options):
    model = moe_of(name, **options)
    headroom.quantize(model, to)
    return model


@pytest.mark.parametrize("to", ["nf4", "int8"])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss", "NemotronH", "DeepseekV3"])
def test_levels_give_the_same_bits_in_fewer_bytes(name, to):
    model, inputs = quantized(name, to), tokens_of()
    ids = {key: x for key, x in inputs.items() if key != "labels"}
    want, first, kept = step(model, inputs), None, []  # without patch at L1
    for level in (*LEVELS, "L1@host", "L5@host"):
        report = headroom.patch(model, level, norms=False)
        assert {k for k, (one,) in report.swapped.items() if one.now == OURS} == {
            *experts_of(model)
        }
        got = step(model, inputs)
        first = first or got
        assert got.keys() == want.keys() and error(got, want) < 1e-5
        assert_same_bits(got.values(), (first if name == "GptOss" else want).values())
        torch.manual_seed(7)
        kept.append(kept_bytes(lambda: model(**ids).logits, list(model.parameters())))
    width = 1 if name == "NemotronH" else 2  # of gates and what they multiply
    rows = len(experts_of(model)) * 2 * TOKENS * CHOSEN * FEATURES * 4  # of h, in float32
    assert kept[0] - kept[1] == rows
    # Experts that are frozen keep their inputs at L2 alone, which others may keep too.
    inputs_kept = len(experts_of(model)) * 2 * TOKENS * HIDDEN * 4
    assert width * rows - inputs_kept <= kept[1] - kept[2] <= width * rows
    assert kept[3] < kept[2]
    headroom.unpatch(model)
    assert all(type(module) is QuantizedExperts for module in experts_of(model).values())
    assert_same_bits(step(model, inputs).values(), want.values())


def test_quantize_and_dequantize_of_a_patched_model():
    """What a block at L5 does stays; what patch() set on experts reads stacks of floats, and
    goes."""
    model, inputs = moe_of("Mixtral"), tokens_of()
    headroom.patch(model, "L5", norms=False)
    headroom.quantize(model)
    want = step(model, inputs)
    other = copy.deepcopy(model)
    headroom.patch(other, "L2", norms=False)
    assert_same_bits(step(other, inputs).values(), want.values())
    headroom.dequantize(other)
    got = step(other, inputs)
    assert type(next(iter(experts_of(other).values()))).__name__ == "MixtralExperts"
    assert error({key: got[key] for key in want}, want) < 1e-5
    headroom.unpatch(other)
    headroom.unpatch(model)
    assert_same_bits(step(model, inputs).values(), want.values())


def test_weights_on_the_host():
    model, inputs = quantized("Mixtral", num_hidden_layers=3), tokens_of()
    for p in model.parameters():
        if p.is_floating_point():
            p.requires_grad_(p.dim() == 1)
    want = step(model, inputs)
    headroom.patch(model, "L2", norms=False, weights="host")
    assert_same_bits(step(model, inputs).values(), want.values())


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_the_level_stays_when_experts_are_quantized_or_decoded_later(name):
    model, inputs = moe_of(name), tokens_of()
    other = copy.deepcopy(model)
    headroom.quantize(other)
    headroom.patch(other, "L2", norms=False)
    want = step(other, inputs)
    headroom.patch(model, "L2", norms=False)
    before = kept_bytes(lambda: model(input_ids=inputs["input_ids"]).logits, model.parameters())
    headroom.quantize(model)
    assert_same_bits(step(model, inputs).values(), want.values())
    for _ in range(2):
        kept = kept_bytes(lambda: model(input_ids=inputs["input_ids"]).logits, model.parameters())
        assert kept <= before
        headroom.dequantize(model)
    headroom.unpatch(model)
    assert all("forward" not in vars(module) for module in experts_of(model).values())


def test_a_forward_that_somebody_has_replaced_is_left():
    model = quantized("Mixtral")
    first, second = experts_of(model).values()
    second.forward = second.forward
    report = headroom.patch(model, norms=False)
    assert OURS in str(report)
    assert "(model.layers.1.mlp.experts): something else has replaced its forward" in str(report)


def test_compilation():
    model = quantized("Mixtral")
    headroom.patch(model, "L2", norms=False)
    experts = next(iter(experts_of(model).values()))
    args = torch.randn(5, HIDDEN), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*args), experts(*args))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_on_a_device(name, level):
    model, inputs = quantized(name), tokens_of()
    headroom.patch(model, level, norms=False)
    want = step(model, inputs)
    got = step(model.cuda(), {key: x.cuda() for key, x in inputs.items()})
    torch.testing.assert_close({key: x.cpu() for key, x in got.items()}, want)


def test_the_numbers_are_those_of_the_codes():
    model, inputs = quantized("Qwen3Moe"), tokens_of()
    decoded = headroom.dequantize(copy.deepcopy(model))
    headroom.patch(model, "L5")
    got = step(model, inputs)
    exact = {key: x for key, x in step(in_float64(decoded), inputs).items() if key in got}
    assert error(got, exact) < 2e-6

"""Experts whose stacks PEFT has given adapters, patched: the same numbers, without whole stacks."""

import copy

import headroom
import pytest
import torch
from torch import nn

from helpers.bits import assert_same_bits
from helpers.few_bits import error
from helpers.hf_models import outputs, shaken, transformers
from helpers.kept import kept_bytes
from helpers.moe_models import EXPERTS, FEATURES, HIDDEN, in_float64, moe_of, step, tokens_of

peft = pytest.importorskip("peft")
STACKS = {"Mixtral": "gate_up_proj", "GptOss": "gate_up_proj", "NemotronH": "up_proj"}
LEVELS = "L0", "L1", "L2", "L5"
OURS = "headroom.functional.experts"


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def adapted(name, both=True, modules=(), **options):
    names = [
        "experts.down_proj",
        *([f"experts.{STACKS.get(name, 'gate_up_proj')}"] if both else []),
    ]
    given = dict(r=4, lora_alpha=6, target_modules=[*modules], target_parameters=names)
    model = peft.get_peft_model(moe_of(name), peft.LoraConfig(**(given | options)))
    return shaken(model).train()


def calls_of_peft(model):
    """Counts the calls in which PEFT makes stacks."""
    seen = []

    def noted(wrapper):
        def activate(names):
            seen.append(wrapper)
            return type(wrapper)._activate_lora(wrapper, names)

        wrapper._activate_lora = activate

    for module in model.modules():
        if type(module).__name__ == "ParamWrapper":
            noted(module)
    return seen


def errors(got, exact):
    return {
        key: ((got[key].double() - x).norm() / x.norm().clamp_min(1e-12)).item()
        for key, x in exact.items()
    }


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("name", STACKS)
def test_losses_and_gradients_are_those_of_peft(name, both):
    model, inputs = adapted(name, both, ["q_proj"]), tokens_of()
    exact = step(in_float64(model), inputs)
    theirs = step(model, inputs)
    keys = dict(model.named_parameters()).keys()
    worst, want = max(errors(theirs, exact).values()), None
    for level in LEVELS:
        report = headroom.patch(model, level, norms=False)
        ours = [one for (one, *_) in report.swapped.values() if one.now == OURS]
        assert len(ours) == 2 and set(report.levels.values()) == {level}
        assert not any("experts" in one.name for one in report.left)
        seen = calls_of_peft(model)
        got = step(model, inputs)
        assert not seen and dict(model.named_parameters()).keys() == keys
        assert max(errors(got, exact).values()) <= 2 * max(worst, 1e-6)
        want = want or got
        assert got.keys() == want.keys() == theirs.keys()
        assert_same_bits(got.values(), want.values())
        for module in model.modules():
            vars(module).pop("_activate_lora", None)
    headroom.unpatch(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert_same_bits(step(model, inputs).values(), theirs.values())


def test_nothing_of_the_size_of_a_stack_is_kept():
    model = adapted("Mixtral")
    stack, kept = EXPERTS * HIDDEN * FEATURES * 4, []
    for patched in (False, True):
        if patched:
            headroom.patch(model, "L2", norms=False)
        module = model.base_model.model.model.layers[0].mlp.experts
        x, weight = torch.randn(8, HIDDEN, requires_grad=True), torch.rand(8, 2)
        index = torch.arange(16).view(8, 2) % EXPERTS
        kept.append(kept_bytes(lambda m=module, a=(x, index, weight): m(*a), model.parameters()))
    rank = EXPERTS * 4 * 4  # of A or B: what stands in for a column of each expert
    assert kept[0] > 3 * stack > kept[1]
    assert kept[1] <= 2 * rank * HIDDEN + rank * FEATURES + 4096  # B in the order of experts


def test_several_disabled_merged_and_deleted_adapters():
    model, inputs = adapted("GptOss"), tokens_of()
    config = copy.deepcopy(model.peft_config["default"])
    config.r, config.lora_alpha = 2, 5
    model.add_adapter("second", config)
    for key, p in model.named_parameters():
        if ".second." in key:
            nn.init.normal_(p, std=0.1)
    plain = outputs(moe_of("GptOss").eval())
    other = copy.deepcopy(model)
    report = headroom.patch(model, "L2", norms=False)
    assert not report.left
    seen = calls_of_peft(model)
    for names in (["default"], ["second"], ["default", "second"]):
        for one in (model, other):
            one.base_model.set_adapter(names)
        want = step(other, inputs)
        got = step(model, inputs)
        assert got.keys() == want.keys()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert not seen
    with model.disable_adapter():
        torch.testing.assert_close(outputs(model.eval()), plain)
    assert not seen
    want = outputs(model)
    model.merge_adapter()
    torch.testing.assert_close(outputs(model), want, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():  # by which PEFT unmerges
        torch.testing.assert_close(outputs(model), plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs(model), want, rtol=1e-4, atol=1e-4)
    assert not seen
    model.delete_adapter("second")
    other.delete_adapter("second")
    for one in (model, other):
        one.set_adapter("default")
    torch.testing.assert_close(outputs(model), outputs(other.eval()))


def test_a_copy_and_the_model_that_peft_gives_back():
    model = adapted("Mixtral")
    headroom.patch(model, "L2", norms=False)
    want = outputs(model.eval())
    again = copy.deepcopy(model)
    assert_same_bits(outputs(again), want)
    seen = calls_of_peft(again)
    outputs(again)
    assert not seen
    merged = model.merge_and_unload()
    torch.testing.assert_close(outputs(merged), want, rtol=1e-4, atol=1e-4)
    headroom.unpatch(merged)
    torch.testing.assert_close(outputs(merged), want, rtol=1e-4, atol=1e-4)


def left_of(model):
    report = headroom.patch(model, norms=False)
    assert OURS not in str(report)
    return {one.reason for one in report.left}


def test_what_is_left_to_peft():
    model = adapted("GptOss", target_parameters=["experts.down_proj_bias"])
    want = step(model, tokens_of())
    assert left_of(model) == {"PEFT has given its down_proj_bias adapters"}
    assert error(step(model, tokens_of()), want) < 1e-5  # attention is not left
    model = adapted("Mixtral")
    for module in model.modules():
        if type(module).__name__ == "ParamWrapper":
            module._did_swap_in_out_features = False
    assert left_of(model) == {
        "its adapters are of a PEFT before 0.19.1, where A and B are transposed"
    }
    model = adapted("Mixtral")
    for layer in model.base_model.model.model.layers:
        layer.mlp.experts.forward = layer.mlp.experts.forward
    assert left_of(model) == {"something else has replaced the forward of its adapters"}
    base = moe_of("Mixtral")
    headroom.quantize(base)
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.down_proj"])
    (reason,) = left_of(peft.get_peft_model(base, config))
    assert reason.startswith("PEFT takes the codes of its stacks for matrices")


@pytest.mark.parametrize("where", ["base", "inner", "A"])
def test_hooks_are_called(where):
    model, seen = adapted("Mixtral"), []
    headroom.patch(model, norms=False)
    want = step(model, tokens_of())
    outer = model.base_model.model.model.layers[0].mlp.experts
    module = {"base": outer.get_base_layer(), "inner": outer.base_layer, "A": outer.lora_A.default}
    module[where].register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(step(model, tokens_of()), want, rtol=1e-4, atol=1e-5)
    assert seen or where == "A"  # PEFT does not call the layers of A and B


def test_headroom_gives_none_where_peft_has():
    model = adapted("Mixtral")
    with pytest.raises(
        ValueError, match="experts is 2, but .* that can have adapters: it has adap"
    ):
        headroom.lora(model, 4, targets=[], experts=2)


def test_stacks_with_adapters_are_not_quantized():
    model, inputs = adapted("Mixtral", False, ["q_proj"]), tokens_of()
    report = headroom.quantize(model)
    assert not any("Experts" in one.was for one in report.quantized) and report.quantized
    assert "PEFT has given its stacks adapters" in str(report)
    want = step(model, inputs)
    headroom.patch(model, "L2", norms=False)
    assert error(step(model, inputs), want) < 1e-5


def test_a_model_in_peft_is_saved_in_few_bits(tmp_path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(moe_of("Mixtral"), config)
    headroom.quantize(model)
    base = model.unload()
    base.save_pretrained(tmp_path)
    other = moe_of("Mixtral", seed=8)
    headroom.load_quantized(other, tmp_path)
    assert_same_bits(outputs(other), outputs(base))

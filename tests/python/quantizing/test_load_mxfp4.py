"""Files of gpt-oss, whose experts are in MXFP4: their bytes come in, compute, and go out."""

import copy

import headroom
import pytest
import torch
from headroom.functional import dequantize_matrix
from headroom.nn import QuantizedExperts

from helpers.bits import assert_same_bits
from helpers.few_bits import error
from helpers.moe_models import experts_of, in_float64, moe_of, step, tokens_of, transformers

safetensors = pytest.importorskip("safetensors.torch")
STACKS = ("gate_up_proj", "down_proj")
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def gpt_oss():
    return moe_of("GptOss", intermediate_size=32).bfloat16()


def in_mxfp4(model):
    """Returns the tensors of a file like those of gpt-oss, of random codes."""
    g = torch.Generator().manual_seed(4)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for path in experts_of(model):
        for stack in STACKS:
            count, inputs, outputs = state.pop(f"{path}.{stack}").shape
            shape = (count, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=g, dtype=torch.uint8)
            state[f"{path}.{stack}_blocks"] = blocks
            scales = torch.randint(121, 125, shape, generator=g, dtype=torch.uint8)
            state[f"{path}.{stack}_scales"] = scales
    return state


def loaded_from(state, folder):
    safetensors.save_file(state, folder / "model.safetensors")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(gpt_oss().config)
    model.config.quantization_config = dict(QUANTIZATION)
    return model, headroom.load_quantized(model, folder)


def decoded_by_transformers(state):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = {key: x for key, x in state.items() if not key.endswith(("_blocks", "_scales"))}
    for key in state:
        if key.endswith("_blocks"):
            name = key.removesuffix("_blocks")
            found[name] = convert_moe_packed_tensors(state[key], state[f"{name}_scales"])
    return found


def test_bytes_in_and_out(tmp_path):
    state = in_mxfp4(gpt_oss())
    model, report = loaded_from(state, tmp_path)
    assert all(type(module) is QuantizedExperts for module in experts_of(model).values())
    got = model.state_dict()
    assert got.keys() == state.keys()
    assert_same_bits([got[key] for key in state], state.values())
    assert "2 GptOssExperts -> mxfp4" in str(report)
    numel = 2 * 6 * 3 * 32 * 32
    assert sum(one.before for one in report.quantized) == 2 * numel
    assert sum(one.after for one in report.quantized) == numel // 2 + numel // 32
    assert model.config.quantization_config == QUANTIZATION
    model.save_pretrained(tmp_path / "saved")
    saved = safetensors.load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == state.keys()
    assert_same_bits([saved[key] for key in state], state.values())
    other, _ = loaded_from(
        in_mxfp4(moe_of("GptOss", intermediate_size=32, seed=9).bfloat16()), tmp_path
    )
    other.load_state_dict(model.state_dict())
    copied = copy.deepcopy(other).state_dict()
    assert_same_bits([copied[key] for key in state], state.values())


def test_numbers_are_those_of_transformers(tmp_path):
    state = in_mxfp4(gpt_oss())
    model, _ = loaded_from(state, tmp_path)
    dense = gpt_oss()
    dense.load_state_dict(decoded_by_transformers(state))
    for mine, theirs in zip(experts_of(model).values(), experts_of(dense).values()):
        for q, stack in zip(mine.stacks(), STACKS):
            assert_same_bits(dequantize_matrix(q).mT, getattr(theirs, stack).detach())
    other = copy.deepcopy(model)
    headroom.lora(other, 2, experts=True, targets=[])
    headroom.merge(other)
    assert not hasattr(other.config, "quantization_config")
    headroom.unmerge(other)
    assert other.config.quantization_config == QUANTIZATION
    headroom.dequantize(model)
    got, want = model.state_dict(), dense.state_dict()
    assert got.keys() == want.keys()
    assert_same_bits([got[key] for key in want], want.values())
    assert not hasattr(model.config, "quantization_config")


def test_gradients_are_those_of_decoded_stacks_at_every_level(tmp_path):
    model, _ = loaded_from(in_mxfp4(gpt_oss()), tmp_path)
    model, inputs = model.float().train(), tokens_of()
    want = step(model, inputs)
    decoded = headroom.dequantize(copy.deepcopy(model), torch.float32)
    exact = {key: x for key, x in step(in_float64(decoded), inputs).items() if key in want}
    theirs = {key: x for key, x in step(decoded, inputs).items() if key in want}
    assert error(want, exact) <= 2 * error(theirs, exact)
    first = None
    for level in ("L0", "L2", "L5"):
        headroom.patch(model, level, norms=False)
        got = step(model, inputs)
        first = first or got
        assert error(got, want) < 1e-5  # of attention without probabilities
        assert_same_bits(got.values(), first.values())
    headroom.dequantize(model, torch.float32)  # which lie otherwise, and are patched no more
    got = step(model, inputs)
    assert error({key: got[key] for key in want}, exact) < 1e-5


@pytest.mark.parametrize(
    ("stack", "change", "message"),
    [
        ("gate_up_proj_scales", None, "has blocks .* and scales None in the files"),
        ("gate_up_proj_blocks", None, "experts' has .'down_proj'. in few bits in"),
        ("down_proj_scales", lambda x: x[:-1].clone(), "wanted .experts, out, in / 32, 16"),
        (
            "gate_up_proj_blocks",
            lambda x: x.transpose(1, 2).contiguous(),
            "has blocks .6, 1, 64, 16. and scales .6, 64, 1. in",
        ),
        ("down_proj_scales", lambda x: x.fill_(255), "'down_proj_scales' must have finite numbers"),
        (
            "down_proj_blocks",
            lambda x: x.short(),
            "torch.int16 and scales torch.uint8, wanted uint8",
        ),
    ],
)
def test_what_does_not_fit(stack, change, message, tmp_path):
    state = in_mxfp4(gpt_oss())
    key = f"model.layers.0.mlp.experts.{stack}"
    value = state.pop(key)
    if change is not None:
        state[key] = change(value)
    with pytest.raises(ValueError, match=message):
        loaded_from(state, tmp_path)


def test_stacks_that_lie_the_other_way_round(tmp_path):
    state = in_mxfp4(gpt_oss())
    key = "model.layers.1.mlp.experts.gate_up_proj"
    state[f"{key}_blocks"] = state[f"{key}_blocks"].view(6, 32, 2, 16)
    state[f"{key}_scales"] = state[f"{key}_scales"].view(6, 32, 2)
    with pytest.raises(
        ValueError, match=r"gate_up_proj' is \[6, 32, 64\] in the files, and \[6, 64"
    ):
        loaded_from(state, tmp_path)

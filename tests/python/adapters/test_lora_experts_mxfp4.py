"""Adapters over experts of gpt-oss in MXFP4, whose matrices lie the other way round there."""

import copy

import headroom
import pytest
import safetensors.torch
import torch
from headroom.nn import QuantizedExperts
from headroom.state import load_adapter, save_adapter

from helpers.bits import assert_same_bits
from helpers.hf_models import outputs, shaken, transformers
from helpers.moe_models import experts_of, moe_of, put_in_mxfp4, step, tokens_of

SIZES = dict(intermediate_size=32)  # down_proj is square


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def in_mxfp4():
    model = moe_of("GptOss", **SIZES)
    put_in_mxfp4(model)
    return model


def test_values_gradients_files_and_merging(tmp_path):
    model = in_mxfp4()
    headroom.lora(model, 4, alpha=6, experts=True)
    shaken(model)
    dense = headroom.dequantize(copy.deepcopy(model), torch.float32)
    module = dense.model.layers[0].mlp.experts
    assert not isinstance(module.base_layer, QuantizedExperts) and module.base_layer.is_transposed
    for each in experts_of(dense).values():
        each.requires_grad_(False)
    want = step(dense, tokens_of())
    for level in ("L0", "L2", "L5"):
        headroom.patch(model, level, norms=False)
        got = step(model, tokens_of())
        assert got.keys() == want.keys()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    headroom.unpatch(model)
    wanted = outputs(model)
    save_adapter(model, tmp_path)
    other = in_mxfp4().eval()
    load_adapter(other, tmp_path)
    assert_same_bits(outputs(other), wanted)
    with pytest.raises(ValueError, match="requantize=True, but nothing can be put into MXFP4"):
        headroom.merge(model, requantize=True)
    headroom.merge(model, torch.float32)
    assert type(model.model.layers[0].mlp.experts) is type(module.base_layer)
    torch.testing.assert_close(outputs(model), wanted, rtol=1e-4, atol=1e-4)
    headroom.merge(dense)
    torch.testing.assert_close(outputs(dense), wanted, rtol=1e-4, atol=1e-4)
    headroom.unmerge(model)
    assert_same_bits(outputs(model), wanted)
    headroom.patch(model, "L2", norms=False)  # whose stacks then lie as those of the model again
    headroom.merge(model, torch.float32)
    torch.testing.assert_close(outputs(model), wanted, rtol=1e-4, atol=1e-4)
    headroom.unmerge(model)
    headroom.unpatch(model)
    assert_same_bits(outputs(model), wanted)
    base = headroom.dequantize(in_mxfp4(), torch.float32)  # files whose matrices lie as the model's
    safetensors.torch.save_file(dict(base.state_dict()), tmp_path / "base.safetensors")
    headroom.merge(model, base=tmp_path / "base.safetensors")
    torch.testing.assert_close(outputs(model), wanted, rtol=2e-2, atol=2e-2)

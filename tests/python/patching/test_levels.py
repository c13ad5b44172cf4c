"""Blocks of a model whose levels are set by name, as planning and fitting set them."""

from __future__ import annotations

import headroom
import pytest
from headroom.patching.levels import Blocks, set_levels
from torch import nn

from helpers import foreign_models as models
from helpers.hf_models import inputs_of, model_of


def of_headroom():
    sizes = dict(vocab_size=40, hidden_size=32, features=48, layers=2, heads=4)
    return headroom.nn.Transformer(headroom.nn.TransformerConfig(**sizes, save="L1"))


def test_models_that_are_not_known_change_what_blocks_keep_alone():
    model = models.llama()
    assert set_levels(model, {}) is None
    blocks = Blocks(model)
    assert blocks.model is model and blocks.names == ["layers.0", "layers.1"]
    assert blocks.module("layers.1") is model.layers[1]
    assert blocks.levels("layers.0") == ("L0", "L5")
    assert blocks.leanest == {"layers.0": "L5", "layers.1": "L5"}
    assert blocks.now == {"layers.0": "L0", "layers.1": "L0"}
    report = set_levels(model, {"layers.1": "L5"})
    assert report.levels == {"layers.1": "L5"} and not report.swapped
    assert blocks.now is None  # setting them again would take this back
    headroom.unpatch(model)
    model.layers[0].gradient_checkpointing = True
    assert Blocks(model).now is None
    assert Blocks(model, has_levels=False).names == []
    assert Blocks(nn.Linear(2, 2)).names == [] and Blocks(nn.Linear(2, 2)).now == {}


def test_blocks_of_headroom():
    model = of_headroom()
    blocks = Blocks(model)
    assert blocks.now == {"blocks.0": "L1", "blocks.1": "L1"}
    assert blocks.levels("blocks.1") == headroom.nn.LEVELS
    blocks.set({"blocks.0": "L3", "blocks.1": "L4"})
    assert model.save == ["L3", "L4"]


def test_a_copy_has_its_leanest_levels_and_its_own_weights():
    model = of_headroom()
    blocks = Blocks.of_copy(model)
    assert blocks.model is not model and blocks.model.save == ["L5", "L5"]
    assert model.save == ["L1", "L1"] and blocks.module("blocks.0") is blocks.model.blocks[0]
    blocks.set({"blocks.0": "L2", "blocks.1": "L0"})
    assert blocks.model.save == ["L2", "L0"]
    assert Blocks.of_copy(model, has_levels=False).names == []


@pytest.mark.parametrize("fused_loss", [False, True])
def test_known_models_get_the_layers_of_headroom(fused_loss):
    model = model_of("Llama")
    blocks = Blocks.of_copy(model, fused_loss=fused_loss)
    assert blocks.now is None and blocks.levels(blocks.names[0]) == headroom.nn.LEVELS
    copied = blocks.model
    assert headroom.patch(copied, norms=False).levels  # it can be patched anew
    report = set_levels(copied, {"model.layers.1": "L2"}, fused_loss=fused_loss)
    assert report.levels == {"model.layers.0": "L1", "model.layers.1": "L2"}
    assert {s.kind for swaps in report.swapped.values() for s in swaps} == (
        {"RMSNorm", "loss"} if fused_loss else {"RMSNorm"}
    )
    assert (copied(**inputs_of()).logits is None) == fused_loss
    loss_alone = set_levels(copied, {}, fused_loss=True)
    assert "loss" in {s.kind for swaps in loss_alone.swapped.values() for s in swaps}

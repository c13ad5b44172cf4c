"""A model whose frozen weights are in few bits, fitted into a budget."""

import headroom
import pytest
import torch

from helpers.few_bits import freeze
from helpers.hf_models import model_of

pytest.importorskip("transformers")


def test_a_quantized_model_is_fitted():
    model = freeze(model_of("Llama", hidden_size=128, intermediate_size=256))
    headroom.quantize(model)
    codes = model.model.layers[0].mlp.up_proj.weight
    ids = torch.randint(3, 61, (4, 32))
    batch = dict(input_ids=ids, labels=ids)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    budget = int(0.8 * headroom.plan(model, optimizer, batch).total_bytes)
    fitted = headroom.fit(model, batch, optimizer=optimizer, budget=budget)
    for _ in range(2):
        assert fitted.step(batch).isfinite()
    assert fitted.measured_peak <= budget
    assert abs(fitted.predicted_peak / fitted.measured_peak - 1) <= 0.001
    assert model.model.layers[0].mlp.up_proj.weight is codes

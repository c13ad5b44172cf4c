"""Plans of models with adapters, against the counter of real bytes."""

import headroom
import pytest
import torch

from helpers.hf_models import model_of

pytest.importorskip("transformers")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("level", ["L0", "L1", "L5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to", [None, "nf4", "int8"])
@pytest.mark.parametrize("dora", [False, True])
def test_a_plan_is_what_a_run_takes(to, dtype, level, dropout, dora):
    model = model_of("Llama", hidden_size=128, intermediate_size=256).to(dtype)
    if to is not None:
        headroom.quantize(model, to)
    report = headroom.lora(model, 4, dropout=dropout, dora=dora)
    headroom.patch(model, level)
    ids = torch.randint(3, 61, (2, 32))
    batch = dict(input_ids=ids, labels=ids)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    plan = headroom.plan(model, optimizer, batch)
    kinds = plan.peak_by_kind
    assert kinds["parameters"] == report.trained_bytes + report.frozen_bytes
    count = 14 * (3 if dora else 2)  # of tensors, each with its step
    assert kinds["optimizer_state"] == 2 * report.trained_bytes + 4 * count
    with headroom.memory.track(model, optimizer) as timeline:
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert abs(plan.total_bytes / timeline.peak_bytes - 1) <= 0.001
    assert timeline.peak_by_kind["parameters"] == kinds["parameters"]
    assert kinds.get("gradients", 0) <= report.trained_bytes

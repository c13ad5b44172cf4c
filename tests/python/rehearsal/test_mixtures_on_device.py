"""Mixtures that are fine-tuned on the device: the losses of the CPU, and the bytes of the plan."""

import gc

import headroom
import pytest
import torch

from helpers.hf_models import shaken
from helpers.moe_models import moe_of, put_in_mxfp4

pytest.importorskip("transformers")
pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("runtime")]
STEPS = 3


CASES = {
    "gpt-oss in MXFP4, streamed": ("GptOss", "mxfp4", "L5", {"weights": "host"}),
    "Qwen3 in NF4, released, kept in 8 bits": ("Qwen3Moe", "nf4", "L5:8bit", {}),
    "Mixtral in int8, with a scaler": ("Mixtral", "int8", "L2", {}),
}


def made(family, to, save, options):
    """Returns a model in few bits with adapters, of experts too."""
    model = moe_of(family, intermediate_size=32, moe_intermediate_size=32)
    if to == "mxfp4":
        put_in_mxfp4(model)
    headroom.quantize(model, "nf4" if to == "mxfp4" else to)
    torch.manual_seed(1)
    headroom.lora(model, 4, experts=True)
    shaken(model)
    headroom.patch(model.train(), save, loss=True, **options)
    return model


def trained(model, ids, case):
    """Returns the losses of some steps, and the adapters after them."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = headroom.optim.AdamW8bit(params, lr=1e-2)
    if "released" in case:
        headroom.release_gradients(model, optimizer)
    scaler = headroom.amp.GradScaler(ids.device.type, enabled="scaler" in case)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in params]


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_cpu(case):
    ids = torch.randint(3, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    wanted, params = trained(made(*CASES[case]), ids, case)
    model = made(*CASES[case]).cuda()
    losses, there = trained(model, ids.cuda(), case)
    assert losses == pytest.approx(wanted, rel=1e-3) and losses[-1] < losses[0]
    for mine, right in zip(there, params, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("case", ["gpt-oss in MXFP4, streamed", "Mixtral in int8, with a scaler"])
def test_a_plan_is_what_the_allocator_reaches(case):
    ids = torch.randint(3, 61, (2, 512), generator=torch.Generator().manual_seed(0)).cuda()
    model = made(*CASES[case]).cuda()
    gc.collect()
    torch.cuda.empty_cache()
    plan = headroom.plan(model, headroom.optim.AdamW8bit, {"input_ids": ids, "labels": ids})
    torch.cuda.reset_peak_memory_stats()
    trained(model, ids, "")
    assert plan.allocated_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=1e-3)

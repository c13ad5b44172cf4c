"""Loops with Muon that scale losses, accumulate, clip, release gradients or keep states elsewhere,
against Muon and AdamW in float64, of whole batches."""

import headroom
import torch
from headroom.optim import Muon, Muon8bit
from torch import nn

from helpers.combined import combinations, distance, in_float64
from helpers.muon import JORDAN, orthogonalized

ROWS, STEPS, LR, CLIP = 12, 3, 0.05, 0.5
FACTORS = (1.0, 8.0, 0.25)  # of the losses, which decide how much of each step momentum keeps


def build(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 41), nn.Tanh(), nn.Linear(41, 24)).to(dtype)


def loss_of(model, x, step):
    return FACTORS[step] * (model(x) - x.flip(1)).float().square().mean()


def reference(model, batches, clips):
    """Muon on matrices and AdamW on the others, in a few lines of float64."""
    model, moments = in_float64(model), {}
    others = [p for p in model.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW(others, lr=LR, weight_decay=0.1)
    for step, x in enumerate(batches):
        model.zero_grad()
        (FACTORS[step] * (model(x.double()) - x.double().flip(1)).square().mean()).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        with torch.no_grad():
            for param in (p for p in model.parameters() if p.dim() == 2):
                moment = moments.setdefault(param, torch.zeros_like(param))
                moment.lerp_(param.grad, 0.05)
                u = param.grad.lerp(moment, 0.95)
                tall = u.shape[0] > u.shape[1]
                x = orthogonalized(u.T if tall else u, JORDAN)
                x, scale = (x.T if tall else x), max(1.0, param.shape[0] / param.shape[1]) ** 0.5
                param.mul_(1 - LR * 0.1).add_(x, alpha=-LR * scale)
    return model


@combinations(
    {
        "cls": [Muon, Muon8bit],
        "weights": ["f32", "bf16-remainder16", "bf16-f32"],
        "batch": ["whole", "micro-batches", "accumulator"],
        "scaler": [None, "torch", "headroom"],
        "clip": [None, "step", "function"],
        "release": [False, True],
        "offload": [None, "state"],
        "variant": ["standard", "gram"],
        "workspace": [0, "1 MiB"],
    },
    # Released gradients are stepped at once.
    possible=lambda release, batch, scaler, clip, **_: (
        not release or (batch == "whole" and scaler is None and clip is None)
    ),
)
def test_a_run_is_that_of_whole_batches_in_float64(case):
    dtype = torch.float32 if case["weights"] == "f32" else torch.bfloat16
    model = build(dtype)
    first = [p.detach().double() for p in model.parameters()]
    batches = torch.randn(STEPS, ROWS, 24).to(dtype)
    wanted = reference(model, batches, case["clip"] is not None)
    options = {"variant": case["variant"], "workspace": case["workspace"], "ns_dtype": "float32"}
    if case["cls"] is Muon8bit:
        options |= {"min_8bit_size": 64, "block_size": 64}
    if dtype == torch.bfloat16:
        options["master"] = case["weights"].partition("-")[2]
    if case["clip"] == "step":
        options["max_grad_norm"] = CLIP
    optimizer = case["cls"](model, lr=LR, offload=case["offload"], **options)
    scalers = {"torch": torch.amp.GradScaler, "headroom": headroom.amp.GradScaler}
    scaler = scalers[case["scaler"]]("cpu", init_scale=64.0) if case["scaler"] else None
    if case["release"]:
        headroom.release_gradients(model, optimizer)
    accumulator = headroom.GradAccumulator(optimizer) if case["batch"] == "accumulator" else None
    for step, x in enumerate(batches):
        parts = [x] if case["batch"] == "whole" else x.split(ROWS // 3)
        for part in parts:
            loss = loss_of(model, part, step)
            loss = loss if scaler is None else scaler.scale(loss)
            if accumulator is None:
                (loss / len(parts)).backward()
            else:
                loss.backward()
                accumulator.add(weight=len(part))
        if accumulator is not None:
            accumulator.finish()
        if case["clip"] == "function":
            if scaler is not None:
                scaler.unscale_(optimizer)
            headroom.clip_grad_norm_(model.parameters(), CLIP)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    own = headroom.optim.master_weights(optimizer, model)
    # Momentum in 8 bits; gradients in bfloat16, of which those near 0 decide where AdamW goes.
    bound = 0.15 if case["cls"] is Muon8bit else 0.002
    bound = 0.25 if dtype == torch.bfloat16 else bound
    for (name, param), right, start in zip(model.named_parameters(), wanted.parameters(), first):
        value = own.get(name, param).detach().double()
        assert distance(value - start, right.detach() - start) < bound, name

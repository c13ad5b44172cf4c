"""`GradScaler.update()`, and the op alone: one launch, so this measures the overhead of a call."""

from __future__ import annotations

import torch

from ._model import OP_ONLY
from .harness import Case, Contender


def _state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = torch.full((), 2.0**16, device=device)
    return scale, torch.zeros((), dtype=torch.int32, device=device), torch.zeros((), device=device)


def headroom_op(device: torch.device) -> Contender:
    import headroom

    state = _state(device)
    return Contender(lambda: headroom.functional.update_scale_(*state, growth_interval=1 << 30))


def torch_op(device: torch.device) -> Contender:
    scale, tracker, found_inf = _state(device)
    update = torch._amp_update_scale_
    return Contender(lambda: update(scale, tracker, found_inf, 2.0, 0.5, 1 << 30))


def scaler_update(device: torch.device, kind: type[torch.amp.GradScaler]) -> Contender:
    """After a step that has found nothing infinite."""
    param = torch.nn.Parameter(torch.ones(8, device=device))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.SGD([param], lr=0.0)
    scaler = kind(device.type, growth_interval=1 << 30)
    scaler.scale(torch.ones((), device=device))

    return Contender(scaler.update, prepare=lambda: scaler.step(optimizer))


def headroom_update(device: torch.device) -> Contender:
    import headroom

    return scaler_update(device, headroom.amp.GradScaler)


def cases(device: torch.device, quick: bool) -> list[Case]:
    def setup(device):
        return {
            "headroom": lambda: headroom_update(device),
            OP_ONLY: lambda: headroom_op(device),
            "torch": lambda: scaler_update(device, torch.amp.GradScaler),
            "torch, op only": lambda: torch_op(device),
        }

    return [Case("update", "one scale, no overflow", setup, "torch")]

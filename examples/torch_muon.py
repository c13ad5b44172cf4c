"""torch's Muon for the matrices of a GPT's blocks, and its AdamW for everything else."""

import torch
from torch import nn

from model import GPT


class TorchMuon:
    takes_model = True

    def __init__(self, model: GPT, lr: float, weight_decay: float, adamw: dict, **options: object):
        common = {"lr": lr, "weight_decay": weight_decay}
        layers = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]
        hidden = [layer.weight for layer in layers]
        chosen = {*map(id, hidden)}
        others = [param for param in model.parameters() if id(param) not in chosen]
        self.parts = [
            torch.optim.Muon(hidden, **common, **options),
            torch.optim.AdamW(others, **common, **adamw),
        ]

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

"""Steps under torch.compile."""

import torch


def compile_step(optimizer, backend, fullgraph=True):
    return torch.compile(lambda: optimizer.step(), backend=backend, fullgraph=fullgraph)

"""Optimizers of other libraries, steps of them, and what their state dicts hold."""

import headroom
import torch

from helpers.bits import assert_same_bits

ADAMW, ADAMW8BIT = headroom.optim.AdamW, headroom.optim.AdamW8bit
convert = headroom.state.convert_state

SHAPES = (
    (80, 64),
    (70, 60),
    (37,),
)  # whole blocks of 256, a short last block, too small for 8 bits
LR = 1e-2


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def run(params, optimizer, steps=3, seed=1):
    """Steps with gradients that spread over three powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            scale = 10.0 ** -(3 * torch.rand(param.shape, generator=generator))
            grad = torch.randn(param.shape, generator=generator) * scale
            param.grad = torch.empty_like(param).copy_(grad)
        optimizer.step()
    return params, optimizer


def clones(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def tensors(value):
    """All tensors in a state dict."""
    if isinstance(value, torch.Tensor):
        parts = [getattr(value, name) for name in getattr(value, "tensor_attrs", ())]
        return [part for part in parts if isinstance(part, torch.Tensor)] or [value]
    if isinstance(value, (dict, list, tuple)):
        inner = [value[key] for key in sorted(value)] if isinstance(value, dict) else value
        return [tensor for each in inner for tensor in tensors(each)]
    return []


def assert_same_entries(left, right):
    """Of two state dicts, to the bit."""
    assert left["state"].keys() == right["state"].keys()
    for key, entry in left["state"].items():
        assert entry.keys() == right["state"][key].keys()
    assert_same_bits(tensors(left["state"]), tensors(right["state"]))


def old_bitsandbytes(params, block_size, qmap=None):
    """A state as bitsandbytes wrote it before 0.44: flat, with blocks of 2048."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for i, param in enumerate(params):
        blocks = -(-param.numel() // block_size)
        state[i] = {"step": 5}
        for j, is_signed in ((1, True), (2, False)):
            state[i][f"state{j}"] = torch.randint(
                1, 256, param.shape, dtype=torch.uint8, generator=generator
            )
            state[i][f"absmax{j}"] = torch.rand(blocks, generator=generator)
            state[i][f"qmap{j}"] = (
                headroom.functional.dynamic_map(is_signed) if qmap is None else qmap
            )
    group = dict(
        lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, params=[*range(len(params))]
    )
    return {"state": state, "param_groups": [group]}


def torch_sgd():
    _, optimizer = run(ps := parameters(), torch.optim.SGD(ps, lr=1, momentum=0.9))
    return optimizer.state_dict()

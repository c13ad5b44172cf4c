"""What the programs of this folder share: small models, their data, and what they compare."""

import os
import subprocess
import sys

import torch
from torch import nn


def network():
    """Layers without a loss of their own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def batches(count=6, rows=16):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 64, generator=generator) for _ in range(count)]


def llama():
    """A causal language model of transformers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def sentences(count=64, tokens=32):
    """Rows of tokens that a causal language model learns soon: some that repeat."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (4, tokens), generator=generator).repeat(-(-count // 4), 1)[:count]
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(model, optimizer, data):
    """The losses of a loop of torch alone, in which a model learns its own input."""
    losses = []
    for x in data:
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_bytes(optimizer):
    tensors = [v for state in optimizer.state.values() for v in state.values()]
    return sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))


def assert_same_losses(ours, theirs, rtol=1e-4):
    """The training learns, and its losses are those without Headroom."""
    assert len(ours) == len(theirs) > 1, (ours, theirs)
    assert ours[-1] < ours[0], ours
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=rtol, atol=0)


def on_ranks(count=2):
    """Runs the program on several ranks, by torchrun: returns on each of them, and ends the process
    that has started them."""
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    sys.exit(subprocess.run([sys.executable, *launcher, *sys.argv]).returncode)

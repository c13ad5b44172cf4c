"""Experts in few bits, and adapters of experts, in two processes of FSDP2, by whole experts.

The functions without `test_` in their name run on both ranks (helpers/ranks.py).
"""

import copy
from pathlib import Path

import headroom
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from helpers.bits import assert_same_bits
from helpers.hf_models import shaken
from helpers.mesh import can_shard, mesh, whole
from helpers.moe_models import experts_of, moe_of

pytestmark = pytest.mark.gloo


def model_of():
    model = moe_of("Mixtral")
    headroom.lora(model, 4, experts=True)
    return shaken(model).train()


def gradients(model, rank):
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(rank))
    model(input_ids=ids, labels=ids).loss.backward()
    grads = whole([p.grad for p in model.parameters() if p.requires_grad])
    model.zero_grad()
    return grads


def fsdp(rank, folder):
    model, alone = model_of(), model_of()
    for each in (model, alone):
        headroom.patch(each, "L2", norms=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    assert all(isinstance(p, DTensor) for m in experts_of(model).values() for p in m.parameters())
    means = [sum(each) / 2 for each in zip(*(gradients(alone, k) for k in range(2)))]
    assert dist.get_world_size() == 2
    for mine, wanted in zip(gradients(model, rank), means, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6)
    assert_same_bits(whole([*model.parameters()]), [p.detach() for p in alone.parameters()])
    with pytest.raises(TypeError, match="is a DTensor: gather the model before merging"):
        headroom.merge(model)
    with pytest.raises(ValueError, match="its weights are tensors of .*, such as DTensors"):
        headroom.lora(model, 2, experts=2, targets=[], name="other")
    by_one = f"{folder}/of {rank}"
    headroom.state.save_adapter(model, folder)
    headroom.state.save_adapter(alone, by_one)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (Path(folder) / name).read_bytes() == (Path(by_one) / name).read_bytes()


def quantized(to, seed=5, **options):
    model = moe_of("Mixtral", seed=seed)
    headroom.quantize(model, to, **options)
    return model


def few_bits(rank):
    """What one process wrote is cut where it is loaded."""
    if not can_shard():
        return
    for to in ("nf4", "int8"):
        model, wanted = quantized(to, seed=6), quantized(to)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh())
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, copy.deepcopy(wanted.state_dict()), options=options)
        assert_same_bits(whole([*model.parameters()]), [p.detach() for p in wanted.parameters()])
        for mine, right in zip(gradients(model, 0), gradients(wanted, 0), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-6)
        if to == "nf4":
            other = quantized(to, block_size=128).state_dict()
            with pytest.raises(RuntimeError, match="its blocks are others than those of the"):
                set_model_state_dict(model, other, options=options)


@pytest.mark.parametrize("function, arguments", [(fsdp, ["adapter"]), (few_bits, [])])
def test_in_two_processes(function, arguments, ranks, tmp_path):
    ranks(function, *(str(tmp_path / name) for name in arguments))

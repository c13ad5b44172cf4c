"""Models with adapters in two processes: DDP averages adapters, and FSDP2 shards them.

The functions without `test_` in their name run on both ranks (helpers/ranks.py).
"""

from pathlib import Path

import headroom
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from helpers.bits import assert_same_bits
from helpers.mesh import can_shard, mesh, whole

pytestmark = pytest.mark.gloo


def model_of(to, seed=1):
    """Returns a model of quantized layers, or one with all that adapters may have."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 36), nn.ReLU(), nn.Linear(36, 24), nn.Linear(24, 4))
    if to in ("nf4", "int8"):
        headroom.quantize(model, to)
    headroom.lora(model, 2, dora=to == "dora", modules_to_save=["3"] if to == "dora" else [])
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
        if "magnitude" in name or "modules_to_save" in name:
            p.data += 0.3
    return model


def gradients(model, rank=0, dtype=torch.float32):
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(rank)).to(dtype)
    model(x).float().square().mean().backward()
    grads = whole([p.grad for p in model.parameters() if p.requires_grad])
    model.zero_grad()
    return grads


def means(model, **options):
    each = [gradients(model, k, **options) for k in range(dist.get_world_size())]
    return [sum(grads) / len(grads) for grads in zip(*each)]


def ddp(rank, to, folder):
    model = DistributedDataParallel(model_of(to, seed=rank))
    if rank == 0:
        headroom.state.save_adapter(model, folder)
        headroom.state.load_adapter(model.module, folder, "again")
        headroom.adapters.delete_adapter(model.module, "again")
        headroom.adapters.use_adapters(model.module, "default")
    got = gradients(model, rank)  # of the weights of rank 0
    for mine, wanted in zip(got, means(model_of(to, seed=0)), strict=True):
        torch.testing.assert_close(mine, wanted)


def fsdp(rank, to, folder):
    if to in ("nf4", "int8") and not can_shard():
        return
    model, alone = model_of(to), model_of(to)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for mine, wanted in zip(gradients(model, rank), means(alone), strict=True):
        torch.testing.assert_close(mine, wanted)
    assert_same_bits(whole([*model.parameters()]), [p.detach() for p in alone.parameters()])
    for refused in (headroom.merge, lambda model: headroom.lora(model, name="other")):
        with pytest.raises(TypeError, match="is a DTensor"):
            refused(model)
    headroom.state.save_adapter(model, folder)
    by_one = f"{folder}/of {rank}"
    headroom.state.save_adapter(alone, by_one)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (Path(folder) / name).read_bytes() == (Path(by_one) / name).read_bytes()
    (Path(folder) / "file").touch()
    if rank == 0:  # the others do not wait for what is not written
        with pytest.raises(OSError):
            headroom.state.save_adapter(model, f"{folder}/file")
    else:
        headroom.state.save_adapter(model, f"{folder}/file")


def steps(rank, to, folder):
    """Adapters train in shards or in buckets as they do alone, and packed bytes stay."""
    alone, buckets = model_of(to), DistributedDataParallel(model_of(to))
    shards = model_of(to)
    models = [buckets]
    if to not in ("nf4", "int8") or can_shard():
        fully_shard(shards, mesh=mesh())
        models.append(shards)
    packed = [p.detach().clone() for p in alone.parameters() if not p.requires_grad]
    for model in [alone, *models]:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = headroom.optim.AdamW(trained, lr=0.1)
        for _ in range(3):
            for k in range(2) if model is alone else [rank]:
                x = torch.randn(4, 24, generator=torch.Generator().manual_seed(k))
                (model(x).square().mean() / (2 if model is alone else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        frozen = whole([p for p in model.parameters() if not p.requires_grad])
        assert_same_bits(frozen, packed)
        wanted = [p.detach() for p in alone.parameters() if p.requires_grad]
        for mine, other in zip(whole(trained), wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
            assert mine.abs().max() > 0.1


def mixed(rank, to, folder):
    """x and dense weights in bfloat16, and adapters that FSDP2 has cast too."""
    if to in ("nf4", "int8") and not can_shard():
        return
    model, alone = model_of(to), model_of(to).bfloat16()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=mesh(), mp_policy=policy)
    for mine, wanted in zip(gradients(model, rank), means(alone, dtype=torch.bfloat16)):
        assert mine.dtype == torch.float32
        assert (mine - wanted).norm() < 2e-2 * wanted.norm()


@pytest.mark.parametrize("to", [None, "dora", "nf4", "int8"])
@pytest.mark.parametrize("scenario", [ddp, fsdp, mixed, steps])
def test_in_two_processes(scenario, to, ranks, tmp_path):
    ranks(scenario, to, str(tmp_path))

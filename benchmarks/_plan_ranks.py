"""Cases of the planner's benchmark that run on two processes, which talk through gloo."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import tempfile
from functools import partial
from typing import Any

import torch
from torch import nn

from ._plan_cases import Case, cases
from ._plan_steps import made, run_steps

RANKS = 2
RUNS = 20  # at most, see `timeline`
SECONDS = 600


def timeline(case: Case, enough: float) -> Any:
    """Returns the timeline of rank 0: of the run that took the least, of those until one takes at
    most ``enough`` bytes.

    What gloo's thread frees is not seen, and whether it or the main thread frees the copies of what
    is sent is chance. The first run also allocates what is allocated once per process.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        arguments = (torch.get_num_threads(), case.name, enough, store, there)
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        there.close()
        try:
            if not here.poll(SECONDS):
                raise TimeoutError(f"the ranks of {case.name} do not answer")
            return here.recv()
        except EOFError:
            raise RuntimeError(f"a rank of {case.name} failed") from None
        finally:
            for rank in ranks:
                rank.join(SECONDS)
                rank.kill()


def _rank(rank: int, threads: int, name: str, enough: float, store: str, pipe: Any) -> None:
    torch.set_num_threads(threads)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    case = next(case for case in cases() if case.name == name)
    best = None
    for _ in range(RUNS):
        found = _measured(case)
        gc.collect()
        if best is None or found.peak_bytes < best.peak_bytes:
            best = found
        is_more = torch.tensor(best.peak_bytes > enough)
        torch.distributed.all_reduce(is_more, torch.distributed.ReduceOp.MAX)
        if not is_more:
            break
    if rank == 0:
        pipe.send(best)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _measured(case: Case) -> Any:
    import headroom.memory

    model, optimizer, batch = made(case, torch.device("cpu"), partial(_sharded, case))
    with headroom.memory.track(model, optimizer, batch=batch, stacks=False) as tracked:
        run_steps(case, _replicated(case, model), optimizer, batch, torch.device("cpu"))
    return tracked.timeline


def _sharded(case: Case, model: nn.Module) -> nn.Module:
    """Shards the model, if the case says so, by its own hand: not by what the planner reads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not case.is_sharded:
        return model
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (RANKS,))}
    if case.shard == "fsdp-no-reshard":
        options["reshard_after_forward"] = False
    elif case.shard != "fsdp":
        options["mp_policy"] = case.shard.mp_policy
    for block in blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the list of blocks that the models of the cases have."""
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
    return list(lists[0])


def _replicated(case: Case, model: nn.Module) -> nn.Module:
    if case.is_sharded:
        return model
    view = case.shard != "ddp" and case.shard.gradient_as_bucket_view
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)

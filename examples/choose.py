"""Lets `headroom.fit` choose how a rung trains within its budget."""

import time

import headroom
import torch

import data
from data import Text
from model import Size
from run import Run, predict
from rungs import LADDER, Rung

OPTIMIZERS = {"headroom": "headroom.optim.AdamW"}


def choose(rung: Rung, size: Size, device: torch.device, text: Text, seed: int) -> dict:
    """Returns what `headroom.fit` found, as JSON: the `changes` to the fields of the rung, and
    beside them the frontier of `headroom.ladder`, which is what there is to choose from for any
    budget: peaks, seconds, and in words. Both are from one search.

    Only the choice is taken: the run that has it is made from the changed rung, and so a run that
    was saved can be made again without measuring anything.
    """
    first = predict(LADDER[0], size, device)
    budget = int(rung.budget * first.peak_bytes)
    others = first.total_bytes - first.peak_bytes  # of CUDA's context and allocator
    run = Run(rung, size, device, seed)
    pair = [x.to(device) for x in data.batch(text, seed, 0, size.batch, size.context)]
    how = {"optimizer": run.optimizer, "forward": lambda model, batch: model(*batch)}
    started = time.perf_counter()
    ladder = headroom.ladder(run.model, pair, **how)
    looked = time.perf_counter() - started
    found = headroom.fit(
        run.model, pair, budget=budget + others, ladder=ladder, dry_run=True, **how
    )
    seconds = time.perf_counter() - started
    print(f"headroom.ladder took {looked:.1f} s to find what there is:\n{ladder}\n")
    print(f"headroom.fit took {seconds - looked:.1f} s to choose from it:\n{found}", flush=True)
    choice = found.choice
    return {
        "budget_bytes": budget,
        "predicted_peak_bytes": found.plan.peak_bytes,
        "predicted_seconds": found.predicted_seconds,
        "seconds": seconds,
        "choice": str(choice),
        "changes": {
            "save": list(choice.levels),
            "accumulate": choice.micro_batches,
            "optimizer": OPTIMIZERS.get(choice.optimizer, rung.optimizer),
            "release": choice.release,
            "bucket_bytes": found.bucket_bytes or 0,
            "fused_loss": choice.fused_loss,
        },
        "frontier": [[p.peak - others, p.seconds, p.title] for p in ladder.points],
    }

"""Compares what estimators of memory say before a run with what torch's allocator reaches in it, on
a software device: `python -m benchmarks._estimators`, some minutes on a machine without a GPU.

They are Headroom's plan, `torch.distributed._tools.MemTracker` on fake tensors, torch-kitsune,
which has to be installed (`pip install --no-deps torch-kitsune`), and the formula that
`accelerate estimate-memory` prints for Adam. The models are those of `python -m benchmarks plan`
that need nothing of Headroom.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from . import plan
from ._plan_cases import Case, cases, theirs
from ._plan_steps import made, run_steps

FILE = Path(__file__).parent / "results" / "estimators.json"
NAMES = {
    "headroom": "Headroom's plan",
    "mem_tracker": "torch's MemTracker",
    "kitsune": "torch-kitsune",
    "accelerate": "accelerate estimate-memory",
}
PLAIN = ("hf-gpt2", "hf-llama", "hf-llama-recompute", "hf-bert-amp", "hf-lora")
PLAIN += ("resnet-sgd", "vit-adamw", "vit-recompute", "tied-mlp", "moe")
MARK = "estimated: "
# cuBLAS's are 8 MiB for a product, which is much beside small models: only the plan knows of them.
WITHOUT_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


def mem_tracker(case: Case, device: torch.device) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(), device:  # where modules are made: fakes cannot be moved there
        model, batch = case.model(), case.batch()
        optimizer = case.optimizer(model)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batch)
        with tracker:
            run_steps(case, model, optimizer, batch, device, steps=1)
            tracker.reset_mod_stats()  # which it asks for; the states of the optimizer stay
            run_steps(case, model, optimizer, batch, device, steps=1)
    peaks = tracker.get_tracker_snapshot("peak")
    return next(sizes["Total"] for place, sizes in peaks.items() if place.type == device.type)


def kitsune(case: Case, device: torch.device) -> int:
    from kitsune import predict  # pyright: ignore[reportMissingImports]

    model, optimizer, batch = made(case, torch.device("cpu"))
    if case.name == "hf-lora":  # of which it has a function of its own, which takes the model alone
        modules = tuple(model.peft_config["default"].target_modules)
        config = predict.LoRAConfig(rank=8, target_modules=modules)
        shape = tuple(batch[0].shape[1:])
        size = len(batch[0])
        return predict.estimate_lora_memory(theirs(), shape, size, config=config).total_bytes
    momentum = optimizer.param_groups[0].get("momentum")
    names = {None: "adamw", 0.0: "sgd"}
    found = predict.predict_memory(
        model,
        tuple(batch[0].shape[1:]),
        batch_size=len(batch[0]),
        optimizer=names.get(momentum, "sgd_momentum"),
    )
    return found.total_bytes


def accelerate(case: Case, device: torch.device) -> int:
    from accelerate.utils import calculate_maximum_sizes

    return 4 * calculate_maximum_sizes(case.model())[0]


def headroom(case: Case, device: torch.device) -> int:
    return plan.predicted(case, device).allocated_bytes


def rehearsed() -> None:
    """Prints what each case takes and what is said of it. Where this runs, torch has a device."""
    named = {case.name: case for case in cases()}
    for name in PLAIN:
        print(MARK + json.dumps(row(named[name], torch.device("cuda"))), flush=True)


def row(case: Case, device: torch.device) -> dict[str, Any]:
    """Returns what is kept of a case."""
    found: dict[str, Any] = {"case": case.name, "what": case.what}
    found["measured"] = plan.on_gpu(case, device)["allocated"]
    for estimator in (headroom, mem_tracker, kitsune, accelerate):
        try:
            found[estimator.__name__] = estimator(case, device)
        except Exception as error:  # of any type: it is what a user would see
            found[estimator.__name__] = f"{type(error).__name__}: {error}"[:200]
    return found


def errors(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Returns how far an estimator is off in each case that it can say something of."""
    return [row[name] / row["measured"] - 1 for row in rows if isinstance(row[name], int)]


def rows_of_table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the rows of the table of docs/comparison.md."""
    found = []
    for name, says in NAMES.items():
        off = errors(rows, name)
        size = [abs(error) for error in off]
        found.append(
            f"| {says} | {len(off)} of {len(rows)} | {100 * statistics.median(size):.1f} % "
            f"| {100 * min(off):+.0f} % | {100 * max(off):+.0f} % |"
        )
    return found


def main() -> None:
    if sys.argv[1:]:
        return rehearsed()
    from headroom_rehearsal import run

    os.environ |= WITHOUT_WORKSPACES
    report = run(["-m", "benchmarks._estimators", "rehearsed"], gpu="RTX 4090")
    lines = [one for one in report["output"].splitlines() if one.startswith(MARK)]
    rows = [json.loads(line.removeprefix(MARK)) for line in lines]
    if len(rows) < len(PLAIN):
        sys.exit(report["output"])
    print("\n".join(rows_of_table(rows)))
    packages = ("torch", "headroom", "torch-kitsune", "accelerate", "transformers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    FILE.write_text(json.dumps({"versions": versions, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

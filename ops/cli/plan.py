"""Predicts the memory of training steps, without running them and without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from headroom_command.compute_capability import compute_capability

from .._core.atomic import write_json
from ..planning import Plan, plan
from .arguments import count
from .output import print_json
from .setups import add_setup_arguments, setup_of

HELP = "predict the memory of a training step"


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_setup_arguments(command)
    command.add_argument(
        "--capability",
        type=compute_capability,
        metavar="X.Y",
        help="of the GPU, such as 8.6; default: 8.0",
    )
    command.add_argument(
        "--advice", type=count(0), default=0, metavar="N", help="what would help most"
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="write the plan as JSON as well")
    command.add_argument("--top", type=count(0), default=8, metavar="N", help="owners in the table")


def run(options: argparse.Namespace) -> int:
    arguments, keywords = setup_of(options)
    told = None if options.capability is None else divmod(options.capability, 10)
    found = plan(*arguments, **keywords, capability=told)
    if options.out is not None:
        write_json(options.out, found.to_json())
    advice = found.advice(options.advice) if options.advice > 0 else []
    if options.json:
        print_json(described(found) | {"advice": [str(one) for one in advice]})
    else:
        print(found.table(options.top))
        for one in advice:
            print(one)
    return 0


def described(plan: Plan) -> dict[str, Any]:
    """Returns the numbers of a plan, in bytes, for ``--json``."""
    return {
        "format": "headroom.plan.summary/1",
        "model": plan.model,
        "options": plan.options,
        "device": plan.timeline.device,
        "total_bytes": plan.total_bytes,
        "peak_bytes": plan.peak_bytes,
        "reserved_bytes": plan.reserved_bytes,
        "first_step_bytes": plan.first_step,
        "steady_bytes": plan.steady,
        "peak_by_kind": plan.peak_by_kind,
        "peaks_by_phase": plan.timeline.peaks_by_phase(),
        "device_share": vars(plan.device_share),
        "notes": plan.timeline.notes,
    }

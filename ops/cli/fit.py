"""Says whether training steps fit a budget of memory, and the largest batch that does, without a
GPU. Exits with 1 where they do not fit."""

from __future__ import annotations

import argparse

from .._core.sizes import format_bytes, parse_bytes
from ..planning import max_batch, plan
from .output import print_json
from .plan import described
from .setups import add_setup_arguments, setup_of

HELP = "say whether a training step fits a budget"


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_setup_arguments(command)
    command.add_argument(
        "--budget", required=True, metavar="SIZE", help='memory of the device, such as "24 GiB"'
    )
    command.add_argument(
        "--max-batch",
        action="store_true",
        help="find the most samples of a batch that fit; plans about ten times",
    )


def run(options: argparse.Namespace) -> int:
    budget = parse_bytes(options.budget)
    arguments, keywords = setup_of(options)
    if options.max_batch:
        most = max_batch(*arguments, budget=budget, **keywords)
        if options.json:
            found = {"format": "headroom.fit/1", "budget_bytes": budget, "fits": most > 0}
            print_json(found | {"max_batch": most})
        else:
            print(f"largest batch in {format_bytes(budget)}: {most}")
        return 0 if most else 1
    found = plan(*arguments, **keywords)
    fits, rest = found.fits(budget), budget - found.total_bytes
    if options.json:
        head = {"format": "headroom.fit/1", "budget_bytes": budget, "fits": fits}
        print_json(head | {"plan": described(found)})
    else:
        verdict = f"fits, with {format_bytes(rest)} to spare" if fits else "does not fit"
        more = "" if fits else f", by {format_bytes(-rest)}"
        print(f"{format_bytes(found.total_bytes)} of {format_bytes(budget)}: {verdict}{more}")
    return 0 if fits else 1

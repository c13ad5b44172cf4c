"""Says whether training steps fit a budget of memory, and the largest batch that does, without a
GPU; or, on the device itself, how to train the fastest within the budget. Exits with 1 where they
do not fit."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .._core.sizes import format_bytes
from ..planning import max_batch, plan
from ..techniques.technique import allowable
from .arguments import ArgumentError, size
from .output import print_json
from .plan import described
from .setups import add_setup_arguments, real_setup_of, setup_of

HELP = "say whether a training step fits a budget, or how it can"
FORMAT = "headroom.fit/1"


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_setup_arguments(command)
    question = command.add_mutually_exclusive_group(required=True)
    question.add_argument(
        "--budget", type=size, metavar="SIZE", help='memory of the device, such as "24 GiB"'
    )
    question.add_argument(
        "--ladder", action="store_true", help="show all trades of memory against time, measured"
    )
    how = command.add_mutually_exclusive_group()
    how.add_argument(
        "--max-batch",
        action="store_true",
        help="find the most samples of a batch that fit; plans about ten times",
    )
    how.add_argument(
        "--measure",
        action="store_true",
        help="find the fastest way to train within the budget, by running steps; changes nothing",
    )
    real = command.add_argument_group(
        "with --measure and --ladder, which run MODEL, a module:function, on the device"
    )
    real.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=allowable(),
        help="use this too, which changes the mathematics; again for more",
    )
    real.add_argument(
        "--host-budget",
        type=size,
        metavar="SIZE",
        help="memory of the host that may hold what the device has no room for",
    )
    real.add_argument("--png", type=Path, metavar="PNG", help="draw the ladder as well")
    real.add_argument(
        "--out", type=Path, metavar="FILE", help="write the ladder as JSON for headroom report"
    )


def run(options: argparse.Namespace) -> int:
    _check(options)
    if options.ladder:
        return _ladder(options)
    budget = options.budget
    if options.measure:
        return _measured(options, budget)
    arguments, keywords = setup_of(options)
    if options.max_batch:
        most = max_batch(*arguments, budget=budget, **keywords)
        if options.json:
            found = {"format": FORMAT, "budget_bytes": budget, "fits": most > 0}
            print_json(found | {"max_batch": most})
        else:
            print(f"largest batch in {format_bytes(budget)}: {most}")
        return 0 if most else 1
    found = plan(*arguments, **keywords)
    fits, rest = found.fits(budget), budget - found.total_bytes
    if options.json:
        head = {"format": FORMAT, "budget_bytes": budget, "fits": fits}
        print_json(head | {"plan": described(found)})
    else:
        verdict = f"fits, with {format_bytes(rest)} to spare" if fits else "does not fit"
        more = "" if fits else f", by {format_bytes(-rest)}"
        print(f"{format_bytes(found.total_bytes)} of {format_bytes(budget)}: {verdict}{more}")
    return 0 if fits else 1


def _check(options: argparse.Namespace) -> None:
    """Refuses options that do not go together."""
    if options.ladder and (options.max_batch or options.measure):
        raise ArgumentError("--ladder has no budget, which --max-batch and --measure need")
    if options.allow and not (options.measure or options.ladder):
        raise ArgumentError("--allow goes with --measure or --ladder")
    if options.host_budget is not None and not (options.measure or options.ladder):
        raise ArgumentError("--host-budget goes with --measure or --ladder")
    if (options.png or options.out) and not options.ladder:
        raise ArgumentError("--png and --out are of --ladder")


def _measured(options: argparse.Namespace, budget: int) -> int:
    """Shows what ``headroom.fit`` would do."""
    import headroom
    from headroom.fitting import DoesNotFit

    arguments, keywords = real_setup_of(options)
    try:
        fitted = headroom.fit(
            *arguments,
            budget=budget,
            host_budget=options.host_budget,
            allow=tuple(options.allow),
            dry_run=True,
            **keywords,
        )
    except DoesNotFit as error:
        if options.json:
            answer = {"format": FORMAT, "budget_bytes": budget, "fits": False}
            print_json(answer | {"least_bytes": error.least, "reason": str(error)})
        else:
            print(error)
        return 1
    if options.json:
        answer = {"format": FORMAT, "budget_bytes": budget, "fits": True}
        print_json(answer | {"fitted": fitted.to_json()})
    else:
        print(fitted)
    return 0


def _ladder(options: argparse.Namespace) -> int:
    """Shows the whole frontier."""
    import headroom

    arguments, keywords = real_setup_of(options)
    ladder = headroom.ladder(
        *arguments,
        allow=tuple(options.allow),
        host_budget=options.host_budget,
        path=options.png,
        **keywords,
    )
    if options.out is not None:
        ladder.save(options.out)
    if options.json:
        print_json(ladder.to_json())
    else:
        print(ladder)
        for path in filter(None, (options.png, options.out)):
            print(f"wrote {path}", file=sys.stderr)
    return 0

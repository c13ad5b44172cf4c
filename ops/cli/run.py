"""Runs a program of someone else's in this process, with optimizers of Headroom by name, a budget
of memory, or a recording of its steps. Arguments, exit code, errors and signals are the
program's."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headroom_command.program import MISSING, add_program, words_of

from ..integrations.attaching import Budget, register_later
from ..integrations.watching import WatchedSteps
from ..techniques.technique import allowable
from .arguments import ArgumentError, size
from .programs import LAUNCHERS, exit_code, starting

HELP = "run a program with Headroom in the loops that it uses"
HAS_JSON = False
STEPS_ON_CPU = 3  # whose memory is recorded there, where a recording grows until it ends


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "headroom run [options] PROGRAM ARGS...  or  [options] -m MODULE ARGS..."
    command.add_argument(
        "--register",
        action="store_true",
        help="add optimizers by name to transformers, such as --optim headroom_adamw_8bit",
    )
    command.add_argument(
        "--budget",
        type=size,
        metavar="SIZE",
        help="fit the trainings of Trainer or Lightning into this memory of the device",
    )
    command.add_argument(
        "--host-budget", type=size, metavar="SIZE", help="memory of the host for the same"
    )
    command.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=allowable(),
        help="use this too, which changes the mathematics; again for more",
    )
    recording = command.add_mutually_exclusive_group()
    recording.add_argument(
        "--snapshot-on-oom",
        type=Path,
        metavar="DIR",
        help="write a snapshot there if the program ends because memory runs out",
    )
    recording.add_argument(
        "--profile", type=Path, metavar="DIR", help="write a profile of some steps there"
    )
    add_program(command)


def run(options: argparse.Namespace) -> Callable[[], int]:
    """Returns what runs the program, after all arguments were checked."""
    words = words_of(options)
    if not words:
        raise ArgumentError(MISSING)
    wanted = (options.register, options.budget, options.snapshot_on_oom, options.profile)
    if not any(one not in (None, False) for one in wanted):
        raise ArgumentError(
            "there is nothing to do: give --register, --budget, --snapshot-on-oom or --profile"
        )
    if options.budget is None and (options.host_budget is not None or options.allow):
        given = "--allow" if options.host_budget is None else "--host-budget"
        raise ArgumentError(f"{given} goes with --budget")
    name = words[0]
    if (launcher := LAUNCHERS.get(os.path.basename(name))) is not None:
        raise ArgumentError(
            f"{name} starts its program in other processes, where Headroom would not be; begin "
            f"Headroom in those: {launcher} [options] PROGRAM"
        )
    start = starting(words, options.is_module)
    for folder in filter(None, (options.snapshot_on_oom, options.profile)):
        folder.mkdir(parents=True, exist_ok=True)
    return partial(_run, options, start)


def _run(options: argparse.Namespace, start: Callable[[], None]) -> int:
    """Runs the program, and returns 0, or 1 after an error that it did not handle."""
    budget = None
    if options.register:
        register_later()
    if options.budget is not None:
        budget = Budget(options.budget, options.allow, options.host_budget)
    watched = _watched(options, budget)
    error: BaseException | None = None
    try:
        start()
    except BaseException as raised:
        error = raised
    if watched is not None:
        watched.end(None if isinstance(error, SystemExit) else error)
        _tell_files(watched, options)
    if budget is not None and not budget.callbacks:
        _tell("--budget had no effect: no Trainer was made in this process")
    return exit_code(error)


def _watched(options: argparse.Namespace, budget: Budget | None) -> WatchedSteps | None:
    """Returns what records the steps of the program, if it is to be recorded."""
    import headroom

    def waits() -> bool:
        return budget is not None and budget.is_waiting

    def profile(model: Any, optimizers: Any) -> Any:
        return headroom.profile(options.profile, model=model, optimizer=optimizers)

    def snapshot(model: Any, optimizers: Any) -> Any:
        path = options.snapshot_on_oom / f"rank{os.environ.get('RANK', 0)}.pickle"
        return headroom.memory.snapshot(path, model, optimizers, oom_only=True)

    if options.profile is not None:
        return WatchedSteps(profile, waits)
    if options.snapshot_on_oom is not None:
        return WatchedSteps(snapshot, waits, _steps)
    return None


def _steps(model: Any) -> int | None:
    """Returns after how many steps of a model a recording of memory ends."""
    return STEPS_ON_CPU if next(model.parameters()).device.type == "cpu" else None


def _tell_files(watched: WatchedSteps, options: argparse.Namespace) -> None:
    """Tells where the recording is, or why there is none."""
    files = [] if watched.recording is None else watched.recording.files
    for path in files:
        _tell(f"wrote {path}")
    if options.profile is not None and not files:
        why = "the program made too few steps"
        if watched.recording is None:
            why = "no model was trained in this process"
        elif not watched.optimizers:
            why = "no optimizer steps the module that was called first, and nothing else"
        _tell(f"--profile wrote nothing: {why}")


def _tell(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"headroom run: {text}", file=sys.stderr)

"""Runs a program on the software device, and says what it took. Import it after the device was
started."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pickle
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import torch
from headroom._core.dtensor import local_part
from headroom._core.sizes import format_bytes
from headroom.cli.programs import exit_code
from headroom.reports.rehearsal import VERDICTS
from headroom_command.program import typed, words_of
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import certificate, device, history
from .advice import Place, advise
from .compare import compared
from .earlier import FORMAT
from .host import Host, in_words, ran_out
from .lines import line
from .on_gpu import OnGpu
from .weights import load_no_weights

__all__ = ["rehearse"]

_LINES = 8  # of reads, and of the peak, that are shown
_KINDS = "parameters", "gradients", "optimizer_state"
_Key = tuple[str, int, Any]  # a kind, the identity of a parameter, the name of a state of its


class _Ended(SystemExit):
    """Ends the program after its last step."""


def rehearse(
    start: Callable[[], None], options: argparse.Namespace, wanted: dict[str, Any] | None
) -> int:
    """Runs a program until its last step, prints the report, and returns the exit code.

    Args:
        wanted: the device that was started; None where it is a GPU.

    Raises:
        BaseException: what the program ended with, such as SystemExit.
    """
    on = OnGpu() if wanted is None else _Rehearsed(options, wanted)
    seen = _Seen(options.steps)
    history.record()
    process, place = os.getpid(), Place.now()
    if options.devices is not None:
        from .ranks import be_first_of

        be_first_of(options.devices)
    if options.no_weights:
        load_no_weights()
    error: BaseException | None = None
    try:
        start()
    except BaseException as raised:
        error = raised
    if os.getpid() != process:  # a child of the program's own
        return exit_code(error)
    try:
        code = 0 if isinstance(error, _Ended) else exit_code(error)
        ended, left = code, None
    except SystemExit as raised:
        ended, left = _code_of(raised), raised
    except BaseException as raised:
        ended, left = 1, raised
    if isinstance(error, SystemExit):
        error = getattr(sys, "last_value", error)  # that a command has printed
    recorded, kinds = seen.memory()
    found = {"program": typed(options)} | seen.report(on) | {"exit_code": ended}
    found |= {"ranks": options.devices or 1, "host": on.host(error)}
    if found["host"]["refused"]:
        found["fits"] = False
    if recorded is not None:
        found["at_peak"] = history.at_peak(recorded, kinds)
        if options.snapshot is not None:
            options.snapshot.write_bytes(pickle.dumps(recorded))
            found["snapshot"] = str(options.snapshot)
    name = f"exit code {ended}" if isinstance(error, SystemExit) else type(error).__name__
    found["error"] = None if error is None or ended == 0 else name
    found["message"] = None if found["error"] is None else str(error)
    if found["fits"] and found["error"] is not None:
        found["fits"] = None
    print(_text(found), file=sys.stderr)
    failures = []
    if options.fail_above is not None and found["peak_allocated"] > options.fail_above:
        limit, peak = format_bytes(options.fail_above), format_bytes(found["peak_allocated"])
        failures.append(f"tensors took {peak}, more than {limit}")
    if options.certificate is not None:
        try:
            program = os.path.join(place.folder, words_of(options)[0])
            certificate.write(options.certificate, found, recorded, program)
        except ValueError as why:
            failures.append(f"there is no certificate: {why}")
    for failure in failures:
        print(f"headroom rehearse: {failure}", file=sys.stderr)
    if options.compare is not None:
        print(compared(*options.compare, found), file=sys.stderr)
    if options.advise and found["fits"] is False:
        found["advice"] = advise(options, found, place)
    if options.report is not None:
        options.report.write_text(json.dumps(found, indent=2))
    if left is not None and not (failures and ended == 0):
        raise left
    return 1 if failures else ended


def _code_of(error: SystemExit) -> int:
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1


class _Rehearsed:
    """Says what a report has of the software device and of the host that is rehearsed."""

    def __init__(self, options: argparse.Namespace, wanted: dict[str, Any]) -> None:
        self._of = wanted | {"context_is": "estimate"}
        self._host = Host(device().runtime, options.host_memory, device().limit)
        device().answer, device().share = options.loss, options.nonzero
        self.reads, self.host = device().reads, self._host.report

    def device(self) -> dict[str, Any]:
        return self._of

    def peak_reserved(self, by_torch: int) -> int:
        return device().peak_bytes(0)  # with what a program takes beside torch's allocator


class _Seen:
    """Counts steps, requests that were refused, and peaks, while a program runs."""

    def __init__(self, steps: int) -> None:
        self._last = steps
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._times: list[float] = []
        self._held: weakref.WeakKeyDictionary[Any, dict[_Key, int]] = weakref.WeakKeyDictionary()
        self._after: dict[str, int] = {}  # the last step: what optimizers hold that there are then
        self._peaks = 0, 0  # allocated and reserved
        self._memory: tuple[dict[str, Any] | None, dict[int, str]] | None = None
        self._refused: list[dict[str, Any]] = []
        self._begin = time.monotonic()
        register_optimizer_step_post_hook(self._stepped)
        torch.cuda._lazy_call(self._attach)

    def _attach(self) -> None:
        torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)
        reset = torch._C._cuda_resetPeakMemoryStats

        def kept(index: int) -> None:  # what a program forgets
            self._peaks = self._most()
            reset(index)

        torch._C._cuda_resetPeakMemoryStats = kept

    def _most(self) -> tuple[int, int]:
        """Returns the most bytes that were allocated and reserved."""
        if not torch.cuda.is_initialized():
            return self._peaks
        allocated, reserved = self._peaks
        return (
            max(allocated, torch.cuda.max_memory_allocated(0)),
            max(reserved, torch.cuda.max_memory_reserved(0)),
        )

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        done = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if done > len(self._times):
            self._times.append(time.monotonic())
        self._held[optimizer] = {key: t.nbytes for key, t in _held(optimizer).items()}
        # One that steps others, as torchtitan's does, holds what they hold.
        every = {key: size for sizes in self._held.values() for key, size in sizes.items()}
        self._after = dict.fromkeys(_KINDS, 0)
        for (kind, *_), size in every.items():
            self._after[kind] += size
        # One of several optimizers may be ahead.
        if done >= self._last and min(self._counts.values()) >= self._last:
            # Before a program that sees its end moves tensors to the CPU, as Lightning does.
            self._memory = history.recorded(), self._kinds()
            raise _Ended(0)

    def _out_of_memory(self, index: int, asked: int, total: int, free: int) -> None:
        self._refused.append(
            {
                "line": line(),
                "asked": asked,
                "allocated": torch.cuda.memory_allocated(index),
                "reserved": torch.cuda.memory_reserved(index),
            }
        )

    def report(self, on: OnGpu | _Rehearsed) -> dict[str, Any]:
        """Returns what the program took, as what JSON knows."""
        used = torch.cuda.is_initialized()
        allocated, reserved = self._most()
        between = [b - a for a, b in zip(self._times, self._times[1:])]
        return {
            "format": FORMAT,
            "device": on.device(),
            "versions": _versions(),
            "fits": not self._refused if used else None,
            "peak_allocated": allocated,
            "peak_reserved": on.peak_reserved(reserved),
            "after_step": self._after,
            "steps": len(self._times),
            "step_seconds": statistics.median(between) if between else None,
            "refused": self._refused,
            "unknown_reads": dict(on.reads.most_common()),
            "seconds": time.monotonic() - self._begin,
            "snapshot": None,
            "at_peak": [],
        }

    def memory(self) -> tuple[dict[str, Any] | None, dict[int, str]]:
        """Returns what was recorded, and what optimizers hold at its end: kinds by addresses."""
        return self._memory or (history.recorded(), self._kinds())

    def _kinds(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for optimizer in [*self._held]:
            for (kind, *_), t in _held(optimizer).items():
                with contextlib.suppress(RuntimeError):  # a subclass without memory of its own
                    found[t.untyped_storage().data_ptr()] = kind
        return found


def _held(optimizer: Any) -> dict[_Key, torch.Tensor]:
    """Returns an optimizer's parameters, their gradients, and states on the device, by their kind,
    their parameter and, of a state, its name."""
    found: dict[_Key, Any] = {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        found["parameters", id(p), ""] = p
        found["gradients", id(p), ""] = p.grad
    for p, state in optimizer.state.items():
        for name, t in state.items() if isinstance(state, dict) else ():
            found["optimizer_state", id(p), name] = t
    local = ((key, local_part(t)) for key, t in found.items() if isinstance(t, torch.Tensor))
    return {key: t for key, t in local if t.is_cuda}


def _versions() -> dict[str, str]:
    """Returns the versions of Python, and of libraries that the program has imported."""
    found = {"python": platform.python_version()}
    for name, module in sorted(sys.modules.items()):
        if "." in name or name.startswith("_") or name in sys.stdlib_module_names:
            continue
        # Not asked of the module, which may begin to import its parts then.
        version = getattr(module, "__dict__", {}).get("__version__")
        if not isinstance(version, str):
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        found[name] = str(version)  # torch's is a class of its own
    return found


def _by(key: Callable[[dict[str, Any]], str], rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Returns the bytes at the peak under each name, the largest first."""
    sizes: collections.Counter[str] = collections.Counter()
    for row in rows:
        sizes[key(row)] += row["bytes"]
    return sizes.most_common()


def _refusal(one: dict[str, Any]) -> str:
    asked, live = format_bytes(one["asked"]), format_bytes(one["allocated"])
    return f"{asked} asked for beside {live} of tensors, at {one['line']}"


def _times(what: str, refused: Sequence[str]) -> Iterator[str]:
    """Yields that a memory ran out, if it did, and the first times."""
    if refused:
        yield f"  {what} ran out" + f" {len(refused)} times" * bool(refused[1:])
    yield from (f"    {one}" for one in refused[:_LINES])


def _text(found: dict[str, Any]) -> str:
    """Returns the report as lines for people."""
    of = found["device"]
    capability = f"compute capability {of['capability'] / 10:.1f}"
    lines = [
        "",
        f"headroom rehearse: on {of['name']} of {format_bytes(of['memory'])} ({capability}) "
        f"{VERDICTS[found['fits']]}",
    ]
    taken = found["peak_reserved"] + of["context"]
    rows = [
        ("tensors, at most", found["peak_allocated"], ""),
        ("reserved by torch, at most", found["peak_reserved"], ""),
        ("CUDA context", of["context"], of["context_is"]),
        ("left of the device", of["memory"] - taken, ""),
        ("the host's memory, at most", found["host"]["peak"], in_words(found["host"])),
    ]
    lines += [f"  {name:<28}{format_bytes(size):>10}  {note}".rstrip() for name, size, note in rows]
    if found["ranks"] > 1:
        lines.append(f"  rank 0 of {found['ranks']}")
    each = found["step_seconds"]
    each = "" if each is None else f", {each:.2f} s each on this machine's processor"
    lines.append(f"  {found['steps']} steps of optimizers{each}")
    if any(found["after_step"].values()):
        kinds = (f"{k.replace('_', ' ')} {format_bytes(n)}" for k, n in found["after_step"].items())
        lines.append(f"  after the last: {', '.join(kinds)}")
    if found["fits"] is None:
        why = found["error"]
        lines.append("  the device was not used" if why is None else f"  the program failed: {why}")
    lines += _times("memory", [_refusal(one) for one in found["refused"]])
    lines += _times("the host's memory", [*ran_out(found["host"])])
    if reads := found["unknown_reads"]:
        count = sum(reads.values())
        lines.append(f"  {count} reads of values that were not computed, but made of zeros")
        lines += [f"    {number} x {place}" for place, number in list(reads.items())[:_LINES]]
    if rows := found["at_peak"]:
        kinds = _by(lambda row: (row["kind"] or "others").replace("_", " "), rows)
        lines.append(f"  live at the peak: {', '.join(f'{k} {format_bytes(n)}' for k, n in kinds)}")
        places = _by(lambda row: history.place_of(row["stack"]), rows)
        lines += [f"    {format_bytes(size):>10}  {place}" for place, size in places[:_LINES]]
    if found["snapshot"] is not None:
        lines.append(f"  wrote {found['snapshot']}")
    return "\n".join(lines)

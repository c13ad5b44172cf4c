"""Runs a training program for a GPU that this machine does not have: on a device made of software,
whose large tensors are address space, with torch's own allocator. Says whether it fits, the line
that does not, and what the host takes for a step. Arguments, exit code and errors are the
program's."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headroom_command.compute_capability import compute_capability
from headroom_command.program import MISSING, add_program, words_of

from . import device, gpus, package, start
from .earlier import read_report

__all__ = ["HAS_JSON", "HELP", "add_arguments", "main", "refuse_gpus"]

HELP = "run a program for a GPU that this machine does not have"
HAS_JSON = False
COMPUTED = 1 << 20  # bytes up to which tensors have values
STEPS = 3
_REHEARSED = (
    "gpu", "memory", "capability", "host_memory", "devices", "loss", "nonzero", "no_weights",
    "advise", "certificate",
)  # fmt: skip


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "headroom rehearse [options] PROGRAM ARGS...  or  [options] -m MODULE ARGS..."
    command.add_argument("--gpu", metavar="NAME", help='of --gpus, such as "RTX 4090"')
    command.add_argument(
        "--memory", type=_size, metavar="SIZE", help='of the device, such as "12 GiB"'
    )
    command.add_argument(
        "--capability",
        type=compute_capability,
        metavar="X.Y",
        help="compute capability, such as 8.6",
    )
    command.add_argument(
        "--host-memory", type=_size, metavar="SIZE", help='of the host, such as "64 GiB"'
    )
    command.add_argument("--devices", type=_count, metavar="N", help="rehearse rank 0 of N ranks")
    command.add_argument("--gpus", action="store_true", help="list the GPUs that are known")
    command.add_argument(
        "--on-gpu",
        action="store_true",
        help="run as many steps on a GPU of this machine, to --compare them with their rehearsal",
    )
    command.add_argument(
        "--steps", type=_count, default=STEPS, metavar="N", help="end after N steps; default: 3"
    )
    command.add_argument(
        "--loss", type=float, metavar="X", help="what a loss that is read is, which is 0 without"
    )
    command.add_argument(
        "--nonzero",
        type=_share,
        metavar="X",
        help="which part of a mask that is not computed is true, from 0 to 1",
    )
    command.add_argument(
        "--no-weights",
        action="store_true",
        help="from_pretrained of transformers needs the configuration alone",
    )
    command.add_argument(
        "--fail-above", type=_size, metavar="SIZE", help="exit with 1 if tensors take more"
    )
    command.add_argument(
        "--advise",
        action="store_true",
        help="if it does not fit, rehearse it with options of headroom run until it does",
    )
    command.add_argument(
        "--snapshot", type=Path, metavar="FILE", help="write what was allocated, for memory_viz"
    )
    command.add_argument(
        "--report", type=Path, metavar="FILE", help="write the report there, as JSON"
    )
    command.add_argument(
        "--compare", type=_earlier, metavar="FILE", help="say what grew since this --report"
    )
    command.add_argument(
        "--certificate", type=Path, metavar="FILE", help="write what headroom verify can replay"
    )
    add_program(command)


def main(words: Sequence[str]) -> int:
    """Rehearses a program, and returns its exit code, or 1 where it takes more than --fail-above.

    Raises:
        SystemExit: with 2 where the arguments are wrong; what the program ends with.
    """
    parser = argparse.ArgumentParser(prog="headroom rehearse", description=__doc__)
    add_arguments(parser)
    options = parser.parse_args(words)
    try:
        if options.gpus:
            print(_table())
            return 0
        wanted = None
        if options.on_gpu:
            _check_gpu(options, parser)
        else:
            wanted = _device(options)
            refuse_gpus()
            _begin(options, wanted)
        program = _program(options)
    except ValueError as error:  # of arguments
        parser.exit(2, f"{parser.prog}: {error}\n")
    except RuntimeError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    from .report import rehearse

    return rehearse(program, options, wanted)


def _device(options: argparse.Namespace) -> dict[str, Any]:
    """Returns which device is wanted: ``name``, ``gpu`` of the table, ``memory``, ``capability``
    and ``context``.

    Raises:
        ValueError: arguments are missing or wrong.
    """
    if not words_of(options):
        raise ValueError(MISSING)
    if options.advise and os.path.basename(words_of(options)[0]) == "headroom":
        raise ValueError(
            "--advise tries options of headroom run itself: give the program without headroom run"
        )
    known = gpus()
    names = {name.lower(): name for name in known}
    name = None
    if options.gpu is not None:
        name = names.get(options.gpu.lower().removeprefix("nvidia ").removeprefix("geforce "))
        if name is None:
            raise ValueError(
                f"--gpu is {options.gpu!r}, wanted one of {', '.join(known)}; or give --memory and "
                "--capability"
            )
        memory, capability = known[name]
    elif options.memory is None or options.capability is None:
        raise ValueError('give --gpu, such as "RTX 4090", or --memory and --capability')
    else:
        memory = capability = 0
    memory, capability = options.memory or memory, options.capability or capability
    # What is not told of the device is that of a GPU of its kind.
    older = [one for one, (_, number) in known.items() if number <= capability]
    context, _ = package.module("_core/contexts.py").context(divmod(capability, 10))
    if memory <= context:
        raise ValueError(f"--memory is {memory} bytes, and the CUDA context alone takes {context}")
    return {
        "name": name or "a GPU",
        "gpu": name or (older or list(known))[-1],
        "memory": memory,
        "capability": capability,
        "context": context,
    }


def _check_gpu(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuses --on-gpu without a GPU, and with options of what is rehearsed.

    Raises:
        ValueError: an option is not for a GPU that is there.
        RuntimeError: there is none.
    """
    if not words_of(options):
        raise ValueError(MISSING)
    if given := [n for n in _REHEARSED if getattr(options, n) != parser.get_default(n)]:
        raise ValueError(
            f"--on-gpu runs the program as it is, and --{given[0].replace('_', '-')} is of what is "
            "rehearsed; leave it out"
        )
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("--on-gpu runs the program on a GPU, and torch finds none here")


def _begin(options: argparse.Namespace, wanted: dict[str, Any]) -> None:
    """Starts the device."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # of other devices
    numbers = {name: wanted[name] for name in ("memory", "capability", "context")}
    devices = options.devices or 1
    runtime = start(wanted["gpu"], computed=COMPUTED, devices=devices, **numbers)
    import torch

    from .installed import redirect
    from .values import compute

    if torch.version.cuda is None:
        raise RuntimeError("a rehearsal needs a torch that is built for CUDA; this one is not")
    (library,) = package.folder().glob("lib/libheadroom.so.*")
    redirect(library, runtime)
    import headroom  # noqa: F401  (registers its ops)

    from .host import install

    compute(device(), "headroom")
    install(runtime, COMPUTED)


def _program(options: argparse.Namespace) -> Callable[[], None]:
    """Returns what starts the program."""
    from headroom.cli.programs import LAUNCHERS, starting

    words = words_of(options)
    if os.path.basename(words[0]) in LAUNCHERS:
        raise ValueError(
            f"{words[0]} starts its program in other processes, which would not be rehearsed; give "
            "the program itself, with --devices for its ranks"
        )
    return starting(words, options.is_module)


def refuse_gpus() -> None:
    """Refuses a machine that has a GPU.

    Raises:
        RuntimeError: it has one; says what to do.
    """
    if Path("/dev/nvidiactl").exists():
        raise RuntimeError(
            "this machine has a GPU, from which a rehearsal could not keep all libraries of a "
            "program; rehearse where there is none, such as in a container without it, with "
            "--report FILE, and compare here with --on-gpu --compare FILE"
        )


def _table() -> str:
    """Returns the GPUs that are known, a line each."""
    sizes = package.module("_core/sizes.py")
    return "\n".join(
        f"{name:<12}{sizes.format_bytes(memory):>10}  compute capability {number / 10:.1f}"
        for name, (memory, number) in gpus().items()
    )


# ---- Arguments ----------------------------------------------------------------------------------


def _size(text: str) -> int:
    try:
        return package.module("_core/sizes.py").parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"the {error}") from None


def _earlier(path: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the content of an earlier report."""
    try:
        return os.path.basename(path), read_report(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number from 0 to 1")
    return share


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number from 1 on")
    return int(text)

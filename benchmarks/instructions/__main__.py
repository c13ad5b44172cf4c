"""Counts the instructions per element in the hot loops of the built library, and prints how much
of a GPU's memory bandwidth they leave and what calls are predicted to take:
`python -m benchmarks.instructions`. Needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .calls import CALLS, predictions
from .disassembly import Key, MissingTool, instructions, kernel_name, resources
from .loops import hot_loops
from .model import DEVICES, ISSUED, LEFT_OUT, MODEL
from .rows import ROWS, Found, find

NAMES = {device.arch: device.name for device in DEVICES}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument(
        "--library", type=Path, help="libheadroom.so.*; the installed one unless given"
    )
    parser.add_argument(
        "--loops", metavar="KERNEL", help="print all hot loops of the kernels whose name has this"
    )
    parser.add_argument("--arch", default="90", help="of --loops")
    parser.add_argument("--code", action="store_true", help="with --loops: the instructions too")
    return parser.parse_args(arguments)


def installed_library() -> Path:
    import headroom

    return next(Path(headroom.get_library_dir()).glob("libheadroom.so.*"))


def show_rows(found: dict[tuple[str, str, str], Found]) -> None:
    for device in DEVICES:
        rows = [(row, found.get((device.arch, row.kernel, row.mix))) for row in ROWS]
        if not any(one for _, one in rows):
            continue
        print(f"\n{device.name}, code of sm_{device.arch}. {device.source}.")
        print(
            f"  {'kernel':<44}{'bytes':>7}{'instr.':>8}{'budget':>8}{'wanted':>8}{'branches':>10}"
            f"{'loads':>14}{'stores':>12}{'in flight':>11}{'needed':>8}{'fraction':>10}"
        )
        for row, one in rows:
            name = f"  {row.kernel.removesuffix('_kernel')} {row.mix}"
            if one is None:
                print(f"{name:<46}  no loop makes these accesses")
                continue
            budget = row.budget.get(device.arch)
            print(
                f"{name:<46}{row.traffic:7g}{one.instructions:8.1f}"
                f"{'-' if budget is None else format(budget, 'g'):>8}"
                f"{'-' if row.wanted is None else format(row.wanted, 'g'):>8}{one.branches:10.1f}"
                f"{one.turn.accesses('load'):>14}{one.turn.accesses('store'):>12}"
                f" {'+'.join(map(str, one.turn.flights)):>10}"
                f"{device.needed(one.instructions, row.traffic):8.1f}"
                f"{device.fraction(one.instructions, row.traffic):10.2f}"
            )
    print(
        f"\nbytes: of memory, per element. instr., branches: per element, on the shortest way "
        f"through a turn.\nloads, stores: number x bytes of a thread and turn. in flight: loads "
        f"each time that a thread waits.\nneeded: instructions per cycle and multiprocessor for "
        f"full bandwidth. fraction: with {ISSUED:g} of them, at most.\n{LEFT_OUT}"
    )


def show_calls(found: dict[tuple[str, str, str], Found], usage: dict[Key, dict[str, int]]) -> None:
    print(f"\nPredicted, not measured: {MODEL}")
    print(f"  {'call':<52}{'GPU':>10}{'time, us':>10}{'launches':>10}{'fraction':>10}  limit")
    for call in CALLS:
        for device in DEVICES:
            parts = predictions(call, device, found, usage)
            if not parts:
                continue
            seconds = sum(part.seconds for part in parts)
            longest = max(parts, key=lambda part: part.seconds)
            print(
                f"  {call.name:<52}{device.name:>10}{seconds * 1e6:10.1f}{len(parts):10}"
                f"{call.least / device.bandwidth / seconds:10.2f}  {longest.limit}"
            )


def show_loops(library: Path, kernel: str, arch: str, code: bool) -> None:
    for (_, symbol), listing in instructions(library, arch).items():
        if kernel not in kernel_name(symbol):
            continue
        print(f"\n{symbol}: {len(listing)} instructions")
        for loop in hot_loops(listing):
            print("  loop" if loop[0].is_loop else "  no loop: the whole kernel")
            for turn in loop[: 1 if code else None]:
                print(
                    f"    {len(turn.instructions):5} instructions, {turn.branches} branches, loads "
                    f"{turn.accesses('load')}, stores {turn.accesses('store')}, in flight "
                    f"{'+'.join(map(str, turn.flights))}, MUFU {turn.count('MUFU')}, "
                    f"FMUL {turn.count('FMUL')}, FADD {turn.count('FADD')}, "
                    f"FFMA {turn.count('FFMA')}"
                )
                for i in turn.instructions if code else ():
                    print(f"      {i.address:05x} {i.guard:>5} {i.opcode} {i.operands}")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    library = options.library or installed_library()
    try:
        if options.loops is not None:
            show_loops(library, options.loops, options.arch, options.code)
            return 0
        code = {}
        for device in DEVICES:
            code |= instructions(library, device.arch)
        if not code:
            print(f"{library} has no device code: it was built for the CPU only", file=sys.stderr)
            return 1
        found = find(code)
        show_rows(found)
        show_calls(found, resources(library))
    except MissingTool as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains every rung of the memory ladder in a process of its own, then compares them.

    python examples/ladder.py --out runs/demo

Writes ladder.json, ladder.md (the table), ladder.png (the chart) and report.html (a page of both)
to OUT, and exits with 1 if a rung's held-out loss is further from that of the first rung of its
size than rungs.py allows, if rungs that compute the same differ in a bit of a loss, if a peak is
not what was predicted, or if one is above the budget that `headroom.fit` was given.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path

import headroom
import torch

from chart import draw
from rungs import RUNGS, STORY, Rung, chosen, firsts
from train import add_arguments, settings, train_rung

PREDICTION_ERROR = 0.05  # of the measured peak, which is allowed
EXAMPLES = str(Path(__file__).resolve().parent)
PRELOADED = ["chart", "train", "headroom.fitting", "headroom.memory", "headroom.planning"]
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, (EXAMPLES, os.environ.get("PYTHONPATH")))),
    # glibc keeps freed memory for later, so the resident peak would depend on its moods. With a
    # fixed threshold every tensor is mapped by itself and goes back to the system when freed.
    "MALLOC_MMAP_THRESHOLD_": "131072",
}


def run_rung(rung: Rung, args: argparse.Namespace) -> dict:
    """Trains a rung in a process of its own, and returns what it has written."""
    started = time.monotonic()
    process = processes().Process(target=train_rung, args=(rung.key, args.out, settings(args)))
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        process.join()  # it was interrupted too
    if process.exitcode != 0:
        sys.exit(f"Rung {rung.key} did not finish. The same command with --resume continues it.")
    result = json.loads((args.out / rung.key / "result.json").read_text())
    return result | {"title": rung.title, "seconds": time.monotonic() - started}


def processes() -> multiprocessing.context.ForkServerContext:
    """Returns what starts processes: copies of one that has imported everything, which takes
    seconds, and has run nothing."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def same_loss(results: list[dict]) -> tuple[bool, str]:
    """Whether all rungs reach the held-out loss of the first of their size within their
    tolerances, and blocks have the same gradients and losses to the last bit at every level; and in
    words."""
    passed, lines, compared = True, [], []
    width = max(len(result["title"]) for result in results)
    same: dict[str, dict] = {}  # the first rung of each arithmetic
    for result, first in zip(results, firsts(results)):
        if result is first:
            loss = result["held_out_bits_per_byte"]
            passed &= math.isfinite(loss)
            compared.append(f"{result['title']}, {loss:.4f} bits per byte")
            continue
        off = result["held_out_bits_per_byte"] - first["held_out_bits_per_byte"]
        line = f"{result['title']:{width}} {off:+.5f} bits per byte"
        if result["tolerance"] is None:
            passed &= math.isfinite(off)
            lines.append(f"{line} (another training)")
            continue
        good = math.isfinite(off) and abs(off) <= result["tolerance"]
        verdict = "same loss" if good else "OTHER LOSS"
        if result["same_bits"] is not None:
            other = same.setdefault(result["same_bits"], result)
            keys = "losses", "held_out_bits_per_byte"
            if other is not result:
                equal = all(other[key] == result[key] for key in keys)
                verdict += f", {'same bits as' if equal else 'OTHER BITS THAN'} {other['key']}"
                good &= equal
        if result["gradients_of_L0"] is not None:
            good &= result["gradients_of_L0"]
            verdict += f", {'' if result['gradients_of_L0'] else 'NOT '}the gradients of L0"
        passed &= good
        lines.append(f"{line} (allowed: {result['tolerance']:g})  {verdict}")
    verdict = (
        "PASSED: every judged rung reaches" if passed else "FAILED: not every judged rung reaches"
    )
    return passed, "\n".join([*lines, f"{verdict} the loss of {', and of '.join(compared)}."])


def as_predicted(results: list[dict]) -> tuple[bool, str]:
    """Whether every peak is what `headroom.plan` predicted, within PREDICTION_ERROR; and in
    words."""
    errors = {r["title"]: r["predicted_peak_bytes"] / r["peak_bytes"] - 1 for r in results}
    wrong = {title: error for title, error in errors.items() if abs(error) > PREDICTION_ERROR}
    lines = [f"OTHER PEAK THAN PREDICTED: {title}, {error:+.1%}" for title, error in wrong.items()]
    lines += [
        f"OTHER BYTES ON THE HOST THAN PREDICTED: {r['title']}"
        for r in results
        if r["host_bytes"] != r["predicted_host_bytes"]
    ]
    if lines:
        return False, "\n".join(lines)
    worst = max(map(abs, errors.values()))
    return True, f"PASSED: {len(errors)} peaks are as predicted, within {worst:.2%}."


def within_budgets(results: list[dict]) -> tuple[bool, str]:
    """Whether the peaks of the rungs that `headroom.fit` chose are within their budgets; and in
    words."""
    lines, passed = [], True
    for result in results:
        if result["fit"] is None:
            continue
        most, peak = result["fit"]["budget_bytes"], result["peak_bytes"]
        passed &= peak <= most
        verdict = "PASSED: a peak within the budget" if peak <= most else "ABOVE THE BUDGET"
        lines.append(
            f"{verdict}: {result['title']} ({result['fit']['choice']}) takes "
            f"{peak / 2**20:,.1f} of {most / 2**20:,.1f} MiB, chosen in "
            f"{result['fit']['seconds']:.0f} s."
        )
    return passed, "\n".join(lines)


def least_peaks(results: list[dict]) -> str:
    """The peak of the first rung of each size, and the least of that size, in words."""
    peaks: dict[str, list[int]] = {}
    for result, first in zip(results, firsts(results)):
        peaks.setdefault(first["title"], []).append(result["peak_bytes"])
    pairs = ((title, sizes[0] / 2**20, min(sizes) / 2**20) for title, sizes in peaks.items())
    return "; ".join(f"{title} {one:,.0f} MiB -> {least:,.0f} MiB" for title, one, least in pairs)


def table(results: list[dict]) -> str:
    """A Markdown table, a row for each rung. Kinds are shown at the peak."""
    kinds = [kind for kind in results[0]["bytes"] if any(r["bytes"][kind] for r in results)]
    head = ["rung", "time s", "held-out bits/byte", "tokens/s", "bytes/parameter"]
    head += ["predicted MiB", "peak MiB", *(f"{kind.replace('_', ' ')} MiB" for kind in kinds)]
    head += ["host MiB", "process MiB"]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for r in results:
        sizes = [r["predicted_peak_bytes"], r["peak_bytes"], *(r["bytes"][k] for k in kinds)]
        sizes += [r["host_bytes"], r["process_peak_bytes"]]
        numbers = [f"{r['seconds']:.0f}", f"{r['held_out_bits_per_byte']:.4f}"]
        numbers.append(f"{r['tokens_per_second']:,.0f}")
        numbers.append(f"{r['bytes_per_parameter']:.2f}")
        rows.append([r["title"], *numbers, *(f"{size / 2**20:,.1f}" for size in sizes)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows[1] = ["-" * widths[0]] + ["-" * (w - 1) + ":" for w in widths[1:]]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in aligned) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rungs", default=",".join(STORY), help=f"all, or some of {','.join(RUNGS)} (%(default)s)"
    )
    add_arguments(parser)
    args = parser.parse_args()
    keys = list(RUNGS) if args.rungs == "all" else args.rungs.split(",")
    if unknown := [key for key in keys if key not in RUNGS]:
        parser.error(f"--rungs: no rung {unknown[0]!r}; wanted all or some of {', '.join(RUNGS)}")

    results = [run_rung(rung, args) for rung in chosen(keys)]
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads()}
    report = {"versions": versions, "machine": machine, "rungs": results}
    (args.out / "ladder.json").write_text(json.dumps(report, indent=1))
    (args.out / "ladder.md").write_text(table(results))
    draw(results, args.out / "ladder.png")
    headroom.reports.report([args.out / "ladder.json"], args.out / "report.html")
    losses, loss_verdict = same_loss(results)
    peaks_too, peak_verdict = as_predicted(results)
    within, budget_verdict = within_budgets(results)

    print(f"\n{table(results)}")
    print("\n".join(filter(None, (loss_verdict, peak_verdict, budget_verdict))))
    print(f"Peak memory: {least_peaks(results)}.")
    print(f"Table:       {args.out / 'ladder.md'}, {args.out / 'ladder.json'}")
    print(f"Chart:       {args.out / 'ladder.png'}")
    print(f"Report:      {args.out / 'report.html'}")
    print(f"Checkpoints: {args.out}/RUNG/checkpoint.safetensors (go on with --resume --steps N)")
    return 0 if losses and peaks_too and within else 1


if __name__ == "__main__":
    sys.exit(main())

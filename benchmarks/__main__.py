"""Runs the benchmark cases of one stem and prints a table: `python -m benchmarks STEM`."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys

import torch

from . import _report
from .harness import Settings, run

HERE = pathlib.Path(__file__).parent
STEMS = sorted(path.stem for path in HERE.glob("[!_]*.py") if path.stem != "harness")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("stem", choices=STEMS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="run only these")
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    parser.add_argument("--rounds", type=int, default=30, help="samples of each contender")
    parser.add_argument("--threads", type=int, help="torch's CPU threads")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="save the results")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is not met")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args(arguments)
    if options.check and options.quick:
        parser.error("--quick times nothing that --check could judge")
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    quick = options.quick
    module = importlib.import_module(f".{options.stem}", __package__)
    cases = module.cases(device, quick)
    if options.list:
        for case in cases:
            print(f"{case.name:<28}{case.what}")
        return 0
    if options.cases:
        unknown = set(options.cases) - {case.name for case in cases}
        if unknown:
            sys.exit(f"no such case: {', '.join(sorted(unknown))} (--list shows them)")
        cases = [case for case in cases if case.name in options.cases]

    if hasattr(module, "compare"):  # bytes, and not times
        return module.compare(options, cases)
    torch.manual_seed(0)
    head = _report.header(options.stem, device, quick)
    _report.show_header(head)
    settings = Settings(rounds=options.rounds)
    if quick:
        settings = Settings(rounds=min(options.rounds, 3), sample_s=0.0, warmup_s=0.0)
    results = {"limits": {}, "cases": []}
    for kind, result in run(cases, device, settings, quick):
        if kind == "limit":
            results["limits"][result["kind"]] = result
            _report.show_limit(result)
        else:
            results["cases"].append(result)
            _report.show_case(result, quick)
        _report.save(options.json, {**head, "settings": vars(settings), **results})

    failed = [
        f"{case['name']} / {name}"
        for case in results["cases"]
        for name, result in case["contenders"].items()
        if "error" in result
    ]
    missed = [case["name"] for case in results["cases"] for bar in case["bars"] if not bar["met"]]
    if failed:
        print(f"\ndid not run: {', '.join(failed)}")
    if options.check and missed:
        print(f"\nbars not met: {', '.join(missed)}")
    return 1 if failed or (options.check and missed) else 0


if __name__ == "__main__":
    sys.exit(main())

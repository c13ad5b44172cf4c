"""Changes a package of `ops` in small ways, runs for each change the tests that reach it, and
prints what none of them noticed. `tests/mutate.sh` calls it; CONTRIBUTING.md has more."""

from __future__ import annotations

import argparse
import ast
import functools
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .changes import Change, changes_of
from .forks import import_what_tests_need, run_forked
from .reach import ROOT, import_from, make_tree, measured

EQUIVALENT = Path(__file__).with_name("equivalent.json")


def _run_tests(tree, tests):
    import_from(tree)
    options = ["-x", "-q", "-p", "no:cacheprovider"]
    return pytest.main([*options, *tests])


def notices(change: Change, tree: Path, tests, seconds) -> bool:
    """Returns whether a test fails, or hangs, with the change."""
    file = tree / "headroom" / change.path.relative_to(ROOT / "ops")
    file.unlink()
    file.write_text(change.source)
    try:
        return run_forked(_run_tests, tree, tests, seconds=seconds) != 0
    finally:
        file.unlink()
        file.symlink_to(change.path)


class Reach:
    """The tests that reach a line, the quickest first."""

    def __init__(self, folders, select, is_full, package):
        self.by_line: dict[tuple[str, int], set[str]] = {}
        self.seconds: dict[str, float] = {}
        files = [f for d in folders for f in sorted((ROOT / "tests/python" / d).glob("test_*.py"))]
        for count, file in enumerate(files):
            print(f"\r{count} of {len(files)} files of tests measured ", end="", flush=True)
            known = measured(file, select, "full" if is_full else "default", run_forked)
            failed = set(known["failed"])
            self.seconds.update(known["seconds"])
            for path, tests in known["arcs"].items():
                if path.startswith(f"ops/{package}"):
                    for test, arcs in tests.items():
                        if test not in failed:
                            for line in {abs(n) for arc in arcs for n in arc}:
                                self.by_line.setdefault((path, line), set()).add(test)
        print("\r", end="")

    def of(self, change: Change) -> list[str]:
        path = str(change.path.relative_to(ROOT))
        tests = self.by_line.get((path, change.line), set())
        if len(tests) == 0 or change.line not in _lines_of_functions(change.path):
            # Run when the module is imported, for whichever test comes first: any test of the file.
            tests = {t for (p, _), ts in self.by_line.items() if p == path for t in ts}
        return sorted(tests, key=lambda test: self.seconds[test])


@functools.cache
def _lines_of_functions(path):
    return {
        line
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for line in range(node.body[0].lineno, node.end_lineno + 1)
    }


def _changed_lines(path, base):
    diff = subprocess.run(
        ["git", "diff", "-U0", base, "--", str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    lines = set()
    for line in diff.splitlines():
        if line.startswith("@@"):
            start, _, count = line.split()[2][1:].partition(",")
            lines |= set(range(int(start), int(start) + int(count or 1)))
    return lines


def main():
    parser = argparse.ArgumentParser(prog="tests/mutate.sh", description=__doc__)
    parser.add_argument(
        "package", help="a folder of ops, or a file of it: planning, planning/trace.py"
    )
    parser.add_argument(
        "--changed",
        metavar="COMMIT",
        nargs="?",
        const="main",
        help="only lines that differ from a commit (main)",
    )
    parser.add_argument("--count", type=int, default=40, help="changes to try (40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--full", action="store_true", help="tests of the full run, not of the default one"
    )
    parser.add_argument(
        "--tests",
        default=None,
        help="folders of tests, with commas (its own; for _core also functional and state)",
    )
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()

    path = ROOT / "ops" / options.package
    if not path.exists():
        parser.error(f"there is no {path}")
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    package = options.package.split("/")[0]
    own = {"_core": "core,functional,state"}.get(package, package)
    folders = (options.tests or own).split(",")
    select = ["-m", "not cuda"] if options.full else ["-m", "not slow and not cuda", "--sample=1"]

    import_what_tests_need()
    rng = random.Random(options.seed)
    changes = []
    for file in files:
        lines = _changed_lines(file, options.changed) if options.changed else None
        changes += list(changes_of(file, rng, lines))
    rng.shuffle(changes)
    equivalent = json.loads(EQUIVALENT.read_text())
    known = {(e["file"], e["before"], e.get("after")) for e in equivalent}

    def is_known(change):
        file, (before, after) = str(change.path.relative_to(ROOT)), change.lines
        return not known.isdisjoint([(file, before, after), (file, before, None)])

    reach = Reach(folders, select, options.full, package)
    drawn, left_out = [], 0
    for change in changes:
        if len(drawn) == options.count:
            break
        if change.source is None:
            continue
        if is_known(change):
            left_out += 1
        else:
            drawn.append(change)
    print(f"{len(drawn)} of {len(changes)} changes, {left_out} known as equivalent", flush=True)

    trees = [make_tree(i) for i in range(options.processes)]

    def try_one(change):
        tests = reach.of(change)
        if not tests:
            return change, tests, False
        tree = trees.pop()
        seconds = 30 + 3 * sum(reach.seconds[test] for test in tests)
        try:
            return change, tests, notices(change, tree, tests, seconds)
        finally:
            trees.append(tree)

    survivors = []
    with ThreadPoolExecutor(options.processes) as pool:
        for count, (change, tests, noticed) in enumerate(pool.map(try_one, drawn), 1):
            if not noticed:
                survivors.append(change)
                before, after = change.lines
                where = f"{change.path.relative_to(ROOT)}:{change.line}"
                print(
                    f"{where}  ({len(tests)} tests reach it)\n    - {before}\n    + {after}",
                    flush=True,
                )
            print(f"\r{count - len(survivors)} of {count} noticed ", end="", flush=True)
    tried = len(drawn)
    print(f"\r{package}: {tried - len(survivors)} of {tried} noticed, seed {options.seed}")
    return 0 if len(survivors) <= 0.1 * tried else 1


if __name__ == "__main__":
    sys.exit(main())

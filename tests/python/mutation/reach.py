"""Which tests reach which lines and branches of `ops`: measured with coverage, one file of tests at
a time, and kept in build/mutation until the file or a source that it reached has changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import coverage
import pytest
from tests.python.helpers.sampling import sample

__all__ = ["FOLDER", "ROOT", "import_from", "make_tree", "measured"]

# A file whose tests could not be collected has reached nothing, which says nothing of its tests.
MEASURED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "build/mutation"


class _Traced:
    """A function that another process calls for a test, with coverage of what it reaches."""

    def __init__(self, function, test, data: Path):
        self.function, self.test, self.data = function, test, data
        self.__name__ = function.__name__

    def __call__(self, *arguments):
        cov = _coverage(self.data.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}.coverage"))
        cov.start()
        cov.switch_context(self.test)
        try:
            return self.function(*arguments)
        finally:
            cov.stop()
            cov.save()


def _coverage(data: Path):
    options = dict(data_file=str(data), config_file=False, branch=True, include=[f"{ROOT}/ops/*"])
    cov = coverage.Coverage(**options)
    cov.config.disable_warnings = ["no-data-collected", "module-not-measured"]
    return cov


class _Recorder:
    """Tells coverage which test runs, and keeps which tests passed and how long they took."""

    def __init__(self, cov, data: Path):
        from helpers import fresh, ranks

        self.cov = cov
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.sampled: list[str] = []
        self.test = ""
        # What tests run in processes of their own is theirs as well.
        run, call = fresh._run, ranks.Ranks.__call__

        def call_traced(ranks, function, *arguments):
            return call(ranks, _Traced(function, self.test, data), *arguments)

        def follow(test):
            self.test = test
            fresh._run = _Traced(run, test, data)
            cov.switch_context(test)

        self.follow = follow
        ranks.Ranks.__call__ = call_traced

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        self.sampled = [item.nodeid for item in sample(list(items), kept_too=())[0]]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.follow(item.nodeid)
        try:
            return (yield)
        finally:
            self.follow("")

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


def make_tree(name) -> Path:
    """Returns a folder with a package of links to the sources, in which one file can be another."""
    tree = FOLDER / f"tree{name}"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    subprocess.run(["cp", "-rs", str(ROOT / "ops"), str(tree / "headroom")], check=True)
    for cache in tree.rglob("__pycache__"):
        shutil.rmtree(cache)
    return tree


def import_from(tree: Path):
    """Makes this process, and those it starts, import headroom from a tree."""
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = f"{tree}:{os.environ.get('PYTHONPATH', '')}"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True


def _hash(path):
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()


def _measure(test_file: Path, select, result: Path):
    """Runs a file of tests under coverage. Called in a process of its own."""
    import_from(FOLDER / "treemeasured")
    data = result.with_suffix(".coverage")
    cov = _coverage(data)
    recorder = _Recorder(cov, data)
    cov.start()
    options = ["-q", "-p", "no:cacheprovider", *select]
    status = pytest.main([*options, str(test_file)], plugins=[recorder])
    cov.stop()
    cov.save()
    arcs: dict[str, dict[str, set]] = {}
    for found in result.parent.glob(f"{result.stem}.*coverage"):
        _add_arcs(found, arcs)
        found.unlink()
    if status not in MEASURED:
        return int(status)
    result.write_text(
        json.dumps(
            {
                "test": _hash(test_file),
                "sources": {name: _hash(ROOT / name) for name in arcs},
                "arcs": {
                    path: {test: sorted(reached) for test, reached in tests.items()}
                    for path, tests in arcs.items()
                },
                "seconds": recorder.seconds,
                "sampled": recorder.sampled,
                "failed": sorted(recorder.failed),
            }
        )
    )


def _add_arcs(data: Path, arcs):
    with contextlib.closing(
        sqlite3.connect(data)
    ) as found:  # its own queries take one file and test
        query = (
            "select path, context, fromno, tono from arc join file on file.id = file_id "
            "join context on context.id = context_id where context != ''"
        )
        for path, context, start, end in found.execute(query):
            name = os.path.relpath(path, ROOT)
            arcs.setdefault(name, {}).setdefault(context, set()).add((start, end))


def measured(test_file: Path, select, name: str, run, seconds=1800) -> dict:
    """Returns what a file of tests reaches, from an earlier measurement where nothing has changed.
    ``run(function, *arguments, seconds=..., output=...)`` calls a function in another process."""
    result = FOLDER / name / f"{test_file.parent.name}-{test_file.stem}.json"
    if result.exists():
        known = json.loads(result.read_text())
        sources = known["sources"].items()
        fresh = all((ROOT / path).exists() and _hash(ROOT / path) == h for path, h in sources)
        if known["test"] == _hash(test_file) and fresh:
            return known
    result.parent.mkdir(parents=True, exist_ok=True)
    make_tree("measured")
    log = result.with_suffix(".log")
    if run(_measure, test_file, select, result, seconds=seconds, output=log) != 0:
        sys.exit(f"{test_file} could not be measured: see {log}")
    return json.loads(result.read_text())

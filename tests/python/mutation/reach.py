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
from pathlib import Path

import coverage
import pytest
from tests.python.helpers.sampling import sample

__all__ = ["FOLDER", "ROOT", "import_from", "make_tree", "measured"]

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "build/mutation"


class _Recorder:
    """Tells coverage which test runs, and keeps which tests passed and how long they took."""

    def __init__(self, cov):
        self.cov = cov
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.outside: set[str] = set()
        self.sampled: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        self.sampled = [item.nodeid for item in sample(list(items), kept_too=())[0]]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.cov.switch_context(item.nodeid)
        # What runs in processes of its own is not seen; these stand in where no test is.
        if item.get_closest_marker("gloo") or "run_fresh" in getattr(
            getattr(item, "function", None), "__globals__", ()
        ):
            self.outside.add(item.nodeid)
        try:
            return (yield)
        finally:
            self.cov.switch_context("")

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
    data.unlink(missing_ok=True)
    cov = coverage.Coverage(data_file=str(data), branch=True, include=[f"{ROOT}/ops/*"])
    cov.config.disable_warnings = ["no-data-collected", "module-not-measured"]
    recorder = _Recorder(cov)
    cov.start()
    pytest.main(["-q", "-p", "no:cacheprovider", *select, str(test_file)], plugins=[recorder])
    cov.stop()
    cov.save()
    arcs: dict[str, dict[str, list]] = {}
    with contextlib.closing(
        sqlite3.connect(data)
    ) as found:  # its own queries take one file and test
        query = (
            "select path, context, fromno, tono from arc join file on file.id = file_id "
            "join context on context.id = context_id where context != ''"
        )
        for path, context, start, end in found.execute(query):
            name = os.path.relpath(path, ROOT)
            arcs.setdefault(name, {}).setdefault(context, []).append((start, end))
    data.unlink()
    result.write_text(
        json.dumps(
            {
                "test": _hash(test_file),
                "sources": {name: _hash(ROOT / name) for name in arcs},
                "arcs": arcs,
                "seconds": recorder.seconds,
                "sampled": recorder.sampled,
                "failed": sorted(recorder.failed),
                "outside": sorted(recorder.outside),
            }
        )
    )


def measured(test_file: Path, select, name: str, run, seconds=1800) -> dict:
    """Returns what a file of tests reaches, from an earlier measurement where nothing has changed.
    ``run(function, *arguments, seconds=...)`` calls a function in a process of its own."""
    result = FOLDER / name / f"{test_file.parent.name}-{test_file.stem}.json"
    if result.exists():
        known = json.loads(result.read_text())
        sources = known["sources"].items()
        fresh = all((ROOT / path).exists() and _hash(ROOT / path) == h for path, h in sources)
        if known["test"] == _hash(test_file) and fresh:
            return known
    result.parent.mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "treemeasured").exists():
        make_tree("measured")
    run(_measure, test_file, select, result, seconds=seconds)
    return json.loads(result.read_text())

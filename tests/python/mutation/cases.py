"""Writes down which cases `--sample 1` keeps besides those it chooses by their parameters: each
reaches a line or a branch of `ops` that no chosen case of its folder does.

    nice .venv/bin/python -m tests.python.mutation.cases loss planning

measures these folders of tests with all cases but those marked slow (`tests/mutate.sh` installs
what it needs), and rewrites their part of tests/python/helpers/kept_cases.json. To be run after
cases or branches were added; a case that no longer exists is ignored.
"""

from __future__ import annotations

import json
import sys

from .forks import import_what_tests_need, run_forked
from .reach import ROOT, measured

DATA = ROOT / "tests/python/helpers/kept_cases.json"


def missed(files: list[dict]) -> list[str]:
    """Returns the cases to keep: again and again the one that reaches most of what is left."""
    by_case: dict[str, set] = {}
    reached: set = set()
    for file in files:
        sampled, failed = set(file["sampled"]), set(file["failed"])
        for path, tests in file["arcs"].items():
            for test, arcs in tests.items():
                found = {(path, *arc) for arc in arcs}
                if test in sampled:
                    reached |= found
                elif test not in failed:
                    by_case.setdefault(test, set()).update(found)
    kept = []
    while by_case:
        best = max(by_case, key=lambda case: (len(by_case[case] - reached), case))
        if not by_case[best] - reached:
            break
        reached |= by_case.pop(best)
        kept.append(best)
    return sorted(kept)


def main():
    import_what_tests_need()
    for folder in sys.argv[1:]:
        files = sorted((ROOT / "tests/python" / folder).glob("test_*.py"))
        select = ["-m", "not slow and not cuda"]
        kept = missed([measured(file, select, "cases", run_forked) for file in files])
        data = json.loads(DATA.read_text())
        data[folder] = kept
        DATA.write_text(json.dumps(data, indent=0, sort_keys=True) + "\n")
        print(f"{folder}: {len(kept)} cases kept besides the sample", flush=True)


if __name__ == "__main__":
    main()

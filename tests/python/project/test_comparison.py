"""The figures of docs/comparison.md are those of the files of results that their rows name.

Who has measured again runs `python tests/python/project/test_comparison.py`, which renews them.
"""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import _estimators, _published_heads  # noqa: E402

PAGE = Path(__file__).resolve().parents[3] / "docs" / "comparison.md"
ROW = re.compile(
    r"^\| (?P<what>.+) \| (?P<other>.+) \| [\d.,]+ \| [\d.,]+ \| .+ \| \[\w+\+?\]\((?P<file>.+)\) "
    r"\| `(?P<stem>\w+) (?P<options>.*)--cases (?P<case>.+)` \|$",
    re.MULTILINE,
)


def milliseconds(seconds):
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 1 else f"{ms:.3f}"


def renewed(row):
    """Returns a row with what its file says."""
    results = json.loads((PAGE.parent / row["file"]).read_text())
    case = next(case for case in results["cases"] if case["name"] == row["case"])
    ours, theirs = (case["contenders"][name] for name in (case["subject"], row["other"]))
    ratio = theirs["ratio"]["median"]
    commit = results["commit"][:7] + "+" * results["uncommitted_changes"]
    cells = [
        row["what"],
        row["other"],
        milliseconds(ours["seconds"]["median"]),
        milliseconds(theirs["seconds"]["median"]),
        (f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2f}") + ", a loss" * (ratio < 1),
        f"[{commit}]({row['file']})",
        f"`{results['benchmark']} {row['options']}--cases {row['case']}`",
    ]
    return f"| {' | '.join(cells)} |"


def test_the_figures_are_what_was_measured():
    text = PAGE.read_text()
    assert ROW.sub(renewed, text) == text
    rows = ROW.findall(text)
    figures = text.partition("## Figures")[2].partition("## Sources")[0]
    lines = re.findall(r"^\| .*(?:`|\)) \|$", figures, re.MULTILINE)
    assert len(rows) == len(lines) - figures.count("`python -m benchmarks` |") > 20
    assert text.count(", a loss |") >= 5


def test_what_others_publish_and_estimate_is_what_the_files_say():
    """And what is predicted is still what the library would do on those GPUs."""
    text = PAGE.read_text()
    heads = json.loads(_published_heads.FILE.read_text())
    rows = [row for head in heads for row in _published_heads.rows_of_table(head)]
    assert len(rows) >= 8 and "\n".join(rows) in text
    estimated = json.loads(_estimators.FILE.read_text())["cases"]
    assert [row["case"] for row in estimated] == list(_estimators.PLAIN)
    assert "\n".join(_estimators.rows_of_table(estimated)) in text
    assert [(tuple(one["sizes"]), one["gpu"]) for one in heads] == [
        (head.sizes, head.gpu) for head in _published_heads.HEADS
    ]
    for head, kept in zip(_published_heads.HEADS, heads):
        assert kept["predicted"]["ms"] == pytest.approx(
            _published_heads.milliseconds(head), rel=0.01
        )


if __name__ == "__main__":
    PAGE.write_text(ROW.sub(renewed, PAGE.read_text()))

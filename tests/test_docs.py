"""What the documents show runs, and what they name exists."""

import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

import headroom
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *PAGES]
MUST_SHOW_CODE = ["README.md", *PAGES]


def read(document):
    path = ROOT / document
    return path.read_text() if path.exists() else ""


def blocks(document):
    """(first line, source) of each fenced Python block."""
    text = read(document)
    for match in re.finditer(r"^```python *\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start(1)) + 1, match[1]


def examples():
    """(name, source) of each `Example::` in a docstring of the package."""
    seen = set()
    for info in pkgutil.walk_packages(headroom.__path__, "headroom."):
        if info.name.rpartition(".")[2].startswith("_C"):
            continue
        module = __import__(info.name, fromlist=["_"])
        for name, thing in [("", module), *inspect.getmembers(module)]:
            doc = inspect.getdoc(thing) if callable(thing) or thing is module else None
            home = getattr(thing, "__module__", info.name) or ""
            if not doc or not home.startswith("headroom") or (home, name) in seen:
                continue
            seen.add((home, name))
            for match in re.finditer(r"^Examples?::\n\n((?:    .*\n?|\n)+)", doc, re.MULTILINE):
                yield f"{home}.{name}".rstrip("."), textwrap.dedent(match[1])


SNIPPETS = [
    pytest.param(source, document, line, id=f"{document}:{line}")
    for document in DOCUMENTS
    for line, source in blocks(document)
]
EXAMPLES = [pytest.param(source, name, id=name) for name, source in examples()]


@pytest.mark.parametrize("source, document, line", SNIPPETS)
def test_a_snippet_runs_as_it_stands(source, document, line, tmp_path, monkeypatch):
    """In an empty namespace and folder: what it needs, it imports."""
    monkeypatch.chdir(tmp_path)
    exec(compile("\n" * (line - 1) + source, ROOT / document, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("source, name", EXAMPLES)
def test_an_example_in_a_docstring_runs(source, name, tmp_path, monkeypatch):
    """With a `model` to work on, which the reader is assumed to have, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    exec(
        compile(source, name, "exec"),
        {"torch": torch, "headroom": headroom, "model": torch.nn.Linear(3, 2)},
    )


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("document", MUST_SHOW_CODE)
def test_the_document_shows_code(document):
    if not (ROOT / document).exists():
        pytest.skip(f"there is no {document}")
    assert list(blocks(document)), f"{document} has no Python block"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document):
    text = read(document)
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)[^)]*\)", text)
    scripts = re.findall(r"\bbash ([\w./-]+\.sh)", text)
    here = (ROOT / document).parent
    missing = [name for name in links if not (here / name).exists()]
    missing += [name for name in scripts if not (ROOT / name).exists()]
    assert not missing


def test_what_the_package_offers_is_documented():
    for name in headroom.__all__:
        thing = getattr(headroom, name)
        assert inspect.getdoc(thing), f"headroom.{name} has no docstring"
    for name in headroom.optim.__all__:
        assert inspect.getdoc(getattr(headroom.optim, name)), f"headroom.optim.{name}"

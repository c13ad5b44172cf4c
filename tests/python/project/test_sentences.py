"""Docstrings say first what a function does or returns: they begin with a verb."""

import ast
from pathlib import Path

OPS = Path(__file__).resolve().parents[3] / "ops"
# Words that end as verbs do ("Returns", "Checks"), and begin a noun phrase or a remark.
NO_VERBS = """allocations as bytes does events flops is lines microseconds nanoseconds numbers
recorders rows samples sentences tensors this values""".split()


def begins_with_a_verb(docstring):
    """Returns whether the first word is a verb in the third person, as far as its end tells."""
    first = docstring.split()[0].strip('"`*:.,')
    is_verb = first[0].isupper() and first.isascii() and first.replace("-", "").isalpha()
    return is_verb and first.endswith("s") and first.lower() not in NO_VERBS


def functions(folder):
    """Returns (place, docstring) of each function that has one."""
    return [
        (f"{file.relative_to(folder.parent)}:{node.lineno}", docstring)
        for file in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (docstring := ast.get_docstring(node))
    ]


def test_docstrings_of_functions_begin_with_a_verb():
    wrong = [place for place, docstring in functions(OPS) if not begins_with_a_verb(docstring)]
    assert not wrong


def test_what_counts_as_a_verb():
    for docstring in ("Returns it.", "Un-scales it.", "Passes on."):
        assert begins_with_a_verb(docstring)
    for docstring in ("What it is.", "Whether so.", "The bytes.", "Bytes of it.", "torch's way."):
        assert not begins_with_a_verb(docstring)
    assert len(functions(OPS)) > 1000

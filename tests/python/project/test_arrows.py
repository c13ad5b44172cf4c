"""Which files of the Python package import which: arrows between its packages go one way."""

import ast
from pathlib import Path

import pytest

OPS = Path(__file__).resolve().parents[3] / "ops"
FLOORS = {
    name: floor
    for floor, names in enumerate(
        [
            ["_core"],
            ["functional", "step"],
            ["optim", "grad", "amp", "nn", "loss"],
            ["checkpointing", "state", "memory"],
            ["patching"],
            ["planning"],
            ["profiling"],
            ["fitting"],
            ["fitting"],
            ["reports"],
            ["integrations"],
            ["cli"],
        ]
    )
    for name in names
}


def modules():
    """The path of each module, by its name as a tuple."""
    found = {}
    for path in OPS.rglob("*.py"):
        parts = path.relative_to(OPS).with_suffix("").parts
        found[parts[:-1] if parts[-1] == "__init__" else parts] = path
    return found


MODULES = modules()


def statements(tree):
    """The imports that run when a module is imported. Others are lazy, or for type checkers."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try):
            yield from (inner for inner in node.body if isinstance(inner, ast.ImportFrom))


def imported(name, path):
    """The modules of the package that a module imports."""
    package = name if path.name == "__init__.py" else name[:-1]
    for node in statements(ast.parse(path.read_text())):
        if node.level == 0:
            continue
        base = package[: len(package) - node.level + 1]
        target = (*base, *(node.module or "").split(".")) if node.module else base
        for alias in node.names:
            inner = (*target, alias.name)
            if inner in MODULES or target:  # else headroom._C, which is no file of Python
                yield inner if inner in MODULES else target


GRAPH = {name: set(imported(name, path)) for name, path in MODULES.items()}


def test_what_is_looked_at():
    assert len(MODULES) > 80
    assert ("_core", "grouping") in GRAPH["grad", "clip"]
    assert ("state", "file") in GRAPH["state", "save"]


@pytest.mark.parametrize("package", sorted(FLOORS.keys() & {name[0] for name in MODULES if name}))
def test_packages_import_from_their_floor_or_lower_ones(package):
    for name, targets in GRAPH.items():
        if name and name[0] == package:
            upward = [t for t in targets if t and FLOORS.get(t[0], 0) > FLOORS[package]]
            assert not upward, ".".join(name)


def test_no_two_files_import_each_other():
    """Nor in a circle of several. The __init__ of a package is imported before its files."""
    graph = {name: {t for t in targets if t != name[:-1]} for name, targets in GRAPH.items()}
    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join(".".join(one) for one in (*path, name))
        if name not in done:
            for target in graph.get(name, ()):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())

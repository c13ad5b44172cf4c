"""Which files of the Python package import which: arrows between its packages go one way."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FLOORS = {
    name: floor
    for floor, names in enumerate(
        [
            ["_core"],
            ["functional", "host"],
            ["grad", "loss", "checkpointing", "param_states"],
            ["optim", "amp", "nn"],
            ["state", "patching", "release"],
            ["step", "quantizing"],
            ["techniques"],
            ["adapters", "memory", "profiling"],
            ["planning"],
            ["fitting", "retrying", "data"],
            ["reports"],
            ["integrations", "cli", "rehearsal"],
        ]
    )
    for name in names
}


def modules(folder):
    """Returns the path of each module below a folder, by its name as a tuple."""
    found = {}
    for path in (ROOT / folder).rglob("*.py"):
        parts = path.relative_to(ROOT / folder).with_suffix("").parts
        found[parts[:-1] if parts[-1] == "__init__" else parts] = path
    return found


def imported(name, path, known, top):
    """Yields the modules of the package ``top`` that a module imports, in functions and for types
    too, also by their whole names."""
    package = name if path.name == "__init__.py" else name[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (tuple(parts[1:]) for parts in names if parts[0] == top and parts[1:])
        if not isinstance(node, ast.ImportFrom):
            continue
        module = (node.module or "").split(".") if node.module else []
        if node.level == 0 and module[0] != top:
            continue
        target = (*package[: len(package) - node.level + 1], *module)
        target = target if node.level else tuple(module[1:])
        for alias in node.names:
            inner = (*target, alias.name)
            if inner in known or target:  # else headroom._C, which is no file of Python
                yield inner if inner in known else target


def graph(folder):
    """Returns what each module below a folder imports."""
    known, top = modules(folder), {"ops": "headroom"}.get(folder, folder)
    return {name: set(imported(name, path, known, top)) for name, path in known.items()}


GRAPH = graph("ops")
# The only arrows between those of one floor.
BESIDE = {("amp", "optim"), ("profiling", "memory")} | {
    ("cli", "integrations"),
    ("rehearsal", "cli"),
    ("rehearsal", "integrations"),
}


def test_what_is_looked_at():
    assert len(GRAPH) > 80
    assert ("_core", "grouping") in GRAPH["grad", "clip"]
    assert ("state", "file") in GRAPH["state", "save"]
    assert ("optim",) in GRAPH["cli", "setups"] and ("fitting",) in GRAPH["cli", "fit"]


def test_few_files_import_by_a_text():
    """Which hides an arrow: the root and lazy packages, the command, and what looks for torch's."""
    found = {name for name, path in modules("ops").items() if "import_module(" in path.read_text()}
    own = {(), ("_core", "lazy"), ("cli", "command"), ("cli", "doctor")}
    assert found == own | {("planning", "cuda_view")}


def is_allowed(name, target):
    """Returns whether a module may import another, by the floors of their packages."""
    here, there = name[0], target[0]
    if FLOORS[here] == FLOORS.get(there, 0) and here != there:
        return (here, there) in BESIDE
    return FLOORS.get(there, 0) <= FLOORS[here]


@pytest.mark.parametrize("package", sorted(FLOORS.keys() & {name[0] for name in GRAPH if name}))
def test_packages_import_from_lower_floors(package):
    for name, targets in GRAPH.items():
        if name and name[0] == package:
            wrong = [target for target in targets if target and not is_allowed(name, target)]
            assert not wrong, ".".join(name)


@pytest.mark.parametrize(
    ("name", "target"),
    [(("fitting", "api"), ("retrying",)), (("retrying",), ("fitting",)), (("step",), ("memory",))],
)
def test_arrows_that_would_be_wrong(name, target):
    assert not is_allowed(name, target)


@pytest.mark.parametrize("folder", ["ops", "benchmarks"])
def test_no_two_files_import_each_other(folder):
    """Nor in a circle of several. The __init__ of a package is imported before its files."""
    arrows = {
        name: {t for t in targets if t != name[:-1]} for name, targets in graph(folder).items()
    }
    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join(".".join(one) for one in (*path, name))
        if name not in done:
            for target in arrows.get(name, ()):
                visit(target, (*path, name))
            done.add(name)

    for name in arrows:
        visit(name, ())

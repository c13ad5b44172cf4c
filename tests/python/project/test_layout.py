"""An op is one stem in every layer. This names what is missing of one."""

import re
from pathlib import Path

import pytest
import torch
from headroom._core.row_ops import ROW_OPS

from helpers.row_calls import is_described

ROOT = Path(__file__).resolve().parents[3]
OPS = {
    path.name.removesuffix("_cpu.c"): path.parent.name
    for path in sorted((ROOT / "kernels").glob("*/*_cpu.c"))
    if path.parent.name != "core"
}
LAYERS = ["kernels", "capi", "torch_ext", "ops"]  # each knows only the ones to its left


def sources(folder):
    return [path for path in (ROOT / folder).rglob("*") if path.is_file()]


def included(path):
    return re.findall(r'^ *#include\s+[<"]([^>"]+)', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("op, family", OPS.items())
def test_every_layer_has_the_stem(op, family):
    patterns = [
        f"kernels/{family}/{op}.h",
        f"kernels/{family}/{op}_cuda.cu",
        f"capi/{family}/{op}.c",
        f"torch_ext/{family}/{op}.cpp",
        f"ops/functional/{op}.py",
        f"tests/c/{family}/{op}*_test.cpp",
        f"tests/python/*/test_{op}.py",
        f"benchmarks/{op}.py",
    ]
    missing = [pattern for pattern in patterns if not list(ROOT.glob(pattern))]
    assert not missing, f"{op} lacks {', '.join(missing)}"


@pytest.mark.parametrize("op", ["accumulate", "glu"])
def test_what_ops_share_is_not_told_of_an_op(op):
    shared = ["project/test_benchmarks.py", "functional/test_row_ops.py"]
    shared += [f"fuzz/{name}.py" for name in ("c_abi", "torch_ops", "_rows", "_header")]
    for path in shared:
        assert not re.search(rf"\b(hr_)?{op}\b", (ROOT / "tests/python" / path).read_text()), path


def test_files_of_c_have_names_of_their_own():
    """An include names its file from the root, and a report or a debugger by its name alone."""
    kinds = {".c", ".cpp", ".cu", ".cuh", ".h"}
    for layer in ("kernels", "capi", "torch_ext", "tests/c"):
        names = [path.name for path in sources(layer) if path.suffix in kinds]
        assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("layer", LAYERS[:3])
def test_includes_are_relative_to_the_root_and_go_one_way(layer):
    allowed = ("capi/headroom.h", *(f"{one}/" for one in LAYERS[: LAYERS.index(layer) + 1]))
    if layer == "torch_ext":
        allowed = ("capi/headroom.h", "torch_ext/")
    for path in sources(layer):
        ours = [name for name in included(path) if (ROOT / name).is_file()]
        assert not [name for name in ours if not name.startswith(allowed)], path
        quoted = re.findall(r'^ *#include\s+"([^"]+)', path.read_text(), re.MULTILINE)
        assert not [name for name in quoted if not (ROOT / name).is_file()], path


def test_no_test_imports_another():
    """What tests share is in helpers, so that any of them can be moved, or run alone."""
    importing = re.compile(r"^\s*(?:from|import) +[\w.]*\btest_\w+", re.MULTILINE)
    for path in (ROOT / "tests/python").rglob("*.py"):
        assert not importing.findall(path.read_text()), path


def test_tests_have_names_of_their_own():
    """They are modules beside one another, and a report names them by the file alone."""
    names = [path.name for path in (ROOT / "tests/python").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_documented(op):
    function = rf"hr_{op}(_forward)?"
    assert re.search(rf"\b{function}\b", (ROOT / "capi/headroom.h").read_text())
    assert re.search(rf"^\| `{op}` \|", (ROOT / "docs/status.md").read_text(), re.MULTILINE)
    assert re.search(rf"`{function}`", (ROOT / "CHANGELOG.md").read_text())


@pytest.mark.parametrize("folder", ["kernels", "capi"])
def test_lower_layers_know_nothing_of_torch(folder):
    foreign = ("torch/", "Python", "pybind11")
    for path in sources(folder):
        assert not [name for name in included(path) if name.startswith(foreign)], path


@pytest.mark.parametrize("folder", ["kernels", "capi"])
def test_lower_layers_allocate_nothing(folder):
    """So that no call can run out of memory half-way: workspace is queried and passed in."""
    allocators = r"\b(\w*alloc\w*|cudaMalloc\w*|cudaHostAlloc|strn?dup|new|mmap|std::vector)\s*[(<]"
    for path in sources(folder):
        code = re.sub(r"/\*.*?\*/|//[^\n]*|\"[^\"\n]*\"", "", path.read_text(), flags=re.DOTALL)
        assert not re.findall(allocators, code), path


def test_every_op_is_opchecked():
    import headroom.functional  # noqa: F401  (registers the ops)

    schemas = (schema.name for schema in torch._C._jit_get_all_schemas())
    ops = {name.removeprefix("headroom::") for name in schemas if name.startswith("headroom::")}
    texts = [path.read_text() for path in (ROOT / "tests/python").glob("*/test_*.py")]
    checked = "\n".join(text for text in texts if re.search(r"opcheck\(|\(ListOpSuite\)", text))
    described = {n for op in ROW_OPS.values() for n in op.ops if is_described(op, n)}
    ops -= described  # test_row_ops.py checks them
    assert ops and not [op for op in sorted(ops) if not re.search(rf"\b{op}\b", checked)]

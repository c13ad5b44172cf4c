"""An op is one stem in every layer. This names what is missing of one."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
OPS = sorted(path.name.removesuffix("_cpu.c") for path in (ROOT / "kernels").glob("*_cpu.c"))


@pytest.mark.parametrize("op", OPS)
def test_every_layer_has_the_stem(op):
    files = [
        f"kernels/{op}.h",
        f"kernels/{op}_cpu.c",
        f"kernels/{op}_cuda.cu",
        f"capi/{op}.c",
        f"torch_ext/{op}.cpp",
        f"ops/{op}.py",
        f"tests/test_{op}.py",
        f"benchmarks/{op}.py",
    ]
    missing = [file for file in files if not (ROOT / file).is_file()]
    missing += [] if list((ROOT / "tests/c").glob(f"{op}*.cpp")) else [f"tests/c/{op}*.cpp"]
    assert not missing


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_documented(op):
    assert re.search(rf"\bhr_{op}\b", (ROOT / "capi/headroom.h").read_text())
    assert re.search(rf"^\| `{op}` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert f"`hr_{op}`" in (ROOT / "CHANGELOG.md").read_text()
    assert f"from .{op} import" in (ROOT / "ops/__init__.py").read_text()


@pytest.mark.parametrize("folder", ["kernels", "capi"])
def test_lower_layers_know_nothing_of_torch(folder):
    for path in (ROOT / folder).iterdir():
        includes = re.findall(r'#include\s+[<"]([^>"]+)', path.read_text())
        assert not [name for name in includes if name.startswith(("torch", "Python", "pybind11"))]


@pytest.mark.parametrize("folder", ["kernels", "capi"])
def test_lower_layers_allocate_nothing(folder):
    """So that no call can run out of memory half-way: workspace is queried and passed in."""
    allocators = r"\b(\w*alloc\w*|cudaMalloc\w*|cudaHostAlloc|strn?dup|new|mmap|std::vector)\s*[(<]"
    for path in (ROOT / folder).iterdir():
        code = re.sub(r"/\*.*?\*/|//[^\n]*|\"[^\"\n]*\"", "", path.read_text(), flags=re.DOTALL)
        assert not re.findall(allocators, code), path


def test_kernels_do_not_look_up():
    headers = {path.name for path in (ROOT / "capi").glob("*.h")} - {"headroom.h"}
    for path in (ROOT / "kernels").iterdir():
        assert not headers & set(re.findall(r'#include\s+"([^"]+)', path.read_text()))


def test_every_op_is_opchecked():
    import headroom  # noqa: F401  (registers the ops)

    schemas = (schema.name for schema in torch._C._jit_get_all_schemas())
    ops = {name.removeprefix("headroom::") for name in schemas if name.startswith("headroom::")}
    texts = [path.read_text() for path in (ROOT / "tests").glob("test_*.py")]
    checked = "\n".join(text for text in texts if "opcheck(" in text)
    assert ops and not [op for op in sorted(ops) if not re.search(rf"\b{op}\b", checked)]

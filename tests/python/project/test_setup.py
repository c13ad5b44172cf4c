"""setup.py: which CUDA compiler a build uses, and where there is none, NVIDIA's from PyPI; what it
says where something is missing; and what goes into archives."""

import ctypes
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import types
from importlib import metadata
from pathlib import Path

import headroom
import pytest
import torch
from packaging.requirements import Requirement
from setuptools import Distribution

ROOT = Path(__file__).resolve().parents[3]
READELF = shutil.which("readelf")  # of the PATH that tests replace


@pytest.fixture
def setup(monkeypatch, tmp_path):
    """setup.py as pip imports it, on a machine without nvcc."""
    spec = importlib.util.spec_from_file_location("headroom_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("HEADROOM_CUDA", "HEADROOM_CUDA_ARCHS", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "installed", lambda package: None)
    monkeypatch.setattr(module, "TOOLKITS", tmp_path / "toolkits")
    return module


def program(folder, name, text="exit 0"):
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def fake_nvcc(folder, release):
    folder.mkdir(exist_ok=True)
    lines = f"Cuda compilation tools, release {release}, V{release}.1", "compute_75", "compute_90"
    return str(program(folder, "nvcc", "".join(f"echo '{line}'\n" for line in lines)))


def test_the_compiler_becomes_a_requirement_where_there_is_none(setup, monkeypatch):
    wanted = {re.split("[=<>]", r)[0] for r in setup.cuda_requirements()}
    assert wanted == {*setup.CUDA_COMPILER, *setup.CUDA_RUNTIME}
    monkeypatch.setenv("HEADROOM_CUDA", "0")
    assert setup.cuda_requirements() == []


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_pip_hears_of_the_requirement(setup, monkeypatch, kind):
    hook = f"get_requires_for_build_{kind}"
    monkeypatch.setattr(setup.build_meta, hook, lambda settings: ["from-setuptools"])
    assert getattr(setup, hook)() == ["from-setuptools", *setup.cuda_requirements()]


@pytest.mark.parametrize("release, good", [("11.8", False), ("12.8", True), ("13.0", True)])
def test_an_nvcc_from_12_8_on_is_used(setup, monkeypatch, tmp_path, release, good):
    on_path = fake_nvcc(tmp_path, release)
    assert setup.system_nvcc() == (on_path if good else None)
    assert bool(setup.cuda_requirements()) is not good
    in_home = fake_nvcc(tmp_path / "bin", release)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert setup.system_nvcc() == (in_home if good else None)


@pytest.mark.parametrize("torchs, wanted", [(12, "12.9"), (13, "13.0"), (None, "13.0")])
def test_a_torch_for_cuda_12_gets_a_toolkit_that_runs_on_its_drivers(
    setup, monkeypatch, tmp_path, torchs, wanted
):
    monkeypatch.setattr(setup, "torch_cuda_major", lambda: torchs)
    nvccs = {"13.0": fake_nvcc(tmp_path, "13.0")}
    for release in ("12.4", "12.8", "12.9", "13.0"):
        folder = tmp_path / "toolkits" / f"cuda-{release}" / "bin"
        folder.mkdir(parents=True)
        found = fake_nvcc(folder, release)
        nvccs.setdefault(release, found)
    assert setup.system_nvcc() == nvccs[wanted]
    home = fake_nvcc(tmp_path / "bin", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))  # what the user names goes first
    assert setup.system_nvcc() == home


@pytest.mark.parametrize("torchs, told", [(12, True), (13, False)])
def test_the_driver_that_a_build_will_need_is_told(setup, monkeypatch, capsys, torchs, told):
    monkeypatch.setattr(setup, "torch_cuda_major", lambda: torchs)
    assert setup.cuda_requirements()
    assert ("needs driver R580" in capsys.readouterr().err) is told


def test_torchs_cuda_is_read_without_importing_it(setup, monkeypatch, tmp_path):
    if torch.version.cuda is None:
        assert setup.torch_cuda_major() is None
    else:
        assert setup.torch_cuda_major() == int(torch.version.cuda.split(".")[0])
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: spec)
    for text, major in [
        ("cuda: Optional[str] = '12.9'", 12),
        ("cuda: str | None = None", None),
        ('cuda = "13.0"', 13),
    ]:
        (tmp_path / "version.py").write_text(f"debug = False\n{text}\nhip = None\n")
        assert setup.torch_cuda_major() == major
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    assert setup.torch_cuda_major() is None


def test_cuda_can_be_demanded_and_refused(setup, monkeypatch, tmp_path):
    assert setup.cmake_options(tmp_path)["HEADROOM_CUDA"] == "OFF"
    monkeypatch.setenv("HEADROOM_CUDA", "1")
    with pytest.raises(SystemExit, match="HEADROOM_CUDA=1, but there is no CUDA compiler"):
        setup.cmake_options(tmp_path)
    nvcc = fake_nvcc(tmp_path, "13.0")
    assert setup.cmake_options(tmp_path)["CMAKE_CUDA_COMPILER"] == nvcc
    assert setup.cmake_options(tmp_path)["HEADROOM_CUDA"] == "ON"
    monkeypatch.setenv("HEADROOM_CUDA", "0")
    assert "CMAKE_CUDA_COMPILER" not in setup.cmake_options(tmp_path)


@pytest.mark.parametrize(
    "release, name", [("12.9", "nvidia-cublas-cu12"), ("13.0", "nvidia-cublas")]
)
def test_the_header_of_cublas_comes_from_torchs_package(
    setup, monkeypatch, tmp_path, release, name
):
    fake_nvcc(tmp_path, release)
    options = setup.cmake_options(tmp_path)
    assert options["HEADROOM_CUBLAS"] == "ON" and options["HEADROOM_CUBLAS_INCLUDE"] == ""
    header = tmp_path / "nvidia" / "include" / "cublasLt.h"
    file = types.SimpleNamespace(name="cublasLt.h", locate=lambda: header)
    packages = {name: types.SimpleNamespace(files=[file])}
    monkeypatch.setattr(setup, "installed", packages.get)
    assert setup.cmake_options(tmp_path)["HEADROOM_CUBLAS_INCLUDE"] == str(header.parent)
    monkeypatch.setenv("HEADROOM_CUBLAS", "0")
    assert setup.cmake_options(tmp_path)["HEADROOM_CUBLAS"] == "OFF"


@pytest.mark.parametrize("asked", ["ON", "AUTO"])
def test_a_build_for_cuda_is_not_without_products_unless_it_is_told(tmp_path, asked):
    """What CMake does once it knows the compiler, in a project of that part of CMakeLists.txt."""
    text = (ROOT / "CMakeLists.txt").read_text()
    part = text[text.index("    list(JOIN archs") : text.index('message(STATUS "${summary}")')]
    project = """cmake_minimum_required(VERSION 3.24)
project(part LANGUAGES NONE)
set(archs 80 90)
set(cublas_version none)
if(TRUE)
%s
message("${summary}; ${cublas_version}")
"""
    (tmp_path / "CMakeLists.txt").write_text(project % part)

    def configure(**options):
        command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DHEADROOM_CUDA={asked}"]
        command += [f"-D{name}={value}" for name, value in options.items()]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        return done.returncode, " ".join(done.stderr.split())

    code, said = configure(HEADROOM_CUBLAS="ON")
    assert code == (asked == "ON")
    wanted = "HEADROOM_CUBLAS=OFF" if asked == "ON" else "CUDA: no cublasLt.h was found; none"
    assert wanted in said
    code, said = configure(HEADROOM_CUBLAS="OFF")
    assert code == 0 and "WITHOUT PRODUCTS of matrices on CUDA: HEADROOM_CUBLAS=OFF; none" in said
    (tmp_path / "cublasLt.h").touch()
    numbers = (
        "#define CUBLAS_VER_MAJOR 13\n#define CUBLAS_VER_MINOR 4\n#define CUBLAS_VER_PATCH 1\n"
    )
    (tmp_path / "cublas_api.h").write_text(numbers)
    code, said = configure(HEADROOM_CUBLAS="ON", HEADROOM_CUBLAS_INCLUDE=tmp_path)
    assert code == 0 and "for 80 90, compiler: , products: cuBLASLt 13.4; 13.4" in said


# What GPUs run: machine code of their major version, not newer than they are, or else the newest
# PTX that is not, which the driver compiles at the first start.
RUNS = {
    "7.5": "75-real",
    "8.0": "80-real",
    "8.6": "86-real",
    "8.7": "86-real",
    "8.9": "86-real",
    "9.0": "90-real",
    "10.0": "100-real",
    "10.3": "100-real",
    "11.0": "100-virtual",
    "12.0": "120-real",
    "12.1": "120-real",
    "13.0": "120-virtual",
    "7.0": None,
}


def cmake_archs(folder, asked):
    """CMAKE_CUDA_ARCHITECTURES, and the architectures whose PTX the tests execute."""
    text = (ROOT / "CMakeLists.txt").read_text()
    part = text[text.index('    string(REGEX REPLACE "[ ,]+"') : text.index("    enable_language(")]
    script = folder / "archs.cmake"
    shown = 'message("${CMAKE_CUDA_ARCHITECTURES}|${executed_archs}")'
    given = f'cmake_minimum_required(VERSION 3.24)\nset(HEADROOM_CUDA_ARCHS "{asked}")\n'
    script.write_text(f"{given}{part}{shown}\n")
    command = ["cmake", "-P", script]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [part.split(";") for part in said.strip().split("|")]


def test_what_each_gpu_runs(tmp_path):
    built, executed = cmake_archs(
        tmp_path, re.search(r'"(75;.*)"', (ROOT / "setup.py").read_text())[1]
    )
    assert executed == [""]
    kinds = [(int(number), kind) for number, kind in (one.split("-") for one in built)]
    code = [number for number, kind in kinds if kind == "real"]
    ptx = [number for number, kind in kinds if kind == "virtual"]
    for capability, wanted in RUNS.items():
        major, minor = map(int, capability.split("."))
        number = 10 * major + minor
        own = [arch for arch in code if arch // 10 == major and arch <= number]
        older = [arch for arch in ptx if arch <= number]
        found = f"{max(own)}-real" if own else f"{max(older)}-virtual" if older else None
        assert found == wanted, capability


def test_ptx_that_is_asked_for_is_kept_and_executed(tmp_path):
    built, executed = cmake_archs(tmp_path, "90+PTX, 75+PTX 120")
    real = ["75-real", "90-real", "120-real"]
    assert built == [*real, "75-virtual", "90-virtual", "120-virtual"] and executed == ["75", "90"]


@pytest.mark.parametrize(
    "release, cuda, wanted",
    [("12.8", "1", "+cu128"), ("13.0", "1", ""), (None, "1", ""), ("13.0", "0", "+cpu")],
)
def test_a_wheel_for_every_python_says_for_which_cuda_it_is(
    setup, monkeypatch, tmp_path, release, cuda, wanted
):
    if release:
        fake_nvcc(tmp_path, release)
    monkeypatch.setenv("HEADROOM_CUDA", cuda)
    plain = setup.version()
    monkeypatch.setattr(setup, "PLATFORM", "manylinux_2_28_x86_64")
    assert "+" not in plain and setup.version() == plain + wanted


def test_a_wheel_for_every_python_has_no_module_for_one(setup, monkeypatch, tmp_path):
    without = "CMAKE_DISABLE_FIND_PACKAGE_pybind11"
    assert without not in setup.cmake_options(tmp_path)
    monkeypatch.setattr(setup, "PLATFORM", "manylinux_2_28_x86_64")
    assert setup.cmake_options(tmp_path)[without] == "ON"
    command = setup.Wheel(Distribution({"name": "headroom"}))
    assert command.get_tag() == ("py3", "none", "manylinux_2_28_x86_64")


@pytest.mark.parametrize(
    ("here", "wanted"),
    [("", "75"), ("9.0\\n7.5\\n9.0\\n", "75;90"), ("12.1\\n", "all"), ("7.0\\n", "all")],
)
def test_a_build_is_for_the_gpus_that_are_here(setup, monkeypatch, tmp_path, here, wanted):
    wanted = setup.ALL_ARCHS if wanted == "all" else wanted
    fake_nvcc(tmp_path, "13.0")
    assert setup.cmake_options(tmp_path)["HEADROOM_CUDA_ARCHS"] == "75"  # there is no driver
    program(tmp_path, "nvidia-smi", f"printf '{here}'")
    assert setup.cmake_options(tmp_path)["HEADROOM_CUDA_ARCHS"] == wanted
    for asked, gets in (("90", "90"), ("all", setup.ALL_ARCHS)):
        monkeypatch.setenv("HEADROOM_CUDA_ARCHS", asked)
        assert setup.cmake_options(tmp_path)["HEADROOM_CUDA_ARCHS"] == gets
    monkeypatch.delenv("HEADROOM_CUDA_ARCHS")
    monkeypatch.setattr(setup, "PLATFORM", "manylinux_2_28_x86_64")
    assert setup.cmake_options(tmp_path)["HEADROOM_CUDA_ARCHS"] == setup.ALL_ARCHS


@pytest.mark.parametrize(
    "programs, settings, said",
    [
        ("gcc g++", {}, []),
        ("clang icpx", {}, []),
        ("gcc", {}, ["needs a C++ compiler"]),
        ("", {}, ["needs a C compiler", "needs a C++ compiler"]),
        ("", {"CC": "/opt/cc"}, ["needs a C++ compiler"]),
        ("", {"CMAKE_TOOLCHAIN_FILE": "arm.cmake"}, []),
    ],
)
def test_a_compiler_that_is_not_there_is_said(
    setup, monkeypatch, tmp_path, programs, settings, said
):
    for name in ("CC", "CXX", "CMAKE_TOOLCHAIN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for name in programs.split():
        program(tmp_path, name)
    sentences = list(setup.lacking(torch=False))
    assert len(sentences) == len(said) and all(map(str.__contains__, sentences, said))


@pytest.mark.parametrize("version, good", [(None, 0), ("2.9.1", 0), ("2.11.0+cpu", 1), ("3.0", 1)])
def test_a_torch_that_is_not_there_or_too_old_is_said(setup, monkeypatch, tmp_path, version, good):
    program(tmp_path, "cc"), program(tmp_path, "c++")
    here = types.SimpleNamespace(version=version) if version else None
    monkeypatch.setattr(setup, "installed", {"torch": here}.get)
    assert list(setup.lacking(torch=False)) == []
    sentences = list(setup.lacking(torch=True))
    assert len(sentences) == (not good)
    assert good or sentences[0].endswith("and pip fetches what it needs.")
    assert good or (f"torch {version}" if version else "has none") in sentences[0]


def test_a_build_that_fails_ends_with_a_sentence(setup, monkeypatch, tmp_path):
    """And not with a traceback, which pip would show below what the compiler said."""
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "lacking", lambda torch: ["no compiler", "no torch"])
    with pytest.raises(SystemExit, match="^no compiler\nno torch$"):
        setup.build()
    monkeypatch.setattr(setup, "lacking", lambda torch: [])
    cmake = program(tmp_path, "cmake", "exit 3")
    monkeypatch.setattr(setup, "tool", lambda name: str(cmake))
    with pytest.raises(SystemExit, match=r"failed: cmake ended with 3\. Why is above\."):
        setup.build()


@pytest.mark.parametrize(
    "before, said",
    [
        ("sys.version_info = (3, 9, 18)", "needs Python >= 3.10 on Linux"),
        ("sys.platform = 'win32'", "on win32, at "),
        (
            "sys.modules['setuptools.command.bdist_wheel'] = None",
            "pip install 'setuptools>=77.0.3'",
        ),
        ("sys.modules['setuptools'] = None", "or leave out --no-build-isolation."),
    ],
)
def test_what_setup_itself_lacks_is_said(before, said):
    code = f"import sys; {before}; import setup"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def asked_for(library):
    said = subprocess.run([READELF, "-d", library], capture_output=True, text=True, check=True)
    return re.findall(r"\(NEEDED\).*\[(.+)\]", said.stdout)


@pytest.mark.skipif(not READELF, reason="needs readelf")
def test_the_bill_of_materials_names_what_the_binaries_ask_for(setup):
    linked = {
        "nvcc": "13.0.88",
        "cudart_static": "13.0",
        "torch headers": "2.15",
        "pybind11": "3.1",
    }
    package = Path(headroom.__file__).parent
    bill = setup.bill_of_materials(package, linked)
    graph = {one["ref"]: one["dependsOn"] for one in bill["dependencies"]}
    components = {one["bom-ref"]: one for one in bill["components"]}
    files = [*package.glob("lib/lib*.so.0.2"), package / "lib" / "libheadroom_torch.so"]
    inside = {"libheadroom_torch.so": ["torch headers"], files[0].name: ["cudart_static"]}
    modules = [*package.glob("_C.*")]
    inside |= {module.name: ["pybind11"] for module in modules}
    assert len(files) == 2 and sorted(graph["headroom"]) == sorted(f.name for f in files + modules)
    for file in files + modules:
        assert graph[file.name] == asked_for(file) + inside[file.name]
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert components[file.name]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert len(components) == len(bill["components"])
    assert {*sum(graph.values(), [])} == {*components}  # each is there, and used
    assert components["cudart_static"]["version"] == "13.0" and "nvcc" not in components
    assert bill["metadata"]["component"]["version"] == headroom.__version__
    assert bill["metadata"]["tools"]["components"][0]["version"] == "13.0.88"


def test_an_installation_has_its_bill_of_materials():
    # Where the package is: a build leaves another description of it in the clone.
    places = [str(Path(headroom.__file__).parents[1])]
    installed = next(iter(metadata.distributions(name="headroom", path=places)), None)
    files = [] if installed is None else installed.files or []
    if not files or any(file.name.startswith("__editable__") for file in files):
        pytest.skip("an editable installation has none")
    bill = json.loads(next(f for f in files if f.parent.name == "sboms").read_text())
    hashes = {one["name"]: one["hashes"] for one in bill["components"] if one["type"] == "file"}
    assert "libheadroom_torch.so" in hashes
    for file in files:
        if file.name in hashes:
            digest = hashlib.sha256(file.locate().read_bytes()).hexdigest()
            assert hashes.pop(file.name)[0]["content"] == digest
    assert hashes == {}
    has_cuda = headroom.build_info()["cuda"] != "none"
    assert any(one["name"] == "cudart_static" for one in bill["components"]) is has_cuda


def test_a_source_distribution_is_the_same_bytes_whenever_it_is_made(setup, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = setup.SourceDistribution(Distribution({"name": "headroom"}))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    made = []
    for time, mode in ((1e9, 0o600), (1.5e9, 0o664)):
        folder = tmp_path / "headroom-1"
        folder.mkdir()
        for name in ("b.py", "a.py") if made else ("a.py", "b.py"):
            (folder / name).write_text(name)
            (folder / name).chmod(mode)
            os.utime(folder / name, (time, time))
        path = Path(command.make_archive("out/headroom-1", "gztar", base_dir="headroom-1"))
        made.append(path.read_bytes())
        with tarfile.open(path) as tar:
            members = {one.name: (one.mtime, one.mode, one.uname) for one in tar}
        assert list(members) == ["headroom-1", "headroom-1/a.py", "headroom-1/b.py"]
        assert members["headroom-1/a.py"] == (1_700_000_000, 0o644, "")
        shutil.rmtree(folder)
    assert made[0] == made[1]


def test_an_old_python_gets_as_far_as_setup():
    """What the build requires and an old Python cannot have, pip does not look for there."""
    requires = re.search(
        r"^requires = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    found = [Requirement(one) for one in re.findall(r'"(.*?)"', requires[1])]
    for name in ("setuptools", "torch"):
        marker = next(one.marker for one in found if one.name == name)
        assert marker.evaluate({"python_version": "3.10"})
        assert not marker.evaluate({"python_version": "3.9"})


@pytest.mark.slow
@pytest.mark.release
def test_nvidias_compiler_from_pypi_builds_the_library(setup, tmp_path):
    environment = ROOT / ".venv-nvcc"  # kept for the next run
    python = environment / "bin" / "python"
    env = {**os.environ, "PATH": f"{python.parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}

    def run(*command):
        command = [str(part) for part in command]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    if not python.exists():
        run(sys.executable, "-m", "venv", environment)
    tools = ["setuptools>=77.0.3", "cmake>=3.24", "ninja", *setup.cuda_requirements()]
    run(python, "-m", "pip", "install", "--quiet", *tools)
    assert run(python, "-c", "import setup; print(setup.system_nvcc())") == "None\n"
    code = "import pathlib, setup; print(setup.pypi_nvcc(pathlib.Path('toolkit').resolve()))"
    nvcc = run(python, "-c", code).strip()
    options = ["-DHEADROOM_TORCH=OFF", "-DHEADROOM_CUDA=ON", "-DHEADROOM_CUDA_ARCHS=90"]
    options += [f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DCMAKE_BUILD_TYPE=Debug"]  # which is quick
    options += ["-DHEADROOM_CUBLAS=OFF"]  # whose package is large
    run("cmake", "-G", "Ninja", "-S", ROOT, "-B", "build", *options)
    said = run("cmake", "--build", "build")
    assert said.splitlines()[-1].endswith("PRODUCTS of matrices on CUDA: HEADROOM_CUBLAS=OFF")
    library = ctypes.CDLL(str(tmp_path / "build" / "libheadroom.so"))
    library.hr_build_info.restype = ctypes.c_char_p
    assert b"cuda=13.0; archs=90; cublas=none;" in library.hr_build_info()

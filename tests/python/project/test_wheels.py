"""The wheel for every Python: .ci/wheels makes it, and it works without a compiler on this torch
and on the oldest one. It is built for the CPU alone, which takes a minute."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from helpers.oldest_torch import oldest_python, run

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.release]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Runs .ci/wheels of a checkout with the packages of this environment, and returns the folder
    of what it makes."""
    if platform.machine() != "x86_64":
        pytest.skip("the libraries of another glibc are linked on x86-64")
    # What it holds is looked at, not how fast it is.
    quick = tmp_path_factory.mktemp("compiler") / "quick"
    quick.write_text('#!/bin/sh\nexec "$@" -O1\n')
    quick.chmod(0o755)

    def made(root=ROOT, **more):
        out = tmp_path_factory.mktemp("dist")
        settings = {"OUT": str(out), "PYTHON": sys.executable, "HEADROOM_CUDA": "0"} | more
        settings |= {f"CMAKE_{language}_COMPILER_LAUNCHER": str(quick) for language in ("C", "CXX")}
        run("bash", root / ".ci" / "wheels", "x86_64", env=os.environ | settings)
        return out

    return made


@pytest.fixture(scope="module")
def dist(wheels):
    return wheels()


@pytest.fixture(scope="module")
def wheel(dist):
    return next(dist.glob("*.whl"))


def site_packages(python):
    return run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()


@pytest.fixture(scope="module", params=["this torch", "the oldest torch"])
def installed(request, wheel, tmp_path_factory):
    """Runs the Python of a new environment that has the wheel, with a torch, and no programs."""
    others = sysconfig.get_path("purelib")
    if request.param == "the oldest torch":
        others = site_packages(oldest_python())
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    Path(site_packages(python), "others.pth").write_text(f"{others}\n")
    programs = folder / "bin"

    def program(name, *arguments, path=programs, cwd=folder):
        """Runs a program of the environment, which finds others in ``path`` alone."""
        return run(programs / name, *arguments, env={"PATH": str(path), "HOME": folder}, cwd=cwd)

    return program


def test_the_name_says_for_what_it_is(wheel):
    assert wheel.name.endswith("+cpu-py3-none-manylinux_2_28_x86_64.whl")


def test_the_source_distribution_holds_all_that_is_compiled(dist):
    names = run("tar", "-tzf", next(dist.glob("*.tar.gz"))).splitlines()
    inside = {name.partition("/")[2] for name in names}
    folders = ("capi", "kernels", "torch_ext", "ops")
    tracked = run("git", "ls-files", *folders, cwd=ROOT).splitlines()
    assert inside >= {"setup.py", "pyproject.toml", "CMakeLists.txt", "LICENSE", *tracked}


@pytest.mark.parametrize("cuda", ["0", "1"])
def test_two_builds_are_the_same_bytes(wheels, tmp_path, cuda):
    """In two folders, and with CUDA in one: nvcc makes names of functions from the path."""
    if cuda == "1" and shutil.which("nvcc") is None:
        pytest.skip("needs a CUDA compiler")
    settings = {"HEADROOM_CUDA": cuda, "HEADROOM_CUDA_ARCHS": "75", "CCACHE_DISABLE": "1"}
    settings["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    first = wheels(**settings)
    root = ROOT
    if cuda == "0":
        root = tmp_path / "another" / "place"
        for name in run("git", "ls-files", cwd=ROOT).splitlines():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, root / name)
        shutil.copytree(ROOT / "build/wheels/tools", root / "build/wheels/tools")
    second = wheels(root, **settings)
    names = sorted(file.name for file in first.iterdir())
    assert len(names) == 2 and names == sorted(file.name for file in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_it_says_what_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if "/sboms/" in one]
        bill = json.loads(archive.read(name))
        assert name.partition("/")[0].endswith(".dist-info")
        files = {Path(one).name: one for one in archive.namelist() if ".so" in one}
        for one in bill["components"]:
            if one["type"] == "file":
                digest = hashlib.sha256(archive.read(files.pop(one["name"]))).hexdigest()
                assert one["hashes"][0]["content"] == digest
    assert list(files) == ["libheadroom.so"]  # a script for linkers
    assert (
        "cudart_static" not in str(bill) and bill["metadata"]["component"]["version"][-4:] == "+cpu"
    )


def test_nothing_in_it_is_for_one_python(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if "cpython" in name or name.endswith("_C.so")]
    assert "headroom/include/headroom.h" in names


STEPS = """
import shutil, sys
import headroom, torch
from headroom._core.binaries import _C

assert _C is None and headroom.__file__.startswith(sys.prefix), headroom.__file__
assert not any(map(shutil.which, ("cc", "c++", "gcc", "g++", "clang", "nvcc")))
for name in ("AdamW", "AdamW8bit", "Adafactor", "SGD8bit"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = getattr(headroom.optim, name)(model.parameters(), lr=1e-3)
    scaler, x, losses = headroom.amp.GradScaler("cpu"), torch.randn(32, 64), []
    for _ in range(8):
        losses.append((model(x) - x).square().mean())
        scaler.scale(losses[-1]).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert losses[-1] < losses[0], (name, losses)
print(headroom.build_info()["version"], torch.__version__)
"""


def test_it_trains(installed):
    version, _ = installed("python", "-c", STEPS).split()
    assert f"headroom {version}+cpu" in " ".join(installed("pip", "list").split())


def test_doctor_calls_it_whole(installed):
    said = installed("headroom", "doctor")
    assert "nothing is broken" in said and "headroom._C" in said


def test_its_binaries_are_what_the_source_promises(installed):
    """On the wheel, the tests of exports, of torch's stable interface, and of dependencies."""
    promises = "exported or exports or stable_interface or dependencies or answers"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", promises]
    tests = ROOT / "tests" / "python" / "project" / "test_build.py"
    path = f"{os.defpath}:/usr/bin"  # where nm and readelf are
    assert "5 passed" in installed("python", *command, tests, path=path, cwd=ROOT)


def test_a_broken_promise_is_found(wheel, tmp_path):
    """check_wheel.py refuses a wheel whose name promises an older glibc."""
    older = tmp_path / wheel.name.replace("2_28", "2_5")
    older.write_bytes(wheel.read_bytes())
    command = [sys.executable, ROOT / ".ci" / "check_wheel.py", older]
    env = os.environ | {"PYTHONPATH": str(ROOT / "build" / "wheels" / "tools")}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode != 0 and "its symbols are those of" in done.stderr

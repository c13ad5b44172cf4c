"""``headroom doctor`` with parts of the machine and of the installation taken away or broken."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import headroom
import headroom_command
import pytest
import torch
from headroom._core.cgroups import cgroup_limit
from headroom.cli import doctor, main
from headroom.cli.doctor import BROKEN, NOTE, examine, runs_on, table


def named(findings):
    return {(one.part, one.name): one for one in findings}


def test_what_it_finds_here(capsys):
    started = time.process_time()
    assert main(["doctor", "--json"]) == 0
    assert time.process_time() - started < 1  # torch is imported
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "headroom.doctor/1"
    values = {(row["part"], row["name"]): row["value"] for row in found["findings"]}
    assert values["versions", "torch"].startswith(torch.__version__)
    assert values["library", "instruction set"] == headroom.build_info()["cpu"]
    assert values["versions", "threads of torch"] == str(torch.get_num_threads())
    assert found["broken"] == sum(row["status"] == BROKEN for row in found["findings"])
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(value in text for value in values.values())


def test_a_torch_that_cannot_be_imported(monkeypatch):
    real = importlib.import_module

    def imported(name):
        if name in ("torch", "headroom"):
            raise OSError("libtorch_cpu.so: undefined symbol\nfoo")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", imported)
    found = named(examine())
    assert found["versions", "torch"].status == BROKEN
    assert found["versions", "torch"].value == "libtorch_cpu.so: undefined symbol foo"
    assert "pip install" in found["library", "import headroom"].advice
    assert found["devices", "CPU"].value and found["memory", "RAM"].value


def test_a_library_without_the_module_of_python(monkeypatch):
    def build_info():
        raise RuntimeError("headroom._C is missing: the package was built without pybind11")

    monkeypatch.setattr(headroom, "build_info", build_info)
    found = named(examine())["library", "build"]
    assert found.status == BROKEN and "pybind11" in found.value + found.advice


def test_a_system_without_any_of_its_files(tmp_path):
    found = named(examine(tmp_path))
    assert found["memory", "RAM"].status == NOTE
    assert found["memory", "limit of the cgroup"].value == "none"
    assert found["memory", "/dev/shm"].value == "none"
    assert found["devices", "NVIDIA driver"].status == NOTE
    assert "error" not in [name for _, name in found]


def test_a_part_that_raises_is_a_line(monkeypatch):
    def memory(root):
        raise ZeroDivisionError("of any type")
        yield

    monkeypatch.setattr(doctor, "_memory", memory)
    found = named(examine())["memory", "error"]
    assert found.status == BROKEN and found.value == "of any type"
    assert "1 broken, marked with !" in table([found])


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_limits_of_cgroups(tmp_path):
    assert cgroup_limit(tmp_path) is None
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    top = tmp_path / "sys/fs/cgroup"
    write(top / "a/b/memory.max", "max\n")
    assert cgroup_limit(tmp_path) is None
    write(top / "a/memory.max", f"{3 << 30}\n")  # that of the group around it counts
    assert cgroup_limit(tmp_path) == 3 << 30
    write(top / "memory.max", f"{2 << 30}\n")
    assert cgroup_limit(tmp_path) == 2 << 30
    first = tmp_path / "v1"
    write(first / "proc/self/cgroup", "12:cpu,cpuacct:/x\n7:memory:/docker/abc\n0::/\n")
    # In a container the path is that of the host, and is not there.
    write(first / "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{5 << 30}\n")
    assert cgroup_limit(first) == 5 << 30
    write(first / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert cgroup_limit(first) is None


@pytest.mark.parametrize(
    "archs, device, answer",
    [
        ([75, 80, 90], 86, True),  # machine code of 80
        ([75, 80, 90], 75, True),
        ([75, 80, 90], 70, False),
        ([86], 80, False),  # a larger minor number
        ([90], 100, True),  # portable code of the newest
        ([90], 89, False),
    ],
)
def test_devices_that_a_library_runs_on(archs, device, answer):
    assert runs_on(archs, device) is answer


def test_devices_that_the_library_lacks_or_that_fail(monkeypatch, tmp_path):
    class Properties:
        name, major, minor = "Tesla V100", 7, 0

    def properties(index):
        if index == 1:
            raise RuntimeError("CUDA error: device is lost")
        return Properties

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1 << 30, 16 << 30))
    info = headroom.build_info() | {"cuda": "13.0", "archs": "80;90"}
    monkeypatch.setattr(headroom, "build_info", lambda: info)
    found = named(examine(tmp_path))
    first, second = found["devices", "cuda:0"], found["devices", "cuda:1"]
    assert first.status == BROKEN and 'HEADROOM_CUDA_ARCHS="70"' in first.advice
    assert "1.00 GiB free of 16.0 GiB" in first.value
    assert second.status == BROKEN and "device is lost" in second.value


def test_the_command_says_why_the_package_cannot_be_imported(tmp_path):
    """The doctor is started without the package, and so works where it is broken."""
    package = Path(headroom.__file__).parent
    broken = tmp_path / "headroom"
    for folder in ("cli", "_core"):
        (broken / folder).mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('the library is of another torch')\n")
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: cannot open')\n")
    for name in ("cli/doctor.py", "_core/cgroups.py", "_core/sizes.py"):
        (broken / name).write_bytes((package / name).read_bytes())
    start = Path(headroom_command.__file__).read_text()
    (tmp_path / "start.py").write_text(start + "\nsys.exit(main())\n")
    command = [sys.executable, "start.py", "doctor"]
    options = {
        "cwd": tmp_path,
        "capture_output": True,
        "text": True,
        "env": {"PATH": "", "PYTHONPATH": str(tmp_path)},
    }
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    assert "! import headroom" in done.stdout
    assert "the library is of another torch" in done.stdout
    assert "libtorch.so: cannot open" in done.stdout
    limit = next(line for line in done.stdout.splitlines() if "limit of the cgroup" in line)
    assert "unknown" not in limit
    (broken / "_core" / "cgroups.py").unlink()
    done = subprocess.run(command, **options)
    assert done.returncode == 0 and "unknown: " in done.stdout, done.stderr

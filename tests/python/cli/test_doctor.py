"""``headroom doctor`` with parts of the machine and of the installation taken away or broken."""

import importlib.metadata
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import headroom
import headroom_command
import pytest
import torch
from headroom._core import binaries
from headroom._core.cgroups import cgroup_limit
from headroom.cli import doctor, main
from headroom.cli.doctor import BROKEN, NOTE, OK, Finding, examine, now, runs_on, table


def named(findings):
    return {(one.part, one.name): one for one in findings}


def test_what_it_finds_here(capsys):
    assert main(["--version"]) == 0  # what the command imports, and torch, is imported
    capsys.readouterr()
    started = time.process_time()
    assert main(["doctor", "--json"]) == 0
    assert time.process_time() - started < 1
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


def test_its_first_line(capsys):
    def line(*changes):
        rows = {
            ("versions", "torch"): Finding("versions", "torch", "2.15, built for CUDA 13.2"),
            ("library", "CUDA"): Finding("library", "CUDA", "13.0"),
            ("devices", "NVIDIA driver"): Finding("devices", "NVIDIA driver", "580"),
        }
        return now([*(rows | {one[:2]: Finding(*one) for one in changes}).values()])

    gpu = ("devices", "cuda:0", "NVIDIA T4, sm_75, 14 GiB free of 15 GiB")
    assert line().startswith("Trains on the CPU, and rehearses programs for GPUs: headroom reh")
    built = ("versions", "torch", "2.15, built for the CPU")
    assert "plans for GPUs" in line(built) and "With a torch built for CUDA it" in line(built)
    assert line(gpu).startswith("Trains on NVIDIA T4: headroom.fit")
    alone = ("library", "CUDA", "built for the CPU", NOTE, "for a GPU: pip")
    assert line(gpu, alone) == "This library is built for the CPU, and trains on it alone. " + (
        "for a GPU: pip."
    )
    broken = (
        "devices",
        "cuda:0",
        "NVIDIA T4; the library has 90",
        BROKEN,
        "HEADROOM_CUDA_ARCHS=75",
    )
    wanted = "First mend cuda:0: NVIDIA T4; the library has 90. HEADROOM_CUDA_ARCHS=75"
    assert line(broken) == wanted
    compiler = ("optional", "C++ compiler", "not installed", NOTE, "apt-get install g++")
    plans = "Trains on the CPU, and plans for GPUs: headroom plan. With a C++ compiler it rehearses"
    assert line(compiler).startswith(plans)
    assert "With a torch built for CUDA and a C++ compiler" in line(built, compiler)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith(now(examine()) + "\n\nversions\n")


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
    assert "pip install" in found["library", "import of headroom"].advice
    assert found["devices", "CPU"].value and found["memory", "RAM"].value


def test_a_library_without_the_module_of_python(monkeypatch):
    assert ("library", "headroom._C") not in named(examine())
    monkeypatch.setattr(binaries, "_C", None)
    found = named(examine())["library", "headroom._C"]
    assert found.status == NOTE and "small tensors" in found.advice
    assert headroom.build_info()["version"] == headroom.__version__


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


@pytest.mark.parametrize("cublas, status", [("13.4", "ok"), ("none", "note")])
def test_a_library_without_products_is_noted(monkeypatch, tmp_path, cublas, status):
    info = headroom.build_info() | {"cuda": "13.0", "archs": "80;90", "cublas": cublas}
    monkeypatch.setattr(headroom, "build_info", lambda: info)
    found = named(examine(tmp_path))["library", "products on CUDA"]
    assert found.status == status and ("cublasLt.h" in found.advice) is (status == "note")


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
    assert first.status == BROKEN and "for compute capability 7.5 and newer" in first.value
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
    assert "! import of headroom" in done.stdout
    assert "the library is of another torch" in done.stdout
    assert "libtorch.so: cannot open" in done.stdout
    limit = next(line for line in done.stdout.splitlines() if "limit of the cgroup" in line)
    assert "unknown" not in limit
    (broken / "_core" / "cgroups.py").unlink()
    done = subprocess.run(command, **options)
    assert done.returncode == 0 and "unknown: " in done.stdout, done.stderr


DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul\n"


def test_all_lines_of_a_machine(monkeypatch, tmp_path):
    write(tmp_path / "proc/driver/nvidia/version", DRIVER)
    write(tmp_path / "proc/cpuinfo", "processor : 0\nmodel name\t: Good CPU 7\nflags : x\n")
    write(tmp_path / "proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 2097152 kB\nHuge: 3\n")
    write(tmp_path / "proc/self/cgroup", "0::/a\n")
    write(tmp_path / "sys/fs/cgroup/a/memory.max", f"{3 << 30}\n")

    class Cuda:
        @staticmethod
        def cuDriverGetVersion(number):
            number._obj.value = 13020

    limits = dict.fromkeys(["RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_MEMLOCK"], 1 << 20)
    limits = {getattr(resource, name): size for name, size in limits.items()}
    limits[resource.RLIMIT_NOFILE] = 1024
    none = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, none), none))
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: {"libcuda.so.1": Cuda}[name])
    monkeypatch.setattr(doctor.os, "statvfs", lambda path: SimpleNamespace(f_frsize=4, f_blocks=99))
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda process: {1, 5, 6})
    monkeypatch.setenv("CXX", "good++")
    monkeypatch.setattr(doctor.shutil, "which", {"good++": "/bin/good++"}.get)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    info = {"version": "1.2", "compiler": "cc 5", "cpu": "avx9", "cuda": "none"}
    monkeypatch.setattr(headroom, "build_info", lambda: info)
    installed = {"headroom": "1.2.3", "isal": "9.9"}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    machine = f"{platform.system()} {platform.release()} {platform.machine()}"
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    lacks = "not installed"
    assert examine(tmp_path) == [
        ("versions", "Python", f"{platform.python_version()} at {sys.executable}", OK, ""),
        ("versions", "system", machine, OK, ""),
        ("versions", "torch", f"{torch.__version__}, {cuda}", OK, ""),
        ("versions", "threads of torch", str(torch.get_num_threads()), OK, ""),
        ("versions", "headroom", "1.2.3", OK, ""),
        ("library", "version", "1.2", OK, ""),
        ("library", "compiler", "cc 5", OK, ""),
        ("library", "instruction set", "avx9", OK, ""),
        ("library", "CUDA", "built for the CPU", NOTE,
         "for a GPU: HEADROOM_CUDA=1 pip install . fetches the compiler"),
        ("devices", "CPU", "Good CPU 7, 3 cores for this process", OK, ""),
        ("devices", "NVIDIA driver", "580.65.06, for CUDA 13.2 and older", OK, ""),
        ("devices", "CUDA in torch", "not available", BROKEN,
         'why: nvidia-smi, and python -c "import torch; torch.cuda.init()"'),
        ("memory", "RAM", "2.00 GiB available of 8.00 GiB", OK, ""),
        ("memory", "limit of the cgroup", "3.00 GiB", NOTE,
         "the process is killed above this, whatever RAM is free"),
        ("memory", "ulimit -v", "1.00 MiB", NOTE, "CUDA reserves addresses for all of its memory"),
        ("memory", "ulimit -d", "1.00 MiB", NOTE, "allocations above it fail"),
        ("memory", "ulimit -l", "1.00 MiB", OK, ""),
        ("memory", "ulimit -f", "unlimited", OK, ""),
        ("memory", "ulimit -n", "1024", OK, ""),
        ("memory", "/dev/shm", "396 B", NOTE,
         "workers of a DataLoader need more; docker run --shm-size=8g"),
        ("optional", "C++ compiler", "/bin/good++", OK, ""),
        ("optional", "matplotlib", lacks, NOTE,
         "pictures of headroom.ladder: pip install matplotlib"),
        ("optional", "transformers", lacks, NOTE,
         "headroom plan with a config.json: pip install transformers"),
        ("optional", "isal", "9.9", OK, ""),
        ("optional", "bitsandbytes", lacks, NOTE,
         "nothing of Headroom needs it; its optimizer states convert without it"),
        ("optional", "torchao", lacks, NOTE, "converting states of torchao: pip install torchao"),
    ]  # fmt: skip

    # And where these are otherwise.
    info |= {"cuda": "13.0", "archs": "80;90"}
    del installed["headroom"]
    write(tmp_path / "sys/fs/cgroup/a/memory.max", f"{8 << 30}\n")  # as much as there is
    write(tmp_path / "proc/driver/nvidia/version", "of another form\n")
    write(tmp_path / "proc/cpuinfo", "processor : 0\n")
    large = SimpleNamespace(f_frsize=1 << 20, f_blocks=256)
    monkeypatch.setattr(doctor.os, "statvfs", lambda path: large)
    found = named(examine(tmp_path))
    assert found["versions", "headroom"].value == "not installed as a package"
    assert found["library", "CUDA"] == ("library", "CUDA", "13.0", OK, "")
    assert found["library", "architectures"] == ("library", "architectures", "80;90", OK, "")
    assert found["memory", "limit of the cgroup"][2:] == ("none", OK, "")
    assert found["memory", "/dev/shm"][2:] == ("256 MiB", OK, "")
    driver = found["devices", "NVIDIA driver"]
    assert driver.value == "of an unknown version, for CUDA 13.2 and older"
    assert found["devices", "CPU"].value.startswith(f"{platform.machine()}, 3 cores")

    def no_library(name):
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(doctor.ctypes, "CDLL", no_library)
    write(tmp_path / "proc/driver/nvidia/version", DRIVER)
    found = named(examine(tmp_path))
    assert found["devices", "NVIDIA driver"][2:] == (
        *("580.65.06, libcuda.so.1: cannot open", BROKEN),
        "in a container: start it with the NVIDIA runtime (--gpus all)",
    )
    assert ("devices", "CUDA in torch") not in found


@pytest.fixture
def driver_of(monkeypatch, tmp_path):
    """Gives the machine a driver for a CUDA, a library built by another and a torch for a third."""

    def made(driver, library, torch_s, archs="75"):
        write(tmp_path / "proc/driver/nvidia/version", DRIVER)
        number = 1000 * driver[0] + 10 * driver[1]

        class Cuda:
            @staticmethod
            def cuDriverGetVersion(into):
                into._obj.value = number

        monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: {"libcuda.so.1": Cuda}[name])
        info = headroom.build_info() | {"cuda": library, "archs": archs}
        monkeypatch.setattr(headroom, "build_info", lambda: info)
        monkeypatch.setattr(torch.version, "cuda", torch_s)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        return named(examine(tmp_path)), now(examine(tmp_path))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


@pytest.mark.parametrize(
    "driver, library, torch_s, broken, said",
    [
        ((12, 4), "13.0", "12.6", "NVIDIA driver", "to R580 or newer, or build by a CUDA toolkit"),
        ((11, 8), "13.0", "11.8", "NVIDIA driver", "update the driver to R580 or newer"),
        ((12, 4), "12.8", "13.2", "CUDA in torch", "to R580 or newer, or install a torch for CUDA"),
        ((13, 0), "13.0", "14.1", "CUDA in torch", "to one for CUDA 14, or install a torch for"),
        ((13, 0), "13.0", None, "CUDA in torch", "install a torch for CUDA 13.0 or older"),
        ((13, 0), "none", None, "CUDA in torch", "built for the CPU"),
    ],
)
def test_a_driver_a_library_and_a_torch_that_do_not_fit(
    driver_of, driver, library, torch_s, broken, said
):
    found, first = driver_of(driver, library, torch_s)
    line = found["devices", broken]
    assert line.status == BROKEN and said in f"{line.value} {line.advice}"
    assert line.value in first and line.advice in first
    assert ("or build" in line.advice) is (driver == (12, 4) and library == "13.0")


def test_gpus_that_are_hidden_are_not_broken(driver_of, monkeypatch):
    found, first = driver_of((13, 0), "13.0", "13.2")
    assert found["devices", "NVIDIA driver"].status == OK
    assert found["devices", "CUDA in torch"].status == BROKEN
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found, first = driver_of((13, 0), "13.0", "13.2")
    line = found["devices", "CUDA in torch"]
    assert line.status == NOTE and "CUDA_VISIBLE_DEVICES is ''" in line.value
    assert first.startswith("Trains on the CPU")


def test_a_driver_that_cannot_compile_the_code_of_a_newer_cuda(driver_of, monkeypatch, tmp_path):
    properties = SimpleNamespace(name="NVIDIA L4", major=8, minor=9)
    for driver, status in (((12, 4), BROKEN), ((12, 8), NOTE)):
        driver_of(driver, "12.8", "12.6")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (20 << 30, 24 << 30))
        line = named(examine(tmp_path))["devices", "cuda:0"]
        assert line.status == status and 'HEADROOM_CUDA_ARCHS="89"' in line.advice
        assert ("too old to compile" in line.value) is (status == BROKEN)


def test_a_torch_for_gpus_of_amd(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = examine(tmp_path)
    assert named(found)["versions", "torch"].value.endswith("built for ROCm 6.4")
    assert "NVIDIA alone" in named(found)["devices", "GPUs of AMD"].value
    assert now(found).startswith("Trains on the CPU, and plans for GPUs")


def test_devices_that_the_library_has(monkeypatch, tmp_path):
    properties = SimpleNamespace(name="NVIDIA L4", major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (20 << 30, 24 << 30))
    value = "NVIDIA L4, sm_89, 20.0 GiB free of 24.0 GiB"
    compiled = "; the driver compiles the library's code for sm_75"
    for archs, status, more in (
        ("80;90", OK, ""),
        ("75", NOTE, compiled),
        ("90", BROKEN, "; the library has 90"),
    ):
        info = headroom.build_info() | {"cuda": "13.0", "archs": archs}
        monkeypatch.setattr(headroom, "build_info", lambda info=info: info)
        found = named(examine(tmp_path))["devices", "cuda:0"]
        assert (found.value, found.status) == (value + more, status)


def test_the_whole_text():
    found = [
        doctor.Finding("one", "a", "x"),
        doctor.Finding("one", "longer", "y", NOTE, "do this"),
        doctor.Finding("two", "b", "", BROKEN, "do that"),
        doctor.Finding("two", "c", "z", BROKEN),
    ]
    assert table(found) == (
        "one\n  a       x\n- longer  y\n            do this\n\n"
        "two\n! b\n            do that\n! c       z\n\n2 broken, marked with !"
    )
    assert table(found[:1]) == "one\n  a  x\n\nnothing is broken"
    assert doctor._short(ValueError("a  b\n" + "c" * 400)) == "a b " + "c" * 293 + "..."
    assert doctor._short(ValueError("c" * 300)) == "c" * 300
    assert doctor._short(ValueError()) == "ValueError"


def test_the_doctor_by_itself(capsys):
    assert doctor.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "headroom.doctor/1"
    for words in (["x"], ["x", "--json"]):
        with pytest.raises(SystemExit) as ended:
            doctor.main(words)
        said = capsys.readouterr()
        assert ended.value.code == 2 and "headroom doctor: error: unrecognized" in said.err
        if len(words) == 1:
            assert said.out == ""
        else:
            assert json.loads(said.out) == {
                "format": "headroom.error/1",
                "error": "unrecognized arguments: x",
                "type": "ArgumentError",
            }


def test_a_quota_on_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda process: {1, 5, 6})
    write(tmp_path / "proc/self/cgroup", "0::/a\n")
    write(tmp_path / "sys/fs/cgroup/a/cpu.max", "150000 100000\n")
    found = named(examine(tmp_path))["devices", "quota of the cgroup"]
    assert found.value == "1.5 processors" and found.status == NOTE
    write(tmp_path / "sys/fs/cgroup/a/cpu.max", "400000 100000\n")
    assert ("devices", "quota of the cgroup") not in named(examine(tmp_path))


LOADERS = """import torch
from torch.utils.data import DataLoader

def loader():
    return DataLoader(torch.arange(32.0), batch_size=4)

def with_step():
    return loader(), 0.5

def broken():
    raise ZeroDivisionError("no data")
"""


def test_a_loader_is_advised_on(tmp_path, monkeypatch, capsys):
    write(tmp_path / "loaders_of_a_test.py", LOADERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(headroom.data.trials, "SECONDS", 0.02)
    monkeypatch.setattr(doctor, "examine", lambda: [])
    assert main(["doctor", "--json", "--loader", "loaders_of_a_test:with_step"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loader"]["trials"][0]["work_seconds"] >= 0.5 and found["broken"] == 0
    assert found["loader"]["settings"]["num_workers"] == 0
    assert main(["doctor", "--loader", "loaders_of_a_test:loader"]) == 0
    assert "\nloader\nadvised     num_workers=" in capsys.readouterr().out
    for name, why in (("broken", "no data"), ("nothing", "has no attribute"), ("", "not callable")):
        assert main(["doctor", "--json", "--loader", f"loaders_of_a_test:{name}"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["broken"] == 1 and why in found["findings"][0]["value"]

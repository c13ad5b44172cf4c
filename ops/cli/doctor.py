"""Says what Headroom runs on here: versions, devices, instruction sets, limits of memory, and what
is missing with how to get it; and, where a loader is given, which settings it should have. Never
fails: what is broken or absent becomes a line.

This file imports nothing but the standard library until it runs, and nothing of the package by
name, so that it also works where ``import headroom`` does not.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HELP = "say what this machine and installation have, lack, and how to get it"
OK, NOTE, BROKEN = "ok", "note", "broken"
OLDEST = 75  # compute capability that the kernels are for
DRIVERS = {12: "R530", 13: "R580"}  # the oldest, by the major version of CUDA
TORCHES = "https://pytorch.org has the commands"
OPTIONAL = {
    "matplotlib": "pictures of headroom.ladder: pip install matplotlib",
    "transformers": "headroom plan with a config.json: pip install transformers",
    "isal": "checksums of state files at the speed of memory: pip install isal",
    "bitsandbytes": "nothing of Headroom needs it; its optimizer states convert without it",
    "torchao": "converting states of torchao: pip install torchao",
}


class Finding(NamedTuple):
    """A line: what was looked at, what was found, and what to do about it."""

    part: str
    name: str
    value: str
    status: str = OK
    advice: str = ""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--loader",
        metavar="MODULE:FUNCTION",
        help="a function that returns a DataLoader, or one and its step: a function of a batch, or "
        "seconds; it is measured for some seconds",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    findings, advice = examine(), None
    if options.loader is not None:
        try:
            advice = _advice(options.loader)
        except Exception as error:  # of any type: the function is the user's
            why = f"--loader is {options.loader!r}: {_short(error)}"
            findings.append(Finding("loader", "error", why, BROKEN, "wanted module:function"))
    if options.json:
        rows = [finding._asdict() for finding in findings]
        broken = sum(finding.status == BROKEN for finding in findings)
        found = {"format": "headroom.doctor/1", "now": now(findings), "broken": broken}
        found["findings"] = rows
        if advice is not None:
            found["loader"] = advice.as_dict()
        print(json.dumps(found, indent=2))
    else:
        print(f"{now(findings)}\n\n{table(findings)}")
        if advice is not None:
            print(f"\nloader\n{advice}")
    return 0


def _advice(name: str) -> Any:
    """Returns the advice on the loader that a function of the user's makes."""
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())  # workers that are spawned have it too
    try:
        made = pkgutil.resolve_name(name)()
        data = importlib.import_module("headroom.data")
        return data.advise(*made) if isinstance(made, tuple) else data.advise(made)
    finally:
        sys.path[:] = path


def main(arguments: list[str] | None = None) -> int:
    """Runs the doctor by itself, where the package cannot be imported."""
    parser = argparse.ArgumentParser(prog="headroom doctor", description=__doc__)
    add_arguments(parser)
    options, unknown = parser.parse_known_args(arguments)
    if unknown and options.json:
        error = {"error": f"unrecognized arguments: {unknown[0]}", "type": "ArgumentError"}
        print(json.dumps({"format": "headroom.error/1"} | error, indent=2))
    if unknown:
        parser.error(f"unrecognized arguments: {unknown[0]}")
    return run(options)


def examine(root: Path = Path("/")) -> list[Finding]:
    """Returns all findings. Files of the system are read below ``root``."""
    parts: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": _versions,
        "library": _library,
        "devices": lambda: _devices(root),
        "memory": lambda: _memory(root),
        "optional": _optional,
    }
    found = []
    for part, look in parts.items():
        try:
            found += look()
        except Exception as error:  # of any type: what is looked at may be broken in any way
            found.append(Finding(part, "error", _short(error), BROKEN, "please report this"))
    return found


def now(findings: list[Finding]) -> str:
    """Returns what a user can do on this machine now, or has to do first, as a sentence."""
    for one in findings:
        if one.status == BROKEN:
            the = "the " if " " in one.name else ""
            return f"First mend {the}{one.name}: {one.value}. {one.advice}".rstrip()
    found = {(one.part, one.name): one for one in findings}
    gpus = [one.value.partition(",")[0] for (_, name), one in found.items() if "cuda:" in name]
    cuda = found.get(("library", "CUDA"))
    if gpus and cuda is not None and cuda.status == NOTE:
        return f"This library is {cuda.value}, and trains on it alone. {cuda.advice}."
    if gpus:
        return f"Trains on {', '.join(gpus)}: headroom.fit in your loop, or headroom run train.py."
    torch = found.get(("versions", "torch"))
    lacks = []
    if torch is None or "for CUDA" not in torch.value:
        lacks.append("a torch built for CUDA")
    compiler = found.get(("optional", "C++ compiler"))
    if compiler is not None and compiler.status == NOTE:
        lacks.append("a C++ compiler")
    if lacks:
        more = f"plans for GPUs: headroom plan. With {' and '.join(lacks)} it rehearses programs"
    else:
        more = 'rehearses programs for GPUs: headroom rehearse --gpu "RTX 4090" train.py'
    return f"Trains on the CPU, and {more}."


def table(findings: list[Finding]) -> str:
    """Returns the findings as text, a part after the other."""
    signs = {OK: " ", NOTE: "-", BROKEN: "!"}
    lines, last = [], None
    width = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        if finding.part != last:
            lines += [""] * bool(lines) + [finding.part]
            last = finding.part
        lines.append(f"{signs[finding.status]} {finding.name:<{width}}  {finding.value}".rstrip())
        if finding.advice:
            lines.append(f"  {'':<{width}}    {finding.advice}")
    broken = sum(finding.status == BROKEN for finding in findings)
    verdict = "nothing is broken" if not broken else f"{broken} broken, marked with !"
    return "\n".join([*lines, "", verdict])


# ---- versions and the library -------------------------------------------------------------------


def _imported(name: str) -> Any:
    """Returns the module, or the error that importing it raised."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken binary raises OSError, a wrong torch AttributeError, ...
        return error


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "Python", f"{platform.python_version()} at {sys.executable}")
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("versions", "system", system)
    torch = _imported("torch")
    if isinstance(torch, Exception):
        advice = f"pip install torch, of 2.11 or newer; {TORCHES}"
        yield Finding("versions", "torch", _short(torch), BROKEN, advice)
    else:
        kinds = {"CUDA": getattr(torch.version, "cuda", None)}
        kinds["ROCm"] = getattr(torch.version, "hip", None)
        kinds = [f"{kind} {version}" for kind, version in kinds.items() if version]
        of = f"built for {kinds[0] if kinds else 'the CPU'}"
        yield Finding("versions", "torch", f"{torch.__version__}, {of}")
        yield Finding("versions", "threads of torch", str(torch.get_num_threads()))
    try:
        version = importlib.metadata.version("headroom")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed as a package"
    yield Finding("versions", "headroom", version)


def _library() -> Iterator[Finding]:
    headroom = _imported("headroom")
    if isinstance(headroom, Exception):
        value = _short(headroom)
        advice = "" if "pip install" in value else "in the source folder: pip install ."
        yield Finding("library", "import of headroom", value, BROKEN, advice)
        return
    info = headroom.build_info()
    yield Finding("library", "version", info.get("version", "?"))
    yield Finding("library", "compiler", info.get("compiler", "?"))
    yield Finding("library", "instruction set", info.get("cpu", "?"))
    cuda = info.get("cuda", "")
    if not re.search(r"\d", cuda):
        advice = "for a GPU: HEADROOM_CUDA=1 pip install . fetches the compiler"
        yield Finding("library", "CUDA", "built for the CPU", NOTE, advice)
    else:
        yield Finding("library", "CUDA", cuda)
        yield Finding("library", "architectures", info.get("archs", "?"))
        cublas = info.get("cublas", "none")
        if re.search(r"\d", cublas):
            yield Finding("library", "products on CUDA", f"cuBLASLt, of {cublas} or newer")
        else:
            advice = "for linear layers and losses on a GPU: pip install nvidia-cublas, or a CUDA "
            advice += "toolkit, which have cublasLt.h; then HEADROOM_CUDA=1 pip install ."
            yield Finding("library", "products on CUDA", "built without", NOTE, advice)
    if getattr(_imported("headroom._core.binaries"), "_C", None) is None:
        advice = "for steps of thousands of small tensors: pip install . in a clone"
        yield Finding("library", "headroom._C", "not in this build", NOTE, advice)


# ---- devices ------------------------------------------------------------------------------------


def _devices(root: Path) -> Iterator[Finding]:
    yield Finding("devices", "CPU", f"{_cpu_name(root)}, {_cores()} cores for this process")
    try:
        quota = _own("cgroups").cgroup_cpus(root)
    except (OSError, ImportError, AttributeError):  # the part "memory" says so
        quota = None
    if quota is not None and quota < _cores():
        advice = "more threads and workers of loaders than that wait for each other"
        yield Finding("devices", "quota of the cgroup", f"{quota:.4g} processors", NOTE, advice)
    driver, newest = _driver(root)
    built = _cuda_of_library()
    if newest and newest[0] < built[0]:
        value = f"{driver.value}; the library is built by CUDA {_dotted(built)}"
        advice = f"update the driver to {_driver_for(built[0])}"
        if newest >= (12, 1):
            advice += ", or build by a CUDA toolkit 12.8 or 12.9: "
            advice += "CUDA_HOME=/usr/local/cuda-12.8 pip install ."
        driver = driver._replace(value=value, status=BROKEN, advice=advice)
    yield driver
    torch = _imported("torch")
    if isinstance(torch, Exception):
        return
    if getattr(torch.version, "hip", None):
        text = "torch is built for ROCm; Headroom runs on GPUs of NVIDIA alone"
        yield Finding("devices", "GPUs of AMD", text, NOTE)
        return
    if not torch.cuda.is_available():
        if newest:
            yield _no_cuda(torch.version.cuda, newest)
        return
    archs = _architectures()
    for index in range(torch.cuda.device_count()):
        name = f"cuda:{index}"
        try:
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
        except Exception as error:
            advice = "look at it with nvidia-smi"
            yield Finding("devices", name, _short(error), BROKEN, advice)
            continue
        number = 10 * properties.major + properties.minor
        sizes = f"{_size(free)} free of {_size(total)}"
        value = f"{properties.name}, sm_{number}, {sizes}"
        if number < OLDEST:
            text = f"{value}; Headroom is for compute capability 7.5 and newer"
            advice = "hide it by CUDA_VISIBLE_DEVICES, and train on another GPU or the CPU"
            yield Finding("devices", name, text, BROKEN, advice)
        elif archs and not runs_on(archs, number):
            advice = f'HEADROOM_CUDA_ARCHS="{number}" pip install .'
            text = f"{value}; the library has {' '.join(map(str, archs))}"
            yield Finding("devices", name, text, BROKEN, advice)
        elif archs and not has_code_for(archs, number) and newest and newest < built:
            advice = f'HEADROOM_CUDA_ARCHS="{number}" pip install ., or update the driver'
            text = f"{value}; the driver, of CUDA {_dotted(newest)}, is too old to compile the "
            text += f"library's code for sm_{max(archs)}, of CUDA {_dotted(built)}"
            yield Finding("devices", name, text, BROKEN, advice)
        elif archs and not has_code_for(archs, number):
            advice = f'code of its own may be faster: HEADROOM_CUDA_ARCHS="{number}" pip install .'
            text = f"{value}; the driver compiles the library's code for sm_{max(archs)}"
            yield Finding("devices", name, text, NOTE, advice)
        else:
            yield Finding("devices", name, value)


def has_code_for(archs: list[int], device: int) -> bool:
    """Returns whether a library for these architectures has machine code for a device: it runs on
    the same major number and a minor one that is not smaller."""
    return any(arch // 10 == device // 10 and arch <= device for arch in archs)


def runs_on(archs: list[int], device: int) -> bool:
    """Returns whether a library for these architectures runs on a device: by its machine code, or
    by the portable code of the newest architecture, which runs on all that are newer."""
    return has_code_for(archs, device) or device >= max(archs)


def _architectures() -> list[int]:
    headroom = _imported("headroom")
    try:
        return [int(number) for number in re.findall(r"\d+", headroom.build_info()["archs"])]
    except Exception:  # the part "library" has said why
        return []


def _no_cuda(built: str | None, newest: tuple[int, int]) -> Finding:
    """Returns why torch finds no GPU though there is a driver, whose newest CUDA is given."""
    name, value = "CUDA in torch", "not available"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not built:
        value += ": this torch is built for the CPU"
        advice = f"install a torch for CUDA {_dotted(newest)} or older; {TORCHES}"
    elif int(built.partition(".")[0]) > newest[0]:
        value += f": torch is built for CUDA {built}, newer than the driver"
        advice = f"update the driver to {_driver_for(int(built.partition('.')[0]))}, or install a "
        advice += f"torch for CUDA {newest[0]}; {TORCHES}"
    elif hidden is not None:
        value += f": CUDA_VISIBLE_DEVICES is {hidden!r}"
        return Finding("devices", name, value, NOTE, "unset it to train on a GPU")
    else:
        advice = 'why: nvidia-smi, and python -c "import torch; torch.cuda.init()"'
    return Finding("devices", name, value, BROKEN, advice)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _driver_for(cuda: int) -> str:
    return f"{DRIVERS[cuda]} or newer" if cuda in DRIVERS else f"one for CUDA {cuda}"


def _cuda_of_library() -> tuple[int, int]:
    """Returns the version of CUDA that built the library, or zeros."""
    try:
        found = re.match(r"(\d+)\.(\d+)", _imported("headroom").build_info()["cuda"])
    except Exception:  # the part "library" has said why
        found = None
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _driver(root: Path) -> tuple[Finding, tuple[int, int] | None]:
    """Returns the line of NVIDIA's driver, and the newest CUDA that it can run, or None."""
    file = root / "proc/driver/nvidia/version"
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text())
    except OSError:
        return Finding("devices", "NVIDIA driver", "none; runs on the CPU", NOTE), None
    version = found[1] if found else "of an unknown version"
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        advice = "in a container: start it with the NVIDIA runtime (--gpus all)"
        text = f"{version}, {_short(error)}"
        return Finding("devices", "NVIDIA driver", text, BROKEN, advice), None
    newest = (number.value // 1000, number.value % 1000 // 10)
    text = f"{version}, for CUDA {_dotted(newest)} and older"
    return Finding("devices", "NVIDIA driver", text), newest


def _cpu_name(root: Path) -> str:
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found[1] if found else platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- memory -------------------------------------------------------------------------------------


def _memory(root: Path) -> Iterator[Finding]:
    total = available = None
    try:
        text = (root / "proc/meminfo").read_text()
        sizes = {
            name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)
        }
        total, available = sizes["MemTotal"], sizes["MemAvailable"]
        yield Finding("memory", "RAM", f"{_size(available)} available of {_size(total)}")
    except (OSError, KeyError) as error:
        yield Finding("memory", "RAM", f"unknown: {_short(error)}", NOTE)
    yield _cgroup(root, total)
    yield from _limits()
    try:
        shared = os.statvfs(root / "dev/shm")
        size = shared.f_frsize * shared.f_blocks
        small = size < 1 << 28
        advice = "workers of a DataLoader need more; docker run --shm-size=8g" if small else ""
        yield Finding("memory", "/dev/shm", _size(size), NOTE if small else OK, advice)
    except OSError:
        yield Finding("memory", "/dev/shm", "none", NOTE, "workers of a DataLoader need it")


def _cgroup(root: Path, total: int | None) -> Finding:
    name = "limit of the cgroup"
    try:
        limit = _own("cgroups").cgroup_limit(root)
    except (OSError, ImportError, AttributeError) as error:
        return Finding("memory", name, f"unknown: {_short(error)}", NOTE)
    if limit is None or (total is not None and limit >= total):
        return Finding("memory", name, "none")
    advice = "the process is killed above this, whatever RAM is free"
    return Finding("memory", name, _size(limit), NOTE, advice)


def _limits() -> Iterator[Finding]:
    import resource

    for name, which, why in (
        ("ulimit -v", "RLIMIT_AS", "CUDA reserves addresses for all of its memory"),
        ("ulimit -d", "RLIMIT_DATA", "allocations above it fail"),
        ("ulimit -l", "RLIMIT_MEMLOCK", ""),
        ("ulimit -f", "RLIMIT_FSIZE", "saved states cannot be larger"),
        ("ulimit -n", "RLIMIT_NOFILE", ""),
    ):
        limit = resource.getrlimit(getattr(resource, which))[0]
        if limit == resource.RLIM_INFINITY:
            yield Finding("memory", name, "unlimited")
        else:
            text = str(limit) if which == "RLIMIT_NOFILE" else _size(limit)
            yield Finding("memory", name, text, NOTE if why else OK, why)


def _optional() -> Iterator[Finding]:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler:
        yield Finding("optional", "C++ compiler", compiler)
    else:
        advice = "headroom rehearse, and builds from source: apt-get install g++"
        yield Finding("optional", "C++ compiler", "not installed", NOTE, advice)
    for name, purpose in OPTIONAL.items():
        try:
            yield Finding("optional", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("optional", name, "not installed", NOTE, purpose)


# ---- text ---------------------------------------------------------------------------------------


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _size(size: int) -> str:
    """Returns the size as Headroom writes it everywhere."""
    try:
        return _own("sizes").format_bytes(size)
    except (OSError, ImportError, AttributeError):
        return f"{size / 2**30:.2f} GiB"


def _own(name: str) -> Any:
    """Returns a file of the package that imports nothing but the standard library, as a module. Its
    path finds it, because its name would import the package."""
    file = Path(__file__).resolve().parents[1] / "_core" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"headroom_{name}", file)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module

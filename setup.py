"""Builds the binaries with CMake. Also the PEP 517 backend: setuptools' own, plus one requirement.

Where no nvcc >= 12.8 is installed, NVIDIA's compiler packages from PyPI become build requirements.
They are of CUDA 13, and what they build needs driver R580; a toolkit 12.8 or 12.9 builds for R530.
HEADROOM_CUDA=0 builds for the CPU only, HEADROOM_CUDA=1 fails without a CUDA compiler, or without
the header of cuBLAS, unless HEADROOM_CUBLAS=0 builds without products of matrices on CUDA;
HEADROOM_CUDA_ARCHS="80 90+PTX" builds device code for other GPUs than those here, and PTX of the
second, "all" for all;
MAX_JOBS limits the parallel jobs.
HEADROOM_WHEEL="manylinux_2_28_x86_64" makes a wheel for every Python on that platform, without
headroom._C, as .ci/wheels does with libraries of that glibc.
"""

import gzip
import hashlib
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
from importlib import metadata
from pathlib import Path

if sys.version_info < (3, 10) or sys.platform != "linux":
    sys.exit(
        "Headroom needs Python >= 3.10 on Linux (on Windows: WSL 2). This is Python "
        f"{sys.version.split()[0]} on {sys.platform}, at {sys.executable}."
    )
try:
    from setuptools import Extension, build_meta, find_packages, setup
    from setuptools.build_meta import *  # noqa: F403  (the hooks that are not overridden below)
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.build_ext import build_ext
    from setuptools.command.build_py import build_py
    from setuptools.command.sdist import sdist
except ImportError as error:
    sys.exit(
        f"Building Headroom without isolation takes what this Python lacks ({error}): pip install "
        "'setuptools>=77.0.3' cmake ninja 'pybind11>=3', or leave out --no-build-isolation."
    )

ROOT = Path(__file__).resolve().parent
TOOLKITS = Path("/usr/local")  # where NVIDIA's installers put them
ALL_ARCHS = "75;80;86;90;100;120"
PLATFORM = os.environ.get("HEADROOM_WHEEL")  # of a wheel for every Python
CUDA_COMPILER = ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"]
CUDA_RUNTIME = ["nvidia-cuda-runtime", "nvidia-cuda-cccl"]
# Their headers are used where the compiler has none; every torch for CUDA brings one of them.
# Nothing links to it.
CUBLAS = {13: "nvidia-cublas", 12: "nvidia-cublas-cu12"}


def installed(package):
    """The distribution, or None. An isolated build can see two: nvcc asks for any runtime and gets
    the newest, torch pins one. The older is closer to our compiler, and the same every time."""
    found = metadata.distributions(name=package)
    return min(found, key=lambda d: numbers_of(d.version), default=None)


def numbers_of(version):
    """The numbers of a version, which compare as they should."""
    return [int(number) for number in re.findall(r"\d+", version)]


def torch_cuda_major():
    """The major version of CUDA that the torch here was built with, or None."""
    torch = importlib.util.find_spec("torch")
    text = Path(torch.origin).with_name("version.py").read_text() if torch else ""
    found = re.search(r"^cuda\b.*= *['\"](\d+)\.", text, re.M)
    return int(found[1]) if found else None


def release_of(nvcc):
    """The version of an nvcc, as numbers; (0, 0) for what says none."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def is_recent(nvcc):
    """Whether an nvcc knows every GPU we build for."""
    return release_of(nvcc) >= (12, 8)


def system_nvcc():
    """A recent nvcc of CUDA_HOME, of the toolkits for the torch here, or of PATH.

    A runtime of CUDA 13 needs driver R580. Who has a torch for CUDA 12 may have an older one, and
    gets a build that runs there if a toolkit 12.8 or 12.9 is installed.
    """
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None
    if nvcc is None and torch_cuda_major() == 12:
        found = sorted(TOOLKITS.glob("cuda-12.*/bin/nvcc"), reverse=True)
        nvcc = next((str(one) for one in found if is_recent(one)), None)
    nvcc = nvcc or shutil.which("nvcc")
    return nvcc if nvcc and is_recent(nvcc) else None


def cuda_requirements():
    if os.environ.get("HEADROOM_CUDA") == "0" or system_nvcc():
        return []
    if torch_cuda_major() == 12:
        print(
            "headroom: this torch is built for CUDA 12, and the compiler that is fetched for the "
            "build is of CUDA 13: the result needs driver R580 or newer. For an older driver, from "
            "R530 on, install a CUDA toolkit 12.8 or 12.9 (PyPI has no nvcc before 13.0) and set "
            "CUDA_HOME.",
            file=sys.stderr,
        )
    # A runtime that torch has pinned stays as it is: the 13.0 compiler works with any 13.x.
    runtime = [p for p in CUDA_RUNTIME if not installed(p)]
    return [f"{p}==13.0.*" for p in CUDA_COMPILER + runtime]


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + cuda_requirements()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + cuda_requirements()


def pypi_nvcc(folder):
    """Links the files of NVIDIA's packages into the layout of a toolkit and returns its nvcc.

    The packages may lie in two places (pip isolates some from others), nvcc looks in one, and
    expects lib64. A folder that stays in place also keeps CMake's cache valid between builds.
    """
    packages = [installed(p) for p in CUDA_COMPILER + CUDA_RUNTIME]
    if not all(packages):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    for file in (f for p in packages for f in p.files):
        if file.parts[:2] == ("nvidia", "cu13"):
            link = folder.joinpath(*file.parts[2:])
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.locate().resolve())
    (folder / "lib64").symlink_to("lib")
    return str(folder / "bin" / "nvcc")


def cublas_include(major):
    """The folder of cublasLt.h in NVIDIA's package for this version of CUDA, or None."""
    package = installed(CUBLAS[major]) if major in CUBLAS else None
    headers = [f for f in (package.files or []) if f.name == "cublasLt.h"] if package else []
    return str(headers[0].locate().resolve().parent) if headers else None


def cuda_archs(nvcc):
    """The GPUs that a build is for: those that are asked for, else all in a wheel, else those here.

    Without a GPU here it is the oldest, whose portable code the driver of any GPU compiles, since
    building for all takes longer. With one that the compiler does not know it is all.
    """
    asked = os.environ.get("HEADROOM_CUDA_ARCHS") or ("all" if PLATFORM else "")
    if asked:
        return ALL_ARCHS if asked == "all" else asked
    here = sorted(int(number.replace(".", "")) for number in gpus_here())
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
    if not all(f"compute_{number}" in known for number in here):
        return ALL_ARCHS
    return ";".join(map(str, here)) or ALL_ARCHS.split(";")[0]


def gpus_here():
    """The compute capabilities of the GPUs of this machine, such as "8.6"."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # there is no driver
        return set()
    return set(re.findall(r"^(\d+\.\d)$", said, re.MULTILINE))


def cmake_options(build):
    cuda = {"0": "OFF", "1": "ON"}.get(os.environ.get("HEADROOM_CUDA", ""), "AUTO")
    nvcc = None if cuda == "OFF" else system_nvcc() or pypi_nvcc(build / "cuda")
    if cuda == "ON" and nvcc is None:
        sys.exit(
            "HEADROOM_CUDA=1, but there is no CUDA compiler: no nvcc >= 12.8 in CUDA_HOME or on "
            f"PATH, and not all of {', '.join(CUDA_COMPILER + CUDA_RUNTIME)} are installed here.\n"
            "Install a CUDA toolkit >= 12.8, or let pip fetch the packages (pip install . without "
            "--no-build-isolation), or build for the CPU with HEADROOM_CUDA=0."
        )
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
        "HEADROOM_CUDA": cuda if nvcc else "OFF",
        "HEADROOM_CUBLAS": "OFF" if os.environ.get("HEADROOM_CUBLAS") == "0" else "ON",
        "HEADROOM_TESTS": "OFF",  # tests/run.sh adds them to this build
    }
    if PLATFORM:
        options["CMAKE_DISABLE_FIND_PACKAGE_pybind11"] = "ON"  # its modules are for one Python
    if nvcc:
        options["CMAKE_CUDA_COMPILER"] = nvcc
        options["HEADROOM_CUBLAS_INCLUDE"] = cublas_include(release_of(nvcc)[0]) or ""
        options["HEADROOM_CUDA_ARCHS"] = cuda_archs(nvcc)
    return options


def tool(name):
    """A program of this Python's environment, which need not be activated, or of PATH."""
    path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if path is None:
        sys.exit(f"building Headroom needs {name}: pip install {name}")
    return path


def lacking(torch):
    """Says what a build needs and is not here. CMake says it, too, but far above the end of what
    pip shows, or after minutes."""
    wanted = (
        ("C", "CC", ("cc", "gcc", "clang", "icx")),
        ("C++", "CXX", ("c++", "CC", "g++", "clang++", "icpx")),
    )
    for language, variable, names in wanted:
        chosen = os.environ.get(variable) or os.environ.get("CMAKE_TOOLCHAIN_FILE")
        if not chosen and not any(map(shutil.which, names)):
            yield (
                f"Building Headroom needs a {language} compiler, and none of {', '.join(names)} is "
                "on PATH. Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install "
                f"gcc-c++), or name yours in {variable}."
            )
    if torch:
        found = installed("torch")
        if found is None or numbers_of(found.version)[:2] < [2, 11]:
            has = f"has torch {found.version}" if found else "has none"
            yield (
                f"Building Headroom needs torch >= 2.11, and {sys.executable} {has}: pip install "
                "'torch>=2.11', or leave out --no-build-isolation, and pip fetches what it needs."
            )


def run(*command):
    """Runs a program, which says itself why it fails: a traceback would stand below that."""
    if code := subprocess.run(command).returncode:
        sys.exit(
            f"Building Headroom failed: {Path(command[0]).name} ended with {code}. Why is above."
        )


def build(torch=True):
    """Builds the binaries, or those that need no torch, and returns cmake and the folder."""
    if found := list(lacking(torch)):
        sys.exit("\n".join(found))
    cmake = tool("cmake")
    folder = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
    options = cmake_options(folder)
    options["CMAKE_MAKE_PROGRAM"] = tool("ninja")
    options["HEADROOM_TORCH"] = "ON" if torch else "OFF"
    cache = folder / "CMakeCache.txt"
    fresh = ["--fresh"] if cache.exists() and is_stale(cache.read_text(), options) else []
    define = [f"-D{name}={value}" for name, value in options.items()]
    run(cmake, "-G", "Ninja", "-S", ROOT, "-B", folder, *fresh, *define)
    jobs = os.environ.get("MAX_JOBS")
    run(cmake, "--build", folder, *(["-j", jobs] if jobs else []))
    return cmake, folder


def is_stale(cache, options):
    """CMake cannot change the folder or the CUDA compiler of a configured build."""
    nvcc = options.get("CMAKE_CUDA_COMPILER")
    folder = f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n"
    return folder not in cache or (nvcc is not None and f"={nvcc}\n" not in cache)


class CMakeBuild(build_ext):
    def run(self):
        cmake, folder = build()
        package = Path(self.get_ext_fullpath("headroom._C")).resolve().parent
        for stale in package.glob("_C.*"):
            stale.unlink()
        for component in ("Unspecified", "python"):
            run(cmake, "--install", folder, "--prefix", package, "--component", component)
        # A wheel cannot hold a link and would copy the library: two of them in a process would not
        # share their state. The linker, the only reader of this name, takes a script instead.
        name = package / "lib" / "libheadroom.so"
        soname = os.readlink(name)
        name.unlink()
        name.write_text(f"INPUT({soname})\n")


class Wheel(bdist_wheel):
    """With a bill of materials, and for every Python where a platform is given."""

    def get_tag(self):
        return ("py3", "none", PLATFORM) if PLATFORM else super().get_tag()

    def write_wheelfile(self, folder, *more):
        super().write_wheelfile(folder, *more)
        package = Path(folder).parent / "headroom"
        if not package.exists():  # an editable wheel holds a link
            return
        linked = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}" / "linked.txt"
        pairs = (line.split("=") for line in linked.read_text().splitlines())
        file = Path(folder, "sboms", "headroom.cdx.json")  # where PEP 770 wants it
        file.parent.mkdir()
        file.write_text(json.dumps(bill_of_materials(package, dict(pairs)), indent=2) + "\n")


# What linked.txt names, but for compilers: how it got into the binaries, whose it is, and which of
# them hold it.
INSIDE = {
    "cudart_static": ("statically", "NVIDIA", "LicenseRef-NVIDIA-CUDA-EULA", "libheadroom.so"),
    "cublasLt.h": ("by declarations", "NVIDIA", "LicenseRef-NVIDIA-CUDA-EULA", "libheadroom.so"),
    "torch headers": ("by headers", "PyTorch", "BSD-3-Clause", "libheadroom_torch"),
    "pybind11": ("by headers", "pybind11", "BSD-3-Clause", "_C."),
}


def bill_of_materials(package, linked):
    """What a wheel's binaries hold and ask for, as CycloneDX 1.6 (ECMA-424)."""
    files = {}
    for file in sorted([*package.glob("_C.*"), *package.glob("lib/*.so*")]):
        if (data := file.read_bytes()).startswith(b"\x7fELF"):
            files[file.name] = data
    component = {"type": "library", "bom-ref": "headroom", "name": "headroom", "version": version()}
    component["purl"] = f"pkg:pypi/headroom@{version().replace('+', '%2B')}"
    component["licenses"] = [{"license": {"id": "BSD-3-Clause"}}]
    components = []
    graph = {"headroom": list(files)}
    for name, data in files.items():
        digest = {"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}
        components.append({"type": "file", "bom-ref": name, "name": name, "hashes": [digest]})
        inside = [one for one, (*_, where) in INSIDE.items() if one in linked and where in name]
        graph[name] = [*needed(data), *inside]

    def named(name, how, **more):
        made = [{"name": "headroom:linked", "value": how}]
        components.append({"type": "library", "bom-ref": name, "name": name, **more})
        components[-1]["properties"] = made

    for name in sorted({one for names in graph.values() for one in names} - {*files, *INSIDE}):
        named(name, "dynamically, not in the wheel")
    for name, (how, whose, license, _) in INSIDE.items():
        if name in linked:
            terms = "name" if license.startswith("LicenseRef") else "id"
            terms = {"license": {terms: license.removeprefix("LicenseRef-")}}
            more = {"version": linked[name], "supplier": {"name": whose}, "licenses": [terms]}
            named(name, how, **more)
    tools = [
        {"type": "application", "name": name, "version": number}
        for name, number in linked.items()
        if name not in INSIDE
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"tools": {"components": tools}, "component": component},
        "components": components,
        "dependencies": [{"ref": ref, "dependsOn": names} for ref, names in graph.items()],
    }


def needed(library):
    """The names of the libraries that a 64-bit ELF file asks for ("System V ABI", chapter 5). No
    program says it on every machine, and for every processor."""
    start, size, count = (
        *struct.unpack_from("<Q", library, 32),
        *struct.unpack_from("<HH", library, 54),
    )
    # Type, flags, offset, address, physical address, size.
    segments = [struct.unpack_from("<IIQQQQ", library, start + size * at) for at in range(count)]
    _, _, offset, _, _, length = next(one for one in segments if one[0] == 2)  # PT_DYNAMIC
    entries = [struct.unpack_from("<qQ", library, offset + 16 * at) for at in range(length // 16)]
    address = dict(entries)[5]  # DT_STRTAB
    names = next(
        offset + address - first
        for kind, _, offset, first, _, length in segments
        if kind == 1 and first <= address < first + length  # PT_LOAD
    )
    places = [names + value for tag, value in entries if tag == 1]  # DT_NEEDED
    return [library[at : library.index(0, at)].decode() for at in places]


class SourceDistribution(sdist):
    """The same bytes for the same files, at the time of SOURCE_DATE_EPOCH, where that is given."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **more):
        time = os.environ.get("SOURCE_DATE_EPOCH")
        if time is None or format != "gztar" or root_dir is not None:
            return super().make_archive(base_name, format, root_dir, base_dir, **more)

        def plain(member):
            member.mtime, member.uid, member.gid = int(time), 0, 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        path = Path(f"{base_name}.tar.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file, gzip.GzipFile("", "wb", 9, file, int(time)) as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                tar.add(base_dir, filter=plain)  # which sorts names
        return str(path)


class CleanBuildPy(build_py):
    def run(self):
        # build/lib outlives a build; a module deleted from ops/ must not get into the next wheel.
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "headroom"), ignore_errors=True)
        super().run()


# Packages that are imported without headroom: by pytest, to say why headroom cannot be, and before
# torch.
OUTSIDE = {
    "headroom_pytest": "ops/memory/pytest_plugin",
    "headroom_command": "ops/cli/command_line",
    "headroom_rehearsal": "ops/rehearsal",
    "headroom_rehearsal.sources": "rehearsal",
}


def inner_packages():
    outside = [folder.removeprefix("ops/").replace("/", ".") for folder in OUTSIDE.values()]
    return find_packages("ops", exclude=outside)


def variant():
    """The local part of a wheel's version: "" for CUDA 13, "+cu128" for 12.8, "+cpu" for neither.

    PyPI takes no local versions, so it can only get the first, and pip offers nobody another.
    """
    if os.environ.get("HEADROOM_CUDA") == "0":
        return "+cpu"
    nvcc = system_nvcc()
    major, minor = release_of(nvcc) if nvcc else (13, 0)  # PyPI's compiler
    return f"+cu{major}{minor}" if major < 13 else ""


def version():
    header = (ROOT / "capi" / "headroom.h").read_text()
    numbers = re.findall(r"^#define HR_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", header, re.M)
    return ".".join(numbers) + (variant() if PLATFORM else "")


if __name__ == "__main__":
    setup(
        version=version(),
        license="BSD-3-Clause",
        package_dir={"headroom": "ops", **OUTSIDE},
        packages=["headroom", *OUTSIDE] + [f"headroom.{name}" for name in inner_packages()],
        package_data={
            "headroom": ["py.typed"],
            "headroom.reports": ["page-files/*"],
            "headroom_rehearsal.sources": ["*.h", "*.c", "*.cpp"],
        },
        ext_modules=[Extension("headroom._C", sources=[])],
        cmdclass={
            "bdist_wheel": Wheel,
            "build_ext": CMakeBuild,
            "build_py": CleanBuildPy,
            "sdist": SourceDistribution,
        },
    )

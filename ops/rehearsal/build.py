"""Builds the libraries of the software device, once for each version of them and of CUDA."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Of a checkout, or beside this file in a wheel.
SOURCES = next(f for f in (HERE / "sources", HERE.parent.parent / "rehearsal") if f.is_dir())
RUNTIME = ("cudart", "host", "host_memory", "memory", "order", "settings", "streams")
FLAGS = ["-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def build() -> Path:
    """Returns the folder of the libraries, which are compiled if they are not there yet.

    They lie in ``$HEADROOM_CACHE``, or else ``~/.cache/headroom``.

    Raises:
        RuntimeError: torch is not built for CUDA, or there is no C++ compiler; the message names
            what is missing.
    """
    cuda = _cuda_folder()
    names = _sonames(cuda)
    digest = hashlib.sha256(str(sorted(names.values())).encode())
    digest.update(Path(__file__).read_bytes())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.read_bytes())
    cache = Path(os.environ.get("HEADROOM_CACHE") or Path.home() / ".cache" / "headroom")
    folder = cache / f"software-device-{digest.hexdigest()[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache))
        try:
            _Build(made, cuda, names).run()
            made.rename(folder)
        except OSError:
            if not folder.exists():  # which another process may have made meanwhile
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _cuda_folder() -> Path:
    """Returns the folder of NVIDIA's packages for the torch that is installed."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        raise RuntimeError("the software device needs torch; install it: pip install torch")
    for folder in ("cu13", "cuda_runtime"):
        found = Path(torch.origin).parent.parent / "nvidia" / folder
        if found.is_dir():
            return found
    raise RuntimeError(
        "the software device needs a torch that is built for CUDA, with NVIDIA's packages from "
        f"PyPI, and found none beside {Path(torch.origin).parent}; install one: pip install torch"
    )


def _sonames(cuda: Path) -> dict[str, Path]:
    """Returns the real libraries that are replaced, by their names without versions."""
    found = {}
    for name in ("cudart", "cublas", "cublasLt", "cupti"):
        libraries = sorted(cuda.parent.glob(f"**/lib{name}.so.[0-9]*"))
        if not libraries:
            raise RuntimeError(
                f"found no lib{name}.so below {cuda.parent}, whose functions are replaced"
            )
        found[name] = libraries[0]
    return found


class _Build:
    """Compiles and links into a folder; what can be done side by side is."""

    def __init__(self, folder: Path, cuda: Path, names: dict[str, Path]) -> None:
        self._folder, self._cuda, self._names = folder, cuda, names
        self._objects = Path(tempfile.mkdtemp(dir=folder))
        self._cxx = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
        if self._cxx is None:
            raise RuntimeError(
                "the software device is compiled when it is first used, and there is no C++ "
                "compiler; on Debian and Ubuntu: sudo apt-get install g++"
            )

    def run(self) -> None:
        include = ["-I", str(SOURCES), "-isystem", str(self._cuda / "include")]
        running = [
            self._compile(SOURCES / f"{name}.cpp", "-std=c++17", *include) for name in RUNTIME
        ]
        running += [
            self._compile(SOURCES / f"{name}.c", "-x", "c")
            for name in ("cuda", "nvml", "cublas", "cublaslt", "cupti")
        ]
        for process in running:
            self._finish(process)
        runtime = self._link(
            "cudart", list(RUNTIME), "return rehearsal_refuse(NAME);", "cuda* __cuda*"
        )
        self._link("cublas", ["cublas"], "return 0;", "cublas*")
        self._link("cublasLt", ["cublaslt"], "return 0;", "cublas*")
        self._link("cupti", ["cupti"], "return 15;", "cupti*")  # CUPTI_ERROR_NOT_INITIALIZED
        driver = re.findall(r"\bcu[A-Z]\w*(?=\()", (self._cuda / "include/cuda.h").read_text())
        stubs = self._stubs(
            "cuda", set(driver), [*RUNTIME, "cuda"], "return rehearsal_lacks(NAME);"
        )
        self._share("libcuda.so.1", [self._objects / "cuda.o", stubs, runtime])
        self._share("libnvidia-ml.so.1", [self._objects / "nvml.o", runtime])
        shutil.rmtree(self._objects)

    def _compile(self, source: Path, *options: str) -> subprocess.Popen[str]:
        target = self._objects / f"{source.stem}.o"
        return self._start(*FLAGS, *options, "-c", str(source), "-o", str(target))

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen([str(self._cxx), *arguments], stderr=subprocess.PIPE, text=True)

    def _finish(self, process: subprocess.Popen[str]) -> None:
        _, text = process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"the software device does not compile:\n{text[-4000:]}")

    def _link(self, name: str, objects: list[str], body: str, exported: str) -> Path:
        """Links one of the libraries that are replaced, with stubs for what is not written."""
        real = self._names[name]
        stubs = self._stubs(name, _functions(real, "-D"), objects, body)
        script = self._objects / f"{name}.map"
        patterns = " ".join(f"{pattern};" for pattern in f"{exported} cu* rehearsal_*".split())
        script.write_text(f"{real.name} {{ global: {patterns} local: *; }};")
        files = [self._objects / f"{one}.o" for one in objects]
        return self._share(real.name, [*files, stubs], f"-Wl,--version-script={script}")

    def _stubs(self, name: str, wanted: set[str], objects: list[str], body: str) -> Path:
        """Compiles a function for each name that the objects lack."""
        have = set[str]().union(*(_functions(self._objects / f"{one}.o") for one in objects))
        source = self._objects / f"{name}_stubs.cpp"
        lines = [
            'extern "C" {',
            "int rehearsal_lacks(const char *), rehearsal_refuse(const char *);",
        ]
        for one in sorted(wanted - have):
            text = body.replace("NAME", f'"{one}"')
            lines.append(f'__attribute__((visibility("default"))) int {one}() {{ {text} }}')
        source.write_text("\n".join([*lines, "}"]))
        self._finish(self._compile(source))
        return source.with_suffix(".o")

    def _share(self, soname: str, files: list[Path], *options: str) -> Path:
        path = self._folder / soname
        self._finish(
            self._start(
                "-shared", "-o", str(path), *map(str, files), *options, f"-Wl,-soname,{soname}",
                "-Wl,-rpath,$ORIGIN", "-static-libstdc++", "-static-libgcc", "-pthread",
            )
        )  # fmt: skip
        return path


def _functions(library: Path, *options: str) -> set[str]:
    """Returns the names of the functions that a library or an object defines."""
    text = subprocess.run(
        ["nm", "--defined-only", *options, str(library)], capture_output=True, text=True, check=True
    ).stdout
    rows = (line.split() for line in text.splitlines())
    return {row[2].partition("@")[0] for row in rows if len(row) == 3 and row[1] == "T"}

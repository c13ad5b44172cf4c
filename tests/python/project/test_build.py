"""What the build promises, asked of the binaries: exports, dependencies, header, C package."""

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import headroom
import pytest

ROOT = Path(__file__).resolve().parents[3]
HEADER = Path(headroom.get_include()) / "headroom.h"
LIBRARY = Path(headroom.get_library_dir()) / "libheadroom.so.0.2"
TORCH_LIBRARY = Path(headroom.get_library_dir()) / "libheadroom_torch.so"


# This Python's own programs (cmake, ninja), which are on PATH only if its environment is activated.
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])


def run(*command, **env):
    """Standard output of a command; a failure shows all that it said."""
    if shutil.which(command[0], path=PATH) is None:
        pytest.skip(f"needs {command[0]}")
    command = [str(part) for part in command]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PATH": PATH, **env}
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def symbols(library, kind):
    """(type, name) of the dynamic symbols; a name from a versioned library keeps its @VERSION."""
    lines = run("nm", "-D", f"--{kind}-only", library).splitlines()
    return {tuple(line.split()[-2:]) for line in lines}


def needed(library):
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", library)))


# --- Symbols and dependencies -----------------------------------------------------------------


def test_only_the_functions_of_the_header_are_exported():
    declared = set(re.findall(r"^HR_API [^;(]*?\b(\w+)\(", HEADER.read_text(), re.M))
    assert {name for _, name in symbols(LIBRARY, "defined")} == declared
    assert all(name.startswith("hr_") for name in declared)


def test_the_torch_library_exports_nothing():
    assert symbols(TORCH_LIBRARY, "defined") == set()


def test_the_torch_library_uses_torchs_stable_interface_alone():
    names = {(kind, name) for kind, name in symbols(TORCH_LIBRARY, "undefined") if "@" not in name}
    from_torch = {(kind, name) for kind, name in names if re.match(r"aoti_torch_|torch_", name)}
    others = {name for kind, name in names - from_torch if kind == "U"}
    strays = {name for name in others if not re.match(r"hr_|_Z(N[KRO]*)?St", name)}  # ours, std::
    assert from_torch and not strays
    # A torch for the CPU has no CUDA functions, and the library must load there too.
    assert {kind for kind, name in from_torch if "_cuda_" in name} == {"w"}


def test_dependencies():
    system = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}
    system |= {"libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-aarch64.so.1"}
    assert needed(LIBRARY) <= system
    assert needed(TORCH_LIBRARY) - system == {"libheadroom.so.0.2", "libtorch.so"}
    for library in (LIBRARY, TORCH_LIBRARY):
        paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]", run("readelf", "-d", library))
        assert set(paths) <= {"$ORIGIN"}


def test_loads_without_torch_and_answers():
    code = (
        "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); lib.hr_build_info.restype = "
        "ctypes.c_char_p; print(lib.hr_version(), lib.hr_build_info().decode())"
    )
    version, info = run(sys.executable, "-I", "-c", code, LIBRARY).split(maxsplit=1)
    major, minor, patch = map(int, headroom.__version__.split("."))
    assert int(version) == major * 10000 + minor * 100 + patch
    assert f"version={headroom.__version__};" in info


def test_one_version_everywhere():
    source = (ROOT / "capi" / "headroom.h").read_text()
    numbers = re.findall(r"^#define HR_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", source, re.M)
    assert headroom.__version__ == importlib.metadata.version("headroom") == ".".join(numbers)


# --- The header and the C package -------------------------------------------------------------


@pytest.mark.parametrize("compiler", [("cc", "-xc", "-std=c99"), ("c++", "-xc++", "-std=c++17")])
@pytest.mark.parametrize("part", ["", "-DHR_EXPERIMENTAL"])
def test_the_header_compiles_alone_without_warnings(compiler, part, tmp_path):
    source = tmp_path / "alone"
    source.write_text(
        "#include <headroom.h>\n#include <headroom.h>\n"
        "int main(void) { hr_adamw_config c = HR_ADAMW_CONFIG_INIT; return c.size == 0; }\n"
    )
    flags = ["-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    run(*compiler, *flags, *part.split(), f"-I{HEADER.parent}", source)


def test_the_experimental_part_is_seen_by_those_who_ask_for_it():
    """Parts come in the order simple, advanced, experimental, and the last is behind a macro."""
    text = HEADER.read_text()
    parts = re.findall(r"^/\* ==== Part (\d), (\w+) =+ \*/$", text, re.MULTILINE)
    assert parts == [("1", "simple"), ("2", "advanced"), ("3", "experimental")]
    found = [
        set(
            re.findall(r"\b(hr_\w+)\(", run("cc", "-E", "-xc", *part, f"-I{HEADER.parent}", HEADER))
        )
        for part in ([], ["-DHR_EXPERIMENTAL"])
    ]
    behind = text[text.index("#ifdef HR_EXPERIMENTAL") :]
    assert found[1] - found[0] == set(re.findall(r"HR_API hr_\w+ (hr_\w+)\(", behind))
    assert "hr_mlp_forward" in found[1] and "hr_adamw" in found[0]


def blocks_of_code(text):
    """The programs in the comments of a header: indented text that calls a function of it."""
    blocks = re.findall(r"(?:^ \*(?:     .*)?\n)+", text, re.MULTILINE)
    blocks = [re.sub(r"^ \*(?:     )?", "", block, flags=re.MULTILINE) for block in blocks]
    return [block for block in blocks if "hr_last_error()" in block]


@pytest.mark.parametrize("compiler", [("cc", "-xc", "-std=c99"), ("c++", "-xc++", "-std=c++17")])
def test_the_calls_in_the_header_compile_and_run(compiler, tmp_path):
    """As they stand, in one function each, beside what their text says that the program has."""
    blocks = blocks_of_code(HEADER.read_text())
    assert len(blocks) == 2 and "hr_adafactor(" in blocks[1]
    given = """
        static float a[512 * 256], b[512 * 256], c[512], d[256];
        void *param = a, *grad = b, *row_var = c, *col_var = d;
        for (int i = 0; i < 512 * 256; i++) { a[i] = 1; b[i] = (float)(i % 7) - 3; }
    """
    moved = ["weight[0] < 1", "a[0] != 1 && c[0] > 0 && d[0] > 0"]
    functions, includes = "", {"headroom.h", "stdio.h", "stdlib.h"}
    for number, (block, wanted) in enumerate(zip(blocks, moved, strict=True)):
        includes |= set(re.findall(r"#include <(.+?)>", block))
        block = re.sub(r"^#include.*", "", block, flags=re.MULTILINE)
        body = (given if number else "") + block + f"return !({wanted});"
        functions += f"static int run{number}(void) {{ {body} }}\n"
    source, program = tmp_path / "calls", tmp_path / "program"
    source.write_text(
        "".join(f"#include <{name}>\n" for name in sorted(includes))
        + functions
        + "int main(void) { return run0() || run1(); }\n"
    )
    flags = ["-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}"]
    library = [f"-L{LIBRARY.parent}", f"-Wl,-rpath,{LIBRARY.parent}"]
    run(*compiler, *flags, source, *library, "-lheadroom", "-o", program)
    run(program)


@pytest.fixture(scope="module")
def prefix(request, tmp_path_factory):
    """Where header, library, CMake package and pkg-config file are installed."""
    if request.param == "python package":
        return HEADER.parents[1]
    build = ROOT / "build" / "c-library"  # kept, so that the next run takes a second
    # What is installed is looked at, not how fast it is; but the examples should end soon.
    options = ["-DHEADROOM_TORCH=OFF", "-DHEADROOM_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Debug"]
    options += ["-DCMAKE_C_FLAGS_DEBUG=-O1"]
    run("cmake", "-G", "Ninja", "-S", ROOT, "-B", build, *options)
    run("cmake", "--build", build)
    prefix = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", build, "--prefix", prefix)
    return prefix


both_prefixes = pytest.mark.parametrize(
    "prefix",
    ["python package", pytest.param("cmake --install", marks=pytest.mark.slow)],
    indirect=True,
)


def largest_error(output):
    return float(re.search(r"largest error of a coefficient: (\S+)", output)[1])


C_EXAMPLES = sorted(path.stem for path in (ROOT / "examples" / "c").glob("*.c"))
SKIPPED = 77  # what a program returns where there is no CUDA device


def run_example(program, **environment):
    """Runs a program of examples/c, which checks its own results. Skips where it does."""
    result = subprocess.run([program], capture_output=True, text=True, env=os.environ | environment)
    if result.returncode == SKIPPED:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", C_EXAMPLES)
@both_prefixes
def test_c_program_through_pkg_config(prefix, name, tmp_path):
    folder = str(prefix / "lib" / "pkgconfig")
    flags = run("pkg-config", "--cflags", "--libs", "headroom", PKG_CONFIG_PATH=folder).split()
    program = tmp_path / name
    source = ROOT / "examples" / "c" / f"{name}.c"
    strict = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    if "cuda" in name:
        cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
        if not (cuda / "include" / "cuda_runtime_api.h").exists():
            pytest.skip("no CUDA toolkit")
        flags += ["-isystem", cuda / "include", f"-L{cuda / 'lib64'}", "-lcudart"]
    run("cc", *strict, source, *flags, "-lm", "-o", program)
    path = os.environ.get("LD_LIBRARY_PATH", "")
    libraries = [str(prefix / "lib"), "/usr/local/cuda/lib64", path]
    output = run_example(program, LD_LIBRARY_PATH=":".join(libraries))
    if name == "least_squares":
        assert largest_error(output) < 1e-4


@both_prefixes
def test_c_program_through_find_package(prefix, tmp_path):
    source = ROOT / "examples" / "c"
    run("cmake", "-S", source, "-B", tmp_path, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    assert largest_error(run(tmp_path / "least_squares")) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["cmake --install"], indirect=True)
def test_a_build_for_the_cpu_says_so(prefix):
    library = ctypes.CDLL(str(prefix / "lib" / "libheadroom.so"))
    library.hr_build_info.restype = ctypes.c_char_p
    assert b"cuda=none; archs=;" in library.hr_build_info()

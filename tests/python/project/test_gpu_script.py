"""tests/gpu.sh without a GPU: programs that only pretend take the place of those that need one."""

import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FAKES = {
    "nvidia-smi": 'case "$*" in *name*) echo "A GPU";; *compute_cap*) echo 9.0;; esac',
    "nvcc": "echo 'Cuda compilation tools, release 13.0'",
    # The C tests: of three suites, of which $FAILS fails.
    "cmake": """
echo "cmake $*" >>"$CALLS"
case "$*" in *--build*)
    mkdir -p "$2/tests/c"
    cp "$(dirname "$0")/c-tests" "$2/tests/c/headroom_tests" ;;
esac""",
    "c-tests": r"""
case "$*" in *--gtest_list_tests*)
    printf "%s\n" On/Gemm. "  Test/Cuda" On/Some. "  Test/Cuda  # GetParam() = Cuda" SomeBits.
    exit ;;
esac
suite=$(sed -E 's/.*gtest_filter=([A-Za-z]+)[.].*/\1/' <<<"$*")
echo "suite $suite with $LD_LIBRARY_PATH" >>"$CALLS"
[ "$suite" = "$FAILS" ] && exit 134
[ "$suite" = SomeBits ] && echo "[       OK ] SomeBits.Test (1 ms)" && exit
echo "[       OK ] On/$suite.Test/Cuda (1 ms)"
echo "[  SKIPPED ] On/$suite.Other/Cuda (0 ms)"
""",
    "compute-sanitizer": 'echo "$*" >>"$CALLS"',
    # pytest says what it has done when it is interrupted.
    "python": """
echo "python $*" >>"$CALLS"
case "$*" in
*"-m pip install"*--target*site*) mkdir -p "$HEADROOM_GPU_WORK/site/headroom" ;;
*"import bitsandbytes"* | *"import xdist"*) exit 1 ;;
*'["cublas"]'*) exit ${WITHOUT_PRODUCTS:-0} ;;
*libcublasLt*) echo /torch/nvidia/cu13/lib ;;
*"-m pytest"*"not slow"*)
    trap 'echo "1 passed, interrupted"; exit 2' INT
    echo "tests/python/optim/test_x.py::test_a[FAILED] PASSED [ 50%]"
    [ -z "$HANGS" ] || sleep 600 & wait
    echo "tests/python/optim/test_x.py::test_b FAILED [100%]"
    echo "FAILED tests/python/optim/test_x.py::test_b - said again"
    exit 0 ;;
*"-m pytest"*) exit 5 ;;
*"-m benchmarks"*) while [ "$1" != --json ]; do shift; done; echo '{}' >"$2" ;;
esac""",
}


@pytest.fixture
def gpu(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in FAKES.items():
        (tools / name).write_text("#!/bin/bash\n" + text + "\n")
        (tools / name).chmod(0o755)
    (tools / "nvcc").with_name("python3").symlink_to(tools / "python")
    gtest = tmp_path / "googletest"
    gtest.mkdir()
    (gtest / "CMakeLists.txt").touch()
    environment = {
        **os.environ,
        "PATH": f"{tools}:/usr/bin:/bin",
        "PYTHON": str(tools / "python"),
        "CALLS": str(tmp_path / "calls"),
        "HEADROOM_GPU_WORK": str(tmp_path / "work"),
        "GTEST_DIR": str(gtest),
        "WHEELS_DIR": str(tmp_path / "wheels"),
        "HANGS": "",
        "FAILS": "",
    }
    environment.pop("CUDA_HOME", None)

    def run(*arguments, **changed):
        (tmp_path / "calls").write_text("")
        done = subprocess.run(
            ["bash", str(ROOT / "tests" / "gpu.sh"), str(tmp_path / "out"), *arguments],
            env=environment | changed,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr, (tmp_path / "calls").read_text()

    run.out = tmp_path / "out"
    run.folder = tmp_path
    return run


def stages(text):
    """{stage: result} of the summary."""
    return dict(re.findall(r"^(\S+) +[\d-]+  (\S.*)$", text, re.M))


def test_everything_at_once(gpu):
    code, said, calls = gpu("300")
    assert code == 0, said
    files = sorted(path.name for path in gpu.out.iterdir())
    assert len(files) <= 8 and {"summary.txt", "results.tar.gz", "pytest.log"} <= set(files)
    summary = (gpu.out / "summary.txt").read_text()
    found = stages(summary)
    assert list(found)[:4] == ["build", "c-build", "c-tests", "pytest"]
    assert {found[name] for name in list(found)[:-1]} == {"passed"}
    assert "C tests on CUDA: 2 OK 2 SKIPPED" in summary or "2 SKIPPED 2 OK" in summary
    assert "1 PASSED" in summary and "1 FAILED" in summary  # once, though said twice
    assert "NOT HERE, so no bar against them was judged: bitsandbytes\n" in summary
    with tarfile.open(gpu.out / "results.tar.gz") as packed:
        assert "./adamw.json" in packed.getnames()
    benchmarked = re.findall(r"-m benchmarks (\w+)", calls)
    assert benchmarked[0] == "adamw" and len(set(benchmarked)) == len(benchmarked)
    rows = {"norm", "glu", "rope", "gemm", "mlp_block"}
    losses = {"cross_entropy", "divergence", "linear_cross_entropy"}
    assert {"update_scale", *rows, *losses} <= set(benchmarked)
    assert "state_file" not in calls and "--rounds 10" in calls
    assert f"CUDA_HOME {gpu.folder}" in (gpu.out / "build.log").read_text()


def test_each_suite_has_a_process_and_those_of_products_are_last(gpu):
    """An error that a GPU keeps fails all calls after it."""
    code, said, calls = gpu("300", "c-tests", FAILS="Some")
    suites = re.findall(r"^suite (\w+) with (.*)$", calls, re.M)
    assert sorted(suites[:2])[0][0] == "Some" and suites[2][0] == "Gemm"
    assert all(libraries.startswith("/torch/nvidia/cu13/lib:") for _, libraries in suites)
    assert code == 1 and "FAILED SUITE Some: status 134" in said
    assert "C tests on CUDA: 1 OK 1 SKIPPED" in said or "1 SKIPPED 1 OK" in said
    assert stages(said)["c-tests"].startswith("FAILED: status 1")


def test_nothing_passes_where_products_were_compiled_out(gpu):
    code, said, calls = gpu("300", WITHOUT_PRODUCTS="1")
    found = stages((gpu.out / "summary.txt").read_text())
    assert code == 1 and found["build"].startswith("FAILED")
    assert "built without products on CUDA" in said
    assert found["pytest"] == found["benchmarks"] == "SKIPPED: the build failed"
    assert "-m pytest" not in calls and "-m benchmarks" not in calls


def test_the_sanitizer_leaves_cublas_alone(gpu):
    _, _, calls = gpu("300", "memcheck")
    (chosen,) = re.findall(r"--tool memcheck .*--gtest_filter=(\S+)", calls)
    left_out = chosen.partition(":-")[2].split(":")
    assert {"*Gemm*", "*Mlp*", "*Linear*"} <= set(left_out)


def test_a_second_call_builds_nothing_and_runs_what_it_is_asked_for(gpu):
    gpu("300", "c-tests")
    code, said, calls = gpu("300", "benchmarks", BENCHMARKS="weights")
    assert code == 0, said
    assert "pip install" not in calls and "installed by an earlier call" in said
    assert (
        set(re.findall(r"-m benchmarks (\w+)", calls)) == {"weights"} and "-m pytest" not in calls
    )
    gpu("300", "c-tests", HEADROOM_CUDA_ARCHS="80")
    assert "pip install" in (gpu.folder / "calls").read_text()


@pytest.mark.slow
def test_a_pytest_that_hangs_still_reports(gpu):
    code, said, _ = gpu("20", "pytest", HANGS="1")
    assert code == 1
    found = stages((gpu.out / "summary.txt").read_text())
    assert found["pytest"].startswith("FAILED: stopped after"), said
    assert "1 PASSED" in said and "interrupted" in (gpu.out / "pytest.log").read_text()


def test_carried_wheels_are_installed(gpu):
    (gpu.folder / "wheels").mkdir()
    (gpu.folder / "wheels" / "some-1.0-py3-none-any.whl").touch()
    _, _, calls = gpu("300", "c-tests")
    assert re.search(r"pip install .*--no-index.*some-1\.0", calls)


def test_without_a_gpu(gpu):
    (gpu.folder / "tools" / "nvidia-smi").unlink()
    code, said, _ = gpu("300")
    assert code == 3 and stages(said)["pytest"] == "SKIPPED: NO GPU"


@pytest.mark.parametrize("arguments", [["ten"], ["300", "nothing"]])
def test_wrong_arguments(gpu, arguments):
    code, said, calls = gpu(*arguments)
    assert code == 2 and arguments[-1] in said and not calls


def test_help():
    done = subprocess.run(
        ["bash", str(ROOT / "tests" / "gpu.sh"), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    for word in ("wheels/", "googletest/", "BENCHMARKS", "bitsandbytes"):
        assert word in done.stdout


def test_the_syntax():
    assert subprocess.run(["bash", "-n", str(ROOT / "tests" / "gpu.sh")]).returncode == 0

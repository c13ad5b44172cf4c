#!/usr/bin/env bash
# Compiles the library and the C tests for 64-bit Arm, runs them under an emulator, and compares the
# bits that every op leaves with those of this machine:
#
#   bash tests/aarch64.sh build/cmake-cpython-311/tests/c/headroom_tests
#
# The argument is the program of the C tests for this machine. Needs the packages that tests/run.sh
# full installs, CMake and ninja. Takes two minutes on 2 cores.
set -euo pipefail

native=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$PWD/build/aarch64
reports=$build/reports
googletest=()
[ ! -d /usr/src/googletest ] || googletest=(-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=/usr/src/googletest)

cmake -S . -B "$build" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/tests/c/aarch64.cmake" \
    -DHEADROOM_TORCH=OFF -DHEADROOM_CUDA=OFF -DHEADROOM_TESTS=ON -DHEADROOM_SANITIZED_TESTS=OFF \
    "${googletest[@]}" >"$build.log" 2>&1 ||
    { cat "$build.log"; exit 1; }
cmake --build "$build" --target headroom_tests

# Death tests start the program again, for which there is no emulator then.
rm -rf "$reports"
export GTEST_BRIEF=1
seq 0 15 | GTEST_FILTER='-*/Cuda*:*OnCuda*:*DeathTest*' GTEST_TOTAL_SHARDS=16 xargs -P "$(nproc)" -I{} \
    env GTEST_SHARD_INDEX={} GTEST_OUTPUT="json:$reports/{}.json" \
    qemu-aarch64 -L /usr/aarch64-linux-gnu "$build/tests/c/headroom_tests" >"$build/tests.log" 2>&1 ||
    { cat "$build/tests.log"; exit 1; }

python3 - "$native" "$reports" <<'END'
import json
import subprocess
import sys
from pathlib import Path

native, reports = sys.argv[1], Path(sys.argv[2])


def bits(report):
    """Returns the digests of a report of GoogleTest by the names of the tests."""
    return {
        f"{suite['name']}.{test['name']}": test["bits"]
        for suite in json.loads(report.read_text())["testsuites"]
        for test in suite["testsuite"]
        if "bits" in test
    }


there = {}
for report in reports.iterdir():
    there |= bits(report)
here = reports / "here.json"
options = f"--gtest_filter={':'.join(there)}", f"--gtest_output=json:{here}", "--gtest_brief=1"
subprocess.run([native, *options], check=True)
others = [name for name, value in bits(here).items() if there[name] != value]
if others or not there:
    sys.exit("\n".join(["other bits than on this machine:", *others]))
print(f"The bits of {len(there)} tests are those of this machine.")
END

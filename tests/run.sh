#!/usr/bin/env bash
# Sets up .venv and passes the tests: style, C and kernels (CPU, emulated CUDA, PTX), Python.
#
#   bash tests/run.sh          what shows a regression soon: every test, with every value of its
#                              parameters; without what is marked slow
#   bash tests/run.sh full     the slow tests too, with eight cases of each, the sanitizers, and the PTX
#                              of two architectures
#   bash tests/run.sh pairs    before a release: the same with every pair of these values, code for all
#                              architectures, all that the PTX of one can do, wheels, the oldest
#                              torch, and 64-bit Arm
#
# On 2 cores the first takes 10 to 20 minutes with torch's installation, and the second an hour. All
# end by saying what took longest.
set -euo pipefail
# Images of containers often set it; then each process compiles all of torch's Python that it imports.
unset PYTHONDONTWRITEBYTECODE

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
cd "$root"

case ${1:-} in
'')
    sanitized=OFF release=OFF
    select=(-m "not slow" --sample 1)
    # Under the emulator: lists longer than a launch, other orders of threads, checks taken away. Of
    # the PTX: what small cases do not reach.
    c_select=(-E 'emulated.*(ManyTensors|SeveralLaunches|NoTensorOfMany|OnCuda|MissingChecks)|ptx.whole')
    # Without a GPU the code for one is enough to see what the compiler makes of the kernels.
    [ -e /dev/nvidiactl ] || export HEADROOM_CUDA_ARCHS="${HEADROOM_CUDA_ARCHS:-90+PTX}"
    ;;
full | pairs)
    sanitized=ON release=OFF
    # The oldest, and one with what newer ones have.
    archs="75+PTX 90+PTX"
    select=(-m "not release" --sample 1 --slow-cases 8)
    # Of the PTX, what nearly every kernel does with small cases. That a check which is taken away is
    # noticed tests the tests, for eight minutes of a core.
    c_select=(-E 'ptx.whole|MissingChecks')
    if [ "$1" = pairs ]; then
        release=ON select=(--sample 2)
        archs="75+PTX 80 86 90+PTX 100 120+PTX" # which all have budgets
        c_select=(-E 'ptx.(some.90|whole.(75|120))')
    fi
    export HEADROOM_CUDA_ARCHS="${HEADROOM_CUDA_ARCHS:-$archs}"
    ;;
*) echo "usage: tests/run.sh [full | pairs]" >&2 && exit 2 ;;
esac

stages=()
stage() {
    local started=$SECONDS name=$1
    shift
    printf '\n== %s (%d s)\n' "$name" "$SECONDS"
    "$@"
    stages+=("$((SECONDS - started)) s  $name")
}

# Packages of Debian and Ubuntu: a compiler, GoogleTest, what examples/c builds with, the formatter,
# for the full run a browser, and before a release a compiler and an emulator of 64-bit Arm.
system_packages() {
    local missing=() sudo=(sudo -n)
    command -v g++ >/dev/null || missing+=(g++)
    command -v pkg-config >/dev/null || missing+=(pkg-config)
    command -v readelf >/dev/null || missing+=(binutils)
    command -v clang-format >/dev/null || missing+=(clang-format)
    [ -e /usr/include/gtest/gtest.h ] || missing+=(libgtest-dev)
    # What reads the pages of reports; without one their tests are skipped.
    [ "$sanitized" = OFF ] || command -v chromium google-chrome >/dev/null || missing+=(chromium)
    if [ "$release" = ON ] && [ "$(uname -m)" = x86_64 ]; then
        command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu)
        command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
    fi
    [ ${#missing[@]} -gt 0 ] || return 0
    [ "$(id -u)" != 0 ] || sudo=()
    if command -v apt-get >/dev/null && "${sudo[@]}" true 2>/dev/null; then
        echo "apt-get install ${missing[*]}"
        "${sudo[@]}" apt-get update -qq >/dev/null
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
    else
        echo "some tools are missing; on Debian and Ubuntu: sudo apt-get install ${missing[*]}"
    fi
}

style() {
    if command -v clang-format >/dev/null; then
        git ls-files '*.c' '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
    fi
    "$venv/bin/ruff" check .
    "$venv/bin/ruff" format --check .
    "$venv/bin/basedpyright" --pythonpath "$venv/bin/python"
}

# The C tests join the build that the package was made in, so that what both need is compiled once.
build_c_tests() {
    local tag
    tag=$("$venv/bin/python" -c 'import sys; print(sys.implementation.cache_tag)')
    build=$root/build/cmake-$tag
    # A package that was installed before the build folder was deleted leaves none to join.
    "$venv/bin/cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$venv/bin/ninja" \
        -DPython_EXECUTABLE="$venv/bin/python" -DHEADROOM_TESTS=ON \
        -DHEADROOM_SANITIZED_TESTS=$sanitized >"$build-tests.log" 2>&1 ||
        { cat "$build-tests.log"; exit 1; }
    "$venv/bin/cmake" --build "$build"
}

c_tests() {
    "$venv/bin/ctest" --test-dir "$build" --output-on-failure -j "$(nproc)" "${c_select[@]}"
    if [ -x "$build/tests/ptx/headroom_tests_ptx" ]; then
        tail -qn 1 "$build"/tests/ptx/*.txt
    else
        echo "PTX was not executed: that takes nvcc >= 12.8"
    fi
    # awk reads to the end: were the reader to leave early, sort would die of SIGPIPE, and with it this.
    slowest=$(sort -k3 -rn "$build/Testing/Temporary/CTestCostData.txt" |
        awk 'NR <= 5 { printf "%.1f s  %s\n", $3, $1 }')
}

aarch64() {
    if command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null; then
        PATH=$venv/bin:$PATH bash tests/aarch64.sh "$build/tests/c/headroom_tests"
    else
        echo "left out; what it needs: sudo apt-get install g++-aarch64-linux-gnu qemu-user"
    fi
}

# A process for each core, but no more than memory has room for. In order: the files of few tests,
# which xdist would put last, take longest. A process that ends in a test ends the run: its successor
# would wait for ever.
python_tests() {
    "$venv/bin/python" -m pytest "${select[@]}" --durations=10 \
        --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "$@"
}

# torch's CUDA half and ours, on a device made of software: all that is queued there runs as late as it
# may, and accesses in no order fail a test.
on_software_device() {
    if [ ! -e "$build"/tests/rehearsal/libheadroom.so ]; then
        echo "left out: that takes nvcc >= 12.8"
    elif ! "$venv/bin/python" -c 'import sys, torch.version as v; sys.exit(v.cuda is None)'; then
        echo "left out: torch is built without CUDA"
    else
        HEADROOM_SOFTWARE_DEVICE="late ordered devices=2" python_tests \
            -p headroom_rehearsal.pytest_plugin -m "cuda and not slow" "$@"
    fi
}

# Most people's processors have AVX2 and no more. What torch.compile has made for this one is not run
# there: it crashes in a torch that is held to AVX2.
with_avx2() {
    HEADROOM_CPU_LEVEL=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
        TORCHINDUCTOR_CACHE_DIR=$root/build/inductor-avx2 "$@"
}

mkdir -p build
stage "system packages" system_packages
stage "environment and package" bash examples/setup.sh
stage "style" style
stage "C tests: build" build_c_tests
stage "C tests" c_tests
if [ "$release" = ON ] && [ "$(uname -m)" = x86_64 ]; then
    stage "C tests of 64-bit Arm, emulated" aarch64
fi
stage "Python tests on the software device" on_software_device tests/python/rehearsal
if [ "$sanitized" = ON ]; then
    # Apart, since those above find a device on which nothing is allocated.
    stage "Python tests of ops on the software device" on_software_device tests/python/{amp,core,data,grad}
fi
if [ "$sanitized" = OFF ] && grep -qs avx512f /proc/cpuinfo; then
    ops=(tests/python/{amp,functional,grad,optim})
    stage "Python tests of ops, with AVX2" with_avx2 python_tests "${ops[@]}"
    stage "Python tests" python_tests tests/python "${ops[@]/#/--ignore=}"
else
    stage "Python tests" python_tests tests/python
fi

printf '\n== Passed in %d s. What took longest:\n' "$SECONDS"
printf '%s\n' "${stages[@]}" | sort -rn
printf 'Among the C tests (among the Python tests: above):\n%s\n' "$slowest"

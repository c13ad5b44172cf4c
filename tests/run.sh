#!/usr/bin/env bash
# Sets up .venv and passes the tests: style, C and kernels (CPU, emulated CUDA, sanitizers), Python.
#
#   bash tests/run.sh          everything
#   bash tests/run.sh quick    without the tests marked slow
#
# Under 15 minutes on 2 cores from a bare clone, torch's installation included.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
build=$root/build/tests
cd "$root"

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

# Packages of Debian and Ubuntu: a compiler, GoogleTest, what examples/c builds with, the formatter.
system_packages() {
    local missing=()
    command -v g++ >/dev/null || missing+=(g++)
    command -v pkg-config >/dev/null || missing+=(pkg-config)
    command -v readelf >/dev/null || missing+=(binutils)
    command -v clang-format >/dev/null || missing+=(clang-format)
    [ -e /usr/include/gtest/gtest.h ] || missing+=(libgtest-dev)
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "apt-get install ${missing[*]}"
        apt-get update -qq >/dev/null
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
    else
        say "some tools are missing; on Debian and Ubuntu: sudo apt-get install ${missing[*]}"
    fi
}

style() {
    if command -v clang-format >/dev/null; then
        git ls-files '*.c' '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
    fi
    "$venv/bin/ruff" check .
    "$venv/bin/ruff" format --check .
}

c_tests() {
    # Without a driver nothing here would run the code for GPUs. The package has it all the same, for
    # the tests that read it; the emulated tests compile the kernels for the host.
    local cuda=OFF
    if [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; then cuda=AUTO; fi
    "$venv/bin/cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$venv/bin/ninja" \
        -DHEADROOM_TORCH=OFF -DHEADROOM_TESTS=ON -DHEADROOM_CUDA=$cuda >"$build.log" 2>&1 ||
        { cat "$build.log"; exit 1; }
    "$venv/bin/cmake" --build "$build"
    "$venv/bin/ctest" --test-dir "$build" --output-on-failure -j "$(nproc)"
}

say "system packages"
system_packages
bash examples/setup.sh
say "style"
style
say "C and kernels"
mkdir -p "$(dirname "$build")"
c_tests
say "Python"
# A process for each core, but no more than memory has room for. In order: the files of few tests,
# which xdist would put last, take longest.
"$venv/bin/python" -m pytest ${1:+-m "not slow"} --durations=10 \
    --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder tests/python

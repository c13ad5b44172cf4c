#!/usr/bin/env bash
# Everything that needs a GPU, in one call, without a network:
#
#     tests/gpu.sh DIR [SECONDS]
#
# Builds for the GPU at hand, runs the C tests and the pytest cases marked cuda on it, the
# benchmarks, and compute-sanitizer. Results and logs go into DIR: few files, each below 16 MB.
# Each stage has a share of SECONDS (540 unless given); one that fails or runs out of it does not
# stop the rest. The summary comes last. Exit status: 0 if every stage passed or was skipped for
# want of a tool, 1 if one failed, 2 for wrong arguments, 3 if there is no GPU, so that nothing was
# shown.
#
# Needs python3 (or PYTHON) with torch >= 2.11, setuptools, pybind11 and pytest; nvcc, CMake, ninja.
# GTEST_DIR: sources of GoogleTest, where it is not installed. HEADROOM_CUDA_ARCHS: another target.
# SANITIZER_FILTER: the part of the C tests that compute-sanitizer runs (--gtest_filter).
# HEADROOM_COMMIT: what the benchmarks record where the sources come without their history.
# shellcheck disable=SC2317  # functions are called through trap and bash -c
set -uo pipefail

case $# in 1 | 2) ;; *) echo "usage: $0 DIR [SECONDS]" >&2 && exit 2 ;; esac
total=${2:-540}
if ! [[ $total =~ ^[1-9][0-9]+$ ]]; then
    echo "SECONDS must be a number of at least 10, not '$total'" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
python=${PYTHON:-python3}
site=$work/site
ctests=$work/ctests
c_program=$ctests/tests/c/headroom_tests
cd "$root" || exit 2
export out root work python site ctests c_program PYTHONUNBUFFERED=1
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}

# Shares of 540 seconds. What a stage leaves over is there for the ones after it.
stages=(build c-build c-tests pytest benchmarks memcheck racecheck initcheck synccheck)
declare -A share=([build]=110 [c-build]=80 [c-tests]=50 [pytest]=90 [benchmarks]=90
                  [memcheck]=30 [racecheck]=30 [initcheck]=20 [synccheck]=20)
declare -A result=() took=()
failed=0
start=$SECONDS
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1) || gpu=
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1) ||
    capability=
export HEADROOM_CUDA_ARCHS=${HEADROOM_CUDA_ARCHS:-${capability//./}}
HEADROOM_CUDA_ARCHS=${HEADROOM_CUDA_ARCHS:-90}

# Seconds that a stage may take: all that is left but the shares of the stages after it.
limit_of() {
    local reserved=20 after=0 stage # 20: to stop a stage that runs over, and for the summary
    for stage in "${stages[@]}"; do
        [ $after = 0 ] || reserved=$((reserved + share[$stage]))
        [ "$stage" != "$1" ] || after=1
    done
    echo $((total - (SECONDS - start) - reserved * total / 540))
}

skip() {
    result[$1]="SKIPPED: $2"
    printf '\n== %s skipped: %s\n' "$1" "$2"
}

# stage NAME LOG COMMAND...: runs the command within the stage's limit, its output also in the log.
stage() {
    local name=$1 log=$out/$2 begin=$SECONDS limit code
    shift 2
    limit=$(limit_of "$name")
    if [ "$limit" -lt 2 ]; then
        result[$name]="FAILED: no time left for it"
        failed=1
        return 1
    fi
    {
        printf '\n== %s, at most %d s\n' "$name" "$limit"
        timeout -k 5 "$limit" "$@" 2>&1 </dev/null
    } | tee -a "$log"
    code=${PIPESTATUS[0]}
    took[$name]=$((SECONDS - begin))
    case $code in
    0) result[$name]=passed ;;
    124 | 137) result[$name]="FAILED: stopped after $limit s" ;;
    *) result[$name]="FAILED: status $code, see $(basename "$log")" ;;
    esac
    [ "$code" = 0 ] || failed=1
    return "$code"
}

summary() {
    local name log
    for log in "$out"/*.log; do # a log that grew too large keeps its end
        if [ -f "$log" ] && [ "$(stat -c %s "$log")" -gt 15000000 ]; then
            tail -c 15000000 "$log" >"$work/end" && mv "$work/end" "$log"
        fi
    done
    {
        printf '\n%-12s %7s  %s\n' stage seconds result
        for name in "${stages[@]}"; do
            printf '%-12s %7s  %s\n' "$name" "${took[$name]:--}" "${result[$name]:-NOT REACHED}"
        done
        printf '%-12s %7d  of %d; %s\n' total $((SECONDS - start)) "$total" "${gpu:-no GPU}"
    } | tee "$out/summary.txt"
    rm -rf "$work"
}
trap summary EXIT
trap 'exit 1' INT TERM

machine() {
    nvidia-smi
    nvcc --version | tail -n 2
    cmake --version | head -n 1
    "$python" -c 'import sys, torch; print("python", sys.version, "torch", torch.__version__)'
    lscpu | grep -E '^Model name|^CPU\(s\)'
    free -g | sed -n 2p
    echo "arch $HEADROOM_CUDA_ARCHS, commit ${HEADROOM_COMMIT:-$(git rev-parse HEAD)}"
}

# Into a folder of its own: a virtual environment would not see the packages of the one in use.
build() {
    HEADROOM_CUDA=1 "$python" -m pip install -v --no-build-isolation --no-deps --no-index \
        --target "$site" . &&
        "$python" -c 'import headroom; print(headroom.__file__, headroom.build_info())'
}

gtest_sources() {
    local folder
    for folder in "${GTEST_DIR:-}" "$root/googletest" /usr/src/googletest; do
        if [ -n "$folder" ] && [ -f "$folder/CMakeLists.txt" ]; then
            (cd "$folder" && pwd)
            return
        fi
    done
    [ -f /usr/include/gtest/gtest.h ] # installed, so no sources are needed
}

c_build() {
    local sources options=()
    sources=$(gtest_sources)
    [ -z "$sources" ] || options=("-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=$sources")
    cmake -S "$root" -B "$ctests" -G Ninja -DHEADROOM_TESTS=ON -DHEADROOM_TORCH=OFF \
        -DHEADROOM_CUDA=ON "-DHEADROOM_CUDA_ARCHS=$HEADROOM_CUDA_ARCHS" "${options[@]}" &&
        cmake --build "$ctests" --target headroom_tests
}

c_tests() {
    set -o pipefail
    "$c_program" | tee "$work/c_tests" || return 1
    # Where CUDA cannot be used its tests are skipped: that must not look like success.
    grep -q '^\[       OK \].*Cuda' "$work/c_tests" && return
    echo "no C test ran on the GPU"
    return 1
}

python_tests() {
    "$python" -c 'import torch; torch.zeros(1, device="cuda")' && # or every test would be skipped
        "$python" -m pytest -m cuda -p no:cacheprovider -q tests/python
}

benchmarks() {
    local name code=0
    for name in benchmarks/[!_]*.py; do
        name=$(basename "$name" .py)
        [ "$name" != harness ] || continue
        "$python" -m benchmarks "$name" --device cuda --check --json "$out/$name.json" || code=1
    done
    return "$code"
}

sanitize() {
    # API errors are not reported: tests provoke some, and check what comes back.
    local line=(compute-sanitizer --tool "$1" --error-exitcode 9 --report-api-errors no)
    if [ "$c_tests_built" = 1 ]; then
        "${line[@]}" "$c_program" --gtest_filter="${SANITIZER_FILTER:-*Cuda*}"
    else # torch's cache would hide accesses beyond the end of a tensor
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${line[@]}" --kernel-name kns=adamw "$python" -m pytest \
            -m cuda -p no:cacheprovider -q -x -k "${SANITIZER_TESTS:-adamw}" tests/python
    fi
}

export -f build gtest_sources c_build c_tests python_tests benchmarks sanitize
rm -f "$out"/{build,tests,benchmarks,sanitizer}.log
machine 2>&1 | tee "$out/build.log"

built=0
export c_tests_built=0
stage build build.log bash -c build && built=1
if [ ! -f tests/c/CMakeLists.txt ]; then
    skip c-build "THERE ARE NO C TESTS"
elif ! gtest_sources >/dev/null; then
    skip c-build "NO GOOGLETEST HERE: the C tests were not built (set GTEST_DIR)"
elif stage c-build build.log bash -c c_build; then
    c_tests_built=1
fi

if [ -z "$gpu" ]; then
    for name in c-tests pytest benchmarks memcheck racecheck initcheck synccheck; do
        skip "$name" "NO GPU"
    done
    [ $failed = 0 ] && exit 3
    exit 1
fi

if [ $c_tests_built = 1 ]; then
    stage c-tests tests.log bash -c c_tests
else
    skip c-tests "THE C TESTS WERE NOT BUILT"
fi
if [ $built = 1 ]; then
    stage pytest tests.log bash -c python_tests
    stage benchmarks benchmarks.log bash -c benchmarks
else
    skip pytest "the build failed"
    skip benchmarks "the build failed"
fi
for tool in memcheck racecheck initcheck synccheck; do
    if ! command -v compute-sanitizer >/dev/null; then
        skip $tool "NO compute-sanitizer HERE"
    elif [ $c_tests_built = 0 ] && [ $tool = initcheck ]; then
        skip $tool "it knows only the writes of the kernels it watches: needs the C tests"
    elif [ $c_tests_built = 0 ] && [ $built = 0 ]; then
        skip $tool "the build failed"
    else
        stage $tool sanitizer.log bash -c "sanitize $tool"
    fi
done
exit $failed

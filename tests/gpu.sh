#!/usr/bin/env bash
# Everything that needs a GPU, in one call, without a network:
#
#     tests/gpu.sh DIR [SECONDS] [STAGE...]
#
# Builds for the GPU at hand, runs the C tests and the pytest cases marked cuda on it, the
# benchmarks, and compute-sanitizer: in this order, the most telling first. Each suite of the C tests
# has a process of its own, because some errors of a GPU fail every call after them. DIR gets at most 8
# files, each below 16 MB: summary.txt, logs, and results.tar.gz with what the tests and benchmarks
# write. All of them grow while a stage runs, so that one that is stopped leaves what it has.
# Each stage has a share of SECONDS (540 unless given) and what the ones before left over; one that
# fails or runs out of it does not stop the rest. STAGE chooses among c-tests, pytest, benchmarks,
# memcheck, racecheck, initcheck and synccheck; the builds that they need always run. A second call
# uses the builds of the first where the sources are the same:
#
#     tests/gpu.sh out 540 c-tests pytest memcheck
#     tests/gpu.sh out 540 benchmarks
#
# Exit status: 0 if every stage passed or was skipped for want of a tool, 1 if one failed, 2 for
# wrong arguments, 3 if there is no GPU, so that nothing was shown.
#
# Needs python3 (or PYTHON) with torch >= 2.11, setuptools, pybind11 >= 3 and pytest; nvcc, CMake,
# ninja. What a machine without a network lacks can be carried in folders of this one:
#
#     googletest/   GoogleTest's sources (cp -r /usr/src/googletest . after apt install libgtest-dev)
#     wheels/       packages: pybind11, pytest-xdist, pytest-timeout, and what benchmarks compare
#                   with: bitsandbytes, torchao, torch-optimi. `pip download --no-deps -d wheels
#                   --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 NAME`
#                   fetches one; of bitsandbytes only the libraries libbitsandbytes_cpu.so and the
#                   one of torch's CUDA are needed (`python -m wheel unpack`, `pack`).
#
# HEADROOM_CUDA_ARCHS: another target. HEADROOM_GPU_WORK: where the builds are kept (build/gpu).
# GTEST_DIR, WHEELS_DIR: the two folders, elsewhere. BENCHMARKS: names of the benchmarks to run (those
# of all ops).
# ROUNDS: samples of each contender (10). SANITIZER_FILTER: the part of the C tests that
# compute-sanitizer runs (--gtest_filter). HEADROOM_COMMIT: what the benchmarks record where the
# sources come without their history.
# shellcheck disable=SC2317  # functions are called through trap and bash -c
set -uo pipefail

usage() { sed -n '2,/^# shellcheck/{/^# shellcheck/d;s/^# \{0,1\}//;p}' "$0"; }
case ${1:-} in
-h | --help) usage && exit 0 ;;
'') echo "usage: $0 DIR [SECONDS] [STAGE...]; $0 --help says more" >&2 && exit 2 ;;
esac
total=${2:-540}
if ! [[ $total =~ ^[1-9][0-9]+$ ]]; then
    echo "SECONDS must be a number of at least 10, not '$total'" >&2
    exit 2
fi
# Shares of 540 seconds. What a stage leaves over is there for the ones after it.
builds=(build c-build)
tests=(c-tests pytest benchmarks memcheck racecheck initcheck synccheck)
declare -A share=([build]=90 [c-build]=70 [c-tests]=60 [pytest]=120 [benchmarks]=100
                  [memcheck]=40 [racecheck]=20 [initcheck]=10 [synccheck]=10)
chosen=("${@:3}")
[ ${#chosen[@]} -gt 0 ] || chosen=("${tests[@]}")
for name in "${chosen[@]}"; do
    if ! [[ " ${tests[*]} " == *" $name "* ]]; then
        echo "no such stage: '$name'; there are ${tests[*]}" >&2
        exit 2
    fi
done
stages=("${builds[@]}")
for name in "${tests[@]}"; do
    [[ " ${chosen[*]} " != *" $name "* ]] || stages+=("$name")
done

mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
work=${HEADROOM_GPU_WORK:-$root/build/gpu}
mkdir -p "$work" || exit 2
python=${PYTHON:-python3}
site=$work/site
ctests=$work/ctests
results=$work/results # what goes into results.tar.gz
c_program=$ctests/tests/c/headroom_tests
cd "$root" || exit 2
if nvcc=$(command -v nvcc); then
    : "${CUDA_HOME:=$(dirname "$(dirname "$(readlink -f "$nvcc")")")}"
    export CUDA_HOME
fi
export out root work python site ctests results c_program PYTHONUNBUFFERED=1
export PYTHONPATH=$site:$work/wheels${PYTHONPATH:+:$PYTHONPATH}

declare -A result=() took=()
failed=0
start=$SECONDS
query() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }
gpu=$(query name) || gpu=
capability=$(query compute_cap) || capability=
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
# SIGINT first, on which pytest still writes its summary.
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
        stage_limit=$limit timeout -s INT -k 10 "$limit" "$@" 2>&1 </dev/null
    } | tee -a "$log"
    code=${PIPESTATUS[0]}
    took[$name]=$((SECONDS - begin))
    case $code in
    0) result[$name]=passed ;;
    124 | 130 | 137) result[$name]="FAILED: stopped after $limit s" ;;
    *) result[$name]="FAILED: status $code, see $(basename "$log")" ;;
    esac
    [ "$code" = 0 ] || failed=1
    pack
    return "$code"
}

pack() { tar -czf "$out/results.tar.gz" -C "$results" . 2>/dev/null; }

# The folder of torch's cuBLAS: what is no Python finds it by its name alone.
cublas_folder() {
    "$python" -c 'import pathlib, torch
root = pathlib.Path(torch.__file__).parents[1] / "nvidia"
print(next((str(path.parent) for path in sorted(root.glob("*/lib/libcublasLt.so.1?"))), ""))'
}

# How the tests of a log ended, as far as it goes: lines with $2, by the word that $3 matches in them.
counts_of() {
    [ -f "$out/$1" ] || return 0
    sed -E 's/\x1b\[[0-9;]*m//g' "$out/$1" | awk -v line="$2" -v word="$3" '
        $0 ~ line && match($0, word) {
            found = substr($0, RSTART, RLENGTH)
            gsub(/[^A-Z]/, "", found)
            n[found]++
        }
        END { for (found in n) printf " %d %s", n[found], found }'
}

summary() {
    local name log peers
    for log in "$out"/*.log; do # a log that grew too large keeps its end
        if [ -f "$log" ] && [ "$(stat -c %s "$log")" -gt 15000000 ]; then
            tail -c 15000000 "$log" >"$work/end" && mv "$work/end" "$log"
        fi
    done
    pack
    {
        printf '\n%-12s %7s  %s\n' stage seconds result
        for name in "${stages[@]}"; do
            printf '%-12s %7s  %s\n' "$name" "${took[$name]:--}" "${result[$name]:-NOT REACHED}"
        done
        printf 'C tests on CUDA:%s\n' \
            "$(counts_of c-tests.log '/Cuda[^ ]* [(]' '^[[] *(OK|FAILED|SKIPPED) *[]]')"
        printf 'pytest:%s\n' \
            "$(counts_of pytest.log '::' ' (PASSED|FAILED|ERROR|SKIPPED|XFAIL)( |$)')"
        peers=$(cat "$work/missing" 2>/dev/null)
        [ -z "$peers" ] || printf 'NOT HERE, so no bar against them was judged: %s\n' "$peers"
        printf '%-12s %7d  of %d; %s\n' total $((SECONDS - start)) "$total" "${gpu:-no GPU}"
    } | tee "$out/summary.txt"
}
trap summary EXIT
trap 'exit 1' INT TERM

machine() {
    nvidia-smi
    nvcc --version | tail -n 2
    echo "CUDA_HOME ${CUDA_HOME:-not set}"
    cmake --version | head -n 1
    "$python" -c 'import sys, torch; print("python", sys.version, "torch", torch.__version__)'
    "$python" -c 'import pybind11; print("pybind11", pybind11.__version__)'
    lscpu | grep -E '^Model name|^CPU\(s\)'
    free -g | sed -n 2p
    echo "arch $HEADROOM_CUDA_ARCHS, commit ${HEADROOM_COMMIT:-$(git rev-parse HEAD)}"
}

# Into a folder of its own: a virtual environment would not see the packages of the one in use.
carried() {
    local folder=${WHEELS_DIR:-$root/wheels}
    compgen -G "$folder/*.whl" >/dev/null || return 0
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade \
        --target "$work/wheels" "$folder"/*.whl
}

# What the installation is made of, and for what.
sources() {
    {
        echo "$HEADROOM_CUDA_ARCHS $("$python" --version) $(command -v nvcc)"
        find kernels capi torch_ext ops setup.py pyproject.toml CMakeLists.txt -type f \
            ! -name '*.pyc' ! -path 'ops/lib/*' -print0 | sort -z | xargs -0 sha256sum
    } | sha256sum
}

build() {
    carried || return 1
    local now
    now=$(sources)
    if [ -d "$site/headroom" ] && [ "$now" = "$(cat "$work/installed" 2>/dev/null)" ]; then
        echo "installed by an earlier call from the same sources"
    else
        rm -rf "$site" "$work/installed"
        HEADROOM_CUDA=1 "$python" -m pip install -v --no-build-isolation --no-deps --no-index \
            --target "$site" . || return 1
        echo "$now" >"$work/installed"
    fi
    "$python" -c 'import headroom._C; print(headroom.__file__, headroom.build_info())' ||
        { echo "headroom._C is missing: is pybind11 >= 3 here? (wheels/)" && return 1; }
    # What multiplies would be refused, or left out, test after test.
    "$python" -c 'import headroom; raise SystemExit(headroom.build_info()["cublas"] == "none")' ||
        { echo "built without products on CUDA: no cublasLt.h was found" && return 1; }
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
    options+=("-DHEADROOM_CUBLAS_INCLUDE=$("$python" -c 'import setup
print(setup.cublas_include(setup.release_of(setup.system_nvcc())[0]) or "")' 2>/dev/null)")
    cmake -S "$root" -B "$ctests" -G Ninja -DHEADROOM_TESTS=ON -DHEADROOM_TORCH=OFF \
        -DHEADROOM_CUDA=ON "-DHEADROOM_CUDA_ARCHS=$HEADROOM_CUDA_ARCHS" "${options[@]}" &&
        cmake --build "$ctests" --target headroom_tests
}

# One suite, on every backend; its output comes at once, since others may run beside it.
suite() {
    local said=$work/suites/$1 code=0
    "$c_program" --gtest_filter="$1.*:*/$1.*" --gtest_output="xml:$results/c-tests/$1.xml" \
        >"$said" 2>&1 </dev/null || code=$?
    [ "$code" = 0 ] || echo "FAILED SUITE $1: status $code" >>"$said"
    flock "$work/suites" cat "$said"
    return "$code"
}

# What calls cuBLAS comes last: what is known of it is least. Large matrices take all of the memory.
c_tests() {
    local code=0 all last='^(Gemm|Mlp|Linear|LargeMatrices)'
    rm -rf "$work/suites" && mkdir -p "$work/suites" "$results/c-tests"
    LD_LIBRARY_PATH=$(cublas_folder):${LD_LIBRARY_PATH:-}
    export LD_LIBRARY_PATH
    all=$("$c_program" --gtest_list_tests | sed -En 's|^(.*/)?([A-Za-z0-9_]+)\.( .*)?$|\2|p' | sort -u)
    grep -vE "$last" <<<"$all" | xargs -r -P 4 -I NAME bash -c 'suite NAME' || code=1
    while read -r name; do
        suite "$name" || code=1
    done < <(grep -E "$last" <<<"$all")
    # Where CUDA cannot be used its tests are skipped: that must not look like success.
    grep -qh '^\[       OK \].*Cuda' "$work/suites"/* && return "$code"
    echo "no C test ran on the GPU"
    return 1
}

has() { "$python" -c "import $1" 2>/dev/null; }

# By what a failure would mean: ops, optimizers, the scaler, gradients, then the rest; last what is
# marked slow. A result is a line, so that a run that is killed still has them.
python_tests() {
    local options=(-m pytest -v -ra -p no:cacheprovider) folders=() folder code=0
    "$python" -c 'import torch; torch.zeros(1, device="cuda")' || return 1 # or all would be skipped
    ! has xdist || options+=(-n 8 --dist loadfile --no-loadscope-reorder)
    ! has pytest_timeout || options+=(--timeout 90)
    for folder in functional nn loss optim amp grad core; do
        [ ! -d "tests/python/$folder" ] || folders+=("tests/python/$folder")
    done
    for folder in tests/python/*/; do
        folder=${folder%/}
        [[ " ${folders[*]} " == *" $folder "* ]] || folders+=("$folder")
    done
    # exec would hide a failure of the first run; INT reaches the pytest that runs.
    "$python" "${options[@]}" -m "cuda and not slow" --junitxml "$results/pytest.xml" \
        "${folders[@]}" || code=$?
    [ $code != 2 ] || return 2 # interrupted
    "$python" "${options[@]}" -m "cuda and slow" --junitxml "$results/pytest-slow.xml" \
        "${folders[@]}" || [ $? = 5 ] || code=1 # 5: there are none
    return "$code"
}

# Those of all ops, after the ones that carry the claims.
benchmark_names() {
    local name names=(adamw adamw8bit adafactor cross_entropy linear_cross_entropy mlp_block norm)
    for name in kernels/*/*_cpu.c; do
        name=$(basename "$name" _cpu.c)
        [ ! -f "benchmarks/$name.py" ] || [[ " ${names[*]} " == *" $name "* ]] || names+=("$name")
    done
    echo "${names[*]}"
}

benchmarks() {
    local name code=0 peer missing=() begin=$SECONDS left
    : "${stage_limit:?is set by stage}"
    for peer in bitsandbytes torchao optimi transformers; do
        has "$peer" || missing+=("$peer")
    done
    echo "${missing[*]}" >"$work/missing"
    [ ${#missing[@]} = 0 ] || echo "not here: ${missing[*]}; bars against them are not judged"
    for name in ${BENCHMARKS:-$(benchmark_names)}; do
        left=$((stage_limit - (SECONDS - begin)))
        if [ $left -lt 10 ]; then
            echo "no time left for $name: another call with BENCHMARKS=$name would have"
            code=1
            continue
        fi
        timeout -k 5 $left "$python" -m benchmarks "$name" --device cuda --check \
            --rounds "${ROUNDS:-10}" --json "$results/$name.json" || code=1
    done
    return "$code"
}

sanitize() {
    # API errors are not reported: tests provoke some, and check what comes back.
    local line=(compute-sanitizer --tool "$1" --error-exitcode 9 --report-api-errors no)
    LD_LIBRARY_PATH=$(cublas_folder):${LD_LIBRARY_PATH:-}
    export LD_LIBRARY_PATH
    if [ "$c_tests_built" = 1 ]; then
        "${line[@]}" "$c_program" --gtest_filter="${SANITIZER_FILTER:-$sanitized}"
    else # torch's cache would hide accesses beyond the end of a tensor
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${line[@]}" --kernel-name kns=adamw "$python" -m pytest \
            -m cuda -p no:cacheprovider -q -x -k "${SANITIZER_TESTS:-adamw}" tests/python
    fi
}
# All of it takes minutes under a tool: every shape and odd address, not every option. Products would
# be tests of cuBLAS, whose kernels take longest.
sanitized='*Cuda:-*Options*:*Special*:*Exhaustive*:*ManyTensors*:*Repeat*:*Accuracy*:*Pattern*'
export sanitized+=':*Gemm*:*Mlp*:*Linear*:*LargeMatrices*'

export -f carried sources build cublas_folder gtest_sources c_build suite c_tests has python_tests
export -f benchmark_names benchmarks sanitize
rm -f "$out"/{build,c-tests,pytest,benchmarks,sanitizer}.log "$out/results.tar.gz" "$work/missing"
rm -rf "$results" && mkdir -p "$results"
machine 2>&1 | tee "$out/build.log"

built=0
export c_tests_built=0
stage build build.log bash -c build && built=1
if [ ! -f tests/c/CMakeLists.txt ]; then
    skip c-build "THERE ARE NO C TESTS"
elif ! gtest_sources >/dev/null; then
    skip c-build "NO GOOGLETEST HERE: the C tests were not built (carry googletest/)"
elif stage c-build build.log bash -c c_build; then
    c_tests_built=1
fi

if [ -z "$gpu" ]; then
    for name in "${stages[@]:2}"; do
        skip "$name" "NO GPU"
    done
    [ $failed = 0 ] && exit 3
    exit 1
fi

for name in "${stages[@]:2}"; do
    case $name in
    c-tests)
        if [ $c_tests_built = 1 ]; then
            stage c-tests c-tests.log bash -c c_tests
        else
            skip c-tests "THE C TESTS WERE NOT BUILT"
        fi
        ;;
    pytest | benchmarks)
        if [ $built = 0 ]; then
            skip "$name" "the build failed"
        elif [ "$name" = pytest ]; then
            stage pytest pytest.log bash -c python_tests
        else
            stage benchmarks benchmarks.log bash -c benchmarks
        fi
        ;;
    *)
        if ! command -v compute-sanitizer >/dev/null; then
            skip "$name" "NO compute-sanitizer HERE"
        elif [ $c_tests_built = 0 ] && [ "$name" = initcheck ]; then
            skip "$name" "it knows only the writes of the kernels it watches: needs the C tests"
        elif [ $c_tests_built = 0 ] && [ $built = 0 ]; then
            skip "$name" "the build failed"
        else
            stage "$name" sanitizer.log bash -c "sanitize $name"
        fi
        ;;
    esac
done
exit $failed

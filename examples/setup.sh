#!/usr/bin/env bash
# Makes or updates the virtual environment of the demo and the tests, and installs Headroom in it.
#
#   bash examples/setup.sh            what the demo and the tests need
#   bash examples/setup.sh demo       what the demo needs: built for the CPU alone where no driver
#                                     could run the code for GPUs
#
# Needs Python >= 3.10 and a C++ compiler. Running it again is quick while no source has changed.
# PYTHON chooses the Python that makes the environment, VENV the folder (default: .venv).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$(realpath -m "${VENV:-$root/.venv}")
python=$venv/bin/python

goal=${1:-test}
extras=demo,test
asked_for="${HEADROOM_CUDA:-} ${HEADROOM_CUDA_ARCHS:-}"
case $goal in
demo)
    extras=demo
    [ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || export HEADROOM_CUDA="${HEADROOM_CUDA:-0}"
    ;;
test) ;;
*) echo "usage: setup.sh [demo]" >&2 && exit 2 ;;
esac

say() { printf '== %s\n' "$*"; }
fail() { printf 'setup.sh: %s\n' "$*" >&2; exit 1; }
# Python compiles what it imports; pip would compile all, for most of a minute.
pip() { "$python" -m pip --disable-pip-version-check install --no-compile "$@"; }
has_torch() { "$python" -c 'import torch' 2>/dev/null; }

find_python() {
    local name new_enough='import sys; sys.exit(sys.version_info < (3, 10))'
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        if "$name" -c "$new_enough" 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    fail "no Python >= 3.10 found; install one, or name it: PYTHON=/path/to/python3 bash $0"
}

# Debian and Ubuntu ship Python without the part that puts pip into an environment.
make_venv() {
    local base
    base=$(find_python)
    say "making $venv with $("$base" --version)"
    if ! "$base" -c 'import ensurepip' 2>/dev/null; then
        local install="apt-get install -y python3-venv"
        { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; } ||
            fail "$base cannot make environments; first run: sudo $install"
        say "$install"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive $install -qq; } >/dev/null
    fi
    "$base" -m venv "$venv"
}

# Everything that the installed package is made of.
fingerprint() {
    (
        cd "$root"
        echo "$asked_for"
        "$python" -c 'import sys; from importlib.metadata import version
print(sys.version, version("torch"), version("headroom"))'
        find capi kernels torch_ext ops rehearsal setup.py pyproject.toml CMakeLists.txt \
            examples/setup.sh -type f ! -name '*.pyc' ! -name '*.so*' -print0 |
            LC_ALL=C sort -z | xargs -0 sha256sum
    ) 2>/dev/null | sha256sum
}

# torch with the CUDA libraries is 6 GB installed, and pip unpacks it beside what it has fetched.
check_space() {
    local free
    free=$(df --output=avail -BG "$venv" | tail -n 1 | tr -dc 0-9)
    has_torch || [ "$free" -ge 10 ] ||
        fail "$venv has $free GB of disk left, wanted 10; free some, or choose another disk with VENV="
}

# What the build, the package and its extras need, one a line.
requirements() {
    "$python" - ${extras//,/ } <<'EOF'
import sys

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    import tomli as tomllib

with open("pyproject.toml", "rb") as file:
    table = tomllib.load(file)
project, extras = table["project"], table["project"]["optional-dependencies"]
print(*table["build-system"]["requires"], *project["dependencies"], sep="\n")
print(*(one for extra in sys.argv[1:] for one in extras[extra]), sep="\n")
EOF
}

install() {
    check_space
    command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null ||
        fail "no C++ compiler found; on Debian and Ubuntu: sudo apt-get install g++"
    # The build runs in this environment and not in pip's isolated one, which would install torch a
    # second time. So its requirements are ours to install: the fixed ones, then the build's own.
    say "installing what is needed (torch alone is a few GB; pip keeps it for the next time)"
    local list=$venv/requirements.txt
    pip --quiet 'tomli; python_version < "3.11"'
    requirements >"$list"
    if ! has_torch; then
        # What needs no torch is compiled while pip fetches it. The build goes on from there, or
        # shows why that failed. Whatever happens, nothing runs on after this.
        trap wait EXIT
        grep -E '^(setuptools|cmake|ninja)' "$list" >"$list.tools"
        pip --quiet -r "$list.tools"
        nice "$python" -c 'import setup; setup.cuda_requirements() or setup.build(torch=False)' \
            >/dev/null 2>&1 &
    fi
    pip -r "$list"
    "$python" -c 'import setup; print(*setup.cuda_requirements(), sep="\n")' >"$list"
    pip --quiet -r "$list"
    wait
    say "building and installing Headroom"
    pip --quiet --no-build-isolation ".[$extras]"
}

[ -x "$python" ] && "$python" -m pip --version >/dev/null 2>&1 || make_venv
stamp=$venv/headroom-$goal.sha256
if [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then
    say "Headroom in $venv is up to date"
else
    rm -f "$venv"/headroom-*.sha256
    started=$SECONDS
    (cd "$root" && install)
    fingerprint >"$venv/headroom-demo.sha256" # what the tests need serves the demo too
    [ "$goal" = demo ] || fingerprint >"$stamp"
    say "environment ready in $((SECONDS - started)) s: $venv"
fi

#!/usr/bin/env bash
# Changes a Python package in small ways and prints which changes no test notices.
#
#   bash tests/mutate.sh loss                       40 changes, drawn with seed 0, and the default run's tests
#   bash tests/mutate.sh loss --seed 3 --count 80   other changes, more of them
#   bash tests/mutate.sh loss --full                the tests and cases of the full run
#   bash tests/mutate.sh loss --changed [COMMIT]    only lines that differ from a commit (main)
#
# It needs what tests/run.sh has set up, writes to build/mutation, and leaves the sources as they are.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${VENV:-$root/.venv}/bin/python
cd "$root"
"$python" -c 'import cosmic_ray, coverage' 2>/dev/null ||
    "$python" -m pip install --quiet "cosmic-ray>=8.7,<9" "coverage>=7.6" # the extra "mutation"
exec nice -n 10 "$python" -m tests.python.mutation "$@"

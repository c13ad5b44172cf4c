#!/usr/bin/env bash
# Trains a small GPT on this machine's Python sources, once per rung of the memory ladder: in plain
# torch, and with more and more of Headroom.
#
#   bash examples/demo.sh [--data PATH] [--size tiny|small|medium|large|xl|words]
#                         [--device cpu|cuda] [--steps N] [--rungs all|torch,L1,L5,...]
#                         [--out DIR] [--resume]
#
# Sets up .venv first. 4 to 8 minutes on 2 CPU cores, the installation included.
set -euo pipefail
# Images of containers often set it; then each process compiles all of torch's Python that it imports.
unset PYTHONDONTWRITEBYTECODE

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/examples/setup.sh" demo
exec "${VENV:-$root/.venv}/bin/python" "$root/examples/ladder.py" --out "$root/runs/demo" "$@"

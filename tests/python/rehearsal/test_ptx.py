"""Ops from Python through torch to the instructions that nvcc made of their kernels: tests of ops,
on the software device with the PTX in place of the emulator's kernels."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "build/cmake-*/tests/rehearsal/ptx/libheadroom.so"
OPS = ["adamw8bit", "unscale_norm", "cross_entropy"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is None or not any(ROOT.glob(FOLDER)),
        reason="needs torch for CUDA, and the target headroom_ptx_on_software_device",
    ),
]


def run(*names, fault=""):
    """Returns the exit status of tests of ops on the device, how many passed, and the output."""
    environment = os.environ | {"HEADROOM_SOFTWARE_DEVICE": "late ordered ptx"}
    if fault:
        environment["HEADROOM_PTX_FAULT"] = fault
    command = [sys.executable, "-m", "pytest", "-q", "-p", "headroom_rehearsal.pytest_plugin"]
    command += ["-p", "no:cacheprovider", "-m", "cuda and not slow", "--sample", "1"]
    command += [f"tests/python/functional/test_{name}.py" for name in names]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", result.stdout)
    return result.returncode, int(passed[1]) if passed else 0, result.stdout[-4000:]


@pytest.mark.parametrize("name", OPS)
def test_an_op_does_what_its_instructions_do(name):
    status, passed, output = run(name)
    assert status == 0 and passed > 0, output


def test_an_instruction_that_was_changed_is_noticed():
    """What ran is the PTX: a root that is not drawn is another result."""
    status, _, output = run("adamw8bit", fault="adamw8bit_kernel|sqrt.rn.f32|abs.f32")
    assert status == 1, output

"""What is said when the binaries are loaded."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("level, said", [("AVX2", 1), ("baseline", 0)])
def test_a_level_that_does_not_exist_is_said_once(level, said):
    code = "import headroom, headroom.optim; print(headroom.build_info()['cpu'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HEADROOM_CPU_LEVEL": level},
    )
    assert done.stderr.count("HEADROOM_CPU_LEVEL=") == said
    assert said or done.stdout.strip() == level

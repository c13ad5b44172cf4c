"""What the tests of states share."""

import pytest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step-1.safetensors"

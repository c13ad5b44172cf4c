"""What ``import headroom`` costs and shows."""

import subprocess
import sys

import headroom
import pytest

HEAVY = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
]
LIGHT = "headroom", "headroom.optim", "headroom.amp", "headroom.state", "headroom.grad.clip"


@pytest.fixture(scope="module")
def loaded():
    """What importing headroom loads of HEAVY, then importing its packages, and then the names that
    load most; torch does not."""
    code = (
        f"import sys, torch; heavy = set({HEAVY!r}) - set(sys.modules); "
        "shown = lambda: print(*sorted(heavy & set(sys.modules))); "
        f"import headroom; shown(); import {', '.join(LIGHT)}; shown(); "
        "headroom.fit, headroom.patch, headroom.nn.Transformer; shown()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return [line.split() for line in found.stdout.splitlines()]


def test_importing_the_package_loads_no_distributed_torch(loaded):
    assert not loaded[0]


def test_importing_its_packages_loads_neither_fsdp_nor_checkpoints(loaded):
    assert not set(loaded[1]) & {"torch.distributed.checkpoint", "torch.distributed.fsdp"}


def test_only_what_compiles_loads_the_compiler(loaded):
    assert "torch._dynamo" not in loaded[2]


def test_only_public_names_are_shown():
    assert dir(headroom) == sorted([*headroom.__all__, "__version__"])
    raw = {name for name in headroom.functional.__all__ if name.endswith("_")}
    assert raw and not raw & set(dir(headroom))
    assert not [name for name in raw if hasattr(headroom, name)]


@pytest.mark.parametrize("package", ["", "optim", "state", "amp", "functional", "nn", "memory"])
def test_every_name_is_there(package):
    module = getattr(headroom, package) if package else headroom
    assert sorted(module.__all__) == module.__all__
    assert not [name for name in module.__all__ if not hasattr(module, name)]


def test_names_that_moved_are_the_same_objects():
    for name in ("ReleaseHandle", "release_gradients"):
        assert getattr(headroom.optim, name) is getattr(headroom.release, name)
    assert headroom.release_gradients is headroom.release.release_gradients
    for name in ("check_same_state", "convert_state", "load_sharded"):
        assert getattr(headroom.optim, name) is getattr(headroom.state, name)
    for name in ("save_state", "load_state", "latest", "StateFileError"):
        assert getattr(headroom, name) is getattr(headroom.state, name)
    assert issubclass(headroom.optim.AdamW, headroom.optim.Optimizer)


def test_a_name_that_is_none_is_refused():
    for module in (headroom, headroom.optim, headroom.state):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute"):
            module.adamw  # noqa: B018

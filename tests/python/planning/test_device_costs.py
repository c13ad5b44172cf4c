"""The fixed costs of a GPU."""

import pytest
import torch
from headroom.planning.device import context, cublas_workspace

MIB = 1 << 20


def test_workspaces_of_cublas():
    assert cublas_workspace((8, 0)) == 4096 * 1024 * 2 + 16 * 1024 * 8
    assert cublas_workspace((9, 0)) == cublas_workspace((12, 0)) == 32 * MIB
    assert cublas_workspace((9, 0), config=":4096:2:16:8") == 8 * MIB + 128 * 1024
    assert cublas_workspace((9, 0), config=":0:0") == MIB  # cuBLASLt's
    assert cublas_workspace((9, 0), config="no sizes") == 32 * MIB


def test_context_grows_with_the_generation():
    costs = [
        context(capability) for capability in [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)]
    ]
    sizes = [size for size, _ in costs]
    assert sizes == sorted(sizes) and 200 * MIB < sizes[0] < sizes[-1] < 1024 * MIB
    assert all(source for _, source in costs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_workspace_is_what_torch_takes():
    if not hasattr(torch.backends.cuda, "cublas_workspace_size"):
        pytest.skip("this torch cannot say")
    capability = torch.cuda.get_device_capability()
    assert cublas_workspace(capability) == torch.backends.cuda.cublas_workspace_size()

"""The fixed costs of a GPU."""

import pytest
import torch
from headroom.planning.device_costs import blas_workspaces, context

MIB = 1 << 20


def test_workspaces_of_cublas():
    assert blas_workspaces((8, 0)).cublas == 4096 * 1024 * 2 + 16 * 1024 * 8
    assert blas_workspaces((9, 0)).cublas == blas_workspaces((12, 0)).cublas == 32 * MIB
    assert blas_workspaces((9, 0), config=":4096:2:16:8").cublas == 8 * MIB + 128 * 1024
    assert blas_workspaces((9, 0), config=":0:0").bytes == MIB
    assert blas_workspaces((9, 0), config="no sizes").bytes == 32 * MIB


def test_context_grows_with_the_generation():
    costs = [
        context(capability) for capability in [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)]
    ]
    sizes = [cost.bytes for cost in costs]
    assert sizes == sorted(sizes) and 200 * MIB < sizes[0] < sizes[-1] < 1024 * MIB
    assert all(cost.source for cost in costs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_workspace_is_what_torch_takes():
    if not hasattr(torch.backends.cuda, "cublas_workspace_size"):
        pytest.skip("this torch cannot say")
    capability = torch.cuda.get_device_capability()
    assert blas_workspaces(capability).cublas == torch.backends.cuda.cublas_workspace_size()

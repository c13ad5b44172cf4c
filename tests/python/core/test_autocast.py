"""What torch.autocast casts, as torch.nn.functional.linear has it."""

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom._core.rows import autocast

TARGET = torch.tensor([1, 0, 2])
WEIGHT = torch.ones(3, 1)
OPS = {  # of an input and a square weight
    "linear_cross_entropy": lambda x, w: headroom.linear_cross_entropy(x, w, TARGET),
    "linear_log_prob": lambda x, w: headroom.linear_log_prob(x, w, TARGET),
    "linear_distillation_loss": lambda x, w: headroom.linear_distillation_loss(x, w, x, w),
    "gemm": headroom.functional.gemm,
    "mlp_block": lambda x, w: headroom.nn.functional.mlp_block(x, w[0], torch.cat((w, w)), w),
    "experts": lambda x, w: headroom.functional.experts(
        x, TARGET[:, None] % 1, WEIGHT, torch.cat((w, w))[None], w[None]
    ),
}


def test_what_is_cast():
    inputs = torch.ones(3, 3), torch.ones(3, 3, dtype=torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        for x in inputs:
            assert F.linear(x, x).dtype == torch.bfloat16
            got, none, index = autocast(x, None, TARGET)
            assert got.dtype == torch.bfloat16 and none is None and index is TARGET
    assert autocast(inputs[0])[0] is inputs[0]


@pytest.mark.parametrize("name", OPS)
def test_float64_stays_what_it_is(name):
    """torch computes in it; ours refuse it, as they do without autocast."""
    x, w = torch.randn(3, 3).double(), torch.randn(3, 3).double()
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, w).dtype == torch.float64
        assert OPS[name](x.float(), w.float()).isfinite().all()
        with pytest.raises(RuntimeError, match="float64|Double"):
            OPS[name](x, w)

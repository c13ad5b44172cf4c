"""Returns the values of the codes of 8-bit moments: the op ``headroom::dynamic_map``."""

from __future__ import annotations

import torch
from torch import Tensor


def dynamic_map(signed: bool) -> Tensor:
    """Returns the values of the 256 codes of 8-bit moments, ascending, float32 ``[256]``.

    The signed map, in [-1, 1], is for first moments, the unsigned one, in [0, 1], for second
    moments. Both have the bits of bitsandbytes' maps (Dettmers et al., arXiv:2110.02861), so that
    codes can be exchanged with it. The tensor is new, on the CPU.
    """
    return torch.ops.headroom.dynamic_map(signed)


@torch.library.register_fake("headroom::dynamic_map")
def _(is_signed):
    return torch.empty(256, dtype=torch.float32, device="cpu")

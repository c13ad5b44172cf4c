"""Makes matrices nearly orthogonal: the op ``headroom::newton_schulz_``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.checks import check_choice
from .._core.registration import FLOATS, complete, register_fake, register_flops, require
from .gemm import matmul_precision
from .muon_momentum import check_vector

VARIANTS = ("standard", "gram")
RESTART = 2  # the iteration before which the gram variant restarts: newton_schulz.c
PRODUCTS = 32 << 20  # bytes of workspace that products have a use for on CUDA


def newton_schulz_(
    x: Tensor,
    squares: Tensor,
    *,
    coefficients: Sequence[Sequence[float]],
    eps: float = 1e-7,
    variant: str = "standard",
    workspace: Tensor | None = None,
) -> Tensor:
    """Scales matrices by their norms and takes their singular values towards 1, in place.

    The second step of Muon. Its products run in the dtype of ``x``, with sums in float32, and on
    CUDA follow ``torch.backends.cuda.matmul``.

    Args:
        x: contiguous tensor ``[batch, m, n]`` with m <= n, float32, bfloat16 or float16; written.
        squares: float32 ``[batch]``: the sum of the squares of each matrix.
        coefficients: three numbers for each iteration.
        eps: the least norm that a matrix is divided by.
        variant: ``"standard"``, or ``"gram"``, which has fewer operations where n is several m and
            is less exact: for float32 and float16.
        workspace: contiguous uint8 tensor of :func:`newton_schulz_workspace` bytes; written. By
            default it is allocated for the call.

    Returns:
        ``x``, which holds the result.

    Raises:
        ValueError: the variant is unknown.
        RuntimeError: another argument does not fit, or a CUDA tensor was given and there is no
            cuBLASLt.

    The iteration and its sources are documented at ``hr_newton_schulz`` in ``headroom.h``.
    """
    if workspace is None:
        count = newton_schulz_workspace(*x.shape, x.dtype, variant, x.device)
        workspace = torch.empty(count, dtype=torch.uint8, device=x.device)
    check_choice("variant", variant, VARIANTS)
    torch.ops.headroom.newton_schulz_(
        x,
        squares,
        workspace,
        coefficients=[float(number) for triple in coefficients for number in triple],
        eps=eps,
        gram=variant == "gram",
        precision=matmul_precision(x.dtype) if x.device.type == "cuda" else 0,
    )
    return x


def newton_schulz_workspace(
    batch: int,
    m: int,
    n: int,
    dtype: torch.dtype,
    variant: str = "standard",
    device: torch.device | str = "cpu",
) -> int:
    """Returns the bytes of workspace for ``x`` of shape ``[batch, m, n]``: a second x, and two
    matrices ``[batch, m, m]`` or with ``"gram"`` four; on CUDA 32 MiB more for the products, which
    choose among fewer algorithms if that is left out."""
    check_choice("variant", variant, VARIANTS)

    def rounded(cols: int) -> int:
        return -(-batch * m * cols * dtype.itemsize // 256) * 256

    products = PRODUCTS if torch.device(device).type == "cuda" else 0
    return rounded(n) + (4 if variant == "gram" else 2) * rounded(m) + products


def newton_schulz_flops(batch: int, m: int, n: int, steps: int, gram: bool) -> int:
    """Returns the floating-point operations of the products."""
    if not gram:
        return steps * batch * (4 * m * m * n + 2 * m**3)
    runs = [steps] if steps <= RESTART else [RESTART, steps - RESTART]
    squares = sum(1 + (each - 1) * 4 for each in runs)
    return batch * (len(runs) * 4 * m * m * n + squares * 2 * m**3)


def _fake(x, squares, workspace, coefficients, gram, **_):
    require(x.dim() == 3 and x.is_contiguous(), "x must be a contiguous tensor [batch, m, n]")
    require(x.dtype in FLOATS, f"x has dtype {x.dtype}, wanted one of {FLOATS}")
    batch, m, n = x.shape
    require(m <= n, f"m is {m} and n {n}, wanted 0 <= m <= n")
    check_vector("squares", squares, batch, [x])
    require(
        len(coefficients) > 0 and len(coefficients) % 3 == 0,
        f"coefficients has {len(coefficients)} numbers, wanted three for each step",
    )
    wanted = newton_schulz_workspace(batch, m, n, x.dtype, VARIANTS[gram])
    require(
        workspace.dtype == torch.uint8 and workspace.is_contiguous(),
        "workspace must be a contiguous uint8 tensor",
    )
    count = workspace.numel()
    require(count >= wanted, f"workspace_bytes is {count}, wanted {wanted} or more")


def _flops(x, coefficients, gram, **_) -> int:
    return newton_schulz_flops(*x, len(coefficients) // 3, gram)


register_fake("newton_schulz_", _fake)
complete("newton_schulz_")
register_flops("newton_schulz_", _flops)

"""Norms as modules, with the names and parameters of torch's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..functional.norm import CASTINGS, layer_norm, rms_norm

__all__ = ["LayerNorm", "RMSNorm"]


def _columns(kind: str, normalized_shape: int | tuple[int, ...]) -> int:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(
            f"{kind}: normalized_shape is {normalized_shape}, wanted the size of one dimension"
        )
    return shape[0]


class RMSNorm(nn.Module):
    """:class:`torch.nn.RMSNorm` over the last dimension, by :func:`headroom.functional.rms_norm`.

    Args:
        normalized_shape: the size of the last dimension.
        eps: added to the mean of squares; None: the machine epsilon of float32, in which it is
            computed whatever the dtype, as in torch.
        elementwise_affine: whether there is a weight.
        offset: added to the weight, which is zeros at first if the offset is 1, as in Gemma.
        casting: as in :func:`headroom.functional.rms_norm`. The default rounds as torch does.
    """

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        casting: str = "once",
    ) -> None:
        super().__init__()
        if casting not in CASTINGS:
            raise ValueError(f"casting is {casting!r}, wanted one of {', '.join(CASTINGS)}")
        columns = _columns("RMSNorm", normalized_shape)
        self.normalized_shape = (columns,)
        self.eps, self.offset, self.casting = eps, offset, casting
        self.elementwise_affine = elementwise_affine
        weight = torch.empty(columns, device=device, dtype=dtype) if elementwise_affine else None
        self.weight = None if weight is None else nn.Parameter(weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1 - self.offset)

    @property
    def epsilon(self) -> float:
        return torch.finfo(torch.float32).eps if self.eps is None else self.eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon, offset=self.offset, casting=self.casting)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        )


class LayerNorm(nn.Module):
    """:class:`torch.nn.LayerNorm` over the last dimension, by
    :func:`headroom.functional.layer_norm`, with the arguments of torch's."""

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        columns = _columns("LayerNorm", normalized_shape)
        self.normalized_shape = (columns,)
        self.eps, self.elementwise_affine = eps, elementwise_affine

        def vector(wanted: bool) -> nn.Parameter | None:
            return (
                nn.Parameter(torch.empty(columns, device=device, dtype=dtype)) if wanted else None
            )

        self.weight = vector(elementwise_affine)
        self.bias = vector(elementwise_affine and bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        )

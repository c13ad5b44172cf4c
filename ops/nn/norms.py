"""Norms as modules, with the names and parameters of torch's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._core.checks import check_choice
from ..functional.norm import CASTINGS, layer_norm, rms_norm


def _check_shape(kind: str, normalized_shape: int | tuple[int, ...]) -> None:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(
            f"{kind}: normalized_shape is {normalized_shape}, wanted the size of one dimension"
        )


class RMSNorm(nn.RMSNorm):
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
        check_choice("casting", casting, CASTINGS)
        _check_shape("RMSNorm", normalized_shape)
        # First: torch's constructor calls reset_parameters().
        self.offset, self.casting = offset, casting
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1 - self.offset)

    @property
    def epsilon(self) -> float:
        return torch.finfo(torch.float32).eps if self.eps is None else self.eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon, offset=self.offset, casting=self.casting)  # type: ignore[return-value]


class LayerNorm(nn.LayerNorm):
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
        _check_shape("LayerNorm", normalized_shape)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)  # type: ignore[return-value]

"""The loss of a linear layer as a module, with the names and parameters of torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._core.checks import check_choice
from ..functional.cross_entropy import REDUCTIONS
from ..functional.linear_quantized import weight_and_bias
from ..loss.linear_cross_entropy import linear_cross_entropy


class LinearCrossEntropyLoss(nn.Module):
    """:class:`torch.nn.LinearCrossEntropyLoss`, by :func:`headroom.linear_cross_entropy`: a linear
    layer and the cross entropy of its logits, which are never whole in memory.

    The ``state_dict`` is that of torch's class. :func:`headroom.quantize` may turn ``linear`` into
    one of 4 or 8 bits. To share the weight of another layer, such as a
    tied embedding, assign it: ``loss.linear.weight = embedding.weight``.

    Args:
        in_features, num_classes: of the linear layer.
        bias: whether it has a bias.
        reduction: "mean", "sum" or "none".
        weight: ``[num_classes]``, a factor for each class, or None; a buffer.
        ignore_index: targets that count for nothing; None: -100.
        label_smoothing: the share of the target, from 0 to 1, that all classes get.
        options: of :func:`headroom.linear_cross_entropy`, such as ``softcap``, ``z_loss``,
            ``workspace`` or ``empty="nan"``, which is what torch's class does of a batch in which
            nothing counts.

    Raises:
        ValueError: ``reduction`` is none of the above, ``label_smoothing`` not in [0, 1], or
            ``weight`` of another shape.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        owner = "LinearCrossEntropyLoss"
        check_choice("reduction", reduction, REDUCTIONS, f"{owner}: ")
        if weight is not None and weight.shape != (num_classes,):
            raise ValueError(
                f"{owner}: weight has shape {tuple(weight.shape)}, wanted ({num_classes},)"
            )
        if not 0 <= label_smoothing <= 1:
            raise ValueError(
                f"{owner}: label_smoothing is {label_smoothing}, wanted a share from 0 to 1"
            )
        self.num_classes, self.reduction = num_classes, reduction
        self.ignore_index = -100 if ignore_index is None else ignore_index
        self.label_smoothing, self.options = label_smoothing, options
        self.register_buffer("weight", weight)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor, target: Tensor, **options: Any) -> Any:
        """Returns the loss of ``input``, ``[..., in_features]``, and of ``target``, ``[...]``.

        ``options`` are those of one call, such as ``denominator`` or ``token_weight``.
        """
        weight, bias = weight_and_bias(self.linear, input.dtype)
        return linear_cross_entropy(
            input,
            weight,
            target,
            bias,
            class_weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            **self.options | options,
        )

    def extra_repr(self) -> str:
        return (
            f"reduction={self.reduction}, ignore_index={self.ignore_index}, "
            f"label_smoothing={self.label_smoothing}"
        )

"""LoRA+ of PEFT with the optimizers of Headroom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["create_loraplus_optimizer"]

OptimizerType = TypeVar("OptimizerType", bound=torch.optim.Optimizer)


def create_loraplus_optimizer(
    model: PeftModel,
    optimizer_cls: type[OptimizerType],
    *,
    lr: float,
    loraplus_lr_ratio: float,
    **options: Any,
) -> OptimizerType:
    """Returns the optimizer that ``peft.optimizers.create_loraplus_optimizer`` makes, for classes
    of any name.

    PEFT's function imports bitsandbytes for a class that is called Adam8bit or AdamW8bit, to keep
    the moments of embeddings at 32 bits in bitsandbytes' optimizers. Headroom's classes of these
    names do not need bitsandbytes; :meth:`headroom.optim.Adam8bit.override` chooses their bits.

    Example::

        from headroom.integrations.peft import create_loraplus_optimizer

        optimizer = create_loraplus_optimizer(
            model, headroom.optim.AdamW8bit, lr=1e-3, loraplus_lr_ratio=16.0
        )

    Args:
        model: a model of :func:`peft.get_peft_model`.
        optimizer_cls: a class of :mod:`headroom.optim`, or another optimizer's.
        lr: learning rate of the matrices A.
        loraplus_lr_ratio: learning rate of the matrices B over that of A (Hayou et al.,
            arXiv:2402.12354).
        options: ``loraplus_weight_decay`` and ``loraplus_lr_embedding`` of PEFT's function, and
            options of the optimizer.

    Raises:
        ImportError: the package peft is missing.
    """
    try:
        from peft.optimizers import create_loraplus_optimizer as create
    except ImportError as error:
        raise ImportError("headroom.integrations.peft needs the package peft") from error

    def make(params: Any, **given: Any) -> OptimizerType:
        return optimizer_cls(params, **given)

    rates: dict[str, Any] = {"lr": lr, "loraplus_lr_ratio": loraplus_lr_ratio}
    optimizer: Any = create(model, make, **rates, **options)  # which looks at the name of `make`
    return optimizer

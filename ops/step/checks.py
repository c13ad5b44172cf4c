"""Checks the description of a step that is to train, as a user gives it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .._core.checks import check_number
from .description import Step
from .pytree import tensors_in

__all__ = ["check_batch_and_loss", "check_described"]

PLAIN = (tuple, list, Mapping, DataLoader, Dataset)
"""Batches in which nothing but a tensor is looked for. Others may have them wherever they like."""


def check_described(step: Step) -> None:
    """Checks what would otherwise fail deep in a step, or not at all.

    Raises:
        TypeError, ValueError: a field does not fit; says which one, and what was wanted.
    """
    model, batch = step.model, step.batch
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, wanted a torch.nn.Module")
    if not model.training:
        raise ValueError("the model is in eval(): call model.train() before this")
    check_batch_and_loss(step)
    # NumPy may be missing, so its arrays are known by what they have.
    is_plain = isinstance(batch, PLAIN) or hasattr(batch, "__array_interface__")
    if is_plain and next(tensors_in(batch), None) is None:
        raise TypeError(
            f"sample_batch is a {type(batch).__name__} without tensors, wanted one batch of the "
            "loop; of a DataLoader: next(iter(loader))"
        )
    if step.amp is not None and not (
        isinstance(step.amp, torch.dtype) and step.amp.is_floating_point
    ):
        raise TypeError(f"amp is {step.amp!r}, wanted a dtype such as torch.bfloat16")
    scaler = step.scaler
    if scaler and not hasattr(scaler, "is_enabled"):
        raise TypeError(f"scaler is {scaler!r}, wanted a torch.amp.GradScaler")
    if step.max_grad_norm is not None:
        check_number("max_grad_norm", step.max_grad_norm, "a norm above 0")
        if not step.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {step.max_grad_norm}, wanted a norm above 0")


def check_batch_and_loss(step: Step) -> None:
    """Checks that there is a batch, and one way at the most to compute its loss.

    Raises:
        TypeError, ValueError: says which argument does not fit, and what was wanted.
    """
    if step.batch is None:
        raise ValueError("sample_batch is None, wanted a batch such as the loop will see")
    if step.loss is not None and step.forward is not None:
        raise ValueError("loss and forward were both given: forward computes the loss itself")
    for name, value in (("loss", step.loss), ("forward", step.forward)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} is {value!r}, wanted a function")

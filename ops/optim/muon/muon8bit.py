"""Muon with momentum of one byte, and AdamW with 8-bit moments for what is no hidden matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ..._core.weight_modes import Master, Rounding
from ...param_states.block_scales import zero_absmaxs
from ...param_states.states import Layout, Slot
from ..adam8bit import AdamW8bit
from ..options import own_arguments
from .matrices import Split, keeps_blocks
from .muon import MatrixOptimizer
from .rule import JORDAN, AdjustLr, Precision, Triple, Variant
from .steps import ABSMAX, MOMENT


class Muon8bit(MatrixOptimizer, AdamW8bit):
    r"""Muon with momentum of one byte: :class:`Muon` with 1 byte of state per element of a matrix
    instead of 4, and :class:`AdamW8bit` for other parameters.

    Momentum is a code of the dynamic map per element and a float32 scale per block, as in
    :class:`SGD8bit`. A bfloat16 matrix with ``master="remainder16"`` takes 7.02 bytes per element
    with its gradient and state.

    Args:
        params, lr, weight_decay, momentum, nesterov, maximize, max_grad_norm: as in :class:`Muon`.
        ns_coefficients, eps, ns_steps, adjust_lr_fn, ns_dtype, normuon: as in :class:`Muon`.
        adamw, split, convolutions, variant, workspace, process_group: as in :class:`Muon`.
        master, rounding, seed, count_stalled, offload, budget: as in :class:`Muon`.
        min_8bit_size, block_size: as in :class:`AdamW8bit`. Matrices that are split or batched,
            whose parts do not begin at a block, have float32 momentum, too.
        nonfinite: ``"propagate"`` or ``"skip_step"``, as in :class:`AdamW8bit`. One element that
            is infinite or NaN makes all of a matrix NaN, so none can be skipped alone.

    The state of a matrix is ``momentum_buffer``, uint8 of its shape, ``momentum_buffer_absmax``,
    float32, and what :class:`Muon` has beside it. ``optim_bits=32`` in a parameter group, or
    ``override()``, chooses float32 momentum. A checkpoint of :class:`torch.optim.Muon` loads;
    torch's takes the codes for numbers without an error: do not load such a checkpoint into it.

    Example::

        model = torch.nn.Sequential(torch.nn.Embedding(10, 64), torch.nn.Linear(64, 64))
        optimizer = headroom.optim.Muon8bit(model, lr=0.02, adamw={"lr": 3e-4})
    """

    _code_names = (MOMENT, "exp_avg", "exp_avg_sq")
    _choices = AdamW8bit._choices | {"nonfinite": ("skip_step", "propagate")}

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Triple | Sequence[Triple] = JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        split: Mapping[str, Split] | None = None,
        convolutions: bool = False,
        variant: Variant = "standard",
        ns_dtype: Precision | None = None,
        normuon: float | None = None,
        workspace: int | str = "256 MiB",
        process_group: Any = None,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        master: Master | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        count_stalled: bool = False,
        offload: Literal["state", "step"] | None = None,
        budget: int | str | None = None,
        min_8bit_size: int = 4096,
        block_size: int = 256,
        nonfinite: Literal["skip_step", "propagate"] = "propagate",
    ) -> None:
        given = own_arguments(locals())
        self._overrides: dict[Tensor, int] = {}
        own = {"optim_bits": 8, "bnb_exact": False, "code_rounding": "nearest"}
        self._begin(given, **own, seed=seed)

    def _codes_in(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (MOMENT,) if group["use_muon"] else self._code_names[1:]

    def _layouts(self, group: dict[str, Any]) -> tuple[Layout, ...]:
        if not group["use_muon"]:
            return super()._layouts(group)
        moment, *others = self._matrix_layout(group).slots
        zeros = partial(zero_absmaxs, block_size=group["block_size"])
        codes = (
            Slot(MOMENT, dtype=torch.uint8, first=_zero_codes),
            Slot(ABSMAX, lambda param: zeros(param).shape, torch.float32, first=zeros),
        )
        in_float32 = moment._replace(dtype=torch.float32)
        return (
            Layout((in_float32, *others), is_whole=True),
            Layout((*codes, *others), is_whole=True),
        )

    def _layout_index(self, param: Tensor, group: dict[str, Any]) -> int:
        index = super()._layout_index(param, group)
        if not group["use_muon"] or self.state.get(param):
            return index
        return index * keeps_blocks(param, group["split"], group["block_size"])


def _zero_codes(param: Tensor) -> Tensor:
    """Returns codes in the order of rows, in which matrices are stepped."""
    order = torch.preserve_format if param.dim() > 3 else torch.contiguous_format
    return torch.zeros_like(param, dtype=torch.uint8, memory_format=order)

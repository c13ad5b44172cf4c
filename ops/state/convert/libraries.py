"""Lists the libraries that states come from and go to, and detects the library of a state."""

from __future__ import annotations

from typing import Any

from ..._core.weight_modes import RESIDUALS
from ...optim.block_scales import ABSMAXS
from . import (
    adam,
    apex,
    bitsandbytes,
    deepspeed,
    flashoptim,
    headroom,
    torch_adafactor,
    torchao,
    transformers_adafactor,
)
from .bitsandbytes import BNB_WRAPPER
from .neutral import MOMENTS, Library

__all__ = ["KEYS", "LIBRARIES", "PRIVATE", "detect"]

LIBRARIES: dict[str, Library] = (
    headroom.LIBRARIES
    | adam.LIBRARIES
    | bitsandbytes.LIBRARIES
    | torchao.LIBRARIES
    | apex.LIBRARIES
    | deepspeed.LIBRARIES
    | flashoptim.LIBRARIES
    | torch_adafactor.LIBRARIES
    | transformers_adafactor.LIBRARIES
)
# The parts of states that readers know, and the options that only some libraries have.
KEYS = {
    *("step", "RMS", "error_bits", BNB_WRAPPER, *MOMENTS, *ABSMAXS, *RESIDUALS),
    *(f"{name}{i}" for name in ("state", "absmax", "qmap") for i in (1, 2)),
    *(f"{name}::{part}" for name in MOMENTS for part in ("quantized", "scales")),
    *("row_var", "col_var", "variance", "exp_avg_sq_row", "exp_avg_sq_col"),
}
PRIVATE = {key for library in LIBRARIES.values() for key in (*library.options, *library.more)}


def detect(state_dict: dict[str, Any]) -> str:
    """Returns the name of the library that a state dict is from, by its keys."""
    entries = [entry for entry in state_dict["state"].values() if entry]
    keys = {key for entry in entries for key in entry}
    options = {key for group in state_dict["param_groups"] for key in group}
    if BNB_WRAPPER in keys or "state1" in keys or "t_alpha" in options:
        return "bitsandbytes"
    if "exp_avg::quantized" in keys or "master_bytewidth" in options:
        return "flashoptim"
    if {"row_var", "variance"} & keys or "beta2_decay" in options:
        return "torch-adafactor"
    if {"exp_avg_sq_row", "RMS"} & keys or "decay_rate" in options:
        return "transformers-adafactor"
    if "exp_avg_absmax" in keys:
        return "headroom-8bit"
    if any(hasattr(entry.get("exp_avg"), "codes") for entry in entries):
        return "torchao-8bit"
    if entries and not {"exp_avg", "exp_avg_sq"} <= keys:
        raise ValueError(
            f"no known library has states with the keys {sorted(map(str, keys))}; the "
            f"libraries are {', '.join(LIBRARIES)}"
        )
    return "apex" if entries and "step" not in keys and "step" in options else "torch"

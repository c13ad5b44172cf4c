"""Reads and writes states of torch's Adafactor."""

from __future__ import annotations

from typing import Any

import torch

from .neutral import Context, Library, State, cast

__all__ = ["LIBRARIES"]


def _read_torch_adafactor(entry: dict[str, Any], context: Context) -> State:
    moments = {name: entry[name + "_var"] for name in ("row", "col") if name + "_var" in entry}
    if moments:
        row, col = moments["row"], moments["col"]
        if row.shape[-1:] != (1,) or col.shape[-2:-1] != (1,):
            raise ValueError(f"has row_var of {tuple(row.shape)} and col_var of {tuple(col.shape)}")
        moments = {"row": row.squeeze(-1), "col": col.squeeze(-2)}
    else:
        moments = {"variance": entry["variance"]}
    return State(entry["step"], moments)


def _write_torch_adafactor(state: State, context: Context) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": torch.tensor(float(state.step))}
    if "row" in state.moments:
        entry["row_var"] = cast(state.moments["row"].unsqueeze(-1), context)
        entry["col_var"] = cast(state.moments["col"].unsqueeze(-2), context)
    else:
        entry["variance"] = cast(state.moments["variance"], context)
    return entry


LIBRARIES = {
    "torch-adafactor": Library(
        _read_torch_adafactor,
        _write_torch_adafactor,
        {"beta2_decay": -0.8, "d": 1.0, "foreach": None, "maximize": False},
        casts=True,
        is_adafactor=True,
    ),
}

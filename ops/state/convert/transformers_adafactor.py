"""Reads and writes states of transformers' Adafactor."""

from __future__ import annotations

from typing import Any

from .neutral import Context, Library, State, cast

__all__ = ["LIBRARIES"]

HF_OPTIONS = {
    "clip_threshold": 1.0,
    "decay_rate": -0.8,
    "beta1": None,
    "scale_parameter": True,
    "relative_step": True,
    "warmup_init": False,
}


def _read_hf_adafactor(entry: dict[str, Any], context: Context) -> State:
    names = {
        "exp_avg": "exp_avg",
        "row": "exp_avg_sq_row",
        "col": "exp_avg_sq_col",
        "variance": "exp_avg_sq",
    }
    return State(entry["step"], {a: entry[b] for a, b in names.items() if b in entry})


def _write_hf_adafactor(state: State, context: Context) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": int(state.step)}
    if "exp_avg" in state.moments and context.group["beta1"] is not None:
        entry["exp_avg"] = cast(state.moments["exp_avg"], context)
    if "row" in state.moments:
        entry["exp_avg_sq_row"] = cast(state.moments["row"], context)
        entry["exp_avg_sq_col"] = cast(state.moments["col"], context)
    else:
        entry["exp_avg_sq"] = cast(state.moments["variance"], context)
    return entry | {"RMS": 0}  # which every step sets before it is used


LIBRARIES = {
    "transformers-adafactor": Library(
        _read_hf_adafactor, _write_hf_adafactor, HF_OPTIONS, casts=True, is_adafactor=True
    ),
}

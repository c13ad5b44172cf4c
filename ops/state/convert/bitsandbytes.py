"""Reads and writes states of bitsandbytes' Adam and AdamW, SGD and Lion: 32-bit, 8-bit, and the
8-bit form of releases before 2026."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...functional.dynamic_map import dynamic_map
from .codes import Codes, check_map, codes_of, floats_of
from .neutral import RULES, Context, Library, State
from .report import Loss, Report

BNB_WRAPPER = "__bnb_optimizer_quant_state__"
BNB_BLOCK_SIZES = (256, 2048, 4096, 1024, 512, 128, 64)  # 2048 before 0.44
NAMES = {"adam": "Adam or AdamW", "sgd": "SGD", "lion": "Lion"}
BNB_OPTIONS = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}


def _read_bitsandbytes(entry: dict[str, Any], context: Context) -> State:
    entry, names = entry | entry.get(BNB_WRAPPER, {}), RULES[context.rule]
    shapes = [entry[f"state{i}"].shape for i in (1, 2) if f"state{i}" in entry]
    if len(shapes) != len(names) or len(set(shapes)) != 1:
        raise ValueError(f"is of another optimizer of bitsandbytes than {NAMES[context.rule]}")
    moments: dict[str, Tensor | Codes] = {}
    for i, name in enumerate(names, 1):
        moment = moments[name] = entry[f"state{i}"]
        if moment.dtype == torch.uint8:
            absmax = entry[f"absmax{i}"]
            numel, blocks = moment.numel(), absmax.numel()
            size = next((b for b in BNB_BLOCK_SIZES if -(-numel // b) == blocks), 256)
            check_map(entry[f"qmap{i}"], i == 1)
            moments[name] = Codes(moment.contiguous(), absmax, size, i == 1)
    return State(entry["step"], moments)


def _moments_of(state: State) -> dict[int, Tensor | Codes]:
    """Returns the moments by bitsandbytes' numbers."""
    if not state.moments:
        raise ValueError("has no momentum, which bitsandbytes' SGD needs")
    own = [moment for name, moment in state.moments.items() if name != "max_exp_avg_sq"]
    return dict(enumerate(own, 1))


def _write_bitsandbytes(state: State, context: Context) -> dict[str, Any]:
    moments = {f"state{i}": floats_of(m).float() for i, m in _moments_of(state).items()}
    return {"step": int(state.step), BNB_WRAPPER: moments}


def _write_bitsandbytes_8bit(state: State, context: Context) -> dict[str, Any]:
    moments = _moments_of(state)
    if not context.is_8bit(moments[1]):
        return _write_bitsandbytes(state, context)
    inner: dict[str, Any] = {}
    for i, moment in moments.items():
        codes = codes_of(moment, 256, i == 1)
        inner[f"state{i}"], inner[f"absmax{i}"] = codes.codes, codes.absmax
        inner[f"qmap{i}"] = dynamic_map(i == 1).to(codes.codes.device)
    return {"step": int(state.step), BNB_WRAPPER: inner}


def _write_bitsandbytes_flat(state: State, context: Context) -> dict[str, Any]:
    entry = _write_bitsandbytes_8bit(state, context)
    return {"step": entry["step"], **entry[BNB_WRAPPER]}


def is_bitsandbytes(optimizer: torch.optim.Optimizer) -> bool:
    return any(cls.__module__.startswith("bitsandbytes") for cls in type(optimizer).__mro__)


def rule_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the rule of an optimizer of bitsandbytes, or None if its states tell or it is none.

    Raises:
        ValueError: it is another one with one moment.
    """
    if not is_bitsandbytes(optimizer):
        return None
    name = getattr(optimizer, "optimizer_name", None)
    if name in ("lars", "rmsprop", "adagrad"):
        raise ValueError(f"{type(optimizer).__name__} of bitsandbytes has no counterpart")
    return {"momentum": "sgd", "lion": "lion"}.get(str(name))


def options_from(group: dict[str, Any], rule: str, notes: list[str]) -> dict[str, Any]:
    """Returns the options of a group of SGD or Lion by their usual names."""
    usual = {name: value for name, value in group.items() if name != "eps"}
    if rule == "sgd":
        momentum, dampening = usual.pop("betas")
        usual |= {"momentum": momentum, "dampening": 0, "nesterov": False}
        if dampening:
            notes.append(f"bitsandbytes' SGD ran without its dampening of {dampening}")
    return usual


def options_to(group: dict[str, Any], rule: str, report: Report) -> dict[str, Any]:
    """Returns the options of a group of SGD or Lion by bitsandbytes' names, and reports those that
    it has no room for."""
    theirs = group | {"eps": 0.0}
    if rule == "sgd":
        for name in ("dampening", "nesterov"):
            if value := theirs.pop(name, 0):
                report.losses.append(Loss(None, name, "dropped"))
                report.notes.append(
                    f"bitsandbytes' SGD has no {name}, and the source was run with {value!r}"
                )
        theirs["betas"] = (theirs.pop("momentum"), 0)
    return theirs


LIBRARIES = {
    "bitsandbytes": Library(_read_bitsandbytes, _write_bitsandbytes, BNB_OPTIONS, rules=(*NAMES,)),
    "bitsandbytes-8bit": Library(
        _read_bitsandbytes, _write_bitsandbytes_8bit, BNB_OPTIONS, rules=(*NAMES,)
    ),
    "bitsandbytes-8bit-flat": Library(
        _read_bitsandbytes, _write_bitsandbytes_flat, BNB_OPTIONS, rules=(*NAMES,)
    ),
}

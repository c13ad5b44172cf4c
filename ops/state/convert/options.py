"""Translates the options of a parameter group to another library."""

from __future__ import annotations

from typing import Any

import torch

from .libraries import LIBRARIES, PRIVATE
from .neutral import State, is_byte, number_of
from .report import Loss, Report

__all__ = ["decouples", "target_group"]


# Options that change later steps, and what they are where an optimizer has none of that name.
USUAL = {
    "maximize": False,
    "amsgrad": False,
    "bias_correction": True,
    "max_grad_norm": None,
    "state_dtype": torch.float32,
    "min_8bit_size": 4096,
    "code_rounding": "nearest",
    "nonfinite": "propagate",
}


def decouples(optimizer: torch.optim.Optimizer) -> bool | None:
    """Returns whether an optimizer decouples weight decay, if its groups do not say so."""
    # DeepSpeed and apex, torchao, FlashOptim.
    for name in ("adam_w_mode", "is_adamw", "_decoupled"):
        if hasattr(optimizer, name):
            return bool(getattr(optimizer, name))
    return True if type(optimizer).__module__.startswith("bitsandbytes") else None


def target_group(
    group: dict[str, Any],
    to: str,
    states: dict[Any, State],
    report: Report,
    decoupled: bool | None,
) -> dict[str, Any]:
    """Returns the options of a group as the target has them, and reports those that it lacks."""
    target, source, notes = LIBRARIES[to], dict(group), report.notes
    if decoupled is not None:
        source.setdefault("decoupled_weight_decay", decoupled)
    own = (*target.options, *target.more)
    new = {**target.options, **{k: v for k, v in source.items() if k not in PRIVATE or k in own}}
    new["lr"] = number_of(source["lr"])
    if target.is_adafactor:
        _translate_adafactor(source, new, to, notes)
    for name, usual in USUAL.items():
        if name not in own and source.get(name) not in (None, usual, str(usual)):
            report.losses.append(Loss(None, name, "dropped"))
            notes.append(f"{to} has no {name}, and the source was run with {source[name]!r}")
    if "decoupled_weight_decay" in own and "decoupled_weight_decay" not in source:
        if source.get("weight_decay"):
            notes.append("the state does not say whether weight decay is Adam's or AdamW's")
    if to == "torchao-8bit":
        new["lr"] = torch.tensor(new["lr"], dtype=torch.float32)
    if to == "apex":
        new["step"] = max((int(state.step) for state in states.values()), default=0)
    _set_weights_options(new, own, [s for s in states.values() if s.weights is not None])
    return new


def _set_weights_options(new: dict[str, Any], own: tuple[str, ...], states: list[State]) -> None:
    """Sets the options that say what is kept beside 16-bit weights. ``states`` are those whose
    float32 weights are known."""
    if "master" in own and any("error_bits" in state.residual for state in states):
        new |= {"master": "f32", "rounding": "nearest", "seed": 0}
    if "master_bytewidth" in own and "master_bytewidth" not in new and states:
        new["master_bytewidth"] = 3 if any(is_byte(state.residual) for state in states) else 4


def _translate_adafactor(
    source: dict[str, Any], new: dict[str, Any], to: str, notes: list[str]
) -> None:
    """Translates between the two rules. Their first epsilons mean different things."""
    is_hf = "decay_rate" in source
    if is_hf == (to == "transformers-adafactor"):
        return
    if is_hf:
        new |= {"beta2_decay": source["decay_rate"], "d": source["clip_threshold"]}
        new |= {"eps": (None, source["eps"][1]), "lr": 1e-2 if new["lr"] is None else new["lr"]}
        if not source["relative_step"] or not source["scale_parameter"] or source["warmup_init"]:
            notes.append("torch's rule always has relative steps, scaled, and no warm-up")
    else:
        new |= {"decay_rate": source["beta2_decay"], "clip_threshold": source["d"]}
        new["eps"] = (1e-30, source["eps"][1])
        if new["lr"] == 1e-2:  # with which relative steps begin
            new["lr"] = None
        else:
            new["relative_step"] = False
            notes.append("the learning rate is constant, where torch's rule bounds it by 1/sqrt(t)")
    if source.get("weight_decay"):
        notes.append("the two rules of Adafactor scale weight decay differently")

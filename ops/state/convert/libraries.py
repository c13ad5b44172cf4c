"""Lists the libraries that states come from and go to, and translates the options of groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...optim.muon.rule import JORDAN, iterations
from ...param_states.block_scales import ABSMAXS
from . import adam, bitsandbytes
from .bitsandbytes import BNB_WRAPPER
from .neutral import BESIDE, MOMENTS, RULES, Library, State, number_of
from .report import Loss, Report

LIBRARIES: dict[str, Library] = adam.LIBRARIES | bitsandbytes.LIBRARIES
# The parts of states that readers know, and the options that only some libraries have.
KEYS = {
    *("step", BNB_WRAPPER, *MOMENTS, *ABSMAXS, *BESIDE),
    *(f"{name}{i}" for name in ("state", "absmax", "qmap") for i in (1, 2)),
}
PRIVATE = {key for library in LIBRARIES.values() for key in (*library.options, *library.more)}
# The options of torch's SGD, and of Lion, that change no step by their usual values.
ONE_MOMENT = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
# Those of torch's Muon, some of which Keller Jordan's, with the same states, does not name.
MUON = {
    "nesterov": True,
    "ns_coefficients": JORDAN,
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
}
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
    "split": None,
    "transposed": False,
    "variant": "standard",
    "ns_dtype": "bfloat16",
    "normuon": None,
}


def rule_of(state_dict: dict[str, Any]) -> str:
    """Returns the rule of the optimizer that a state dict is from, by its keys: one of ``RULES``.

    Raises:
        ValueError: bitsandbytes' SGD and Lion have the same keys.
    """
    keys = {key for entry in state_dict["state"].values() for key in entry}
    groups = state_dict["param_groups"]
    options = {key for group in groups for key in group}
    for entry in state_dict["state"].values():
        if isinstance(inner := entry.get(BNB_WRAPPER), Mapping):
            keys |= inner.keys()
    if any(group.get("use_muon", "ns_steps" in group) is True for group in groups):
        return "muon"
    if "state1" in keys and "state2" not in keys:
        raise ValueError(
            "a state dict of bitsandbytes with one moment does not say whose it is: convert the "
            "optimizer itself, or give rule= as 'sgd' or 'lion'"
        )
    if "dampening" in options:
        return "sgd"
    if keys:
        return "lion" if "exp_avg" in keys and "exp_avg_sq" not in keys else "adam"
    return "lion" if "betas" in options and "eps" not in options else "adam"


def rule_of_group(group: Mapping[str, Any], rule: str) -> str:
    """Returns the rule of a group, which is Adam's where Muon steps no matrices."""
    return "adam" if rule == "muon" and group.get("use_muon") is False else rule


def detect(state_dict: dict[str, Any], rule: str) -> str:
    """Returns the name of the library that a state dict is from, by its keys."""
    entries = [entry for entry in state_dict["state"].values() if entry]
    keys = {key for entry in entries for key in entry}
    options = {key for group in state_dict["param_groups"] for key in group}
    if BNB_WRAPPER in keys or "state1" in keys or "t_alpha" in options:
        return "bitsandbytes"
    if {"beta2_decay", "decay_rate"} & options:
        raise ValueError(
            "states of Adafactor are not converted: headroom.optim.Adafactor loads those of torch, "
            "and with semantics='hf' those of transformers"
        )
    if "exp_avg_absmax" in keys or "momentum_buffer_absmax" in keys:
        return "headroom-8bit"
    if any(hasattr(entry.get("exp_avg"), "codes") for entry in entries):
        return "torchao-8bit"
    # Other optimizers with one moment have parts beside it.
    known = {*RULES["adam"]} <= keys if rule == "adam" else keys <= KEYS
    if entries and not known:
        raise ValueError(
            f"no known library has states with the keys {sorted(map(str, keys))}; the "
            f"libraries are {', '.join(LIBRARIES)}"
        )
    if entries and "step" not in keys and "step" in options:
        return "apex"
    # torch has no Lion, and no AdamW in its Muon.
    return "headroom" if rule == "lion" or "use_muon" in options else "torch"


def decouples(optimizer: torch.optim.Optimizer) -> bool | None:
    """Returns whether an optimizer decouples weight decay, if its groups do not say so."""
    for name in ("adam_w_mode", "is_adamw"):  # of DeepSpeed and apex, of torchao
        if hasattr(optimizer, name):
            return bool(getattr(optimizer, name))
    return True if bitsandbytes.is_bitsandbytes(optimizer) else None


def target_group(
    group: dict[str, Any],
    to: str,
    states: dict[Any, State],
    report: Report,
    decoupled: bool | None,
    rule: str,
) -> dict[str, Any]:
    """Returns the options of a group as the target has them, and reports those that it lacks."""
    target, source, notes = LIBRARIES[to], dict(group), report.notes
    is_adam, to_bnb = rule == "adam", to in bitsandbytes.LIBRARIES
    if not is_adam and report.source in bitsandbytes.LIBRARIES:
        source = bitsandbytes.options_from(source, rule, notes)
    if is_adam and decoupled is not None:
        source.setdefault("decoupled_weight_decay", decoupled)
    options = target.options if is_adam else {} if to_bnb else ONE_MOMENT
    if rule == "muon":
        options = MUON if to == "torch" else MUON | ONE_MOMENT
    own = (*options, *target.more)
    new = {**options, **{k: v for k, v in source.items() if k not in PRIVATE or k in own}}
    new["lr"] = number_of(source["lr"])
    for name, usual in USUAL.items():
        if name not in own and source.get(name) not in (None, usual, str(usual)):
            report.losses.append(Loss(None, name, "dropped"))
            notes.append(f"{to} has no {name}, and the source was run with {source[name]!r}")
    if rule == "muon" and to == "torch":
        first, *others = iterations(new["ns_coefficients"], min(new["ns_steps"], 99))
        new["ns_coefficients"] = first
        if set(others) - {first}:
            report.losses.append(Loss(None, "ns_coefficients", "dropped"))
            notes.append("torch.optim.Muon has the same coefficients in all iterations")
    if not is_adam:
        return bitsandbytes.options_to(new, rule, report) if to_bnb else new
    if "decoupled_weight_decay" in own and "decoupled_weight_decay" not in source:
        if source.get("weight_decay"):
            notes.append("the state does not say whether weight decay is Adam's or AdamW's")
    if to == "torchao-8bit":
        new["lr"] = torch.tensor(new["lr"], dtype=torch.float32)
    if to == "apex":
        new["step"] = max((int(state.step) for state in states.values()), default=0)
    return new

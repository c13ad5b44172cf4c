"""Converts the state of an optimizer: :func:`convert_state`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..._core.progress import progress_bar
from ..._core.registration import FLOATS
from ...functional.adamw8bit import BLOCK_SIZES
from . import checks
from .bitsandbytes import rule_of as rule_of_bitsandbytes
from .codes import Codes, shown
from .libraries import KEYS, LIBRARIES, decouples, detect, rule_of, rule_of_group, target_group
from .neutral import RULES, Context, Library, State
from .report import Report, losses


class Converted(NamedTuple):
    """The result of :func:`convert_state`."""

    state_dict: dict[str, Any]
    report: Report


@torch.no_grad()
def convert_state(
    source: dict[str, Any] | torch.optim.Optimizer,
    to: str,
    *,
    from_: str | None = None,
    rule: str | None = None,
    param_dtype: torch.dtype | None = None,
    block_size: int | None = None,
    min_8bit_size: int = 4096,
    progress: bool = False,
) -> Converted:
    """Returns the state of an optimizer in the form of another library, to resume training there.

    Args:
        source: an optimizer, or the result of its ``state_dict()``. Not changed.
        to: the library. ``"headroom"`` and ``"headroom-8bit"``: Adam and AdamW, SGD, Lion and Muon
            of :mod:`headroom.optim`, and their 8-bit forms. ``"torch"``: Adam, AdamW, SGD and Muon.
            ``"bitsandbytes"``: Adam, AdamW, SGD and Lion of 32 bits; ``"bitsandbytes-8bit"``, and
            ``"bitsandbytes-8bit-flat"`` for releases before 2026. ``"torchao-8bit"``: Adam and
            AdamW. ``"apex"``: FusedAdam. ``"deepspeed"``: DeepSpeedCPUAdam. States of Adafactor
            need no conversion: Headroom's loads torch's, and with ``semantics="hf"`` those of
            transformers.
        from_: the library of ``source``, if its keys do not tell.
        rule: ``"adam"``, ``"sgd"``, ``"lion"`` or ``"muon"``: what ``source`` is the state of, if
            it is a state dict of bitsandbytes' SGD or Lion, which have the same keys. Else it is
            found.
        param_dtype: the dtype of the parameters, if ``source`` is a state dict, which does not say.
            Many loaders cast states to it; the report then includes that loss.
        block_size: elements per scale of 8-bit moments. None: that of the source if the target has
            such blocks, else 256.
        min_8bit_size: tensors with fewer elements get moments of 32 bits; codes stay codes.
        progress: show a progress bar.

    Returns:
        The state dict, for ``load_state_dict`` of the target, and a :class:`Report` of what was
        lost. Parts that are the same in both libraries are not copied if ``source`` is a state
        dict.

        Nothing is lost between Headroom, torch, bitsandbytes 32-bit, apex and DeepSpeed if
        parameters are float32; nor between the 8-bit forms of Headroom, bitsandbytes and torchao
        with equal blocks; nor from 8 bits to float32. From float32 to 8 bits, codes are those that
        :func:`headroom.functional.adamw8bit_` would store. What completes 16-bit weights goes from
        one of Headroom's optimizers to another, and is dropped elsewhere.

    Raises:
        ValueError: an argument is not one of those above, or the state is of no known library,
            does not convert to ``to``, or is malformed: its counters must be whole numbers from 0
            to 2^53, its second moments and scales must not be negative or NaN. The message names
            the parameter. Nothing has changed then.
        NotImplementedError: a state is a DTensor; gather it first, with ``full_state_dict=True`` of
            torch.distributed.checkpoint.
        ImportError: ``to="torchao-8bit"`` without torchao.

    Example::

        old = torch.optim.AdamW(model.parameters(), lr=1e-3)
        new = headroom.optim.AdamW8bit(model.parameters(), lr=1e-3)
        state, report = headroom.state.convert_state(old, to="headroom-8bit")
        new.load_state_dict(state)
        print(report)
    """
    decoupled, dtypes = None, None
    if rule is not None and (not isinstance(rule, str) or rule not in RULES):
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {shown(rule)}")
    if isinstance(source, torch.optim.Optimizer):
        rule = rule or rule_of_bitsandbytes(source)
        decoupled = decouples(source)
        dtypes = [param.dtype for group in source.param_groups for param in group["params"]]
        source = source.state_dict()
    keys = checks.keys_of(source)
    rule = rule_of(source) if rule is None else rule
    from_ = detect(source, rule) if from_ is None else from_
    for name in (from_, to):
        if not isinstance(name, str) or name not in LIBRARIES:
            raise ValueError(f"there is no {shown(name)}; the libraries are {', '.join(LIBRARIES)}")
        if rule not in LIBRARIES[name].rules:
            raise ValueError(
                f"{name} has no {rule}: states of it convert between "
                + ", ".join(key for key, library in LIBRARIES.items() if rule in library.rules)
            )
    rules = {rule_of_group(group, rule) for group in source["param_groups"]}
    if to == "torch" and rules == {"muon", "adam"}:
        raise ValueError(
            "torch.optim.Muon has no AdamW: convert two state dicts, one with the groups of "
            "matrices and their states and one with the others, which have use_muon=False"
        )
    if block_size is not None and (type(block_size) is not int or block_size not in BLOCK_SIZES):
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {shown(block_size)}")
    if type(min_8bit_size) is not int or min_8bit_size < 0:
        raise ValueError(f"min_8bit_size must be a number of elements, got {shown(min_8bit_size)}")
    if param_dtype is not None and param_dtype not in (*FLOATS, torch.float64):
        raise ValueError(f"param_dtype must be a floating-point dtype, got {shown(param_dtype)}")
    dtype_of = dict(zip(keys, dtypes or [param_dtype] * len(keys)))
    reader, target, report = LIBRARIES[from_], LIBRARIES[to], Report(from_, to)
    entries, groups = {}, []
    with progress_bar(len(source["state"]), None, unit="state", shown=progress) as bar:
        for index, group in enumerate(source["param_groups"]):
            own = rule_of_group(group, rule)
            states = {
                key: _state(key, source["state"][key], reader, Context(group, own))
                for key in group["params"]
                if _has_parts(source["state"].get(key))
            }
            if dtypes is not None:
                states = {key: state.copied() for key, state in states.items()}
            with checks.described(f"the options of group {index}", group):
                checks.check_options(group)
                new = target_group(group, to, states, report, decoupled, own)
            size = block_size or _block_size(states)
            if to == "headroom-8bit":
                new["block_size"] = size
            for key, state in states.items():
                context = Context(new, own, dtype_of[key], size, min_8bit_size, target.casts)
                with checks.described(f"the state of parameter {key}", source["state"][key]):
                    entries[key] = target.write(state, context)
                    report.losses += losses(key, state, target.read(entries[key], context))
                bar.update()
            groups.append(new)
    return Converted({"state": entries, "param_groups": groups}, report)


def _has_parts(entry: Any) -> bool:
    """Returns whether a state holds anything: torch's SGD without momentum keeps a None."""
    return entry is not None and any(value is not None for value in entry.values())


def _state(key: Any, entry: Any, reader: Library, context: Context) -> State:
    if any(isinstance(value, DTensor) for value in entry.values()):
        raise NotImplementedError(
            f"the state of parameter {key} is a DTensor; gather it first, with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict and "
            "StateDictOptions(full_state_dict=True)"
        )
    with checks.described(f"the state of parameter {key}", entry):
        checks.check_tensors(entry)
        state = reader.read(entry, context)
        if state.step is None:
            raise KeyError("step")
        state.step = checks.checked_step(state.step)
        checks.check_moments(state.moments)
        checks.check_shapes(state.moments, context.rule)
    state.others = [name for name in entry if name not in KEYS]
    return state


def _block_size(states: dict[Any, State]) -> int:
    """Returns the block size of the codes of a group if Headroom has it, else 256."""
    moments = [moment for state in states.values() for moment in state.moments.values()]
    sizes = {moment.block_size for moment in moments if isinstance(moment, Codes)}
    return sizes.pop() if len(sizes) == 1 and sizes <= set(BLOCK_SIZES) else 256

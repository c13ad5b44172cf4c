"""Adapters of experts in the files of PEFT, where a matrix holds A of all experts, and another B.

PEFT puts a wrapper around a module for each of its parameters that has an adapter, in their order,
and names of tensors do not say which wrapper is of which parameter: ``target_parameters`` does
(PEFT 0.21.2, ``tuners/tuners_utils.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..nn.experts import ExpertsRule, stack_shape
from ..nn.lora_experts import LoRAExperts
from ..nn.switched import outside
from ..quantizing.choice import joined
from .tying import inner

WRAPPED = ".base_layer"
# How files have A and B: as PEFT does since 0.19.1; with rows and columns of stacks exchanged, as
# PEFT 0.17 to 0.19.0 did; or with columns of B by expert, as Unsloth did until September 2026.
LAYOUTS = "peft", "peft-0.17", "unsloth"
_SINCE = 0, 19, 1

Matrices = dict[str, tuple[Tensor, Tensor]]


# ---- writing -------------------------------------------------------------------------------------


def stack_tensors(path: str, module: LoRAExperts, name: str) -> dict[str, Tensor]:
    """Returns A and B of the stacks of a module by the ends of PEFT's names for them."""
    return {
        f"{prefix}.lora_{which}.weight": matrix
        for prefix, stack in _wrapped(path, module, module.adapters[name]).items()
        for which, matrix in zip("AB", module.matrices(name, stack))
    }


def packed(key: str, tensor: Tensor) -> Tensor:
    """Returns A of all experts, ``[experts * rank, in]``, or B, ``[out, rank * experts]``, in whose
    columns experts alternate."""
    if key.endswith("lora_A.weight"):
        return tensor.reshape(-1, tensor.shape[2])
    return tensor.permute(1, 2, 0).reshape(tensor.shape[1], -1)


def parameter_targets(model: nn.Module, names: Iterable[str]) -> list[str] | None:
    """Returns PEFT's ``target_parameters``: the last two parts of names, if these parameters alone
    have them; else whole names."""
    wanted = {*names}
    every = [
        joined(path, name) for path, module in outside(model) for name in inner(module)._parameters
    ]
    ends = {".".join(name.split(".")[-2:]) for name in wanted}
    found = {name for name in every if any(_ends(name, end) for end in ends)}
    return sorted(ends if found == wanted else wanted) or None


# ---- reading -------------------------------------------------------------------------------------


def take_stacks(
    model: nn.Module,
    parts: dict[str, list[Tensor]],
    rules: Mapping[str, ExpertsRule | str],
    config: Mapping[str, Any],
    layout: str | None,
    file: str,
) -> dict[str, Matrices]:
    """Takes the tensors of experts out of those of a file, and returns A ``[experts, rank, in]``
    and B ``[experts, out, rank]`` by the names of their modules and stacks.

    Args:
        model: has the experts.
        parts: A and B by the names in the file.
        rules: what the experts of the model compute.
        config: the settings in the file.
        layout: one of ``LAYOUTS``, or None: as shapes and the version of PEFT say.
        file: its name, for messages.

    Raises:
        ValueError: tensors do not fit, or could be read in two ways.
    """
    raw: dict[tuple[str, str], list[Tensor]] = {}
    for path in sorted({_stem(key, rules) for key in parts if _stem(key, rules) in rules}):
        module = model.get_submodule(path)
        keys = [key for key in parts if _stem(key, rules) == path]
        raw |= _by_stack(path, module, keys, parts, rules[path], config, file)
    exchanged = _are_exchanged(model, raw, rules, config, layout, file)
    found: dict[str, Matrices] = {}
    for (path, stack), (a, b) in raw.items():
        rule: Any = rules[path]
        count = stack_shape(inner(model.get_submodule(path)), rule, stack)[0]
        matrices = _by_expert(a, b, count, layout == "unsloth")
        if exchanged and not _is_transposed(model, path):
            matrices = matrices[1].mT, matrices[0].mT
        found.setdefault(path, {})[stack] = matrices
    return found


def _stem(key: str, rules: Mapping[str, Any]) -> str:
    """Returns the name of the module that wrappers are around."""
    stem = key
    while stem not in rules and stem.endswith(WRAPPED):
        stem = stem.removesuffix(WRAPPED)
    return stem


def _by_stack(
    path: str,
    module: nn.Module,
    keys: list[str],
    parts: dict[str, list[Tensor]],
    rule: ExpertsRule | str,
    config: Mapping[str, Any],
    file: str,
) -> dict[tuple[str, str], list[Tensor]]:
    """Takes the tensors of a module out of those of a file, and returns them by its stacks."""
    if isinstance(rule, str):
        raise ValueError(f"{file}: '{path}' can have no adapters: {rule}")
    targets = config["target_parameters"] or ()
    names = [*inner(module)._parameters]
    names = [name for name in names if names_parameter(path, name, targets)]
    if not targets and len(keys) == len(rule.stacks):
        names = [*rule.stacks]  # which lets no doubt
    wrapped = _wrapped(path, module, names)
    if {*keys} != {*wrapped} or not {*names} <= {*rule.stacks}:
        raise ValueError(
            f"{file} has adapters of {len(keys)} parameters of '{path}', and 'target_parameters' "
            f"names {names} of them, wanted as many of {[*rule.stacks]}"
        )
    return {(path, stack): parts.pop(key) for key, stack in wrapped.items()}


def _wrapped(path: str, module: nn.Module, stacks: Iterable[str]) -> dict[str, str]:
    """Returns the stack of each wrapper around a module, by the name that PEFT gives it."""
    chosen = {*stacks}
    names = [name for name in inner(module)._parameters if name in chosen]
    return {path + WRAPPED * (len(names) - 1 - k): name for k, name in enumerate(names)}


def _are_exchanged(
    model: nn.Module,
    raw: Mapping[tuple[str, str], list[Tensor]],
    rules: Mapping[str, Any],
    config: Mapping[str, Any],
    layout: str | None,
    file: str,
) -> bool:
    """Returns whether A has the columns that B should have, and B those of A, where that may be: of
    stacks ``[experts, out, in]``, which PEFT before 0.19.1 took for ``[experts, in, out]``."""
    found, first = {False, True}, None
    for (path, stack), (a, b, *others) in raw.items():
        count, rows, cols = stack_shape(inner(model.get_submodule(path)), rules[path], stack)
        name, rank = joined(path, stack), len(a)
        if not (a.is_floating_point() and b.is_floating_point()):
            raise ValueError(f"{file}: '{name}' has {a.dtype} and {b.dtype}, wanted floats")
        fits = {
            exchanged
            for exchanged, (i, o) in ((False, (cols, rows)), (True, (rows, cols)))
            if a.shape == (rank, i) and b.shape == (o, rank) and rank and not rank % count
        }
        if _is_transposed(model, path):
            fits -= {True}
        else:
            found, first = found & fits, first or name
        if not (fits and found) or others:
            raise ValueError(
                f"{file}: lora_A {[*a.shape]} and lora_B {[*b.shape]} do not fit '{name}', "
                f"{count} matrices {[rows, cols]}"
            )
    if first is None:
        return False
    said = {"peft": {False}, "peft-0.17": {True}}.get(layout or "", found)
    version = _version(config["peft_version"])
    if len(found & said) == 2 and layout is None and version is None:
        raise ValueError(
            f"{file}: '{first}' has as many rows as columns, and the file does not say which PEFT "
            "wrote it, so that its adapter can be read in two ways: give experts_layout='peft' for "
            "PEFT from 0.19.1 on, or experts_layout='peft-0.17' for PEFT before it"
        )
    if not found & said:
        raise ValueError(f"{file}: '{first}' does not fit experts_layout={layout!r}")
    if len(found & said) == 2:
        return layout is None and version is not None and version < _SINCE
    return True in found & said


def _is_transposed(model: nn.Module, path: str) -> bool:
    """Returns whether PEFT found the stacks of a module to be ``[experts, in, out]``: those of
    gpt-oss, which lie the other way round in MXFP4."""
    module: Any = inner(model.get_submodule(path))
    return module.is_transposed


def _version(text: Any) -> tuple[int, ...] | None:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text) if isinstance(text, str) else None
    return None if found is None else tuple(map(int, found.groups()))


def _by_expert(a: Tensor, b: Tensor, count: int, expert_major: bool) -> tuple[Tensor, Tensor]:
    """Returns the first matrix and the second of each expert."""
    first = a.reshape(count, -1, a.shape[1])
    if expert_major:
        return first, b.reshape(len(b), count, -1).permute(1, 0, 2)
    return first, b.reshape(len(b), -1, count).permute(2, 0, 1)


def names_parameter(path: str, name: str, targets: Iterable[str]) -> bool:
    """Returns whether ``target_parameters`` name a parameter of a module."""
    return any(_ends(joined(path, name), target) for target in targets)


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")

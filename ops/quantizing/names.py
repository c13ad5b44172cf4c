"""The names of tensors in files, for models of transformers that rename or merge them as they load:
its own map says how."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ..state.file.safetensors import Entry
from .stacks import Stack


def by_names_of(
    model: nn.Module, entries: Mapping[str, Entry], own: Collection[str] | None = None
) -> dict[str, Entry | Stack]:
    """Returns the tensors of files by their names in a model, in the order of the files. Matrices
    of experts that the files have one by one become stacks.

    Args:
        own: the names in the model, where it has other ones now.

    Raises:
        ValueError: some matrices of a stack are missing or do not fit the others; or transformers
            makes a tensor of the model in a way that is not known here.
    """
    if own is None:
        tensors = (model.named_parameters, model.named_buffers)
        own = {name for each in tensors for name, _ in each(remove_duplicate=False)}
    found: dict[str, Any] = {}
    matrices: dict[str, dict[str, dict[int, Entry]]] = {}
    if entries.keys() <= {*own} or (steps := _map_of(model)) is None:
        return dict(entries)
    from transformers.core_model_loading import apply_converters, apply_renamings

    renamings, converters = steps
    for name, entry in entries.items():
        if name in own:
            found[name] = entry
            continue
        inner = apply_renamings(name, renamings)
        target, pattern = apply_converters(inner, converters)
        if pattern is None or target not in own:
            if inner in found:
                raise ValueError(f"'{name}' and another tensor of the files are both '{inner}'")
            found[inner] = entry
            continue
        converter = next(one for one in converters if pattern in one.source_patterns)
        if not _is_a_stack(converter):
            how = ", ".join(type(one).__name__ for one in converter.operations)
            raise ValueError(
                f"'{name}' becomes '{target}' in transformers, by {how}, which only transformers "
                "does: load the model by it, and call headroom.quantize()"
            )
        parts = matrices.setdefault(target, {one: {} for one in converter.source_patterns})
        found[target] = None  # in its order
        parts[pattern][_number(inner)] = entry
    for target, parts in matrices.items():
        found[target] = _stack(target, parts)
    return found


def _map_of(model: Any) -> tuple[list[Any], list[Any]] | None:
    """Returns what transformers renames in files of a model and what it converts; None if it is not
    one of its models."""
    if not hasattr(model, "base_model_prefix"):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:  # before 5.0 files had the names of the model
        return None
    steps = get_model_conversion_mapping(model)
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    return [step for step in steps if step not in converters], converters


def _is_a_stack(converter: Any) -> bool:
    """Returns whether a step of transformers' map puts matrices of experts into a stack, whose rows
    may be those of several behind each other."""
    kinds = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
    several = [("Concatenate", 1)] if len(converter.source_patterns) > 1 else []
    return kinds == [("MergeModulelist", 0), *several] and len(converter.target_patterns) == 1


def _number(name: str) -> int:
    """Returns the number of the expert that a tensor belongs to."""
    return int([word for word in name.split(".") if word.isdigit()][-1])


def _stack(target: str, parts: Mapping[str, Mapping[int, Entry]]) -> Stack:
    count = max(map(len, parts.values()))
    for pattern, own in parts.items():
        missing = next((e for e in range(count) if e not in own), None)
        if missing is not None:
            what = pattern.replace("*", str(missing)).replace("\\", "").lstrip(".")
            raise ValueError(f"'{target}' is in the files matrix by matrix, without '{what}'")
    stack = Stack(tuple(tuple(own[e] for own in parts.values()) for e in range(count)))
    first = stack.matrices[0]
    for e, matrix in enumerate(stack.matrices):
        for part, like in zip(matrix, first):
            if (part.dtype, part.shape) != (first[0].dtype, like.shape) or len(part.shape) != 2:
                raise ValueError(
                    f"'{target}' is in the files matrix by matrix, and that of expert {e} is "
                    f"{part.dtype} {[*part.shape]}, others are {like.dtype} {[*like.shape]}"
                )
    return stack
